"""The sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...config import checked_keywords
from ...errors import UnsupportedError
from . import processors as steps
from .processors import Function, Processor
from .sampling import Sampling


@checked_keywords(
    do_sample="temperature=, where 0 is greedy",
    eos_token_id="stop_token_ids=",
    bad_words_ids="bad_token_ids=, or processors= for words of several tokens",
    logits_processor="processors=",
)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen. The logits are processed in the order and arithmetic of transformers.

    temperature: 0 chooses the most probable token. Otherwise the logits are divided by it, and a token is drawn.
    top_k: keeps the k most probable tokens. top_p: keeps the fewest most probable tokens whose probabilities sum to at
        least p. min_p: keeps the tokens at least p times as probable as the most probable one. None keeps all.
    repetition_penalty: divides the logits of tokens in the prompt or the output; negative logits are multiplied.
    presence_penalty, frequency_penalty: are subtracted from the logit of each generated token, the former once, the
        latter for each time that it was generated.
    logit_bias: maps a token id to the number that is added to its logit.
    min_new_tokens: the number of new tokens before which no token of stop_token_ids is chosen.
    allowed_token_ids: only these tokens are chosen. bad_token_ids: these tokens are never chosen.
    processors: functions of (input_ids [1, T] int64, scores [1, V] float32) that return scores, as transformers'
        LogitsProcessor. They must be pure functions, because a position is processed again if its draft was rejected.
    logprobs: the number of most probable tokens whose log-probabilities are reported beside the chosen token's. None
        reports none.
    Raises UnsupportedError for values outside of these meanings.
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
    processors: tuple[Function, ...] = ()
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

    def sampling(self) -> Sampling:
        """Make the Sampling of these parameters. Its steps are in the order of transformers."""
        return Sampling(self._steps(), greedy=self.temperature == 0, num_logprobs=self.logprobs)

    def _steps(self) -> Iterator[Processor]:
        if self.logit_bias:
            yield steps.LogitBias(tuple(dict(self.logit_bias).items()))
        if self.repetition_penalty != 1:
            yield steps.RepetitionPenalty(self.repetition_penalty)
        if self.frequency_penalty or self.presence_penalty:
            yield steps.FrequencyPenalty(self.frequency_penalty, self.presence_penalty)
        if self.min_new_tokens and self.stop_token_ids:
            yield steps.MinNewTokens(self.min_new_tokens, self.stop_token_ids)
        if self.allowed_token_ids is not None:
            yield steps.OnlyTokens(self.allowed_token_ids)
        if self.bad_token_ids:
            yield steps.WithoutTokens(self.bad_token_ids)
        yield from map(steps.OneByOne, self.processors)
        if self.temperature == 0:
            return
        if self.temperature != 1:
            yield steps.Temperature(self.temperature)
        if self.top_k or self.top_p is not None:
            yield steps.TopKTopP(self.top_k, self.top_p)
        if self.min_p is not None:
            yield steps.MinP(self.min_p)


def _validate(params: SamplingParams) -> None:
    _number("temperature", params.temperature, "0 takes the most probable token, 1 samples as is", low=0)
    _number("top_p", params.top_p, "None keeps every token", low=0, high=1)
    _number("min_p", params.min_p, "None keeps every token", low=0, high=1)
    _number("presence_penalty", params.presence_penalty, "0 is none")
    _number("frequency_penalty", params.frequency_penalty, "0 is none")
    _number("repetition_penalty", params.repetition_penalty, "1 is none", low=0)
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


def _number(name: str, value: object, hint: str, *, low: float = -math.inf, high: float = math.inf) -> None:
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
