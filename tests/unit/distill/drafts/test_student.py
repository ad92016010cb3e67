"""init_student against the teacher itself: its layers by hand, its cache, its checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, T5Config, T5ForConditionalGeneration

import hf_accel
from hf_accel import UnsupportedError
from hf_accel.distill.drafts.student import init_student
from hf_accel.undo.state import state_of

from .families import DECODERS, ENCODERS, SMALL, V, llama, made

ALL = {**DECODERS, **ENCODERS}
IDS = torch.arange(40).reshape(2, 20) * 7 % (V - 1) + 1
WAYS = pytest.mark.parametrize("name", ALL)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that must not change: bits, modes, hooks, gradients wanted."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "wanted": [parameter.requires_grad for parameter in model.parameters()],
        "config": copy.deepcopy(model.config).to_dict(),
        "random": torch.get_rng_state(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    torch.testing.assert_close(before.pop("state"), after.pop("state"), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(before.pop("random"), after.pop("random"))
    assert before == after


def layers_of(model: Any) -> nn.ModuleList:
    base = model.base_model
    holder = getattr(base, "encoder", getattr(base, "transformer", base))
    for name in ("layers", "layer", "h"):
        if hasattr(holder, name):
            found: nn.ModuleList = getattr(holder, name)
            return found
    raise AssertionError("no layers")


def by_hand(teacher: Any, kept: list[int]) -> torch.Tensor:
    """Logits of the teacher with its other layers put aside. Its configs' lists are read layer by layer."""
    cut = copy.deepcopy(teacher)
    layers = layers_of(cut)
    rest = [layers[i] for i in kept]
    del layers[:]
    layers.extend(rest)
    config = cut.config
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == 4 and name in ("layer_types",):
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = len(kept)
    arguments = {} if "Bert" in type(cut).__name__ else {"use_cache": False}
    logits: torch.Tensor = cut(IDS, **arguments).logits
    return logits


@pytest.mark.covering(1)
@WAYS
@pytest.mark.parametrize("kept", [[1, 2], [0, 3], [0, 1, 2, 3], [2]], ids=str)
def test_a_student_computes_with_the_kept_layers(name: str, kept: list[int]) -> None:
    teacher = ALL[name]()
    before = snapshot(teacher)
    student = init_student(teacher, layers=kept)
    assert type(student) is type(teacher)
    assert torch.equal(student(IDS).logits, by_hand(teacher, kept))
    assert_same(before, snapshot(teacher))
    pointers = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not pointers & {parameter.data_ptr() for parameter in student.parameters()}
    assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize("name", DECODERS)
def test_a_students_cache_holds_each_layer_once(name: str) -> None:
    student = init_student(DECODERS[name](), layers=[1, 3])
    numbers = [module.layer_idx for module in student.modules() if hasattr(module, "layer_idx")]
    assert sorted(set(numbers)) == [0, 1]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    cached = student.generate(IDS, **settings)
    assert torch.equal(cached, student.generate(IDS, use_cache=False, **settings))
    assert cached.shape == (2, 32)


@WAYS
def test_a_student_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    student = init_student(ALL[name](), num_layers=2)
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, student(IDS).logits)
    assert loaded.config.num_hidden_layers == 2


def test_per_layer_lists_of_configs_are_picked() -> None:
    qwen = init_student(DECODERS["qwen2"](), layers=[0, 3]).config
    assert (qwen.layer_types, qwen.max_window_layers) == (["full_attention", "sliding_attention"], 1)
    assert init_student(DECODERS["gemma3"](), layers=[0, 1, 3]).config.layer_types == [
        "sliding_attention", "full_attention", "sliding_attention",
    ]  # fmt: skip
    assert init_student(DECODERS["smollm3"](), layers=[1, 3]).config.no_rope_layers == [0, 1]
    assert init_student(DECODERS["qwen3 moe"](), layers=[1, 3]).config.mlp_only_layers == [1]


def test_buffers_that_no_checkpoint_has_are_copied_too() -> None:
    teacher = llama()
    teacher.model.rotary_emb.inv_freq.mul_(0.5)
    assert torch.equal(init_student(teacher, layers=[0, 2])(IDS).logits, by_hand(teacher, [0, 2]))


def test_ties_modes_and_generation_config_are_the_teachers() -> None:
    teacher = DECODERS["llama tied"]().train()
    teacher.generation_config.max_new_tokens = 7
    student: Any = init_student(teacher, num_layers=2)
    assert student.training and student.model.layers[1].self_attn.training
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert student.generation_config.max_new_tokens == 7
    assert student.generation_config is not teacher.generation_config
    assert not init_student(teacher.eval(), num_layers=2).training


