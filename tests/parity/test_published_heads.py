"""EAGLE-3 heads of others: they draft what the definition of their layout says, and a wrong one is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel
from hf_accel import HfAccelError, SpeculativeConfig, UnsupportedError
from hf_accel.distill.drafts.heads import DraftHead, target_states
from hf_accel.generation.speculation.drafters.target_states import HeadDrafter

from .families import DECODER, VOCABULARY, build
from .speculating import by_generate, requests

LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE, THETA, EPS = 6, 32, 4, 2, 8, 500.0, 1e-5
KNOWN = list(range(3, VOCABULARY, 2))
LAYER: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rope_theta": THETA,
    "rms_norm_eps": EPS,
}  # fmt: skip
Weights = dict[str, Tensor]


def large(seed: int = 0) -> LlamaForCausalLM:
    """A target with as many layers as the layouts need."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**DECODER, "num_hidden_layers": LAYERS})).eval()


def weights_of(kind: str = "llama", *, words: int = len(KNOWN)) -> Weights:
    """Random weights of a head, by the names of speculators."""
    draw = torch.Generator().manual_seed(3)
    sizes = {
        "fc": (HIDDEN, 3 * HIDDEN), "lm_head": (words, HIDDEN), "norm": (HIDDEN,),
        **{f"layers.0.{name}": (HIDDEN,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"layers.0.mlp.{name}": (48, HIDDEN) for name in ("gate_proj", "up_proj")},
        "layers.0.mlp.down_proj": (HIDDEN, 48), "layers.0.self_attn.q_proj": (HEADS * SIZE, 2 * HIDDEN),
        **{f"layers.0.self_attn.{name}": (KV_HEADS * SIZE, 2 * HIDDEN) for name in ("k_proj", "v_proj")},
        "layers.0.self_attn.o_proj": (HIDDEN, HEADS * SIZE),
    }  # fmt: skip
    if kind == "qwen3":
        sizes |= {f"layers.0.self_attn.{name}": (SIZE,) for name in ("q_norm", "k_norm")}
    return {
        f"{name}.weight": torch.randn(size, generator=draw) * (0.1 if len(size) == 1 else 0.3) + (len(size) == 1)
        for name, size in sizes.items()
    }


def tables() -> Weights:
    known, is_known = torch.tensor(KNOWN), torch.zeros(VOCABULARY, dtype=torch.bool)
    is_known[known] = True
    return {"d2t": known - torch.arange(len(KNOWN)), "t2d": is_known}


def write_speculators(folder: Path, weights: Weights, **changed: Any) -> None:
    """As vLLM's speculators package writes a head."""
    layer = {**LAYER, **changed.pop("layer", {})}
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": len(KNOWN),
        "transformer_layer_config": layer, "norm_before_residual": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"]}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")


