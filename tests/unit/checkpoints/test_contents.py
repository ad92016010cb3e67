"""load() of float checkpoints that are damaged, or not of the model that config.json describes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_accel
from hf_accel import HfAccelError
from hf_accel.checkpoints.contents import check_finite, check_report

from .readers import encode

IDS = torch.arange(3, 15)[None]
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj.weight"
Edit = Callable[[dict[str, Any]], object]


def make(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"tie_word_embeddings": False} | more))


def tensors(edit: Edit) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        edit(content)
        save_file(
            {name: t.contiguous() for name, t in content.items()}, folder / "model.safetensors", {"format": "pt"}
        )

    return apply


def config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))

    return apply


def drop(*names: str) -> Callable[[Path], None]:
    return tensors(lambda t: [t.pop(name) for name in names])


def add(name: str, *shape: int, value: float = 1.0) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: torch.full(shape, value)}))


def put(name: str, value: float) -> Callable[[Path], None]:
    return tensors(lambda t: t[name].view(-1)[7:8].fill_(value))


def change(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: edit(t[name])}))


def both(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [edit(folder) for edit in edits] and None


def index(file: object, *, kind: str = "model.safetensors") -> Callable[[Path], None]:
    """An index of shards that names `file` for one tensor; the checkpoint itself has another name then."""

    def apply(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "a.safetensors")
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        content = {"metadata": {}, "weight_map": names | {"model.norm.weight": file}}
        (folder / f"{kind}.index.json").write_text(json.dumps(content))

    return apply


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def like_gptq(folder: Path) -> None:
    """The tensors of a GPTQ checkpoint, of which config.json does not say that they are quantized."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    levels, zeros = torch.randint(0, 16, (64, 32)), torch.full((64, 1), 8)

    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        some = slice(len(weight))
        return encode.gptq(levels[some], zeros[some], torch.rand(len(weight), 1), None, bits=4), weight

    encode.write(make(), folder, settings, encoded)
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    (folder / "config.json").write_text(json.dumps(content))


NAN = float("nan")
FP8_LEFT = tensors(lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e4m3fn)}))
UNKNOWN = config(quantization_config={"quant_method": "of tomorrow"})
REFUSED = {
    "norm": (drop("model.norm.weight"), "no 'model.norm.weight', which LlamaForCausalLM needs; copy the checkpoint"),
    "linear": (drop(DOWN), f"no '{DOWN}'"),
    "embedding": (drop("model.embed_tokens.weight"), "no 'model.embed_tokens.weight'"),
    "head": (drop("lm_head.weight"), "no 'lm_head.weight'"),
    "head and embedding, tied": (
        both(config(tie_word_embeddings=True), drop("lm_head.weight", "model.embed_tokens.weight")), "no 'lm_head",
    ),
    "no architectures": (both(config(architectures=None), drop(DOWN)), f"no '{DOWN}'"),
    "architectures unknown": (both(config(architectures=["Own"]), drop("lm_head.weight")), "no 'lm_head.weight'"),
    "quantizer unknown": (both(UNKNOWN, drop(DOWN)), f"no '{DOWN}'"),
    "quantized, which config.json does not say": (like_gptq, "which LlamaForCausalLM needs; it holds '.*g_idx', and"),
    "FP8, which config.json does not say": (FP8_LEFT, f"'{Q}.weight' is torch.float8_e4m3fn"),
    "integers": (change(DOWN, lambda t: t.to(torch.int8)), f"'{DOWN}' is torch.int8"),
    "shape": (change(DOWN, lambda t: t[:-1]), r"is \[31, 32\] in the checkpoint, but \[32, 32\]"),
    "pickled": (both(drop(DOWN), pickled), f"no '{DOWN}'"),
    "NaN in a norm": (put("model.norm.weight", NAN), r"'model.norm.weight' holds NaN or infinity at \[7\]"),
    "NaN in an embedding": (put("model.embed_tokens.weight", NAN), r"tokens.weight' holds NaN .* at \[0, 7\]"),
    "infinity": (put("model.norm.weight", -float("inf")), "'model.norm.weight' holds NaN or infinity"),
    "a layer more": (add("model.layers.2.mlp.up_proj.weight", 32, 32), "holds 'model.layers.2.mlp.up_proj.weight'"),
    "a layer less in config.json": (config(num_hidden_layers=1), "holds 'model.layers.1"),
    "a layer more in config.json": (config(num_hidden_layers=3), "no 'model.layers.2"),
    "a bias": (add(f"{Q}.bias", 32), f"holds '{Q}.bias'"),
    "1e9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000, and no model has more than 20,000"),
    "1e9 layers within": (config(text_config={"num_layers": 10**9}), "text_config.num_layers=1000000000"),
    "absolute path": (index("/etc/hostname"), r"weight_map\['model.norm.weight'\] is '/etc/hostname', which is no"),
    "absolute path, pickled": (index("/etc/hostname", kind="pytorch_model.bin"), "'/etc/hostname', which is no"),
    "path above": (index("../a.safetensors"), "'../a.safetensors', which is no file in"),
    "path above, hidden": (index("b/../../a.safetensors"), "which is no file in"),
    "path on a drive": (index("C:\\a.safetensors"), "which is no file in"),
    "no path": (index(7), "is 7, which is no file in"),
    "absolute path in config.json": (config(transformers_weights="/etc/a.safetensors"), "transformers_weights in"),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is no index of shards"),
    "cut file": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:900]),
        "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, tmp_path: Path) -> None:
    damage, text = REFUSED[kind]
    make().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(HfAccelError, match=f"(?s){text}"):
        hf_accel.load(tmp_path)


