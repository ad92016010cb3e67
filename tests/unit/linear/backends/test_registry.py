from __future__ import annotations

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels import triton
from hf_accel.linear import choose
from hf_accel.linear.backends import registry as module
from hf_accel.linear.backends.onednn import is_exact
from hf_accel.linear.backends.torch_int4 import block_size

from ..specs import linear_spec

pytestmark = pytest.mark.skipif(
    not (is_exact() and block_size()), reason="this build of torch lacks the ops that are chosen among"
)

LARGE = {"in_features": 2048, "out_features": 2048}
SMALL = {"in_features": 256, "out_features": 2048}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WITHOUT_TRITON = "torch" if torch.cuda.is_available() else "reference"
ON_GPU = WITHOUT_TRITON if triton.refusal("cuda") else "triton"


@pytest.fixture
def no_kernels(monkeypatch):
    """As on a machine that had no compiler."""
    monkeypatch.setattr(kernels, "refusal", lambda: "cpu kernels: not built (no compiler)")
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("activations", ["auto", "int8"])
def test_the_native_kernels_come_first(shape, bits, dtype, activations):
    choice = choose(linear_spec(**shape, bits=bits, dtype=dtype, activations=activations))
    assert (choice.backend.name, choice.refusals) == ("cpu", ())


def test_without_the_kernels_their_reason_is_told(no_kernels):
    choice = choose(linear_spec(**LARGE, bits=8, dtype=BF16))
    assert choice.refusals == (("cpu", "cpu kernels: not built (no compiler)"),)


@pytest.mark.parametrize(
    ("shape", "bits", "dtype", "keywords", "chosen", "activations"),
    [
        (LARGE, 8, BF16, {}, "onednn", "int8"),
        (LARGE, 8, FP32, {}, "onednn", "int8"),
        (LARGE, 8, BF16, {"activations": "int8"}, "onednn", "int8"),
        (LARGE, 8, BF16, {"activations": None}, "torch", None),
        (LARGE, 8, FP32, {"activations": None}, "reference", None),
        (LARGE, 8, BF16, {"device_type": "cuda"}, ON_GPU, "int8" if ON_GPU == "torch" else None),
        (LARGE, 8, BF16, {"device_type": "cuda", "activations": "int8"}, ON_GPU, "int8"),
        (SMALL, 8, BF16, {}, "torch", None),
        (SMALL, 8, FP32, {}, "onednn", "int8"),
        (SMALL, 8, FP16, {}, "onednn", "int8"),
        (SMALL, 8, BF16, {"activations": "int8"}, "onednn", "int8"),
        (SMALL, 8, BF16, {"activations": None}, "torch", None),
        (LARGE, 4, BF16, {}, "torch", None),
        (SMALL, 4, FP32, {}, "torch", None),
        (LARGE, 4, FP16, {}, "reference", None),
        (LARGE, 4, BF16, {"activations": "int8"}, "reference", "int8"),
    ],
)
def test_auto_without_the_kernels(no_kernels, shape, bits, dtype, keywords, chosen, activations):
    choice = choose(linear_spec(**shape, bits=bits, dtype=dtype, **keywords))
    assert (choice.backend.name, choice.backend.activations) == (chosen, activations)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_zero_points_are_native_too(dtype):
    choice = choose(linear_spec(**LARGE, bits=4, symmetric=False, dtype=dtype))
    assert (choice.backend.name, choice.refusals) == ("cpu", ())


@pytest.mark.parametrize("activations", [None, "int8"])
def test_torch_refuses_zero_points(no_kernels, activations):
    choice = choose(linear_spec(**LARGE, bits=4, symmetric=False, dtype=BF16, activations=activations))
    assert (choice.backend.name, choice.backend.activations) == ("reference", activations)
    assert activations == "int8" or ("torch", "it takes symmetric weights only") in choice.refusals


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_refusals_name_the_backends_that_were_asked_before():
    choice = choose(linear_spec(**LARGE, bits=8, dtype=FP32, activations=None))
    assert choice.refusals == (
        ("cpu", "it rounds activations to INT8"),
        ("onednn", "it rounds activations to INT8"),
        ("torch", "it takes bfloat16, not torch.float32"),
    )
    assert choose(linear_spec(**LARGE, bits=8, dtype=FP32)).refusals == ()


def test_backends_that_are_row_invariant_come_first_where_asked(monkeypatch):
    monkeypatch.setattr(triton, "refusal", lambda device_type: None)
    spec = linear_spec(**LARGE, bits=4, dtype=BF16, device_type="cuda")
    choose.cache_clear()
    for wanted in (False, True):
        choice = choose(spec, row_invariant=wanted)
        assert (choice.backend.name, choice.backend.row_invariant, choice.row_invariant) == ("triton", wanted, wanted)
    choose.cache_clear()


def test_a_named_backend_is_taken_where_auto_would_not():
    spec = linear_spec(**LARGE, bits=8, dtype=BF16)
    assert choose(spec, "torch").backend.name == "torch"
    assert choose(spec, "reference").backend.activations is None


@pytest.mark.parametrize(
    ("name", "bits", "keywords", "message"),
    [
        (
            "cublas",
            8,
            {},
            "'cublas' is not known; choose one of 'auto', 'cpu', 'onednn', 'torch', 'triton', 'reference', "
            "'reference by row'$",
        ),
        ("onednn", 4, {}, r"backend 'onednn' refuses a layer \[2048, 2048\]: it has no INT4 weights; use 'auto'$"),
        ("onednn", 8, {"activations": None}, "refuses .*: it rounds activations to INT8; use 'auto'$"),
    ],
)
def test_a_named_backend_that_refuses_is_an_error(name, bits, keywords, message):
    with pytest.raises(UnsupportedError, match=message):
        choose(linear_spec(**LARGE, bits=bits, dtype=FP32, **keywords), name)


def test_a_choice_tells_its_note_and_its_cost(monkeypatch):
    monkeypatch.setattr(module, "measure", lambda spec, backend: (2.0, 1.0) if backend.name == "torch" else None)
    choice = choose(linear_spec(**SMALL, bits=4, dtype=FP32), "torch")
    assert "rounded to bfloat16" in choice.note
    assert (choice.stock_seconds, choice.seconds) == (2.0, 1.0)
    assert choose(linear_spec(**SMALL, bits=4, dtype=BF16), "torch").note is None
