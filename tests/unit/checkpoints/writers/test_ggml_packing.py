"""Blocks of llama.cpp, byte by byte, and read by transformers' decoders of them."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from hf_accel.checkpoints.readers.ggml_blocks import TYPES
from hf_accel.checkpoints.writers.save_gguf import blocks, ggml_type_of, rounding_of_scales
from hf_accel.config import WeightConfig
from hf_accel.linear import quantize
from hf_accel.linear.formats import Int4Weight, Int8Weight

CONFIGS = [
    WeightConfig(bits=8),
    *(WeightConfig(bits=4, group_size=size, symmetric=symmetric) for size in (32, 64) for symmetric in (True, False)),
    WeightConfig(bits=3, group_size=32),
    WeightConfig(bits=2, group_size=64, symmetric=False),
]
NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8}  # of ggml_type in ggml.h


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor([[value] for value in values])


def test_eight_bits_byte_by_byte() -> None:
    integers = torch.arange(-32, 32, dtype=torch.int8).view(1, 64)
    made = blocks(Int8Weight(integers, column([0.5])))
    half = struct.pack("<e", 0.5)
    assert bytes(made[0].tolist()) == half + struct.pack("32b", *range(-32, 0)) + half + struct.pack("32b", *range(32))


def test_four_bits_byte_by_byte() -> None:
    """The first 16 of a block are in the low nibbles of its bytes, the others in the high ones."""
    integers = torch.tensor([[*range(-8, 8), *range(7, -9, -1)]], dtype=torch.int8)
    nibbles = bytes(low | high << 4 for low, high in zip(range(16), range(15, -1, -1), strict=True))
    made = blocks(Int4Weight.from_integers(integers, column([2.0])))
    assert bytes(made[0].tolist()) == struct.pack("<e", 2.0) + nibbles
    zero_point = torch.tensor([[-5]], dtype=torch.int8)
    made = blocks(Int4Weight.from_integers(integers, column([2.0]), zero_point))
    assert bytes(made[0].tolist()) == struct.pack("<ee", 2.0, -6.0) + nibbles, "(q + 8) * 2 - 6 is (q - -5) * 2"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.label} {config.group_size}")
def test_transformers_reads_the_same_weight(config: WeightConfig, dtype: torch.dtype) -> None:
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    weight = quantize(torch.randn(24, 192, generator=torch.Generator().manual_seed(1)).to(dtype), config)
    kind = ggml_type_of(weight)
    assert kind == ("Q8_0" if config.bits == 8 else "Q4_0" if config.symmetric else "Q4_1")
    assert kind is not None
    try:
        read = dequant.dequantize(blocks(weight), NUMBERS[kind]).view(24, 192)
    except ValueError as error:
        pytest.skip(f"this transformers reads no {kind}: {error}")
    exact = dtype is not torch.float32 and kind != "Q4_1"
    assert (rounding_of_scales(weight) == 0) == exact or kind == "Q4_1"
    assert rounding_of_scales(weight) < 2**-10
    expected = weight.dequantize(torch.float32)
    torch.testing.assert_close(read, expected, rtol=0 if exact else 2**-10, atol=0 if exact else 4e-3)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.label} {config.group_size}")
def test_the_reader_gets_the_same_integers(config: WeightConfig) -> None:
    weight = quantize(torch.randn(24, 192, generator=torch.Generator().manual_seed(7)).half(), config)
    read = TYPES[str(ggml_type_of(weight))].weight(blocks(weight))
    lower = 0 if weight.symmetric else 8 - (1 << weight.bits - 1)  # Q4_1 counts from its lowest level
    assert torch.equal(read.integers(), weight.integers() - lower)
    scale = weight.weight_scale.repeat_interleave(192 // weight.weight_scale.shape[1] // 32, dim=1)
    assert torch.equal(read.weight_scale, scale)


def test_rows_in_another_order() -> None:
    for config in CONFIGS:
        weight = quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(2)), config)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
        assert torch.equal(blocks(weight, order), blocks(weight)[order])


def test_minima() -> None:
    integers = torch.randint(-8, 8, (4, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(4))
    weight = replace(
        Int4Weight.from_integers(integers, torch.full((4, 2), 0.5)), weight_minimum=torch.full((4, 2), 3.0)
    )
    assert ggml_type_of(weight) == "Q4_1"
    assert bytes(blocks(weight)[0, :4].tolist()) == struct.pack("<ee", 0.5, -3.0)


def test_what_has_no_blocks() -> None:
    order = torch.randperm(64, dtype=torch.int32)
    eight = quantize(torch.randn(8, 64), WeightConfig(bits=8))
    assert ggml_type_of(replace(eight, weight_minimum=torch.ones(8, 1))) is None
    assert ggml_type_of(replace(quantize(torch.randn(8, 64), WeightConfig(bits=8)), input_order=order)) is None
    assert ggml_type_of(quantize(torch.randn(8, 48), WeightConfig(bits=8))) is None
    assert ggml_type_of(Int8Weight(torch.ones(1, 32, dtype=torch.int8), column([70000.0]))) is None
