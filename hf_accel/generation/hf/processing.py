"""Stock's LogitsProcessors and StoppingCriteria, as one sequence among others sees them."""

from __future__ import annotations

import copy
import functools
import math
from collections import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from ..sampling.processors import MinP, Processor, RepetitionPenalty, Temperature, TopKTopP
from ..sampling.purity import is_stateful
from ..sampling.sampling import Draw, Sampling
from ..sampling.stopping import StopRules
from ..sampling.token_prefix import Prefix, Tokens, prefix_of
from ..sequence import Sequence

# They look at the scores alone, so that rows with histories of any length go through together.
BLIND = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
# They remember earlier calls, or know which row of the batch is whose.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
BY_ROW = (
    "PrefixConstrainedLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    *STATEFUL,
)


def processors_refusal(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, batch_size: int
) -> str | None:
    """Why these need the whole batch, and each step exactly once; None if a row may go through alone."""
    for processor in processors:
        name = type(processor).__name__
        if name in STATEFUL:
            return f"{name} remembers its calls"
        if batch_size > 1 and (name in BY_ROW or not _is_stock(processor)):
            return f"{name} may depend on the batch"
    for criterion in criteria:
        if batch_size > 1 and not _is_stock(criterion):
            return f"{type(criterion).__name__} may depend on the batch"
    stops = any(isinstance(criterion, stopping_criteria.StopStringCriteria) for criterion in criteria)
    if batch_size > 1 and stops and not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return "without an eos_token_id stock lets rows that have stopped go on until all have"
    return None


def stateful_refusal(processors: LogitsProcessorList, input_ids: Tensor) -> str | None:
    """Why drafts cannot be verified with these; None if no state was found (see purity.is_stateful)."""
    size = max(int(input_ids.max()) + 1, 8)
    for processor in processors:
        if not _is_stock(processor) and is_stateful(processor, size):
            return f"{type(processor).__name__} returns different scores for the same input when it is called again"
    return None


def _is_stock(thing: object) -> bool:
    return type(thing).__module__ in (logits_process.__name__, stopping_criteria.__name__)


@dataclass(frozen=True, eq=False)
class Batched(Processor):
    """transformers' own processors on rows of any length: each length by itself, behind the padding of stock's batch.

    processors: a LogitsProcessorList. blind: they look at the scores alone.
    """

    processors: Any
    blind: bool

    @property
    def uses_prefix(self) -> bool:  # type: ignore[override]
        return not self.blind

    def __call__(self, scores: Tensor, prefixes: abc.Sequence[Prefix]) -> Tensor:
        if self.blind:
            empty = torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
            return self.processors(empty, scores.clone())
        by_length: dict[int, list[int]] = {}
        columns = [prefix.columns for prefix in prefixes]
        for row, ids in enumerate(columns):
            by_length.setdefault(len(ids), []).append(row)
        out = torch.empty_like(scores)
        for rows in by_length.values():
            ids = torch.stack([columns[row] for row in rows]).to(scores.device)
            out[rows] = self._for([prefixes[row].sequence for row in rows])(ids, scores[rows])
        return out

    def _for(self, sequences: abc.Sequence[Tokens | None]) -> Any:
        """The processors with their settings by row, if they have some, for the rows of these sequences."""
        name = "prompt_ignore_length"
        if not any(isinstance(getattr(processor, name, None), Tensor) for processor in self.processors):
            return self.processors
        numbers = [0 if sequence is None else sequence.index for sequence in sequences]
        chosen = LogitsProcessorList()
        for processor in self.processors:
            lengths = getattr(processor, name, None)
            if isinstance(lengths, Tensor):
                processor = copy.copy(processor)
                setattr(processor, name, lengths[numbers])
            chosen.append(processor)
        return chosen


def stock_sampling(
    processors: LogitsProcessorList,
    *,
    greedy: bool,
    num_logprobs: int | None = None,
    draw: Draw | None = None,
) -> Sampling:
    """A LogitsProcessorList as a Sampling: our own forms of those that we know, the others as they are."""
    steps: list[Processor] = []
    for processor in processors:
        step = _known(processor) or Batched(LogitsProcessorList([processor]), isinstance(processor, BLIND))
        last = steps[-1] if steps else None
        if isinstance(step, TopKTopP) and isinstance(last, TopKTopP) and last.p is None and step.k is None:
            steps[-1] = TopKTopP(last.k, step.p)
        elif isinstance(step, Batched) and isinstance(last, Batched):
            together = LogitsProcessorList([*last.processors, *step.processors])
            steps[-1] = Batched(together, last.blind and step.blind)
        else:
            steps.append(step)
    return Sampling(steps, greedy=greedy, num_logprobs=num_logprobs, draw=draw)


def _known(processor: Any) -> Processor | None:
    """Our form of one of transformers' own, set as generate() sets it; None for any other."""
    kind, has = type(processor), vars(processor)
    if has.get("filter_value", -math.inf) != -math.inf or has.get("min_tokens_to_keep", 1) != 1:
        return None
    if kind is logits_process.TemperatureLogitsWarper:
        return Temperature(processor.temperature)
    if kind is logits_process.TopKLogitsWarper:
        return TopKTopP(k=processor.top_k)
    if kind is logits_process.TopPLogitsWarper:
        return TopKTopP(p=processor.top_p)
    if kind is logits_process.MinPLogitsWarper:
        return MinP(processor.min_p)
    if kind is logits_process.RepetitionPenaltyLogitsProcessor and has.get("prompt_ignore_length") is None:
        return RepetitionPenalty(processor.penalty)
    return None


class BatchDraws:
    """Draws for sequences of one call of generate() as torch.multinomial over all its rows does in stock's loop.

    Each step takes numbers for all rows, finished ones included, and a row those of its own step: chunks of prompts
    and preemption bring rows out of step.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._noise: dict[int, Tensor] = {}  # of each step that a row may still be at
        self._num_steps = 0

    def __call__(self, probabilities: Tensor, sequences: abc.Sequence[Sequence]) -> list[int]:
        """The largest of p / e, e exponential."""
        steps = [sequence.num_new for sequence in sequences]
        behind = min(sequence.num_new for sequence in self.sequences if not sequence.is_finished)
        self._noise = {step: noise for step, noise in self._noise.items() if step >= behind}
        while self._num_steps <= max(steps):
            noise = probabilities.new_empty(len(self.sequences), probabilities.shape[1])
            self._noise[self._num_steps] = noise.exponential_()
            self._num_steps += 1
        noises = [self._noise[step][sequence.index] for step, sequence in zip(steps, sequences, strict=True)]
        return (probabilities / torch.stack(noises)).argmax(-1).tolist()


def stop_rules(criteria: StoppingCriteriaList) -> StopRules:
    """Each criterion is asked after every token, as in stock's loop. The length is Sequence.max_new_tokens."""
    ends: set[int] = set()
    others = []
    for criterion in criteria:
        if isinstance(criterion, stopping_criteria.EosTokenCriteria):
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif not isinstance(criterion, stopping_criteria.MaxLengthCriteria):
            others.append(functools.partial(_is_met, criterion))
    return StopRules(frozenset(ends), tuple(others))


def _is_met(criterion: Any, sequence: Sequence) -> bool:
    met = criterion(prefix_of(sequence).columns[None].clone(), None)
    return bool(torch.as_tensor(met).all())
