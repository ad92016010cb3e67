"""hf_accel.load() of checkpoints of other programs: the numbers that they store, in the bits that they have."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_accel
from hf_accel import HfAccelError, UnsupportedError
from hf_accel.linear import QuantLinear
from hf_accel.linear.formats import readable

from . import encode

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj"
IDS = torch.arange(3, 15)[None]


def make(kind: type = LlamaForCausalLM, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    config = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config}[kind](**SIZES | more)
    torch.manual_seed(0)
    return kind(config).to(dtype)


def args(bits: int, strategy: str, symmetric: bool = True, group: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group,
        "dynamic": False, "actorder": None,
    } | more  # fmt: skip


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": group},
    }  # fmt: skip


def draw(weight: Tensor, *, bits: int, group: int | None, middle: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [out, in], zero points and scales [out, groups] of about the size of the weight."""
    outputs, inputs = weight.shape
    groups = inputs // (group or inputs)
    levels = torch.randint(0, 2**bits, (outputs, inputs))
    zeros = torch.full((outputs, groups), 2 ** (bits - 1)) if middle else torch.randint(1, 2**bits, (outputs, groups))
    return levels, zeros, ((torch.rand(outputs, groups) + 0.5) * 0.04 / 2 ** (bits - 4)).half()


def gptq(
    bits: int = 4, *, group: int = 32, act_order: bool = False, middle: bool = True, version: str = "gptq"
) -> Any:
    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        levels, zeros, scales = draw(weight, bits=bits, group=group, middle=middle)
        index = torch.randperm(weight.shape[1]) // group if act_order else None
        parts = encode.gptq(levels, zeros, scales, index, bits=bits, less=1 if version == "gptq" else 0)
        return parts, encode.dense(levels, zeros, scales, index)

    config = {"bits": bits, "group_size": group, "desc_act": act_order, "sym": middle, "checkpoint_format": version}
    return {"quant_method": "gptq", **config}, encoded


def awq(*, group: int = 32) -> Any:
    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        levels, zeros, scales = draw(weight, bits=4, group=group, middle=False)
        return encode.awq(levels, zeros, scales), encode.dense(levels, zeros, scales)

    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, encoded


def pack(bits: int = 4, *, group: int | None = 32, middle: bool = True, order: bool = False) -> Any:
    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        levels, zeros, scales = draw(weight, bits=bits, group=group, middle=middle)
        index = torch.randperm(weight.shape[1]) // group if order else None
        parts = encode.packed(levels, scales, None if middle else zeros, bits=bits)
        return parts | ({"weight_g_idx": index.int()} if order else {}), encode.dense(levels, zeros, scales, index)

    strategy = "channel" if group is None else "group"
    return compressed("pack-quantized", args(bits, strategy, middle, group)), encoded


def bytes_of_4_bits(strategy: str = "group", *, middle: bool = True) -> Any:
    """W4A8: a byte for each number."""
    group = 32 if strategy == "group" else None

    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        levels, zeros, scales = draw(weight, bits=4, group=group, middle=middle)
        zeros = zeros.clamp(max=15)
        parts = {"weight": (levels - 8).to(torch.int8), "weight_scale": scales}
        return parts | ({} if middle else {"weight_zero_point": (zeros - 8).to(torch.int8)}), encode.dense(
            levels, zeros, scales
        )

    inputs = args(8, "token", dynamic=True)
    return compressed("int-quantized", args(4, strategy, middle, group), inputs), encoded


def integers(strategy: str = "channel") -> Any:
    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        levels, _, scales = draw(weight, bits=8, group=None, middle=True)
        scales = scales[:1, 0] if strategy == "tensor" else scales
        exact = encode.dense(levels, 128, scales.view(-1, 1).expand(len(levels), 1))
        return {"weight": (levels - 128).to(torch.int8), "weight_scale": scales}, exact

    inputs = args(8, "token", dynamic=True) if strategy == "channel" else None
    return compressed("int-quantized", args(8, strategy), inputs), encoded


