"""Every backend against the float layer that carries the same quantized numbers, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_accel.linear import BACKENDS, Int4Weight, LinearSpec
from hf_accel.linear.formats import QuantizedWeight, from_state, readable, state
from tests.devices import FP8_ON_A_GPU, device_of

from .specs import linear_spec

# A few roundings of the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
CASES = [
    (8, 1, 33, 32), (8, 3, 37, 32), (8, 33, 64, 32), (8, 64, 384, 32), (8, 257, 48, 32),
    (4, 1, 32, 32), (4, 3, 64, 32), (4, 33, 128, 64), (4, 64, 384, 128), (4, 112, 64, 32), (4, 272, 256, 128),
    (3, 33, 96, 32), (3, 272, 256, 128), (2, 33, 96, 32), (2, 272, 256, 128),
    ("fp8", 1, 32, 32), ("fp8", 64, 384, 32), ("fp8", 257, 48, 32),
]  # fmt: skip


def parameter(backend, *case, name=""):
    """What needs a GPU (or Triton's interpreter) carries the gpu mark."""
    on_gpu = backend.name == "triton" or backend.device_types == ("cuda",)
    is_one_of_two = backend.name == "triton" and backend.activations != "int8"
    kind = " by row" if is_one_of_two and backend.row_invariant else ""
    marks = [pytest.mark.gpu] if on_gpu else []
    return pytest.param(backend, *case, id=f"{backend.name}{kind}-{backend.activations or 'float'}{name}", marks=marks)


# One that rounds many rows alone is two others, of which it takes one by the number of rows.
TRIED = [backend for backend in BACKENDS if getattr(backend, "rounding", "never") != "many rows"]
PAIRS = [
    parameter(backend, *case, name=f"-{'int' * (case[0] != 'fp8')}{case[0]}-{case[1]}x{case[2]}")
    for backend in TRIED
    for case in CASES
    if case[0] in backend.layouts or f"int{case[0]}" in backend.layouts
]


def spec_of(bits, outputs, inputs, *, group_size, dtype, device) -> LinearSpec:
    kind = {"bits": 8, "format": "fp8"} if bits == "fp8" else {"bits": bits}
    sizes = {"in_features": inputs, "out_features": outputs, "group_size": group_size}
    return linear_spec(**sizes, **kind, dtype=dtype, device_type=device)


def on(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    moved = {name: tensor.to(device) for name, tensor in state(weight).items()}
    return from_state(type(weight), moved)


def rounded_rows(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(x.astype(np.float32) / scale).astype(np.float64) * scale


def rounded_groups(x: np.ndarray, size: int) -> np.ndarray:
    out = x.copy()
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size].astype(np.float32)
        absmax = np.abs(part).max(axis=1, keepdims=True)
        levels = np.rint(part * (np.float32(127) / absmax)).astype(np.float64)
        out[:, start : start + size] = levels * (absmax / np.float32(127))
    return out


def nearest_fp8(levels: np.ndarray) -> np.ndarray:
    return torch.from_numpy(levels).clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()


def rounded_to_fp8(x: np.ndarray, size: int) -> np.ndarray:
    out = x.copy()
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size].astype(np.float32)
        absmax = np.abs(part).max(axis=1, keepdims=True)
        levels = nearest_fp8(part * (np.float32(448) / absmax))
        out[:, start : start + size] = levels * (absmax / np.float32(448))
    return out


def as_rounded(backend, x: np.ndarray, bits: int | str, group_size: int) -> np.ndarray:
    if backend.activations is None or not len(x):
        return x
    if backend.activations == "fp8" and backend.name != backend.reference == "reference by row":
        scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(448)
        return nearest_fp8(x.astype(np.float32) / scale) * scale
    if backend.activations == "fp8":
        return rounded_to_fp8(x, x.shape[1] if backend.name == "reference by row" else 128)
    if backend.name == "reference by row":
        return rounded_groups(x, x.shape[1])
    if backend.reference == "reference by row":
        return rounded_rows(x)
    return rounded_groups(x, group_size if bits < 8 else 128)


@pytest.mark.covering(3)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("backend", "bits", "outputs", "inputs", "group_size"), PAIRS)
def test_as_the_float_layer_with_the_dequantized_weight(
    make_weight, backend, bits, outputs, inputs, group_size, dtype, has_bias
):
    device = device_of(backend)
    spec = spec_of(bits, outputs, inputs, group_size=group_size, dtype=dtype, device=device)
    if reason := backend.refuses(spec):
        pytest.skip(reason)
    weight, dense = make_weight(bits, outputs, inputs, group_size=group_size, dtype=dtype)
    packed = backend.pack(on(weight, device))
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    for rows in (0, 1, 2, 3, 5, 17, 64):
        x = torch.randn(rows, inputs).to(dtype)
        exact = x.double().numpy()
        exact = as_rounded(backend, exact, bits, group_size) @ dense.T
        exact = exact + (0 if bias is None else bias.double().numpy())
        got = backend.run(x.to(device), packed, None if bias is None else bias.to(device)).cpu()
        assert got.dtype == dtype
        assert got.shape == (rows, outputs)
        few_bits = dtype == torch.float32 and backend.name == "torch" and backend.note(spec) is not None
        tolerance = TOLERANCE[torch.bfloat16 if few_bits else dtype]
        if device == "cuda" and getattr(backend, "activations", None) == "fp8":
            tolerance = max(tolerance, FP8_ON_A_GPU)
        size = np.sqrt(x.double().numpy() ** 2 @ dense.T**2) + np.abs(exact)  # a sum may cancel, its errors do not
        assert (np.abs(got.double().numpy() - exact) <= tolerance * size).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("backend", "bits", "outputs", "inputs", "group_size"), PAIRS)