def renamed(pattern: str, text: str) -> Callable[[Path], None]:
    def edit(content: dict[str, Any]) -> None:
        old = dict(content)
        content.clear()
        content.update({re.sub(pattern, text, name): tensor for name, tensor in old.items()})

    return tensors(edit)


LEGAL = {
    "untouched": lambda folder: None,
    "old buffers": add("model.layers.0.self_attn.rotary_emb.inv_freq", 8),
    "something else": add("model.something", 3),
    "a bias of zeros": add(f"{Q}.bias", 32, value=0),
    "another dtype": change("model.norm.weight", lambda t: t.bfloat16()),
    "quantizer unknown": UNKNOWN,
    "no architectures": config(architectures=None),
    "pickled": pickled,
    "the base model's names": renamed("^model[.]", ""),
    "shards in a folder": lambda folder: (
        (folder / "b").mkdir(),
        index("a.safetensors")(folder),
        (folder / "a.safetensors").rename(folder / "b/a.safetensors"),
        (folder / "model.safetensors.index.json").write_text(
            (folder / "model.safetensors.index.json").read_text().replace("a.safetensors", "b/a.safetensors")
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:Unknown quantization type")
@pytest.mark.parametrize("kind", LEGAL)
def test_what_transformers_loads_right_is_loaded(kind: str, tmp_path: Path) -> None:
    model = make()
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    LEGAL[kind](tmp_path)
    got = hf_accel.load(tmp_path, weights=None)(IDS).logits
    torch.testing.assert_close(got, expected, rtol=0.02 if kind == "another dtype" else 1e-4, atol=1e-4)


def test_keywords_that_ask_for_another_model(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    both(renamed("^model[.]layers", "model.blocks"), change("lm_head.weight", lambda t: t[:9]))(tmp_path)
    mapping = {r"^model\.blocks": "model.layers"}
    model = hf_accel.load(tmp_path, weights=None, key_mapping=mapping, ignore_mismatched_sizes=True)
    assert torch.equal(model.get_submodule(Q).weight, make().get_submodule(Q).weight)
    with pytest.raises(HfAccelError, match=r"no 'model\.layers"):
        hf_accel.load(tmp_path)


def mixture(**more: Any) -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts | more))


@pytest.mark.parametrize("pieces", [("up",), ("gate", "up", "down")])
def test_a_lost_expert(pieces: tuple[str, ...], tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    drop(*(f"model.layers.1.mlp.experts.3.{piece}_proj.weight" for piece in pieces))(tmp_path)
    with pytest.raises(HfAccelError, match=r"lacks a piece of expert 3 of 'model\.layers\.1"):
        hf_accel.load(tmp_path)


def test_what_only_transformers_finds_is_said_too(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    change("model.layers.1.mlp.experts.3.up_proj.weight", lambda t: t[:, :-1])(tmp_path)
    with pytest.raises(HfAccelError, match="transformers cannot make Qwen3MoeForCausalLM of"):
        hf_accel.load(tmp_path)


@pytest.mark.parametrize("drafting", [1, 0])
def test_layers_that_draft_are_left_out(drafting: int, tmp_path: Path) -> None:
    sizes = {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 2,
    }  # fmt: skip
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | sizes)).save_pretrained(tmp_path)
    both(add("model.layers.2.input_layernorm.weight", 32), config(num_nextn_predict_layers=drafting))(tmp_path)
    if drafting:
        assert hf_accel.is_patched(hf_accel.load(tmp_path))
        return
    with pytest.raises(HfAccelError, match=r"holds 'model\.layers\.2\.input_layernorm"):
        hf_accel.load(tmp_path)


REPORTS = [
    ({"model.norm.weight"}, set(), "no 'model.norm.weight'"),
    (set(), {"model.layers.2.mlp.up_proj.weight"}, "holds 'model.layers.2.mlp.up_proj.weight'"),
    (set(), {"model.something", "model.layers.0.self_attn.rotary_emb.inv_freq"}, None),
]


@pytest.mark.parametrize(("missing", "unexpected", "text"), REPORTS)
def test_what_transformers_reports_of_other_quantizers(
    missing: set[str], unexpected: set[str], text: str | None
) -> None:
    if text is None:
        check_report(make(), missing, unexpected)
        return
    with pytest.raises(HfAccelError, match=text):
        check_report(make(), missing, unexpected)


INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [{}, {7: INF}, {7: -INF}, {9: float("nan")}, {7: INF, 9: -INF}])
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype, wrong: dict[int, float]) -> None:
    values = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    for index, value in wrong.items():
        values.view(-1)[index] = value
    if not wrong:
        return check_finite("scale", values)
    with pytest.raises(
        HfAccelError, match=rf"'scale' holds NaN or infinity at \[{min(wrong) // 4}, {min(wrong) % 4}\]"
    ):
        check_finite("scale", values)


@pytest.mark.parametrize("values", [torch.empty(0), torch.empty(3, 0), torch.full((2,), INF, device="meta")])
def test_without_numbers_nothing_is_wrong(values: Tensor) -> None:
    check_finite("scale", values)
