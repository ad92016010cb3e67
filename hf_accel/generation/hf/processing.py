"""Stock's LogitsProcessors and StoppingCriteria, as one sequence among others sees them."""

from __future__ import annotations

import copy
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from ..prefix import Prefix
from ..purity import is_stateful
from ..sampling import Sampling
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
            return f"{type(processor).__name__} answers the same input differently when asked again"
    return None


def _is_stock(thing: object) -> bool:
    return type(thing).__module__ in (logits_process.__name__, stopping_criteria.__name__)


class StockSampling(Sampling):
    """A LogitsProcessorList on rows of any length.

    padding: ids that stand before each sequence's prompt in stock's input, which its processors see too.
    rows: sequences that are sampled together by torch's own generator, as stock's loop does: each step draws for all
    of them, finished ones included. None: each sequence has random numbers of its own.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        *,
        greedy: bool,
        rows: int | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        self.processors: Any = processors
        self.rows = rows
        self._greedy, self._num_logprobs = greedy, num_logprobs
        self._uses_prefix = any(not isinstance(processor, BLIND) for processor in processors)
        self.padding: dict[Sequence, list[int]] = {}
        self.row_of: dict[Sequence, int] = {}
        self._noise: dict[int, Tensor] = {}  # of each step that a row may still be at
        self._num_steps = 0

    @property
    def greedy(self) -> bool:
        return self._greedy

    @property
    def plain(self) -> bool:
        return self._greedy and not self.processors

    @property
    def uses_prefix(self) -> bool:
        return self._uses_prefix

    @property
    def key(self) -> int:
        return id(self)

    @property
    def num_logprobs(self) -> int | None:
        return self._num_logprobs

    @property
    def draw(self) -> Callable[[Tensor, list[Sequence]], list[int]] | None:
        return None if self.rows is None else self._draw

    def process(self, logits: Tensor, prefixes: abc.Sequence[Prefix] | None) -> Tensor:
        """[n, V] -> [n, V] float32."""
        scores = logits.to(torch.float32, copy=True)
        if not self.uses_prefix or prefixes is None:
            empty = torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
            return self.processors(empty, scores)
        columns = [self._before(prefix.sequence) + prefix.tokens for prefix in prefixes]
        by_length: dict[int, list[int]] = {}
        for row, ids in enumerate(columns):
            by_length.setdefault(len(ids), []).append(row)
        out = torch.empty_like(scores)
        for rows in by_length.values():
            same_length = torch.tensor([columns[row] for row in rows], dtype=torch.int64, device=scores.device)
            out[rows] = self._for([prefixes[row].sequence for row in rows])(same_length, scores[rows])
        return out

    def _before(self, sequence: Sequence | None) -> list[int]:
        return [] if sequence is None else self.padding.get(sequence, [])

    def _for(self, sequences: abc.Sequence[Sequence | None]) -> Any:
        """The processors with their settings by row, if they have some, for the rows of these sequences."""
        name = "prompt_ignore_length"
        if not any(isinstance(getattr(processor, name, None), Tensor) for processor in self.processors):
            return self.processors
        numbers = [0 if sequence is None else self.row_of.get(sequence, 0) for sequence in sequences]
        chosen = LogitsProcessorList()
        for processor in self.processors:
            lengths = getattr(processor, name, None)
            if isinstance(lengths, Tensor):
                processor = copy.copy(processor)
                setattr(processor, name, lengths[numbers])
            chosen.append(processor)
        return chosen

    def _draw(self, probabilities: Tensor, sequences: abc.Sequence[Sequence]) -> list[int]:
        """What torch.multinomial over all rows of the call would give these: the largest of p / e, e exponential.

        Each step takes numbers for all rows, as in stock's loop, and a row those of its own step: chunks of prompts
        and preemption bring rows out of step.
        """
        assert self.rows is not None
        steps = [sequence.num_new for sequence in sequences]
        behind = min(sequence.num_new for sequence in self.row_of if not sequence.is_finished)
        self._noise = {step: noise for step, noise in self._noise.items() if step >= behind}
        while self._num_steps <= max(steps):
            self._noise[self._num_steps] = probabilities.new_empty(self.rows, probabilities.shape[1]).exponential_()
            self._num_steps += 1
        noise = [self._noise[step][self.row_of[sequence]] for step, sequence in zip(steps, sequences, strict=True)]
        return (probabilities / torch.stack(noise)).argmax(-1).tolist()


@dataclass
class StockStop:
    """A sequence's stop rule from a StoppingCriteriaList: each is asked after every token, as in stock's loop.

    The length is Sequence.max_new_tokens; ends: end-of-sequence ids.
    """

    ends: frozenset[int]
    others: list[Any]
    padding: dict[Sequence, list[int]]

    @classmethod
    def of(cls, criteria: StoppingCriteriaList, padding: dict[Sequence, list[int]]) -> StockStop:
        ends: set[int] = set()
        others = []
        for criterion in criteria:
            if isinstance(criterion, stopping_criteria.EosTokenCriteria):
                ends.update(criterion.eos_token_id.flatten().tolist())
            elif not isinstance(criterion, stopping_criteria.MaxLengthCriteria):
                others.append(criterion)
        return cls(frozenset(ends), others, padding)

    def __call__(self, sequence: Sequence) -> str | None:
        if sequence.tokens[-1] in self.ends:
            return "stop"
        if not self.others:
            return None
        ids = torch.tensor([self.padding.get(sequence, []) + sequence.tokens], dtype=torch.int64)
        return "stop" if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.others) else None
