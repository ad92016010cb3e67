"""Checks that a logits processor is a pure function. Drafts need this: a rejected position is processed again."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from .processors import Function, name_of


def is_stateful(processor: Function, vocabulary_size: int) -> bool:
    """Whether the processor returns two different results for one input, with other calls between.

    A copy of the processor is called; if it cannot be copied, the processor itself is called. (deepcopy does not copy
    a function's closure.) The answer True is certain. False is not: the state may have an effect only later or only
    for certain tokens, or the processor may raise an error for the input that is made up here.
    """
    try:
        called = copy.deepcopy(processor)
    except Exception:
        called = processor
    ids = torch.arange(8).remainder(vocabulary_size)[None]
    scores = torch.linspace(-4, 4, vocabulary_size)[None]
    try:
        with torch.random.fork_rng(devices=[]):
            first = _result(called, ids[:, :4], scores)
            for end in (5, 3, 8):
                _result(called, ids[:, :end], scores.flip(-1))
            again = _result(called, ids[:, :4], scores)
    except Exception:
        return False
    return not torch.equal(first, again)


def stateful_refusal(processors: Iterable[Function], vocabulary_size: int) -> str | None:
    """Why drafts cannot be verified with these processors, as one clause; None if no state was found."""
    for processor in processors:
        if is_stateful(processor, vocabulary_size):
            return (
                f"the logits processor {name_of(processor)} returns different scores for the same input when it is "
                "called again"
            )
    return None


def _result(processor: Function, ids: Tensor, scores: Tensor) -> Tensor:
    return processor(ids.clone(), scores.clone()).clone().nan_to_num()
