from __future__ import annotations

import pytest
import torch

from hf_accel.linear.backends import torch_int4 as module
from hf_accel.linear.backends.torch_int4 import BLOCKS, FEW_ROWS, TorchInt4, block_size

from ..specs import linear_spec

SPEC = {"in_features": 64, "out_features": 48, "bits": 4, "dtype": torch.bfloat16, "group_size": 32}

pytestmark = pytest.mark.skipif(not block_size(), reason="torch's INT4 matmul is not available in this build")


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32, "activations": None}, None),
        ({"device_type": "cuda"}, "it runs on cpu, not on cuda"),
        ({"activations": "int8"}, "it keeps activations in floating point"),
        ({"dtype": torch.float16}, "it takes bfloat16 and float32, not torch.float16"),
        ({"out_features": 40}, "it needs outputs in multiples of 16, not 40"),
    ],
)
def test_refuses(keywords, reason):
    assert TorchInt4().refuses(linear_spec(**(SPEC | keywords))) == reason


def missing(integers):
    raise RuntimeError("no such op")


def unknown_order(integers):
    return pack(integers).flip(0)


pack = module._pack


@pytest.mark.parametrize("broken", [missing, unknown_order])
def test_refuses_a_build_that_packs_in_another_way(monkeypatch, broken):
    block_size.cache_clear()
    monkeypatch.setattr(module, "_pack", broken)
    try:
        reason = TorchInt4().refuses(linear_spec(**SPEC))
    finally:
        block_size.cache_clear()
    assert reason == "torch's INT4 matmul is not available in this build"


def test_float32_models_are_told_of_the_rounding():
    assert TorchInt4().note(linear_spec(**SPEC)) is None
    note = TorchInt4().note(linear_spec(**(SPEC | {"dtype": torch.float32})))
    assert note == f"up to {FEW_ROWS} rows are multiplied with inputs and scales rounded to bfloat16"


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_both_instruction_sets_are_unpacked(block):
    """Packed here, output by output, as int4mm_kernel.cpp does; this machine makes one of the two only."""
    outputs, inputs = 2 * block + 16, 8
    integers = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    unsigned = (integers.int() + 8).tolist()
    packed: list[int] = []
    for start in range(0, outputs, block):
        size = min(block, outputs - start)
        first = [start + i for i in range(size // 2)] if size == block else [start + 2 * i for i in range(size // 2)]
        step = block // 2 if size == block else 1
        packed += [unsigned[o][k] | unsigned[o + step][k] << 4 for k in range(inputs) for o in first]
    got = module._unpack(torch.tensor(packed, dtype=torch.uint8).view(outputs, inputs // 2), block)
    assert torch.equal(got, integers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_and_many_rows_agree(make_weight, dtype):
    weight, _ = make_weight(4, 272, 128, group_size=32, dtype=dtype)
    packed = TorchInt4().pack(weight)
    x = torch.randn(FEW_ROWS + 1, 128).to(dtype)
    few = TorchInt4().run(x[:FEW_ROWS], packed, None)
    many = TorchInt4().run(x, packed, None)
    torch.testing.assert_close(few, many[:FEW_ROWS], rtol=2**-6, atol=2**-6 * many.std().item())


@pytest.mark.parametrize(("dtype", "copies"), [(torch.bfloat16, 0), (torch.float32, 1)])
def test_bfloat16_scales_are_held_once(make_weight, dtype, copies):
    weight, _ = make_weight(4, 64, 128, dtype=dtype)
    packed = TorchInt4().pack(weight)
    own = packed.weight_scale.untyped_storage().data_ptr() != packed.scales_and_zeros.untyped_storage().data_ptr()
    assert own == bool(copies)
