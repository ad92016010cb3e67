"""Whether a logits processor is a pure function: drafts are processed, rejected, and processed again."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .processors import Function, OneByOne, name_of
from .sampling import Sampling


def is_stateful(processor: Function, vocabulary_size: int) -> bool:
    """Whether a copy of the processor answers the same input differently the second time, after another in between.

    True is certain. False is not: a state that shows later, or only for certain tokens, is not found; nor is one that
    raises on the input made up here. What cannot be copied (and a function's closure is not) is asked itself.
    """
    try:
        asked = copy.deepcopy(processor)
    except Exception:
        asked = processor
    ids = torch.arange(8).remainder(vocabulary_size)[None]
    scores = torch.linspace(-4, 4, vocabulary_size)[None]
    try:
        with torch.random.fork_rng(devices=[]):
            first = _answer(asked, ids[:, :4], scores)
            for end in (5, 3, 8):
                _answer(asked, ids[:, :end], scores.flip(-1))
            again = _answer(asked, ids[:, :4], scores)
    except Exception:
        return False
    return not torch.equal(first, again)


def refuse_stateful(sampling: Sampling, vocabulary_size: int) -> None:
    """Raises UnsupportedError for a user's processor that drafts would mislead."""
    for processor in [step.function for step in sampling.steps if isinstance(step, OneByOne)]:
        if is_stateful(processor, vocabulary_size):
            raise UnsupportedError(
                f"the logits processor {name_of(processor)} answers the same input differently when asked again, so "
                "drafts cannot be verified with it; make it a function of (input_ids, scores) alone, or leave "
                "speculative=None"
            )


def _answer(processor: Function, ids: Tensor, scores: Tensor) -> Tensor:
    return processor(ids.clone(), scores.clone()).clone().nan_to_num()
