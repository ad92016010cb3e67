"""On the CPU, with a stand-in that takes what torch documents for a GPU and no more."""

from __future__ import annotations

import pytest
import torch

from hf_accel.kernels import triton
from hf_accel.linear import Float8Weight, choose
from hf_accel.linear.backends import torch_scaled_mm as module
from hf_accel.linear.backends.reference import ReferenceByRow
from hf_accel.linear.backends.torch_scaled_mm import TorchScaledMM

from .. import test_parity
from ..specs import linear_spec

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
SPEC = {
    "in_features": 48, "out_features": 32, "bits": 8, "format": "fp8", "dtype": BF16, "device_type": "cuda",
}  # fmt: skip


class OnCpu(TorchScaledMM):
    device_type = "cpu"

    def _missing(self) -> None:
        return None


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Multiplies itself: on a CPU, torch's own takes a scale for each row in later releases only, on a GPU in all."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        assert a.dtype is b.dtype is FLOAT8 and out_dtype is BF16
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
        assert a.is_contiguous() and b.t().is_contiguous() and scale_a.is_contiguous() and scale_b.is_contiguous()
        assert scale_a.dtype is scale_b.dtype is torch.float32
        assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"device_type": "cpu"}, "it runs on cuda, not on cpu"),
        ({"activations": None}, "it rounds activations to FP8"),
        ({"by_group": True}, "it takes no 8-bit weights with a scale for each group of inputs"),
        ({"dtype": torch.float16}, "it takes bfloat16, not torch.float16"),
        ({"in_features": 40}, "it takes multiples of 16, not 40 inputs and 32 outputs"),
        ({"out_features": 33}, "it takes multiples of 16, not 48 inputs and 33 outputs"),
    ],
)
def test_refuses(keywords, reason):
    assert TorchScaledMM().refuses(linear_spec(**(SPEC | keywords))) == reason


def test_it_needs_a_gpu_that_multiplies_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TorchScaledMM().refuses(linear_spec(**SPEC)) == "torch sees no NVIDIA GPU here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "refusal", lambda device_type: "Triton is not installed")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(module, "capability", lambda found=capability: found)
        reason = "it needs a GPU that multiplies FP8, of compute capability 8.9" if refused else None
        assert TorchScaledMM().refuses(linear_spec(**SPEC)) == reason
        assert isinstance(choose.__wrapped__(linear_spec(**SPEC)).backend, TorchScaledMM) != refused


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (64, 384)])
def test_as_every_backend(make_weight, outputs, inputs, has_bias):
    case = (OnCpu(), "fp8", outputs, inputs, 32, BF16)
    test_parity.test_as_the_float_layer_with_the_dequantized_weight(make_weight, *case, has_bias)
    test_parity.test_unpack_returns_what_was_packed(make_weight, *case)


def test_a_row_that_is_no_number_spoils_no_other():
    weight = Float8Weight(torch.randn(16, 64).to(FLOAT8), torch.rand(16, 1).to(BF16))
    backend, x = OnCpu(), torch.randn(40, 64).to(BF16)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    together = backend.run(x, backend.pack(weight), None)
    assert together.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
    expected = ReferenceByRow("fp8").run(x, weight, None)
    torch.testing.assert_close(together, expected, equal_nan=True, rtol=2**-6, atol=2**-6)
