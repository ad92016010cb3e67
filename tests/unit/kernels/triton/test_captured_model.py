"""A whole patched model whose passes are captured and replayed, launches of Triton kernels included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hf_accel
from hf_accel.generation.hf import graphed_runner
from hf_accel.kernels.triton.launch import Launch

from ....parity.families import build
from ....parity.speculating import answers, by_generate_batch, requests
from ...generation import tape
from .processes import interpreted

pytestmark = interpreted

PROMPTS = requests(3, longest=7, seed=3, shared=2)
NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def makers() -> Iterator[list[tape.TapeMaker]]:
    with pytest.MonkeyPatch.context() as patch:
        yield tape.install(patch)


@pytest.mark.parametrize("drafter", [None, pytest.param("ngram", marks=pytest.mark.long)])
def test_tokens(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes: list[list[Any]] = []
    recorded = tape.Tape.__init__

    def watched(self: tape.Tape, calls: list[Any], maker: tape.TapeMaker) -> None:
        tapes.append(calls)
        recorded(self, calls, maker)

    monkeypatch.setattr(tape.Tape, "__init__", watched)
    cache = hf_accel.CacheConfig(block_size=4)
    model = hf_accel.patch(build("llama"), weights=None, attention="triton", cache=cache)
    found = by_generate_batch(model, PROMPTS, NEW_TOKENS, speculative=drafter)
    assert found == answers("llama", PROMPTS, NEW_TOKENS)
    graphs = hf_accel.stats(model)["graphs"]
    assert graphs["replays"] > 2 and len(tapes) == graphs["captures"], graphs
    for calls in tapes:  # in each of two layers K and V are written, and attended to
        launches = [args[0] for _, args, _, _ in calls if args and isinstance(args[0], Launch)]
        assert len(launches) >= 4


@pytest.mark.long
@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}])
def test_quantized_weights(weights: Any) -> None:
    """Their products by Triton are captured as well; tokens are those without graphs."""
    cache = hf_accel.CacheConfig(block_size=4, dtype="int8")
    model = hf_accel.patch(build("llama"), weights=weights, attention="triton", cache=cache)
    found = by_generate_batch(model, PROMPTS, NEW_TOKENS)
    assert hf_accel.stats(model)["graphs"]["replays"] == NEW_TOKENS - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed_runner, "make_graphs", lambda device: None)
        assert by_generate_batch(model, PROMPTS, NEW_TOKENS) == found
    assert "graphs" not in hf_accel.stats(model)
