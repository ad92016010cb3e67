"""Rows times several weights in one launch: the bits of one launch after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.kernels import triton as kernels
from hf_accel.kernels.triton.layer_parts import gated
from hf_accel.kernels.triton.quantized_linear import quantized_linear
from hf_accel.kernels.triton.together import go_together, together_launch
from hf_accel.linear.backends.tiles import FEW, eight
from hf_accel.linear.backends.triton import Triton
from tests.devices import triton_device

from .compiling import compile_for
from .test_quantized_linear import BF16, FP16, runs, weight_of, weight_of_zeros

KINDS = ["int8", "int8 groups", "int4", "int4 zero points", "int4 minima", "fp8"]


def packed(kind: str, outputs: list[int], inputs: int) -> list[Any]:
    backend = Triton(row_invariant=False)
    return [backend.pack(weight_of(kind, (count, inputs), group=32, dtype=BF16)) for count in outputs]


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [[70, 33, 5], [64, 64]], ids=str)
def test_together_is_one_after_the_other(kind, outputs):
    weights, x = packed(kind, outputs, 416), torch.randn(1, 416, device=triton_device()).to(BF16)
    biases = [torch.randn(outputs[0], device=x.device).to(BF16), *[None] * (len(outputs) - 1)]
    assert go_together(weights)
    for tile in (eight(weights[0])[0], FEW):
        outs = [torch.full((1, count), float("nan"), dtype=BF16, device=x.device) for count in outputs]
        together_launch(x, weights, biases, outs, tile=tile).run()
        for weight, bias, out in zip(weights, biases, outs, strict=True):
            assert torch.equal(out, quantized_linear(x, weight, bias, tile=tile))


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_is_one_after_the_other(kind, activation):
    weights = packed(kind, [70, 70], 416)
    for rows, tile in ((1, eight(weights[0])[0]), (1, FEW), (18, FEW)):
        x = torch.randn(rows, 416, device=triton_device()).to(FP16)
        biases = [None, torch.randn(70, device=x.device).to(FP16)]
        out = torch.full((rows, 70), float("nan"), dtype=FP16, device=x.device)
        together_launch(x, weights, biases, [out], activation=activation, tile=tile).run()
        halves: list[Tensor] = [
            quantized_linear(x, weight, bias, tile=tile) for weight, bias in zip(weights, biases, strict=True)
        ]
        assert torch.equal(out, gated(*halves, activation=activation))


def test_what_goes_together():
    first, second = packed("int8", [8, 8], 64)
    assert go_together([first, second]) and not go_together([first])
    assert not go_together([first, *packed("int4", [8], 64)])
    assert not go_together([first, *packed("int8", [8], 128)])
    assert not go_together([first] * 4)
    divided = replace(first, divisor=torch.ones(1))  # each has one of its own
    assert not go_together([divided, divided])


@pytest.mark.skipif(kernels.is_interpreted(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["int8", "int4", "int4 zero points"])
def test_they_fit_every_gpu(kind, capability):
    weights = [weight_of_zeros(kind, (64, 1024), dtype=BF16) for _ in range(3)]
    x, outs = torch.zeros(1, 1024, dtype=BF16), [torch.zeros(1, 64, dtype=BF16) for _ in range(3)]
    tile = FEW
    for count in (2, 3):
        launch = together_launch(x, weights[:count], [None] * count, outs[:count], tile=tile)
        compile_for(launch, capability).assert_fits(capability)
    launch = together_launch(x, weights[:2], [None, None], outs[:1], activation="silu", tile=tile)
    compile_for(launch, capability).assert_fits(capability)
