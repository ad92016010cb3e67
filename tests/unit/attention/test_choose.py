from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_accel import attention
from hf_accel.attention import BACKENDS, AttentionSpec, ReferenceBackend, choose_backend
from hf_accel.errors import UnsupportedError
from hf_accel.kernels import cpu as kernels


def spec(**changes: Any) -> AttentionSpec:
    base = {"head_dim": 64, "value_dim": 64, "num_heads": 32, "num_kv_heads": 4}
    return AttentionSpec(**{"dtype": torch.bfloat16, "device_type": "cpu", **base, **changes})


class Picky(ReferenceBackend):
    """Wants nothing to do with sinks."""

    name = "picky"

    def refuses(self, spec: AttentionSpec) -> str | None:
        return "its kernel has no attention sinks" if spec.sinks else None


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Picky:
    backend = Picky()
    monkeypatch.setattr(attention, "BACKENDS", (backend, *BACKENDS))
    return backend


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the kernels were compiled here makes no difference to these tests."""
    monkeypatch.setattr(kernels, "refusal", lambda: None)


def test_names_are_ordered_by_preference() -> None:
    assert [backend.name for backend in BACKENDS] == [
        "cpu", "flash_attn", "flash_attn", "varlen", "triton", "triton", "sdpa", "reference",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 4096},
        {"softcap": 50.0},
        {"sinks": True},
        {"quantized_kv": True},
        {"dropout": True},
        {"value_dim": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name, chosen", [("auto", "cpu"), ("cpu", "cpu"), ("sdpa", "sdpa"), ("reference", "reference")]
)
def test_every_backend_serves(changes: dict[str, Any], name: str, chosen: str) -> None:
    backend, refusals = choose_backend(spec(**changes), name)
    assert backend.name == chosen and refusals == []


def test_auto_passes_over_a_refusal_and_says_why(picky: Picky) -> None:
    backend, refusals = choose_backend(spec(sinks=True))
    assert backend.name == "cpu"
    assert refusals == [("picky", "its kernel has no attention sinks")]


def test_auto_takes_the_first_that_serves(picky: Picky) -> None:
    assert choose_backend(spec()) == (picky, [])


def test_explicit_refusal_is_an_error_with_the_way_out(picky: Picky) -> None:
    with pytest.raises(UnsupportedError, match=r"'picky'.*no attention sinks.*attention='auto'"):
        choose_backend(spec(sinks=True), "picky")


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"'flash' is not known; .* one of 'cpu', 'flash_attn', .*'sdpa', 'ref",
    ):
        choose_backend(spec(), "flash")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float64}, "it computes in float32, bfloat16 and float16, not in float64"),
        ({"head_dim": 1032}, "heads of 1032 numbers are larger than its 1024"),
    ],
    ids=str,
)
def test_the_native_backend_says_what_it_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    backend, refusals = choose_backend(spec(**changes))
    assert backend.name == "sdpa" and refusals == [("cpu", reason)]


def test_a_backend_for_another_device_is_not_spoken_of() -> None:
    assert choose_backend(spec(device_type="mps"))[1] == []
    with pytest.raises(UnsupportedError, match=r"it runs on a CPU, not on mps.*use attention='auto'"):
        choose_backend(spec(device_type="mps"), "cpu")
    with pytest.raises(UnsupportedError, match="it runs on an NVIDIA GPU, not on mps"):
        choose_backend(spec(device_type="mps"), "triton")


def test_without_the_library_the_reason_is_that_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "refusal", lambda: "cpu kernels: not built (no compiler)")
    assert choose_backend(spec())[1] == [("cpu", "cpu kernels: not built (no compiler)")]
