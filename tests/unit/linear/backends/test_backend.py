from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from hf_accel.linear import BACKENDS, Backend
from hf_accel.linear.backends.onednn import is_exact
from hf_accel.linear.backends.reference import Reference
from hf_accel.linear.backends.torch_int4 import block_size
from hf_accel.linear.formats import KINDS

from ..specs import linear_spec


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype", "weight_bytes"),
    [
        (8, 128, torch.bfloat16, 256 * 100 + 100 * 2),
        (8, 128, torch.float32, 256 * 100 + 100 * 4),
        (4, 128, torch.bfloat16, 128 * 100 + 100 * 2 * 2),
        (4, 32, torch.float16, 128 * 100 + 100 * 8 * 2),
    ],
)
def test_bytes_of_a_layer(bits, group_size, dtype, weight_bytes):
    spec = linear_spec(in_features=256, out_features=100, bits=bits, group_size=group_size, dtype=dtype)
    assert spec.weight_bytes == weight_bytes


def test_bytes_of_zero_points():
    sizes = {"in_features": 256, "out_features": 100, "bits": 4, "group_size": 32, "dtype": torch.float16}
    both = [linear_spec(**sizes, symmetric=symmetric).weight_bytes for symmetric in (True, False)]
    assert both[1] - both[0] == 13 * 8 * 4  # 100 outputs take 13 words


def test_most_backends_have_nothing_to_note():
    spec = linear_spec(in_features=64, out_features=64, bits=8, dtype=torch.float32)
    notes = {backend.note(spec) for backend in BACKENDS if backend.reads(spec)}
    assert notes == {None, "calls with more than 256 rows may round activations to INT8, or the weight to 16 bits"}


def test_every_backend_keeps_the_contract():
    for backend in BACKENDS:
        assert isinstance(backend, Backend)
        assert set(backend.layouts) <= set(KINDS)
        assert backend.activations in (None, "int8", "fp8")


def test_every_backend_has_a_reference_that_rounds_as_it_does():
    for backend in BACKENDS:
        plain = [b for b in BACKENDS if b.name == backend.reference and b.activations == backend.activations]
        assert len(plain) == 1
        assert isinstance(plain[0], Reference) and set(backend.layouts) <= set(plain[0].layouts)


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


@pytest.mark.skipif("avx512_vnni" not in cpu_flags(), reason="the CPU has no AVX-512 VNNI")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_onednn_is_there_where_it_can_be():
    """A self-test that fails by our own fault would skip every other test of it."""
    assert is_exact()


@pytest.mark.skipif(platform.system() != "Linux", reason="the packed layout is known on Linux")
@pytest.mark.parametrize(("capability", "block"), [("AVX512", 64), ("AVX2", 32)])
def test_torchs_int4_is_there_where_it_can_be(capability, block):
    if torch.backends.cpu.get_cpu_capability() != capability:
        pytest.skip(f"torch does not use {capability} here")
    assert block_size() == block
