"""An embedding that looks its rows up in a quantized weight: in the head of a tied model, or in one of its own."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_accel
from hf_accel import WeightConfig
from hf_accel.linear import quantize
from hf_accel.linear.embedding import QuantEmbedding
from hf_accel.undo.journal import original_class

ONE_TABLE = WeightConfig(bits=4, group_size=32, embedding="int8")
FOUR_BITS = WeightConfig(bits=4, group_size=32, head="int4", embedding="int4")
AUTO = WeightConfig(embedding="auto")
KINDS = {  # whether the model is tied, and how it is quantized
    "shared, 8 bits": (True, ONE_TABLE),
    "shared, 4 bits": (True, FOUR_BITS),
    "shared, zero points": (True, replace(FOUR_BITS, symmetric=False)),
    "own, 8 bits": (False, ONE_TABLE),
    "own, 4 bits": (False, replace(FOUR_BITS, head="int8")),
}
FORMATS: dict[str, dict[str, Any]] = {
    kind: {"bits": 8, "group_size": None} if kind.endswith("8 bits")
    else {"bits": 4, "group_size": 32, "symmetric": "zero" not in kind} for kind in KINDS
}  # fmt: skip
BERT = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
each_kind = pytest.mark.parametrize("kind", KINDS)
IDS = torch.tensor([[3, 0, 77, 129, 64]])


# Groups that do not divide the inputs of the linears, which stay as they are.
HEAD_ALONE: dict[str, Any] = {
    "bits": 4, "group_size": 128,
    "skip": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}  # fmt: skip


def tied_model(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def made(kind: str) -> Any:
    tied, _ = KINDS[kind]
    return tied_model(tied=tied)


def patched(kind: str) -> Any:
    return hf_accel.patch(made(kind), weights=KINDS[kind][1])


def table_of(model: Any) -> QuantEmbedding:
    table = model.get_input_embeddings()
    assert isinstance(table, QuantEmbedding)
    return table


@each_kind
def test_rows_are_those_of_the_weight_and_undo_gives_the_very_objects_back(kind: str) -> None:
    model = made(kind)
    embedding, weight = model.get_input_embeddings(), model.get_input_embeddings().weight
    head, before = model.lm_head.weight, weight.detach().clone()
    hf_accel.patch(model, weights=KINDS[kind][1])
    table = table_of(model)
    assert (table.head is model.lm_head) == table.is_shared == KINDS[kind][0] and not list(table.parameters())
    expected = quantize(before, WeightConfig(**FORMATS[kind]))
    assert torch.equal(table(IDS), expected.dequantize(torch.float32)[IDS])
    for wrong in (-1, 130):
        with pytest.raises(IndexError):
            table(torch.tensor([wrong]))
    hf_accel.unpatch(model)
    assert model.get_input_embeddings() is embedding and embedding.weight is weight and model.lm_head.weight is head
    assert torch.equal(weight, before)


@each_kind
def test_the_model_is_that_of_float_weights_of_the_same_numbers(kind: str) -> None:
    """With exact linears and attention nothing but the embedding and the head differs."""
    model, config = made(kind), replace(KINDS[kind][1], skip=PROJECTIONS)
    other = copy.deepcopy(model)
    hf_accel.patch(model, weights=config)
    with torch.no_grad():
        rounded = table_of(model).quantized.dequantize(torch.float32)
        other.get_input_embeddings().weight.copy_(rounded)
        hidden = other.model(IDS).last_hidden_state
    torch.testing.assert_close(model.model(IDS).last_hidden_state, hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.covering(1)
@each_kind
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_tables_of_their_own(again: Any, kind: str) -> None:
    model = patched(kind)
    other = again(model)
    assert table_of(other).head is not table_of(model).head
    assert (table_of(other).head is other.lm_head) == KINDS[kind][0]
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    with torch.no_grad():
        table_of(other).weight[3] = 1.0
    assert not torch.equal(other(IDS).logits, model(IDS).logits)


@each_kind
def test_a_saved_model_holds_one_table(tmp_path: Path, kind: str) -> None:
    model: Any = patched(kind)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" not in stored
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (table_of(loaded).head is loaded.lm_head) == KINDS[kind][0]
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.generate(IDS, max_new_tokens=4).tolist() == model.generate(IDS, max_new_tokens=4).tolist()
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == stored.keys()


@each_kind
def test_a_float_checkpoint_is_loaded_with_one_table(tmp_path: Path, kind: str) -> None:
    made(kind).save_pretrained(tmp_path)
    config = hf_accel.AccelConfig(weights=KINDS[kind][1])
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    model = patched(kind)
    assert torch.equal(table_of(loaded)(IDS), table_of(model)(IDS))
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    hf_accel.unpatch(loaded)
    assert torch.equal(loaded.get_input_embeddings().weight, made(kind).get_input_embeddings().weight)


@each_kind
def test_the_original_is_freed_and_read_back(tmp_path: Path, kind: str) -> None:
    made(kind).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    embedding = model.get_input_embeddings()
    before = embedding.weight.detach().clone()
    hf_accel.patch(model, weights=KINDS[kind][1])
    assert embedding.weight.numel() == 0
    hf_accel.unpatch(model)
    assert torch.equal(embedding.weight, before) and torch.equal(model(IDS).logits, made(kind)(IDS).logits)


@each_kind
@pytest.mark.parametrize("rows", [140, 120])
def test_a_resized_embedding_is_a_float_one_and_undo_keeps_the_tie(kind: str, rows: int) -> None:
    model = made(kind)
    before = model.get_input_embeddings().weight.detach().clone()
    hf_accel.patch(model, weights=KINDS[kind][1])
    rounded = table_of(model)(IDS[:, :3])
    model.resize_token_embeddings(rows, mean_resizing=False)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    assert torch.equal(model.get_input_embeddings()(IDS[:, :3]), rounded)
    model(IDS[:, :3])
    hf_accel.unpatch(model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == KINDS[kind][0]
    kept = min(rows, 130)
    assert torch.equal(model.get_input_embeddings().weight[:kept], before[:kept])


def test_a_resized_table_whose_groups_were_left_to_its_width_is_undone() -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=130, head_dim=16, **sizes)).eval()
    before = model.get_input_embeddings().weight.detach().clone()
    hf_accel.patch(model, weights=WeightConfig(4, embedding="int4"))
    model.resize_token_embeddings(140, mean_resizing=False)
    hf_accel.unpatch(model)
    assert torch.equal(model.get_input_embeddings().weight[:130], before)


TIED: dict[str, tuple[Any, WeightConfig]] = {
    "shared": (lambda: tied_model(), ONE_TABLE),
    "float embedding": (lambda: tied_model(), replace(ONE_TABLE, embedding=None)),
    "encoder": (lambda: BertForMaskedLM(BertConfig(**BERT)).eval(), WeightConfig()),
}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("more", [10, -9])
def test_a_tied_model_that_is_resized_stays_tied(kind: str, more: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock, weights = TIED[kind][0](), TIED[kind][1]
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    assert model.config.tie_word_embeddings is False or kind == "encoder"
    rows = stock.config.vocab_size + more
    for each in (stock, model):
        each.resize_token_embeddings(rows, mean_resizing=False)
    ids = IDS % min(rows, 90)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight and head.weight.shape == (rows, stock.config.hidden_size)
    assert model.config.tie_word_embeddings and model(ids).logits.shape[-1] == rows
    with torch.no_grad():
        head.weight[7] = 0.5
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded(ids).logits, expected)
    hf_accel.unpatch(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings and model.all_tied_weights_keys == stock.all_tied_weights_keys
    assert model.get_expanded_tied_weights_keys(all_submodels=True) == stock.all_tied_weights_keys
    old = [row for row in range(min(rows, rows - more)) if row != 7]
    assert torch.equal(model.get_input_embeddings().weight[old], stock.get_input_embeddings().weight[old])
    assert torch.equal(model.get_input_embeddings().weight[7], torch.full_like(head.weight[7], 0.5))


def test_a_tied_checkpoint_that_is_resized_stays_tied(tmp_path: Path) -> None:
    patched("shared, 8 bits").save_pretrained(tmp_path / "first")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    model.resize_token_embeddings(140, mean_resizing=False)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "second")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["own, 8 bits", "own, 4 bits"])
def test_a_model_that_is_not_tied_does_not_become_so(kind: str) -> None:
    model: Any = patched(kind)
    model.resize_token_embeddings(140, mean_resizing=False)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings is False


def test_rows_of_a_resized_embedding_that_were_written_stay() -> None:
    model = patched("own, 8 bits")
    model.resize_token_embeddings(133, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 2.0
    hf_accel.unpatch(model)
    before = made("own, 8 bits").get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight[7], torch.full((64,), 2.0))
    assert torch.equal(model.get_input_embeddings().weight[8:130], before[8:])


@each_kind
def test_what_is_written_is_looked_up_and_undo_refuses_to_lose_it(kind: str) -> None:
    model: Any = patched(kind)
    with torch.no_grad():
        table_of(model).weight[5] = 0.5
    written = table_of(model).quantized.dequantize(torch.float32)[5]
    assert torch.allclose(written, torch.tensor(0.5), atol=0.01)
    assert torch.equal(table_of(model)(torch.tensor([5]))[0], written)
    if KINDS[kind][0]:
        assert torch.equal(model.lm_head.quantized.dequantize(torch.float32)[5], written)
    with pytest.raises(hf_accel.UnsupportedError, match="cannot unpatch"):
        hf_accel.unpatch(model)


@each_kind
def test_the_dtype_is_the_models(kind: str) -> None:
    model: Any = patched(kind)
    torch.nn.Module.to(model, torch.bfloat16)
    found = table_of(model)(IDS)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, table_of(model).quantized.dequantize(torch.bfloat16)[IDS])


@each_kind
def test_the_estimate_is_what_is_measured(kind: str) -> None:
    model, (_, config) = made(kind).to(torch.bfloat16), KINDS[kind]
    counted = hf_accel.estimate(model.config, weights=config, dtype=torch.bfloat16).weights_bytes
    hf_accel.patch(model, weights=config)
    state = [tensor for name, tensor in model.state_dict().items() if not name.endswith("weight_shape")]
    assert counted == sum(tensor.nbytes for tensor in state) == hf_accel.estimate(model).weights_bytes
    plan = hf_accel.plan(made(kind).to(torch.bfloat16), weights=config)
    assert plan.bytes_after - counted == sum(buffer.nbytes for buffer in model.model.rotary_emb.buffers())


@each_kind
def test_the_plan_says_it(kind: str) -> None:
    tied, config = KINDS[kind]
    plan = hf_accel.plan(made(kind), weights=config)
    lines = [line for line in plan.to_dict()["choices"] if line["topic"] == "weights"]
    if tied:
        head = next(line for line in lines if line["what"].startswith("1 head"))
        assert "model.embed_tokens looks its rows up in it" in head["reason"]
    else:
        own = next(line for line in lines if line["what"] == "1 embedding [130x64]")
        assert own["choice"].startswith(config.embedding) and own["reason"] == "rows are looked up"


# -- what is not asked for ---------------------------------------------------------------------------------


def test_auto_shares_the_int8_head_of_tied_models() -> None:
    assert table_of(hf_accel.patch(tied_model(), weights=AUTO)).is_shared
    for model, weights in (
        (tied_model(), WeightConfig(embedding=None)),
        (tied_model(), replace(AUTO, head=None)),
        (tied_model(), replace(FOUR_BITS, embedding="auto")),
        (tied_model(tied=False), AUTO),
        (BertForMaskedLM(BertConfig(**BERT)), AUTO),
    ):
        hf_accel.patch(model, weights=weights)
        assert original_class(model.get_input_embeddings()) is torch.nn.Embedding


def maximum(embedding: Any) -> None:
    embedding.max_norm = 1.0


def sparse(embedding: Any) -> None:
    embedding.sparse = True


def by_frequency(embedding: Any) -> None:
    embedding.scale_grad_by_freq = True


def own_forward(embedding: Any) -> None:
    embedding.forward = embedding.forward


class Doubled(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def other_class(embedding: Any) -> None:
    embedding.__class__ = Doubled


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", [maximum, sparse, by_frequency, own_forward, other_class])
def test_embeddings_of_other_kinds_stay_stock(change: Any, tied: bool) -> None:
    stock = tied_model(tied=tied)
    change(stock.get_input_embeddings())
    model = copy.deepcopy(stock)
    with pytest.raises(hf_accel.UnsupportedError, match="leave embedding= out"):
        hf_accel.patch(model, weights=ONE_TABLE)
    assert not hf_accel.is_patched(model)
    hf_accel.patch(model, weights=AUTO)
    assert not isinstance(model.get_input_embeddings(), QuantEmbedding)
    assert torch.equal(model.get_input_embeddings()(IDS), stock.get_input_embeddings()(IDS))


def test_the_plan_says_why_a_tied_embedding_stays() -> None:
    model = tied_model()
    maximum(model.get_input_embeddings())
    assert "the embedding stays as it is: Embedding has a max_norm" in " ".join(
        line["reason"] for line in hf_accel.plan(model, weights=AUTO).to_dict()["choices"]
    )


@pytest.mark.parametrize(
    ("tied", "changes", "reason"),
    [
        (True, {"head": None}, "its head stays as it is"),
        (True, {"head": "int4"}, "the weight of the head, which gets INT4"),
        (True, {"skip": ("lm_head",)}, "named in skip="),
        (False, {"embedding": "int4", **HEAD_ALONE}, "group_size=128 does not divide its 64 numbers"),
    ],
)
def test_what_cannot_be_is_refused(tied: bool, changes: dict[str, Any], reason: str) -> None:
    model = tied_model(tied=tied)
    with pytest.raises(hf_accel.UnsupportedError, match=f"{reason}.*leave embedding= out"):
        hf_accel.patch(model, weights=replace(ONE_TABLE, **changes))
    assert not hf_accel.is_patched(model)


def test_groups_that_do_not_divide_the_head_are_refused() -> None:
    with pytest.raises(hf_accel.UnsupportedError, match=r"group_size=128 does not divide the 64 inputs of 'lm_head'"):
        hf_accel.patch(tied_model(), weights=WeightConfig(head="int4", **HEAD_ALONE))


# -- Gemma, adapters and gradients --------------------------------------------------------------------------


def gemma(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_scaled_embeddings_multiply_rows(tied: bool, tmp_path: Path) -> None:
    stock, model = gemma(tied=tied), gemma(tied=tied)
    hf_accel.patch(model, weights=ONE_TABLE)
    table = table_of(model)
    expected = table.quantized.dequantize(torch.float32)[IDS] * stock.model.embed_tokens.embed_scale
    assert torch.equal(table(IDS), expected)
    torch.testing.assert_close(expected, stock.model.embed_tokens(IDS), rtol=0, atol=0.01)
    model.save_pretrained(tmp_path)
    loaded: Any = Gemma3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(table_of(loaded)(IDS), expected)
    model.resize_token_embeddings(140, mean_resizing=False)
    assert torch.equal(model.get_input_embeddings()(IDS), expected)
    hf_accel.unpatch(model)
    assert torch.equal(model.get_input_embeddings()(IDS), stock.get_input_embeddings()(IDS))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("build", [lambda tied: gemma(tied=tied), lambda tied: tied_model(tied=tied)])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_an_embedding_is_trained_and_computes_as_on_stock(build: Any, tied: bool) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["embed_tokens"], r=4, init_lora_weights=False)
    model = build(tied)
    hf_accel.patch(model, weights=replace(ONE_TABLE, skip=PROJECTIONS))
    stock = build(tied)
    with torch.no_grad():
        stock.get_input_embeddings().weight.copy_(table_of(model).quantized.dequantize(torch.float32))
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(1)
    expected = peft.get_peft_model(stock, settings)
    found, wanted = (each.base_model.model.model.embed_tokens for each in (adapted, expected))
    assert torch.equal(found(IDS), wanted(IDS))
    for each in (found, wanted):
        each(IDS).square().sum().backward()
    grads = [[p.grad for _, p in sorted(each.named_parameters()) if p.requires_grad] for each in (found, wanted)]
    assert len(grads[0]) == 2 and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@each_kind
def test_a_copy_that_is_to_be_trained_is_a_float_embedding(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = patched(kind)
    rounded = table_of(model)(IDS)
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["embed_tokens"])
    adapted = peft.get_peft_model(model, settings)
    adapted(IDS).logits.square().sum().backward()
    trained = dict(adapted.named_parameters())
    weight = next(p for name, p in trained.items() if "embed_tokens" in name and p.requires_grad)
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    assert torch.equal(adapted.get_input_embeddings()(IDS), rounded)


@each_kind
def test_gradients_of_what_comes_after_flow(kind: str) -> None:
    """The table is no Parameter; with PEFT's hook on the embedding, gradients reach its output as with stock."""
    model = patched(kind)
    model.enable_input_require_grads()
    outputs: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    model.get_input_embeddings().register_forward_hook(keep)
    model(IDS).logits.square().sum().backward()
    assert outputs[0].grad is not None and outputs[0].grad.abs().sum() > 0


@each_kind
def test_torch_exports_it(kind: str) -> None:
    table = table_of(patched(kind))
    exported = torch.export.export(table, (IDS,))
    assert torch.equal(exported.module()(IDS + 0), table(IDS))
