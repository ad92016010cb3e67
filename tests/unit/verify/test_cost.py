"""Perplexity and divergence against one full pass and the definitions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel.verify import cost as module
from hf_accel.verify.cost import differences, measure_cost, predictions, text_windows

from ...parity.families import build, prompts

LONG = prompts(1, 150)


def measured(model: Any, reference: Any, windows: list[Tensor]) -> Any:
    return measure_cost(model, reference, windows, name="r", text="t")


@torch.no_grad()
def test_by_the_definitions() -> None:
    """Chunks of 64 tokens over a cache are one pass, and sums over windows are means over their tokens."""
    reference, model = build("llama"), hf_accel.patch(build("llama"), weights="int8")
    windows = [LONG, prompts(1, 5, seed=2)]
    result = measured(model, reference, windows)
    losses, changes, kl, same = [], [], [], []
    for ids in windows:
        ours, theirs = (m(ids).logits[0, :-1].double().softmax(-1) for m in (model, reference))
        rows = torch.arange(len(ours))
        losses.append(-theirs[rows, ids[0, 1:]].log())
        changes.append(-ours[rows, ids[0, 1:]].log() - losses[-1])
        kl.append((theirs * (theirs / ours).log()).sum(-1))
        same.append((ours.argmax(-1) == theirs.argmax(-1)).double())
    change = torch.cat(changes)
    assert result.tokens == 149 + 4
    assert result.reference_loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)
    assert result.loss - result.reference_loss == pytest.approx(float(change.mean()), rel=0.1, abs=1e-4)
    assert result.error == pytest.approx(float(change.std()) / math.sqrt(len(change)), rel=0.05)
    assert result.kl == pytest.approx(float(torch.cat(kl).mean()), rel=0.05)
    assert result.same_top == pytest.approx(float(torch.cat(same).mean()), abs=0.015)
    assert 0 < result.kl < 0.1


def test_a_model_against_itself() -> None:
    model = build("llama")
    result = measured(model, copy.deepcopy(model), [LONG])
    assert (result.kl, result.same_top, result.error, result.change) == (0, 1, 0, 0)


@torch.no_grad()
def test_keys_and_values_are_read_from_the_cache() -> None:
    """In a pass without a cache the INT8 of it would cost nothing."""
    settings = hf_accel.CacheConfig(dtype="int8")
    model = hf_accel.patch(build("llama"), weights=None, cache=settings)
    assert measured(model, build("llama"), [LONG]).kl > 1e-5
    cache = hf_accel.PagedCache(model.config, settings)
    expected = model(LONG[:, :-1], past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
    actual, exact = (torch.cat(list(predictions(m, LONG))) for m in (model, build("llama")))
    error, cost = (float((expected - other).abs().amax(-1).mean()) for other in (actual, exact))
    assert error < 0.1 * cost  # not 0: a rounded key may fall on the other side


def test_only_a_chunk_of_logits_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def noted(actual: Tensor, expected: Tensor, targets: Tensor) -> Tensor:
        shapes.append((*actual.shape, len(targets)))
        return differences(actual, expected, targets)

    monkeypatch.setattr(module, "differences", noted)
    measured(build("llama"), build("llama"), [LONG])
    assert shapes == [(64, 101, 64), (64, 101, 64), (21, 101, 21)]


def test_impossible_tokens_diverge_by_nothing() -> None:
    log_p, target = torch.tensor([[0.0, -torch.inf]]), torch.tensor([0])
    assert differences(log_p, log_p, target).tolist() == [[0, 0, 0, 1]]
    assert differences(torch.tensor([[-torch.inf, 0.0]]), log_p, target)[0, 2] == math.inf
    assert differences(torch.full((1, 2), torch.nan), log_p, target)[0, 2].isnan()


def test_windows() -> None:
    windows = text_windows([torch.arange(1026), torch.arange(513), torch.arange(1)])
    assert [tuple(w.shape) for w in windows] == [(1, 512), (1, 512), (1, 2), (1, 512)]
    assert windows[2].tolist() == [[1024, 1025]]
    with pytest.raises(hf_accel.UnsupportedError, match="no two tokens in a row"):
        text_windows([torch.arange(1)])
