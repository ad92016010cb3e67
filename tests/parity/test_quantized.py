"""A quantized model against the same model with dequantized weights in plain Linears; the cost of rounding, apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.linear import QuantLinear

from .audit import Audit
from .dequantize import dequantized
from .families import DECODER, FAMILIES, build, inputs, prompts

INT4 = [{"bits": 4, "group_size": size} for size in (32, 64, 128)]
INT8 = [{"bits": 8}, *({"bits": 8, "group_size": size} for size in (128, 64, 32))]


INT4_TOLERANCE = 0.02  # of the whole: torch's INT4 kernel rounds few rows of float32 inputs to bfloat16


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Wide enough for every group size."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(**DECODER | sizes)).to(dtype).eval()


def quantized(stock: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    return hf_accel.patch(copy.deepcopy(stock), weights=hf_accel.WeightConfig(**settings))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Of the tokens, not of the padding: [tokens, V]."""
    return model(**inputs("left")).logits[inputs("left")["attention_mask"].bool()]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_int8(family: str) -> None:
    stock = build(family)
    patched = quantized(stock, bits=8, activations=None)
    expected = dequantized(stock, patched)
    assert sum(isinstance(module, QuantLinear) for module in patched.modules()) >= 2 * 4 + 1
    torch.testing.assert_close(logits(patched), logits(expected), rtol=1e-4, atol=1e-4)
    generated = (m.generate(**inputs("left"), max_new_tokens=12, do_sample=False) for m in (patched, expected))
    assert torch.equal(*generated)


@pytest.mark.parametrize("family", FAMILIES)
def test_int4(family: str) -> None:
    stock = build(family)
    patched = quantized(stock, **INT4[0], activations=None)
    assert relative_error(logits(patched), logits(dequantized(stock, patched))) < INT4_TOLERANCE


@pytest.mark.parametrize("settings", [*INT8[1:], *INT4], ids=str)
def test_group_sizes(settings: dict[str, Any]) -> None:
    stock = llama()
    patched = quantized(stock, **settings, activations=None)
    expected = dequantized(stock, patched)
    assert relative_error(logits(patched), logits(expected)) < INT4_TOLERANCE
    many_rows = prompts(4, 20)
    with torch.no_grad():
        torch.testing.assert_close(patched(many_rows).logits, expected(many_rows).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"bits": 8}, *INT4], ids=str)
def test_bfloat16_rounds_as_well_as_stock(settings: dict[str, Any]) -> None:
    stock = llama(torch.bfloat16)
    patched = quantized(stock, **settings, activations=None)
    expected = dequantized(stock, patched)
    sequences = expected.generate(**inputs("left"), max_new_tokens=12, do_sample=False)
    Audit(expected, patched, sequences, inputs("left")["attention_mask"]).assert_rounds_as_well_as_stock()


def round_input(size: int) -> Callable[..., tuple[Tensor, ...]]:
    """Each row and group of inputs to 8 bits and back: what `activations="int8"` means, said in floating point."""

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rounded = []
        for part in args[0].split(size, dim=-1):
            scale = (part.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
            rounded.append((part / scale).round() * scale)
        return (torch.cat(rounded, dim=-1), *args[1:])

    return hook


@pytest.mark.parametrize("settings", [*INT8, *INT4], ids=str)
def test_rounded_activations(settings: dict[str, Any]) -> None:
    stock = llama()
    patched = quantized(stock, **settings, activations="int8")
    expected = dequantized(stock, patched)
    unrounded = logits(expected)
    for name, layer in patched.named_modules():
        if isinstance(layer, QuantLinear):
            by_row = layer.choice is not None and layer.choice.backend.name == "onednn"
            size = layer.in_features if by_row else layer.layout.group_size or 128
            expected.get_submodule(name).register_forward_pre_hook(round_input(size))
    # A sum in another order can move an input over the edge of a step, so that a few values differ by a step.
    error = relative_error(logits(patched), logits(expected))
    cost = relative_error(unrounded, logits(expected))
    assert error < cost / 4
    assert 1e-3 < cost < 0.05


BOUNDS = [({"bits": 8}, 0.03), (INT4[0], 0.4), (INT4[1], 0.45), (INT4[2], 0.5)]


@pytest.mark.parametrize(("settings", "bound"), BOUNDS, ids=str)
def test_quantization_error(settings: dict[str, Any], bound: float) -> None:
    """About 14 times more with 4 bits than with 8: 18 times coarser steps of a smaller range."""
    stock = llama()
    patched = quantized(stock, **settings, activations=None, head=None)
    error = relative_error(logits(patched), logits(stock))
    assert bound / 4 < error < bound


def test_error_of_int8_falls_with_the_group_size() -> None:
    """That of weights and that of activations, which share the groups."""
    stock = llama()
    for activations in (None, "int8"):
        errors = [relative_error(logits(quantized(stock, **s, activations=activations)), logits(stock)) for s in INT8]
        assert errors == sorted(errors, reverse=True), activations


@torch.no_grad()
def test_groups_of_int8_are_saved_and_read(tmp_path: Path) -> None:
    patched = quantized(llama(), bits=8, group_size=32)
    layer = patched.model.layers[0].mlp.down_proj
    assert layer.quantized.weight_scale.shape == (128, 8)
    assert "int8 group 32 by " in str(hf_accel.plan(llama(), weights={"bits": 8, "group_size": 32}))
    patched.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.model.layers[0].mlp.down_proj.layout.group_size == 32
    assert torch.equal(logits(again), logits(patched))


def test_error_falls_with_bits_and_group_size() -> None:
    stock = llama()
    errors = [
        relative_error(logits(quantized(stock, **settings, activations=None)), logits(stock))
        for settings in ({"bits": 8}, *INT4)
    ]
    assert errors == sorted(errors)


def is_float_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not isinstance(module, QuantLinear)


def test_skip_and_head() -> None:
    patched = quantized(llama(), skip=["up_proj", "layers.1.self_attn.q_proj"], head=None)
    plain = [name for name, module in patched.named_modules() if is_float_linear(module)]
    assert plain == [
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
    ]


def test_gradients_flow_through_quantized_layers() -> None:
    """To what can still be trained: the embedding, the norms, and adapters."""
    stock = llama()
    patched = quantized(stock, activations=None)
    expected = dequantized(stock, patched)
    gradients = []
    for model in (expected, patched):
        model(**inputs("single"), labels=inputs("single")["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "norm" in name or "embed" in name})
    assert len(gradients[1]) == 2 * 2 + 1 + 1
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)
