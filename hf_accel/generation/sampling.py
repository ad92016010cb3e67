"""How the next token is chosen: what is done to the logits, and whether the largest is taken or one is drawn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import checked_keywords
from ..errors import UnsupportedError
from . import filters, penalties
from .prefix import Prefix

if TYPE_CHECKING:
    from .sequence import Sequence

Processor = Callable[[Tensor, Tensor], Tensor]  # input_ids [1, T] int64, scores [1, V] float32 -> scores


class Sampling(ABC):
    """From a model's logits to the law of the next token."""

    @property
    @abstractmethod
    def greedy(self) -> bool:
        """The largest score is taken; otherwise one token is drawn from their softmax."""

    @property
    @abstractmethod
    def plain(self) -> bool:
        """Greedy, and `process` would change nothing: the answer is the argmax of the logits as they are."""

    @property
    @abstractmethod
    def uses_prefix(self) -> bool:
        """`process` needs to know what stands before."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Sequences whose keys are equal are processed in one call."""

    @property
    def num_logprobs(self) -> int | None:
        """How many of the largest log-probabilities are reported beside the token's own; None reports none."""
        return None

    @property
    def draw(self) -> Callable[[Tensor, list[Sequence]], list[int]] | None:
        """Draws from probabilities [n, V] for n sequences without a draft; None leaves it to the Verifier."""
        return None

    @abstractmethod
    def process(self, logits: Tensor, prefixes: list[Prefix] | None) -> Tensor:
        """Scores [n, V] float32 from logits [n, V], which are not written to.

        prefixes: one for each row, if `uses_prefix`. A pure function: a position is processed again when its draft was
        rejected.
        """


