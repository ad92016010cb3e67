"""What is done to the logits of a token before it is chosen, one kind of change a class.

Each takes scores [n, V] float32 and a Prefix for each of the n rows, and returns new scores; what it was given is
never written to. Arithmetic is that of transformers' class named in each docstring.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import UnsupportedError
from . import filters
from .token_prefix import Prefix

Function = Callable[[Tensor, Tensor], Tensor]  # input_ids [1, T] int64, scores [1, V] float32 -> scores
Prefixes = abc.Sequence[Prefix]


@dataclass(frozen=True)
class Processor:
    """uses_prefix: it has to know what stands before; the others may be given no prefixes."""

    uses_prefix: ClassVar[bool] = False

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        raise NotImplementedError


# -- what looks back ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepetitionPenalty(Processor):
    """Divides the scores of tokens of prompt and output, or multiplies them if negative (Keskar et al. 2019, arXiv
    1909.05858): RepetitionPenaltyLogitsProcessor."""

    uses_prefix: ClassVar[bool] = True
    penalty: float

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        scores = scores.clone(memory_format=torch.contiguous_format)
        places = _places([prefix.columns for prefix in prefixes], scores)
        found = scores.view(-1)[places]
        scores.view(-1)[places] = torch.where(found < 0, found * self.penalty, found / self.penalty)
        return scores


@dataclass(frozen=True)
class FrequencyPenalty(Processor):
    """Subtracts `frequency` for each time that a token was generated, and `presence` once, as OpenAI's API does."""

    uses_prefix: ClassVar[bool] = True
    frequency: float
    presence: float

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        scores = scores.clone(memory_format=torch.contiguous_format)
        places = _places([prefix.ids[prefix.num_prompt :] for prefix in prefixes], scores)
        places, counts = torch.unique(places, return_counts=True)
        scores.view(-1)[places] = scores.view(-1)[places] - self.frequency * counts - self.presence
        return scores


def _places(rows: list[Tensor], scores: Tensor) -> Tensor:
    """Where in the flat scores the ids of each row stand; ids that no logit belongs to are left out."""
    size = scores.shape[1]
    return torch.cat([ids[ids < size] + row * size for row, ids in enumerate(rows)]).to(scores.device)


@dataclass(frozen=True)
class MinNewTokens(Processor):
    """Rules stop tokens out before `count` new tokens: MinNewTokensLengthLogitsProcessor."""

    uses_prefix: ClassVar[bool] = True
    count: int
    stop_token_ids: tuple[int, ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        early = [prefix.num_new < self.count for prefix in prefixes]
        if not any(early):
            return scores
        stops = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
        stops[[token for token in self.stop_token_ids if token < scores.shape[1]]] = True
        return scores.masked_fill(torch.tensor(early, device=scores.device)[:, None] & stops, -torch.inf)


@dataclass(frozen=True)
class OneByOne(Processor):
    """A user's function, called for one row at a time, as rows have different lengths."""

    uses_prefix: ClassVar[bool] = True
    function: Function

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        rows = []
        for row, prefix in enumerate(prefixes):
            given = scores[row : row + 1]
            result = self.function(prefix.ids.to(scores.device)[None].clone(), given.clone())
            if not isinstance(result, Tensor) or result.shape != given.shape:
                got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise UnsupportedError(
                    f"the processor {name_of(self.function)} returned {got} for scores of shape "
                    f"{tuple(given.shape)}; return as many scores"
                )
            rows.append(result.to(dtype=scores.dtype, device=scores.device))
        return torch.cat(rows)


def name_of(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


# -- what looks at single tokens ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitBias(Processor):
    """Adds to the logits of some tokens, as OpenAI's API."""

    bias: tuple[tuple[int, float], ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        ids, biases = zip(*self.bias, strict=True)
        _require_logits("logit_bias", ids, scores)
        columns = torch.tensor(ids, device=scores.device)
        return scores.index_add(1, columns, scores.new_tensor(biases).expand(len(scores), -1))


@dataclass(frozen=True)
class OnlyTokens(Processor):
    """Rules out all but some tokens."""

    ids: tuple[int, ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        _require_logits("allowed_token_ids", self.ids, scores)
        only = torch.full_like(scores, -torch.inf)
        only[:, list(self.ids)] = scores[:, list(self.ids)]
        return only


@dataclass(frozen=True)
class WithoutTokens(Processor):
    """Rules out some tokens: SuppressTokensLogitsProcessor."""

    ids: tuple[int, ...]

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        _require_logits("bad_token_ids", self.ids, scores)
        return scores.index_fill(1, torch.tensor(self.ids, device=scores.device), -torch.inf)


def _require_logits(name: str, ids: abc.Sequence[int], scores: Tensor) -> None:
    if max(ids) >= scores.shape[1]:
        raise UnsupportedError(f"{name} has the id {max(ids)}; the model has {scores.shape[1]} logits: leave it out")


# -- what shapes the distribution --------------------------------------------------------------------------


@dataclass(frozen=True)
class Temperature(Processor):
    """Divides by it: TemperatureLogitsWarper."""

    value: float

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        return scores / self.value


@dataclass(frozen=True)
class TopKTopP(Processor):
    """Keeps the k most probable tokens, and of these the fewest with a mass of p: TopKLogitsWarper and
    TopPLogitsWarper."""

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
