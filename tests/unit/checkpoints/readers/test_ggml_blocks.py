"""Weights in llama.cpp's blocks against the gguf package's own decoder."""

from __future__ import annotations

import pytest
import torch

from hf_accel.checkpoints.readers.ggml_blocks import TYPES

SCALES_AT = {  # where half-precision numbers are, but for the first bytes
    "Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_of_any_blocks(name: str, rows: int) -> None:
    """Any bytes are a block, but for scales that are not finite."""
    kind = TYPES[name]
    blocks = torch.randint(0, 256, (rows, 3, kind.bytes), dtype=torch.uint8)
    at = SCALES_AT.get(name, [0])
    for start in at:
        blocks[..., start : start + 2] = torch.randn(rows, 3, 1).half().view(torch.uint8).view(rows, 3, 2)
    blocks = blocks.flatten(1)
    quantization = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[quantization] == (kind.inputs, kind.bytes)
    expected = torch.from_numpy(gguf.dequantize(blocks.numpy(), quantization))
    weight = kind.weight(blocks)
    assert weight.shape == (rows, 3 * kind.inputs)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    assert weight.layout == kind.layout


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_the_package_encodes(name: str) -> None:
    dense = torch.randn(7, 96)
    blocks = torch.from_numpy(gguf.quantize(dense.numpy(), gguf.GGMLQuantizationType[name]))
    weight = TYPES[name].weight(blocks)
    assert (weight.dequantize(torch.float32) - dense).norm() / dense.norm() < 0.12
