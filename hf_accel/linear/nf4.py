"""NF4 weights (Dettmers et al., QLoRA, 2023) in bitsandbytes' own layers, which transformers and PEFT know.

Nothing here computes: quantizing, multiplying and gradients are bitsandbytes'.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..config import NF4_BLOCK, WeightConfig
from ..errors import UnsupportedError
from ..undo.state import LEVELS
from .backends.backend import Backend, LinearSpec
from .backends.registry import BackendChoice
from .formats import QuantizedWeight

FUSED_OUTPUTS = 32  # bitsandbytes' fused CPU kernel takes multiples of it
WAY_OUT = "pip install bitsandbytes, or choose weights='int4'"


def require_bitsandbytes() -> Any:
    """The package; raises UnsupportedError where it is not installed or does not work."""
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        raise UnsupportedError(
            f"weights='nf4' needs the package bitsandbytes, which cannot be imported ({error}); {WAY_OUT}"
        ) from error


@cache
def has_fused_kernel() -> bool:
    """Return whether bitsandbytes multiplies by packed weights on this CPU, without dequantizing them first."""
    known = getattr(require_bitsandbytes().functional, "has_avx512bf16", None)
    return known is not None and bool(known())


class BitsAndBytes(Backend):
    """The layers of bitsandbytes: `quantize` makes its Params4bit, `nf4_layer` puts that into its Linear4bit."""

    name = "bitsandbytes"
    layouts = ("nf4",)

    def note(self, spec: LinearSpec) -> str | None:
        if spec.device_type != "cpu":
            return None
        if has_fused_kernel():
            return "its fused kernel for AVX-512 BF16, which rounds scales and activations to bfloat16"
        return (
            "this CPU lacks AVX-512 BF16, which bitsandbytes' fused kernel needs: each call dequantizes the weight "
            "first, and weights='int4' is faster"
        )

    @torch.no_grad()
    def quantize(self, weight: Tensor, config: WeightConfig) -> Any:
        """A Params4bit over packed bytes, as transformers' BitsAndBytesConfig(bnb_4bit_quant_type="nf4") makes it."""
        low, high = weight.aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise UnsupportedError("the weight holds NaN or infinity; repair the checkpoint or skip the layer")
        parameter = require_bitsandbytes().nn.Params4bit(
            weight.detach(), requires_grad=False, blocksize=NF4_BLOCK, compress_statistics=False, quant_type="nf4"
        )
        return parameter.to(weight.device)

    def pack(self, weight: QuantizedWeight) -> Any:
        raise UnsupportedError("integers and scales are no NF4; quantize the float weight")

    def unpack(self, packed: Any) -> QuantizedWeight:
        raise UnsupportedError("NF4 is no integers and scales; weights='int4' is")

    def run(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        out: Tensor = require_bitsandbytes().matmul_4bit(x, packed, bias=bias, quant_state=packed.quant_state)
        return out


BACKEND = BitsAndBytes()


def nf4_refusal(spec: LinearSpec, bias: Tensor | None) -> str | None:
    """Return why bitsandbytes' layer cannot stand in a Linear's place, as one clause; None if it can."""
    if bias is not None and bias.dtype is not spec.dtype:
        return "its bias has another dtype than its weight, and bitsandbytes would convert it in place"
    is_cut = bool(spec.out_features % FUSED_OUTPUTS or spec.in_features % NF4_BLOCK)
    if is_cut and spec.device_type == "cpu" and has_fused_kernel():
        return f"bitsandbytes' fused kernel takes multiples of {FUSED_OUTPUTS} outputs and {NF4_BLOCK} inputs"
    return None


def choose_nf4(spec: LinearSpec) -> BackendChoice:
    return BackendChoice(spec, BACKEND, ())


def nf4_layer(weight: Any, bias: nn.Parameter | Tensor | None, spec: LinearSpec, *, source_class: type) -> nn.Linear:
    """bitsandbytes' Linear4bit over what `quantize` made; a Parameter given as bias is kept as it is.

    source_class: of the module that it replaces, which transformers asks for.
    """
    layer: Any = require_bitsandbytes().nn.Linear4bit(
        spec.in_features, spec.out_features, bias=False, compute_dtype=spec.dtype, compress_statistics=False,
        quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight, layer.quant_state = weight, weight.quant_state
    layer.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)
    layer.source_cls = source_class
    vars(layer)[LEVELS] = _levels(weight)
    made: nn.Linear = layer
    return made


def is_nf4(module: object) -> bool:
    """Return whether a module is a layer of bitsandbytes that patch() has put in."""
    return LEVELS in getattr(module, "__dict__", {})


def stored_bytes(layer: nn.Module) -> int:
    """Return the bytes of the packed weight and its scales."""
    weight: Any = layer.weight
    size: int = weight.nbytes + weight.quant_state.absmax.nbytes
    return size


def has_changed(layer: nn.Module) -> bool:
    """Return whether a layer got another weight since patch(), as merging an adapter does.

    Its levels are counted, because bitsandbytes puts them into another order for its fused kernel.
    """
    return bool(vars(layer)[LEVELS] != _levels(layer.weight))


@torch.no_grad()
def _levels(weight: Any) -> list[int]:
    packed = weight.data.contiguous().view(torch.uint8).flatten()
    of_bytes = torch.bincount(packed, minlength=256).view(16, 16)
    counts: list[int] = (of_bytes.sum(0) + of_bytes.sum(1)).tolist()
    return counts