def float8(strategy: str = "channel", *, rounds: bool = False, static: bool = False) -> Any:
    """compressed-tensors' FP8; "fine-grained": as transformers writes it."""
    block = (24, 32)  # which cuts off the last block of outputs, but not of inputs

    def encoded(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        numbers = (torch.randn(weight.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        sizes = {"channel": (1, weight.shape[1]), "tensor": weight.shape}.get(strategy, block)
        scales = torch.rand(*(-(-n // size) for n, size in zip(weight.shape, sizes, strict=True))).add(0.5) / 4000
        whole = scales.double().repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
        suffix = "weight_scale_inv" if strategy == "fine-grained" else "weight_scale"
        exact = numbers.double() * whole[: weight.shape[0], : weight.shape[1]]
        more = {"input_scale": torch.tensor([0.01])} if static else {}
        return {"weight": numbers, suffix: scales.view(1) if strategy == "tensor" else scales} | more, exact

    if strategy == "fine-grained":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}, encoded
    weights = args(8, strategy, type="float", block_structure=list(block) if strategy == "block" else None)
    inputs = args(8, "token", type="float", dynamic=not static) if rounds else None
    return compressed("float-quantized", weights, inputs), encoded


KINDS = {
    "gptq": gptq(), "gptq v2": gptq(version="gptq_v2"), "gptq asymmetric": gptq(middle=False),
    "gptq asymmetric v2": gptq(middle=False, version="gptq_v2"), "gptq act-order": gptq(act_order=True),
    "gptq act-order asymmetric": gptq(act_order=True, middle=False), "gptq 8 bits": gptq(8),
    "gptq 8 bits act-order": gptq(8, act_order=True), "awq": awq(), "w4a16": pack(),
    "w4a16 asymmetric": pack(middle=False), "w4a16 by output": pack(group=None), "w4a16 act-order": pack(order=True),
    "w8a16": pack(8, group=None), "w8a16 by group": pack(8), "w8a8": integers(), "w8a8 by tensor": integers("tensor"),
    "w4a8": bytes_of_4_bits(), "w4a8 by output": bytes_of_4_bits("channel"),
    "w4a8 asymmetric": bytes_of_4_bits(middle=False), "fp8 static": float8("tensor", rounds=True, static=True),
    "fp8": float8(), "fp8 by tensor": float8("tensor", rounds=True), "fp8 by block": float8("block", rounds=True),
    "fp8 of transformers": float8("fine-grained"),
}  # fmt: skip


def write(folder: Path, kind: str, model: Any, **keywords: Any) -> dict[str, Tensor]:
    config, encoded = KINDS[kind]
    weights = encode.write(model, folder, config, encoded, **keywords)
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert weights.keys() == names - {"lm_head"}
    return weights


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """The folder of a kind, which is written once and only read, and its weights."""

    @cache
    def of(kind: str) -> tuple[Path, dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("written") / "in"
        return folder, write(folder, kind, make())

    return of


@pytest.fixture
def saved(tmp_path: Path, written: Callable[[str], tuple[Path, dict[str, Tensor]]]) -> Any:
    def save(kind: str, model: Any = None, **keywords: Any) -> dict[str, Tensor]:
        if model is not None:
            return write(tmp_path / "in", kind, model, **keywords)
        folder, weights = written(kind)
        shutil.copytree(folder, tmp_path / "in")
        return weights

    return save


def float_model(folder: Path, weights: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Any:
    """What the checkpoint stands for, in float64."""
    model = make(tie_word_embeddings=False).to(dtype)
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    own = {name: tensor.to(dtype) for name, tensor in tensors.items() if name in model.state_dict()}
    model.load_state_dict(own | {f"{name}.weight": weight for name, weight in weights.items()})
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_that_are_stored(kind: str, saved: Any, tmp_path: Path) -> None:
    weights = saved(kind)
    model = hf_accel.load(tmp_path / "in")
    assert hf_accel.is_patched(model) and type(model) is not LlamaForCausalLM  # an instance of a class of its own
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        torch.testing.assert_close(layer.quantized.dequantize(torch.float64), weights[name], rtol=1e-6, atol=1e-9)
    exact = float_model(tmp_path / "in", weights)
    with torch.no_grad():
        got, expected = model(IDS).logits.double(), exact(IDS).logits
    assert (got - expected).norm() / expected.norm() < 0.06


# Their layers are those of another kind, once they are loaded.
AS_OTHERS = (
    "gptq v2", "gptq asymmetric v2", "gptq act-order", "gptq 8 bits", "awq", "w4a16", "w4a16 asymmetric",
    "w4a16 act-order", "w8a16 by group", "w4a8 by output", "fp8 static", "fp8 of transformers",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind in AS_OTHERS else ()) for kind in KINDS]
)
def test_what_was_loaded_can_be_saved_and_loaded(kind: str, saved: Any, tmp_path: Path) -> None:
    saved(kind)
    model = hf_accel.load(tmp_path / "in")
    output = model.generate(IDS, max_new_tokens=8, do_sample=False)
    model.save_pretrained(tmp_path / "out")
    for again in (hf_accel.load(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        for (name, one), (other, two) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
            assert name == other and one.dtype is two.dtype and torch.equal(readable(one), readable(two))
        assert torch.equal(again.generate(IDS, max_new_tokens=8, do_sample=False), output)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["gptq act-order asymmetric", "awq", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_keep_their_dtype(kind: str, dtype: torch.dtype, saved: Any, tmp_path: Path) -> None:
    weights = saved(kind, make(dtype=dtype))
    model = hf_accel.load(tmp_path / "in")
    assert model.dtype is dtype
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.compute_dtype is dtype and layer.quantized.weight_scale.dtype is torch.float16
        torch.testing.assert_close(layer.quantized.dequantize(torch.float64), weight, rtol=1e-6, atol=1e-9)
    assert model.generate(IDS, max_new_tokens=4).shape == (1, IDS.shape[1] + 4)


def test_shards_ties_biases_and_device_maps(saved: Any, tmp_path: Path) -> None:
    weights = saved("gptq", make(Qwen2ForCausalLM, tie_word_embeddings=True), shards=3)
    model = hf_accel.load(tmp_path / "in", device_map="cpu", cache={"block_size": 8}, attention="auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layer = model.get_submodule(Q)
    assert layer.bias is not None and torch.equal(layer.bias, make(Qwen2ForCausalLM).get_submodule(Q).bias)
    torch.testing.assert_close(layer.quantized.dequantize(torch.float64), weights[Q], rtol=1e-6, atol=1e-9)


def test_a_bias_that_the_class_has_not_is_kept(saved: Any, tmp_path: Path) -> None:
    """AutoGPTQ writes one, usually of zeros, for each layer."""
    config, encoded = gptq()

    def with_bias(name: str, weight: Tensor) -> tuple[encode.Parts, Tensor]:
        parts, exact = encoded(name, weight)
        return parts | {"bias": torch.ones(len(weight))}, exact

    encode.write(make(), tmp_path / "in", config, with_bias)
    model = hf_accel.load(tmp_path / "in")
    assert torch.equal(model.get_submodule(Q).bias, torch.ones(64))


def test_quantized_layers_that_draft_are_left_out(saved: Any, tmp_path: Path) -> None:
    saved("gptq")
    expected = hf_accel.load(tmp_path / "in")(IDS).logits
    tensor_with("model.layers.2.mlp.up_proj.qweight", lambda _: torch.ones(8, 128).int())(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert torch.equal(hf_accel.load(tmp_path / "in")(IDS).logits, expected)


def test_without_architectures_names_are_checked_too(saved: Any, tmp_path: Path) -> None:
    saved("gptq")
    tensor_with("model.norm.weight", None)(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(HfAccelError, match=r"no 'model\.norm\.weight'"):
        hf_accel.load(tmp_path / "in")


def test_adapters_and_undo(saved: Any, tmp_path: Path) -> None:
    saved("gptq act-order")
    model = hf_accel.load(tmp_path / "in")
    before = model(IDS).logits
    copied = copy.deepcopy(model)
    assert torch.equal(copied(IDS).logits, before)
    with pytest.raises(HfAccelError, match="float"):
        hf_accel.unpatch(model)
    assert torch.equal(model(IDS).logits, before)


def test_a_float_checkpoint_and_one_of_ours(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "float")
    model = hf_accel.load(tmp_path / "float", weights={"bits": 4, "group_size": 32})
    assert model.get_submodule(Q).layout.bits == 4
    model.save_pretrained(tmp_path / "ours")
    again = hf_accel.load(tmp_path / "ours", cache=None)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert hf_accel.load(tmp_path / "float", weights=None).get_submodule(Q).weight.dtype is torch.float32


def test_weights_cannot_be_asked_for_again(saved: Any, tmp_path: Path) -> None:
    saved("awq")
    with pytest.raises(UnsupportedError, match="this awq checkpoint are quantized already; leave weights= out"):
        hf_accel.load(tmp_path / "in", weights="int8")
    assert hf_accel.load(tmp_path / "in", weights=None).get_submodule(Q).layout.bits == 4


# -- what is refused -----------------------------------------------------------------------------------


def config_with(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def group_with(part: str | None = None, **changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        if part is None:
            group.update(changes)
        else:
            group[part] = (group[part] or {}) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def tensor_with(name: str, change: Any) -> Any:
    """change: of the tensor; None: it is left out. A name that is not there is made."""

    def apply(folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name)).contiguous()
        save_file(tensors, file, {"format": "pt"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = dict.fromkeys(tensors, file.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def bytes_with(change: Any) -> Any:
    def apply(folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(change(file.read_bytes()))

    return apply


def nan_first(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = torch.nan
    return tensor


def byte_at(row: int, column: int, byte: int) -> Any:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(torch.uint8)[row, column] = byte
        return tensor

    return change


def both(*damages: Any) -> Any:
    return lambda folder: [damage(folder) for damage in damages] and None


FIFTEEN = tensor_with(f"{Q}.qzeros", lambda t: torch.full_like(t, 0x5555F555))
SHORT, FLOAT, LONGER = (lambda t: t[:-1]), (lambda t: t.float()), (lambda t: torch.cat([t, t]))
WIDE = lambda t: torch.cat([t, t], dim=-1)  # noqa: E731
REFUSED = [
    ("gptq", config_with(bits=3), "weights of 3 bits"),
    ("gptq", config_with(bits=2), "weights of 2 bits"),
    ("gptq", config_with(bits="4"), "weights of 4 bits, of which"),
    ("gptq", config_with(bits=None), "weights of None bits"),
    ("gptq", config_with(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    ("gptq", config_with(checkpoint_format=7), "checkpoint_format=7"),
    ("gptq", config_with(bits=8), "qweight' is"),
    *[("gptq", tensor_with(f"{Q}.{part}", None), f"no '{Q}.{part}'") for part in ("qweight", "qzeros", "scales")],
    *[("gptq", tensor_with(f"{Q}.{part}", SHORT), part) for part in ("qweight", "qzeros", "g_idx")],
    ("gptq", tensor_with(f"{Q}.scales", SHORT), "says group_size=32, but .* has groups of 64 inputs"),
    ("gptq", config_with(group_size=-1), "says group_size=-1, but"),
    ("gptq", config_with(group_size="32"), "says group_size=32, but"),
    ("gptq", both(config_with(desc_act=True), tensor_with(f"{Q}.g_idx", None)), "says desc_act=True, but .* no"),
    ("gptq asymmetric", config_with(sym=True), "says sym=True, but .*qzeros' holds zero points other than 8"),
    ("gptq asymmetric", both(config_with(meta={"quantizer": 7}), FIFTEEN), "holds 15 in the checkpoint"),
    ("gptq asymmetric", both(config_with(meta=[1]), FIFTEEN), "holds 15 in the checkpoint"),
    *[("gptq", tensor_with(f"{Q}.{part}", LONGER), part) for part in ("qweight", "qzeros", "g_idx")],
    *[("gptq", tensor_with(f"{Q}.{part}", WIDE), part) for part in ("qweight", "qzeros", "scales")],
    *[("gptq", tensor_with(f"{Q}.{part}", FLOAT), part) for part in ("qweight", "qzeros", "g_idx")],
    *[("gptq", tensor_with(f"{Q}.{p}", lambda t: t.long()), p) for p in ("qweight", "qzeros")],
    ("gptq", tensor_with(f"{Q}.scales", lambda t: t.int()), "scales' is torch.int32"),
    ("gptq", tensor_with(f"{Q}.scales", nan_first), "scales' holds NaN"),
    ("gptq", tensor_with(f"{Q}.scales", lambda t: t * torch.inf), "scales' holds NaN"),
    ("gptq", tensor_with(f"{Q}.scales", lambda t: t[0]), "scales"),
    ("gptq", tensor_with(f"{Q}.g_idx", torch.zeros_like), "groups of unequal size"),
    ("gptq", tensor_with(f"{Q}.g_idx", lambda t: t - 1), "groups of unequal size"),
    ("gptq", tensor_with(f"{Q}.g_idx", lambda t: t + 10**6), "groups of unequal size"),
    ("gptq", tensor_with(f"{Q}.weight", lambda _: torch.ones(64, 64)), "both quantized and as a float weight"),
    ("gptq", tensor_with(f"{Q}.more", lambda _: torch.ones(3)), "no place for"),
    ("gptq", tensor_with("model.layers.7.mlp.up_proj.qweight", lambda _: torch.ones(8, 8).int()), "has not"),
    ("gptq", tensor_with("model.norm.qweight", lambda _: torch.ones(8, 8).int()), "no plain Linear"),
    ("gptq", tensor_with("model.embed_tokens.qweight", lambda _: torch.ones(8, 8).int()), "no plain Linear"),
    ("gptq", tensor_with("qweight", lambda _: torch.ones(8, 8).int()), "has not|no plain Linear"),
    ("gptq", tensor_with("model.norm.weight", None), "no 'model.norm.weight'"),
    ("gptq", tensor_with("model.norm.weight", SHORT), "model.norm.weight' is"),
    ("gptq", tensor_with("model.norm.weight", lambda t: t.int()), "model.norm.weight' is torch.int32"),
    ("gptq", tensor_with("lm_head.weight", WIDE), "lm_head.weight' is"),
    ("gptq", tensor_with(f"{Q}.bias", lambda _: torch.ones(63)), "bias' is"),
    ("gptq", tensor_with(f"{Q}.bias", lambda _: torch.ones(64).int()), "bias' is torch.int32"),
    ("gptq 8 bits", tensor_with(f"{Q}.qzeros", lambda t: t + 1), "8 bits with zero points"),
    ("gptq 8 bits", config_with(bits=4), "qweight' is"),
    ("awq", config_with(bits=8), "weights of 8 bits"),
    ("awq", config_with(bits=None), "weights of None bits"),
    ("awq", config_with(version="gemv"), "version='gemv'"),
    ("awq", config_with(version="marlin"), "version='marlin'"),
    *[("awq", tensor_with(f"{Q}.{part}", None), f"no '{Q}.{part}'") for part in ("qweight", "scales")],
    *[("awq", tensor_with(f"{Q}.{part}", SHORT), part) for part in ("qweight", "qzeros")],
    ("awq", tensor_with(f"{Q}.scales", SHORT), "says group_size=32, but .* has groups of 64 inputs"),
    ("awq", tensor_with(f"{Q}.qzeros", None), "says zero_point=True, but .* no '.*qzeros'"),
    *[("awq", tensor_with(f"{Q}.{part}", WIDE), part) for part in ("qweight", "qzeros", "scales")],
    *[("awq", tensor_with(f"{Q}.{part}", FLOAT), part) for part in ("qweight", "qzeros")],
    ("awq", tensor_with(f"{Q}.scales", nan_first), "scales' holds NaN"),
    ("w4a16", config_with(sparsity_config={"format": "2:4"}), "sparsity_config"),
    ("w4a16", config_with(transform_config={"config_groups": {}}), "transform_config"),
    ("w4a16", config_with(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    ("w4a16", config_with(quantization_status="frozen"), "quantization_status='frozen'"),
    ("w4a16", config_with(config_groups={}), "config_groups"),
    ("w4a16", config_with(config_groups=None), "config_groups"),
    ("w4a16", config_with(config_groups=[1]), "config_groups"),
    ("w4a16", config_with(format="float-quantized"), "format='float-quantized'"),
    ("w4a16", config_with(format=None), "format=None"),
    ("w4a16", group_with("weights", type="float"), "type 'float'"),
    ("w4a16", group_with("weights", num_bits=2), "weights of 2 bits"),
    ("w4a16", group_with("weights", strategy="block"), "strategy='block'"),
    ("w4a16", group_with(targets=["re:.*mlp.*"]), "no group of config_groups"),
    ("w4a16", group_with(targets=[]), "no group of config_groups"),
    ("w4a16", group_with(output_activations=args(8, "token")), "outputs of layers"),
    ("w4a16", group_with(input_activations=args(4, "token", dynamic=True)), "input_activations"),
    ("w8a8", group_with("input_activations", dynamic=False), "input_activations"),
    ("w8a8", group_with("input_activations", type="float"), "input_activations"),
    ("fp8 by tensor", group_with("input_activations", dynamic=False), "no '.*input_scale'"),
    ("fp8", group_with("weights", strategy="group"), "strategy='group', of which channel, tensor and block are read"),
    ("fp8 by block", group_with("weights", block_structure=None), "blocks of None"),
    ("fp8", tensor_with(f"{Q}.weight", lambda t: t.view(torch.int8)), "must be float8_e4m3fn"),
    ("fp8 of transformers", config_with(weight_block_size=None), "blocks of None"),
    ("fp8 of transformers", config_with(weight_block_size=[24, 40]), "no whole blocks of 40"),
    ("fp8 of transformers", config_with(activation_scheme="static"), "activation_scheme='static'"),
    ("fp8 of transformers", tensor_with(f"{Q}.weight_scale_inv", nan_first), "NaN or infinity"),
    ("fp8 of transformers", tensor_with(f"{Q}.weight", byte_at(3, 5, 0x7F)), r"q_proj.weight' holds NaN at \[3, 5\]"),
    ("fp8", tensor_with(f"{Q}.weight", byte_at(63, 0, 0xFF)), r"q_proj.weight' holds NaN at \[63, 0\]"),
    ("fp8 of transformers", tensor_with(f"{Q}.weight_scale_inv", None), "no '.*weight_scale_inv'"),
    *[("w4a16", tensor_with(f"{Q}.{p}", None), f"no '{Q}.{p}'") for p in ("weight_packed", "weight_scale")],
    *[("w4a16", tensor_with(f"{Q}.{p}", SHORT), p) for p in ("weight_packed", "weight_scale")],
    *[("w4a16", tensor_with(f"{Q}.{p}", WIDE), p) for p in ("weight_packed",)],
    ("w4a16", tensor_with(f"{Q}.weight_packed", FLOAT), "weight_packed' is torch.float32"),
    ("w4a16", tensor_with(f"{Q}.weight_scale", lambda t: t[:, :1].repeat(1, 3)), "is .64, 3. .* must be .64, 2"),
    ("w4a16", group_with("weights", symmetric=False), "says symmetric=false, but .* no '.*weight_zero_point'"),
    ("w4a16", group_with("weights", actorder="group"), "says actorder='group', but .* no '.*weight_g_idx'"),
    ("w4a16", group_with("weights", group_size=48), "says group_size=48, but .* inputs"),
    ("w4a16", group_with("weights", group_size=None), "says group_size=None, but"),
    ("w4a16", group_with("weights", strategy="tensor"), "says strategy='tensor', but .*weight_scale' is .64, 4."),
    ("w4a16 by output", tensor_with(f"{Q}.weight_scale", lambda t: t[0, 0]), "scale' is .. in the .* must be .64, 1"),
    ("w8a8", tensor_with(f"{Q}.weight_scale", lambda t: t[0, 0]), "scale' is .. in the .* must be .64, 1"),
    ("w4a8", tensor_with(f"{Q}.weight", lambda t: t + 1), "says num_bits=4, but .*weight' holds numbers from -7 to 8"),
    ("w4a8 asymmetric", tensor_with(f"{Q}.weight_zero_point", SHORT), "weight_zero_point' is"),
    ("w4a8 asymmetric", tensor_with(f"{Q}.weight_zero_point", FLOAT), "weight_zero_point' is torch.float32"),
    ("w4a8", group_with("input_activations", type="float"), "of 8 bits and of the weights' type"),
    ("fp8 static", tensor_with(f"{Q}.input_scale", None), "with dynamic=false, but .* no '.*input_scale'"),
    ("fp8 static", tensor_with(f"{Q}.input_scale", nan_first), "input_scale' holds NaN"),
    ("w4a16", tensor_with("model.norm.weight", nan_first), "model.norm.weight' holds NaN"),
    ("gptq", tensor_with("model.embed_tokens.weight", nan_first), "tokens.weight' holds NaN"),
    ("w4a16", tensor_with(f"{Q}.weight_scale", nan_first), "weight_scale' holds NaN"),
    ("w4a16", tensor_with(f"{Q}.weight_shape", lambda t: t.flip(0) + 1), "weight_shape"),
    ("w4a16", tensor_with(f"{Q}.weight_shape", lambda t: t.float()), "weight_shape"),
    ("w4a16 asymmetric", tensor_with(f"{Q}.weight_zero_point", SHORT), "weight_zero_point"),
    ("w4a16 act-order", tensor_with(f"{Q}.weight_g_idx", torch.zeros_like), "groups of unequal size"),
    ("w4a16 act-order", tensor_with(f"{Q}.weight_g_idx", SHORT), "weight_g_idx"),
    ("w8a8", tensor_with(f"{Q}.weight", SHORT), "weight' is"),
    ("w8a8", tensor_with(f"{Q}.weight_scale", SHORT), "weight_scale' is"),
    ("w8a8", tensor_with(f"{Q}.weight_scale", nan_first), "weight_scale' holds NaN"),
    ("w8a8", tensor_with(f"{Q}.weight_scale", None), "weight_scale"),
    ("w8a8", tensor_with(f"{Q}.weight_g_idx", lambda _: torch.zeros(64).int()), "order of its activations"),
    ("gptq", bytes_with(lambda b: b[:-100]), "cannot be read"),
    ("gptq", bytes_with(lambda b: b[:50]), "cannot be read"),
    ("gptq", bytes_with(lambda b: b""), "cannot be read"),
    ("gptq", bytes_with(lambda b: b"\xff" * 8 + b[8:]), "cannot be read"),
    ("gptq", bytes_with(lambda b: b[:8] + b"[" + b[9:]), "cannot be read"),
    ("awq", bytes_with(lambda b: b"PK\x03\x04" + b[4:]), "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "damage", "text"), [pytest.param(*r, id=f"{n}-{r[0]}") for n, r in enumerate(REFUSED)]
)
def test_refused(kind: str, damage: Any, text: str, saved: Any, tmp_path: Path) -> None:
    saved(kind)
    damage(tmp_path / "in")
    with pytest.raises(HfAccelError, match=f"(?s){text}"):
        hf_accel.load(tmp_path / "in")


def to_fp8(folder: Path, block: int = 32) -> None:
    """Make FP8 with scales of blocks, as DeepSeek publishes them, of what is saved there."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.repeat(weight.shape[0] // block, weight.shape[1] // block)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["static activations", "experts"])
def test_the_way_out_of_refused_fp8(kind: str, tmp_path: Path) -> None:
    """transformers loads it, on a CPU as floats, and what it has loaded is patched, in FP8 too."""
    if kind == "experts":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | moe)).save_pretrained(tmp_path)
    else:
        make().save_pretrained(tmp_path)
    to_fp8(tmp_path)
    if kind != "experts":
        assert hf_accel.load(tmp_path).get_submodule(Q).layout.format == "fp8"
        config_with(activation_scheme="static")(tmp_path)
    with pytest.raises(UnsupportedError, match=r"from_pretrained\(\), and patch the model with weights=None, or"):
        hf_accel.load(tmp_path)
    for weights in (None, "fp8"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = model(IDS).logits.float()
        model = hf_accel.patch(model, weights=weights)
        got = model(IDS).logits.float()
        assert (got - expected).norm() / expected.norm() < 0.1
