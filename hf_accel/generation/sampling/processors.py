"""Logits processors for many rows at once.

Each takes scores [n, V] float32 and a Prefix for each row, and returns new scores. It does not write to what it was
given. Its arithmetic is that of the transformers class that its docstring names.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...tensors import integers, sent
from . import filters
from .token_prefix import Prefix

Function = Callable[[Tensor, Tensor], Tensor]  # input_ids [1, T] int64, scores [1, V] float32 -> scores
Prefixes = abc.Sequence[Prefix]


@dataclass(frozen=True)
class Processor:
    """A logits processor. uses_prefix: whether it needs the prefixes; if not, they may be empty."""

    uses_prefix: ClassVar[bool] = False

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        raise NotImplementedError


# -- processors that need the prefix -----------------------------------------------------------------------


@dataclass(frozen=True)
class RepetitionPenalty(Processor):
    """Divides the scores of tokens in the prompt or the output, and multiplies negative ones (Keskar et al. 2019,
    arXiv 1909.05858): RepetitionPenaltyLogitsProcessor."""

    uses_prefix: ClassVar[bool] = True
    penalty: float

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        scores = scores.clone(memory_format=torch.contiguous_format)
        places = sent(_places([prefix.columns for prefix in prefixes], scores), scores)
        found = scores.view(-1)[places]
        scores.view(-1)[places] = torch.where(found < 0, found * self.penalty, found / self.penalty)
        return scores


@dataclass(frozen=True)
class FrequencyPenalty(Processor):
    """Subtracts `frequency` for each time that a token was generated, and `presence` once, as in OpenAI's API."""

    uses_prefix: ClassVar[bool] = True
    frequency: float
    presence: float

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        scores = scores.clone(memory_format=torch.contiguous_format)
        places = _places([prefix.ids[prefix.num_prompt :] for prefix in prefixes], scores)
        places, counts = torch.unique(places, return_counts=True)
        places, counts = sent(places, scores), sent(counts, scores)
        scores.view(-1)[places] = scores.view(-1)[places] - self.frequency * counts - self.presence
        return scores


def _places(rows: list[Tensor], scores: Tensor) -> Tensor:
    """Return the indices of each row's ids in the flattened scores, on the host. Ids without a logit are left out."""
    size = scores.shape[1]
    return torch.cat([ids[ids < size] + row * size for row, ids in enumerate(rows)])


@dataclass(frozen=True)
class MinNewTokens(Processor):
    """Excludes stop tokens before `count` new tokens: MinNewTokensLengthLogitsProcessor."""

    uses_prefix: ClassVar[bool] = True
    count: int
    stop_token_ids: tuple[int, ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        if all(prefix.num_new >= self.count for prefix in prefixes):
            return scores
        stops, none = torch.tensor(self.stop_token_ids, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        places = _places([stops if prefix.num_new < self.count else none for prefix in prefixes], scores)
        scores = scores.clone(memory_format=torch.contiguous_format)
        scores.view(-1)[sent(places, scores)] = -torch.inf
        return scores


@dataclass(frozen=True)
class OneByOne(Processor):
    """Calls a user's functions in turn. They get one row at a time, because the prefixes have different lengths."""

    uses_prefix: ClassVar[bool] = True
    functions: tuple[Function, ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        rows = []
        for row, prefix in enumerate(prefixes):
            given = scores[row : row + 1]
            for function in self.functions:
                given = _called(function, prefix.ids.to(scores.device)[None].clone(), given.clone())
            rows.append(given)
        return torch.cat(rows)


def _called(function: Function, ids: Tensor, scores: Tensor) -> Tensor:
    shape, dtype, device = scores.shape, scores.dtype, scores.device  # the function may write to what it gets
    result = function(ids, scores)
    if not isinstance(result, Tensor) or result.shape != shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise UnsupportedError(
            f"the processor {name_of(function)} returned {got} for scores of shape {tuple(shape)}; return as many "
            "scores"
        )
    return result.to(dtype=dtype, device=device)


def name_of(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


@dataclass(frozen=True)
class OnlyTokens(Processor):
    """Excludes all tokens but `ids`."""

    ids: tuple[int, ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        kept = sent(integers(self.ids), scores)
        return torch.full_like(scores, -torch.inf).index_copy_(1, kept, scores.index_select(1, kept))


# -- warpers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Temperature(Processor):
    """Divides the scores by the temperature `value`: TemperatureLogitsWarper."""

    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise UnsupportedError(f"temperature={self.value} must be a finite number above 0; 1 samples as is")

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        return scores / self.value


@dataclass(frozen=True)
class TopKTopP(Processor):
    """Keeps the k most probable tokens, and of these the fewest whose probabilities sum to at least p:
    TopKLogitsWarper and TopPLogitsWarper. None keeps all."""

    k: int | None = None
    p: float | None = None

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        if self.k and self.p is not None:
            return filters.top_k_top_p(scores, self.k, self.p)
        if self.k:
            return filters.top_k(scores, self.k)
        return scores if self.p is None else filters.top_p(scores, self.p)


@dataclass(frozen=True)
class MinP(Processor):
    """Keeps tokens at least p times as probable as the most probable one: MinPLogitsWarper."""

    p: float

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        return filters.min_p(scores, self.p)
