"""On the CPU, with a stand-in that takes what torch documents for a GPU and no more."""

from __future__ import annotations

import pytest
import torch

from hf_accel.linear import Int8Weight, choose
from hf_accel.linear.backends.reference import ReferenceByRow
from hf_accel.linear.backends.torch_int_mm import TorchIntMM

from .. import test_parity
from ..specs import linear_spec

SPEC = {"in_features": 48, "out_features": 32, "bits": 8, "dtype": torch.bfloat16, "device_type": "cuda"}


class OnCpu(TorchIntMM):
    device_type = "cpu"

    def _missing(self) -> None:
        return None


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    multiply = torch._int_mm

    def int_mm(a, b):
        assert a.dtype is b.dtype is torch.int8
        assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        assert a.is_contiguous() and b.t().is_contiguous()
        return multiply(a, b)

    monkeypatch.setattr(torch, "_int_mm", int_mm)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, None if torch.cuda.is_available() else "torch sees no NVIDIA GPU here"),
        ({"device_type": "cpu"}, "it runs on cuda, not on cpu"),
        ({"activations": None}, "it rounds activations to INT8"),
        ({"by_group": True}, "it takes no 8-bit weights with a scale for each group of inputs"),
        ({"in_features": 44}, "it takes multiples of 8, not 44 inputs and 32 outputs"),
        ({"out_features": 33}, "it takes multiples of 8, not 48 inputs and 33 outputs"),
    ],
)
def test_refuses(keywords, reason):
    assert TorchIntMM().refuses(linear_spec(**(SPEC | keywords))) == reason


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", test_parity.TOLERANCE, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 16), (64, 384)])
def test_as_every_backend(make_weight, outputs, inputs, dtype, has_bias):
    case = (OnCpu(), 8, outputs, inputs, 32, dtype)
    test_parity.test_as_the_float_layer_with_the_dequantized_weight(make_weight, *case, has_bias)
    test_parity.test_unpack_returns_what_was_packed(make_weight, *case)


def test_a_row_does_not_depend_on_the_others():
    weight = Int8Weight(torch.randint(-127, 128, (16, 64), dtype=torch.int8), torch.rand(16, 1))
    backend, x = OnCpu(), torch.randn(40, 64)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    together = backend.run(x, backend.pack(weight), None)
    assert together.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
    for row in (0, 17, 39):
        assert torch.equal(backend.run(x[row : row + 1], backend.pack(weight), None), together[row : row + 1])
    torch.testing.assert_close(
        together, ReferenceByRow("int8").run(x, weight, None), equal_nan=True, rtol=1e-4, atol=1e-4
    )


def test_it_comes_before_the_reference_where_there_is_no_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("hf_accel.kernels.triton.refusal", lambda device_type: "Triton is not installed")
    for activations, expected in (("auto", TorchIntMM), ("int8", TorchIntMM), (None, None)):
        choice = choose.__wrapped__(linear_spec(**SPEC, activations=activations))
        assert dict(choice.refusals)["triton"] == "Triton is not installed"
        assert expected is None or isinstance(choice.backend, expected)
        assert (choice.backend.name == "reference") == (expected is None)
    named = choose.__wrapped__(linear_spec(**SPEC), "torch")
    assert isinstance(named.backend, TorchIntMM) and not named.refusals