@checked_keywords(
    do_sample="temperature=, where 0 is greedy",
    eos_token_id="stop_token_ids=",
    bad_words_ids="bad_token_ids=, or processors= for words of several tokens",
    logits_processor="processors=",
)
@dataclass(frozen=True, kw_only=True)
class SamplingParams(Sampling):
    """How a request's tokens are chosen. Order and arithmetic are transformers'.

    temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
    top_k, top_p, min_p: keep the k most probable; the fewest with a mass of p; those at least p times as probable as
        the most probable. None keeps all.
    repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt or output.
    presence_penalty, frequency_penalty: subtracted once, or for each time, from those of generated tokens.
    logit_bias: token id -> what is added to its logit.
    min_new_tokens: stop_token_ids are impossible before as many new tokens.
    allowed_token_ids, bad_token_ids: the only ones possible; never possible.
    processors: functions of (input_ids [1, T] int64, scores [1, V] float32) -> scores, as transformers'
        LogitsProcessor. They must be pure: drafts are processed, rejected, and processed again.
    logprobs: report the log-probability of each token, and those of as many most probable ones; None reports none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    processors: tuple[Processor, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted((i, float(b)) for i, b in bias)))
        for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids"):
            ids = getattr(self, name)
            if ids is not None:
                object.__setattr__(self, name, (ids,) if isinstance(ids, int) else tuple(ids))
        object.__setattr__(self, "processors", tuple(self.processors))
        _validate(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def uses_prefix(self) -> bool:
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or (self.min_new_tokens and self.stop_token_ids)
            or self.processors
        )

    @property
    def plain(self) -> bool:
        fixed = self.logit_bias or self.allowed_token_ids is not None or self.bad_token_ids
        return self.greedy and not self.uses_prefix and not fixed

    @property
    def key(self) -> Hashable:
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "logprobs")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def process(self, logits: Tensor, prefixes: list[Prefix] | None) -> Tensor:
        scores = self._bias(logits.float())
        if self.uses_prefix:
            if prefixes is None or len(prefixes) != len(logits):
                raise UnsupportedError(
                    f"{len(logits)} rows of logits need as many prefixes; Sampling.uses_prefix is set"
                )
            scores = self._look_back(scores, prefixes)
        scores = self._restrict(scores)
        for processor in self.processors:
            scores = _apply(processor, scores, prefixes or [])
        return scores if self.greedy else self._filter(scores)

    def _bias(self, scores: Tensor) -> Tensor:
        if not self.logit_bias:
            return scores
        ids, biases = zip(*self.logit_bias, strict=True)
        _in_vocabulary("logit_bias", ids, scores)
        columns = torch.tensor(ids, device=scores.device)
        return scores.index_add(1, columns, scores.new_tensor(biases).expand(len(scores), -1))

    def _look_back(self, scores: Tensor, prefixes: list[Prefix]) -> Tensor:
        if self.repetition_penalty != 1:
            scores = penalties.repeat(scores, prefixes, self.repetition_penalty)
        if self.frequency_penalty or self.presence_penalty:
            scores = penalties.recount(
                scores, prefixes, frequency=self.frequency_penalty, presence=self.presence_penalty
            )
        early = [prefix.num_new < self.min_new_tokens for prefix in prefixes]
        if any(early) and self.stop_token_ids:
            ids = [token for token in self.stop_token_ids if token < scores.shape[1]]
            stops = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
            stops[ids] = True
            scores = scores.masked_fill(torch.tensor(early, device=scores.device)[:, None] & stops, -torch.inf)
        return scores

    def _restrict(self, scores: Tensor) -> Tensor:
        if self.allowed_token_ids is not None:
            _in_vocabulary("allowed_token_ids", self.allowed_token_ids, scores)
            only = torch.full_like(scores, -torch.inf)
            only[:, list(self.allowed_token_ids)] = scores[:, list(self.allowed_token_ids)]
            scores = only
        if self.bad_token_ids:
            _in_vocabulary("bad_token_ids", self.bad_token_ids, scores)
            columns = torch.tensor(self.bad_token_ids, device=scores.device)
            scores = scores.index_fill(1, columns, -torch.inf)
        return scores

    def _filter(self, scores: Tensor) -> Tensor:
        if self.temperature != 1:
            scores = scores / self.temperature
        if self.top_k and self.top_p is not None:
            scores = filters.top_k_top_p(scores, self.top_k, self.top_p)
        elif self.top_k:
            scores = filters.top_k(scores, self.top_k)
        elif self.top_p is not None:
            scores = filters.top_p(scores, self.top_p)
        return scores if self.min_p is None else filters.min_p(scores, self.min_p)


def _apply(processor: Processor, scores: Tensor, prefixes: list[Prefix]) -> Tensor:
    """One row at a time, as rows have different lengths and a processor may look at all of one."""
    rows = []
    for row, prefix in enumerate(prefixes):
        ids = prefix.ids.to(scores.device)[None]
        given = scores[row : row + 1]
        result = processor(ids.clone(), given.clone())
        if not isinstance(result, Tensor) or result.shape != given.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise UnsupportedError(
                f"the processor {name_of(processor)} returned {got} for scores of shape {tuple(given.shape)}; "
                "return as many scores"
            )
        rows.append(result.to(dtype=scores.dtype, device=scores.device))
    return torch.cat(rows)


def name_of(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _in_vocabulary(name: str, ids: abc.Sequence[int], scores: Tensor) -> None:
    if max(ids) >= scores.shape[1]:
        raise UnsupportedError(f"{name} has the id {max(ids)}; the model has {scores.shape[1]} logits: leave it out")


def _validate(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0, math.inf, "0 takes the most probable token, 1 samples as is")
    _number("top_p", params.top_p, 0, 1, "None keeps every token")
    _number("min_p", params.min_p, 0, 1, "None keeps every token")
    _number("presence_penalty", params.presence_penalty, -math.inf, math.inf, "0 is none")
    _number("frequency_penalty", params.frequency_penalty, -math.inf, math.inf, "0 is none")
    _number("repetition_penalty", params.repetition_penalty, 0, math.inf, "1 is none")
    if params.repetition_penalty == 0:
        raise UnsupportedError("repetition_penalty=0 would divide by it; 1 is none")
    _integer("top_k", params.top_k, "None keeps every token")
    _integer("min_new_tokens", params.min_new_tokens, "0 asks for none")
    _integer("logprobs", params.logprobs, "None reports none")
    for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids"):
        for token in getattr(params, name) or ():
            _integer(name, token, "token ids are not negative")
    for token, bias in dict(params.logit_bias).items():
        _integer("logit_bias", token, "token ids are not negative")
        if math.isnan(bias) or bias == math.inf:
            raise UnsupportedError(f"logit_bias of token {token} is {bias}; give a number, or -inf to rule it out")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise UnsupportedError("allowed_token_ids=() allows no token at all; None allows every one")
    for processor in params.processors:
        if not callable(processor):
            raise UnsupportedError(f"processors holds {processor!r}; give functions of (input_ids, scores)")


def _number(name: str, value: object, low: float, high: float, hint: str) -> None:
    if value is None and name in ("top_p", "min_p"):
        return
    bounds = " from 0 to 1" if high == 1 else " of at least 0" if low == 0 else ""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (low <= value <= high and abs(value) < math.inf)
    ):
        raise UnsupportedError(f"{name}={value!r} must be a finite number{bounds}; {hint}")


def _integer(name: str, value: object, hint: str) -> None:
    if value is None and name in ("top_k", "logprobs"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnsupportedError(f"{name}={value!r} must be an integer of at least 0; {hint}")