def write_original(folder: Path, weights: Weights, **changed: Any) -> None:
    """As the authors of EAGLE-3 write a head, and SpecForge."""
    config = {**LAYER, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(KNOWN), "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    torch.save(named, folder / "pytorch_model.bin")


# -- by the definition of the layouts ------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotate [heads, T, SIZE] by its positions."""
    angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def computed(weights: Weights, states: Tensor, embeddings: Tensor, *, residual_normed: bool) -> Tensor:
    """What the layer gives for states and embeddings [T, HIDDEN]."""
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in weights.items()}
    normed = rms(states, layer["hidden_norm.weight"])
    pairs = torch.cat([rms(embeddings, layer["input_layernorm.weight"]), normed], dim=-1)
    q, k, v = (
        (pairs @ layer[f"self_attn.{name}_proj.weight"].T).view(len(pairs), -1, SIZE).transpose(0, 1) for name in "qkv"
    )
    if "self_attn.q_norm.weight" in layer:
        q, k = rms(q, layer["self_attn.q_norm.weight"]), rms(k, layer["self_attn.k_norm.weight"])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (turned(k), v))
    scores = turned(q) @ k.transpose(1, 2) / SIZE**0.5 + torch.full((len(pairs),) * 2, float("-inf")).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T
    added = (normed if residual_normed else states) + attended
    read = rms(added, layer["post_attention_layernorm.weight"])
    gate, up = (read @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return added + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


@torch.no_grad()
def chain(
    weights: Weights, target: Any, tokens: list[int], count: int, *,
    layers: tuple[int, ...] = (2, 3, 3), known: list[int] = KNOWN, settings: dict[str, Any],
) -> list[int]:  # fmt: skip
    """Draft greedily after these tokens."""
    states, _ = target_states(target, layers, torch.tensor([tokens[:-1]]))
    parts = states[0].chunk(3, dim=-1)
    if settings.get("fc_norm"):
        parts = tuple(rms(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts))
    read = torch.cat(parts, dim=-1)
    if settings.get("norm_before_fc"):
        read = rms(read, weights["input_norm.weight"])
    read, ids, drafted = read @ weights["fc.weight"].T, tokens[1:], list[int]()
    own = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    for _ in range(count):
        residual_normed = settings.get("norm_before_residual", False)
        made = computed(weights, read, own[torch.tensor(ids)], residual_normed=residual_normed)[-1:]
        normed = rms(made, weights["norm.weight"])
        drafted.append(known[int((normed @ weights["lm_head.weight"].T).argmax())])
        read = torch.cat([read, normed if settings.get("norm_output") else made])
        ids = [*ids, drafted[-1]]
    return drafted


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "original": (write_original, {}, {}),
    "SpecForge": (
        write_original,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
        {"layers": (1, 3, 5)},
    ),
    "speculators": (write_speculators, {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, {"layers": (1, 3, 5)}),
    "residual": (write_speculators, {"norm_before_residual": True}, {}),
    "norms": (write_speculators, {"fc_norm": True, "norm_output": True}, {}),
    "one norm": (write_speculators, {"norm_before_fc": True, "layer": {"model_type": "qwen3", "head_dim": SIZE}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_what_the_layout_says(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, over pages, after accepted and rejected drafts, from the folder alone."""
    write, settings, more = CASES[case]
    weights = weights_of(settings.get("layer", {}).get("model_type", "llama"))
    if settings.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": 1 + torch.arange(HIDDEN) / 40 for i in range(3)}
    if settings.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + torch.arange(3 * HIDDEN) / 90
    if case == "residual":
        weights["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    write(tmp_path, weights | tables(), **settings)
    stock, compared = large(), list[int]()
    propose = HeadDrafter.propose

    def checked(self: Any, sequences: Any, lengths: Any) -> Any:
        drafts = propose(self, sequences, lengths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            compared.extend(draft.tokens)
            assert draft.tokens == chain(weights, stock, sequence.tokens, len(draft), settings=settings, **more)
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", checked)
    monkeypatch.setattr(DraftHead, "weights", None)
    config = SpeculativeConfig(drafter=tmp_path, num_draft=3, max_nodes=1)
    model, prompts = hf_accel.patch(large(), weights=None, speculative=config), requests(3, seed=6)
    with_drafts = by_generate(model, prompts, 8)
    assert len(compared) > 30
    assert with_drafts == by_generate(model, prompts, 8, speculative=None)


def test_a_head_of_all_tokens_has_no_tables(tmp_path: Path) -> None:
    weights = weights_of(words=VOCABULARY)
    write_original(tmp_path, weights, draft_vocab_size=VOCABULARY)
    model = large()
    head, tokens = DraftHead.from_pretrained(tmp_path, model), requests(1)[0] * 3
    states, _ = target_states(model, head.target_layers, torch.tensor([tokens[:-1]]))
    logits, _ = head(head.narrowed(states), torch.tensor([tokens[1:]]))
    expected = chain(weights, model, tokens, 1, known=list(range(VOCABULARY)), settings={})
    assert [int(logits[0, -1].argmax())] == expected
    assert head.decoder.get_input_embeddings().weight is model.get_input_embeddings().weight
    with pytest.raises(UnsupportedError, match="copy those to keep it"):
        head.save_pretrained(tmp_path / "again")


def test_a_head_draws_tokens_and_loading_it_draws_none(tmp_path: Path) -> None:
    write_original(tmp_path, weights_of() | tables())
    model = hf_accel.patch(large(), weights=None)
    ids = torch.tensor([[5, 6, 7, 8]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": True}
    made = []
    for drafter, length in ((tmp_path, 2), ("ngram", "auto")):
        torch.manual_seed(3)
        config = SpeculativeConfig(drafter=drafter, num_draft=length, verify="seeded")  # type: ignore[arg-type]
        made.append(model.generate(ids, speculative=config, **options))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculators_model_type": "eagle"}, "heads of kind 'eagle3' are read"),
        ({"layer": {"vocab_size": 99}}, "vocab_size=99, and LlamaForCausalLM has 101"),
        ({"target_hidden_size": 64}, "target_hidden_size=64"),
        ({"layer": {"num_hidden_layers": 2}}, "has 2 layers of model_type 'llama'"),
        ({"layer": {"model_type": "gpt2"}}, "model_type 'gpt2'"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "states 1 to 5 between"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "'narrow.weight'"),
        ({"draft_vocab_size": 7}, "has no d2t that says which"),
        ({"fc_norm": True}, "'norms.0.weight'"),
        ({"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}}, "was made for Qwen3"),
    ],
)
def test_a_head_of_another_target_or_kind_is_an_error(changed: Any, message: str, tmp_path: Path) -> None:
    write_speculators(tmp_path, weights_of() | tables(), **changed)
    with pytest.raises(UnsupportedError, match=message):
        DraftHead.from_pretrained(tmp_path, large())


def test_weights_and_tables_that_cannot_be_right_are_an_error(tmp_path: Path) -> None:
    right, model = weights_of() | tables(), large()
    shuffled = torch.arange(len(KNOWN)).flip(0)
    for wrong, message in (
        ({"d2t": right["d2t"][shuffled] + 2 * shuffled}, "do not rise"),
        ({"d2t": right["d2t"] + 1}, "name different tokens"),
        ({"lm_head.weight": right["lm_head.weight"] * float("nan")}, "not finite"),
        ({"layers.1.mlp.up_proj.weight": torch.ones(3)}, "missing, unknown or of another shape"),
    ):
        write_speculators(tmp_path, right | wrong)
        with pytest.raises(UnsupportedError, match=message):
            DraftHead.from_pretrained(tmp_path, model)
    write_speculators(tmp_path, right)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["norm_before_residual"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="does not say norm_before_residual"):
        DraftHead.from_pretrained(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    write_original(tmp_path, right)
    with pytest.raises(UnsupportedError, match="1 to 1 between"):
        DraftHead.from_pretrained(tmp_path, build("llama"))


SPOILT: dict[str, tuple[Any, str]] = {
    "half a file": (lambda folder: halve(folder / "model.safetensors"), "model.safetensors cannot be read.*copy it"),
    "an empty second file": (lambda folder: (folder / "more.safetensors").touch(), "more.safetensors cannot be read"),
    "half a config": (lambda folder: halve(folder / "config.json"), r"config.json cannot be read: .*; copy it again"),
    "no settings": (lambda folder: (folder / "config.json").write_text("[1]"), "config.json holds a list"),
    "a pickle of something": (lambda folder: pickled(folder), "pytorch_model.bin cannot be read"),
    "no heads": (lambda folder: edit(folder, num_attention_heads=0), "no layer that can be made: ZeroDivision"),
    "unknown rope": (lambda folder: edit(folder, rope_parameters={"rope_type": "x"}), "describes no layer"),
    "a number of text": (lambda folder: edit(folder, head_dim="8"), "describes no layer that can be made"),
}


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(object(), folder / "pytorch_model.bin")


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("how", SPOILT)
def test_files_that_cannot_be_read_are_an_error_of_ours(how: str, tmp_path: Path) -> None:
    write_speculators(tmp_path, weights_of() | tables())
    spoil, message = SPOILT[how]
    spoil(tmp_path)
    with pytest.raises(HfAccelError, match=message):
        DraftHead.from_pretrained(tmp_path, large())


@pytest.mark.parametrize(
    "fields", [{"_attn_implementation": "flash_attention_2"}, {"return_dict": False, "output_hidden_states": True}]
)
def test_settings_of_calls_are_not_those_of_a_layer(fields: dict[str, Any], tmp_path: Path) -> None:
    write_speculators(tmp_path, weights_of() | tables(), layer=fields)
    model, prompts = hf_accel.patch(large(), weights=None, speculative=tmp_path), requests(2, seed=6)
    assert by_generate(model, prompts, 8) == by_generate(model, prompts, 8, speculative=None)


@pytest.mark.parametrize("tied", [True, False])
def test_a_target_with_a_quantized_table_of_embeddings(tied: bool, tmp_path: Path) -> None:
    write_speculators(tmp_path, weights_of() | tables())
    sizes = {**DECODER, "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    table = hf_accel.WeightConfig(bits=4, group_size=32, embedding="int8")
    drafts = SpeculativeConfig(drafter=tmp_path, num_draft=3)
    model = hf_accel.patch(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), weights=table, speculative=drafts)
    head = DraftHead.from_pretrained(tmp_path, model)
    ids = torch.arange(VOCABULARY)
    assert torch.equal(head.decoder.get_input_embeddings()(ids), model.get_input_embeddings()(ids))
    prompts = requests(2, seed=6)
    found = by_generate(model, prompts, 8)
    assert hf_accel.stats(model)["drafted"] > 0
    assert found == by_generate(model, prompts, 8, speculative=None)


def test_a_folder_without_a_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="drafter='nowhere'"):
        SpeculativeConfig(drafter="nowhere")
    model = hf_accel.patch(large(), weights=None, speculative=tmp_path)
    with pytest.raises(UnsupportedError, match="no EAGLE-3 head of others"):
        by_generate(model, requests(1), 4)