def test_dtypes_are_the_teachers_or_the_one_given() -> None:
    teacher = llama().bfloat16()
    teacher.model.norm.float()
    student: Any = init_student(teacher, num_layers=2)
    assert student.dtype == torch.bfloat16
    assert student.model.norm.weight.dtype == torch.float32
    wide = init_student(teacher, num_layers=2, dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert wide.config.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_shared_embeddings_take_no_memory_and_are_frozen(tied: bool) -> None:
    teacher = llama(tie_word_embeddings=tied)
    student: Any = init_student(teacher, num_layers=1, share_embeddings=True)
    assert student.model.embed_tokens.weight.data_ptr() == teacher.model.embed_tokens.weight.data_ptr()
    assert student.lm_head.weight.data_ptr() == teacher.lm_head.weight.data_ptr()
    assert (student.lm_head.weight is student.model.embed_tokens.weight) == tied
    frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert teacher.model.embed_tokens.weight.requires_grad
    assert torch.equal(student(IDS).logits, init_student(teacher, num_layers=1)(IDS).logits)
    with pytest.raises(UnsupportedError, match="dtype"):
        init_student(teacher, num_layers=1, share_embeddings=True, dtype=torch.bfloat16)


def test_importance_drops_the_layer_that_does_nothing() -> None:
    teacher = llama()
    with torch.no_grad():
        for idle in (0, 2):
            teacher.model.layers[idle].self_attn.o_proj.weight.zero_()
            teacher.model.layers[idle].mlp.down_proj.weight.zero_()
    teacher.train()
    teacher.model.layers[1].eval()
    before = snapshot(teacher)
    student = init_student(teacher, num_layers=2, strategy="importance", dataset=IDS)
    assert_same(before, snapshot(teacher))
    torch.testing.assert_close(student.eval()(IDS).logits, teacher.eval()(IDS).logits)
    with pytest.raises(UnsupportedError, match="dataset="):
        init_student(teacher, num_layers=2, strategy="importance")


# -- patched and quantized teachers --------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_patched_teacher_gives_its_own_weights_and_stays_patched(weights: str | None) -> None:
    teacher = llama(hidden_size=64, intermediate_size=128)
    expected = init_student(teacher, layers=[0, 2])
    hf_accel.patch(teacher, weights=weights)
    logits = teacher(IDS).logits
    student = init_student(teacher, layers=[0, 2])
    assert not hf_accel.is_patched(student)
    assert torch.equal(student(IDS).logits, expected(IDS).logits)
    assert hf_accel.is_patched(teacher)
    assert torch.equal(teacher(IDS).logits, logits)


def test_a_teacher_whose_originals_were_freed_is_read_back(tmp_path: Path) -> None:
    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    teacher = type(llama()).from_pretrained(tmp_path).eval()
    expected = init_student(teacher, layers=[0, 2])(IDS).logits
    hf_accel.patch(teacher, weights="int8")
    state = state_of(teacher)
    dropped = len(state.originals.dropped)
    assert dropped, "the test is about weights that are not in memory"
    assert torch.equal(init_student(teacher, layers=[0, 2])(IDS).logits, expected)
    assert len(state.originals.dropped) == dropped
    assert all(parameter.numel() == 0 for parameter, _ in state.originals.dropped)


def test_teachers_that_cannot_be_cut_are_refused_with_the_way_out() -> None:
    lost = llama(hidden_size=64, intermediate_size=128)
    hf_accel.patch(lost, weights="int8", keep_original=False)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))
    albert = AlbertForMaskedLM(AlbertConfig(**SMALL, embedding_size=16))
    torn = llama()
    torn.model.layers[1].extra = nn.Linear(2, 2)
    quantized = llama()
    quantized.is_quantized = True
    offloaded = llama()
    offloaded.model.norm.to("meta")
    cases = {
        "load the model again": lost,
        "encoder-decoder": t5,
        "no list of 4 layers": albert,
        "not what its config builds": torn,
        "float checkpoint": quantized,
        "load it whole": offloaded,
        "give a transformers model": nn.Linear(2, 2),
    }
    for words, teacher in cases.items():
        with pytest.raises(UnsupportedError, match=words):
            init_student(teacher, layers=[0, 1])


def test_layers_that_would_change_in_their_new_place_are_refused() -> None:
    """A pattern that the config gives as a period, and not layer by layer."""
    teacher = DECODERS["qwen3 moe"]()
    teacher.config.mlp_only_layers = []
    teacher.config.decoder_sparse_step = 2
    sparse = made(type(teacher), teacher.config)
    with pytest.raises(UnsupportedError, match="keep the pattern"):
        init_student(sparse, layers=[0, 2])
    kept = init_student(sparse, layers=[2, 3])
    assert torch.isfinite(kept(IDS).logits).all()