def test_unpack_returns_what_was_packed(make_weight, backend, bits, outputs, inputs, group_size, dtype):
    device = device_of(backend)
    spec = spec_of(bits, outputs, inputs, group_size=group_size, dtype=dtype, device=device)
    if reason := backend.refuses(spec):
        pytest.skip(reason)
    weight, _ = make_weight(bits, outputs, inputs, group_size=group_size, dtype=dtype)
    assert_same_state(backend.unpack(backend.pack(on(weight, device))), weight)


def assert_same_state(restored, weight):
    assert type(restored) is type(weight)
    assert state(restored).keys() == state(weight).keys()
    for name, tensor in state(weight).items():
        got = state(restored)[name].cpu()
        assert state(restored)[name].is_contiguous()
        assert got.dtype == tensor.dtype
        assert torch.equal(readable(got), readable(tensor)), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(1, 32, 32), (33, 128, 64), (272, 256, 128)])
@pytest.mark.parametrize("backend", [parameter(backend) for backend in TRIED if "int4" in backend.layouts])
def test_zero_points(backend, outputs, inputs, group_size, dtype):
    device = device_of(backend)
    sizes = {"in_features": inputs, "out_features": outputs, "bits": 4, "group_size": group_size}
    if reason := backend.refuses(linear_spec(**sizes, symmetric=False, dtype=dtype, device_type=device)):
        pytest.skip(reason)
    groups = inputs // group_size
    integers = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    zero_point = torch.randint(-8, 8, (outputs, groups), dtype=torch.int8)
    scale = (torch.rand(outputs, groups) * 0.01 + 0.001).to(dtype)
    weight = Int4Weight.from_integers(integers, scale, zero_point)
    packed = backend.pack(on(weight, device))
    assert_same_state(backend.unpack(packed), weight)
    dense = integers.numpy() - np.repeat(zero_point.numpy().astype(np.float64), group_size, axis=1)
    dense *= np.repeat(scale.double().numpy(), group_size, axis=1)
    for rows in (0, 1, 3, 17):
        x = torch.randn(rows, inputs).to(dtype)
        exact = as_rounded(backend, x.double().numpy(), 4, group_size) @ dense.T
        size = np.sqrt(x.double().numpy() ** 2 @ dense.T**2) + np.abs(exact)
        got = backend.run(x.to(device), packed, None).cpu()
        assert (np.abs(got.double().numpy() - exact) <= TOLERANCE[dtype] * size).all()
