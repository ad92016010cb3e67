"""Applies transformers' logits processors and stopping criteria to single sequences of a ragged batch."""

from __future__ import annotations

import copy
import functools
import math
from collections import abc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ...tensors import integers, sent
from ...undo.running_code import is_replaced_method
from ..request_settings import StopRules
from ..sampling.constraint import Constrained
from ..sampling.processors import MinNewTokens, MinP, Processor, RepetitionPenalty, Temperature, TopKTopP
from ..sampling.sampling import Draw, Sampling
from ..sampling.token_prefix import Prefix, Tokens, prefix_of
from ..sequence import Sequence
from .grammars import ConstraintProcessor

# These use only the scores. So sequences of different lengths can be processed together.
SCORES_ONLY = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.SuppressTokensLogitsProcessor,
)
# These depend on their earlier calls.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
# These depend on the row of a sequence in the batch.
BY_ROW = (
    "PrefixConstrainedLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    *STATEFUL,
)


def processors_refusal(processors: LogitsProcessorList) -> str | None:
    """Return why these need each step exactly once, and all rows of it, as one clause; None if they do not."""
    name = next((type(each).__name__ for each in processors if type(each).__name__ in STATEFUL), None)
    return None if name is None else f"{name} depends on its earlier calls"


def reads_scores_alone(processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, max_length: int) -> bool:
    """Return whether no processor reads earlier tokens, and criteria know the last one and max_length alone."""
    known = all(is_one_of(each, EosTokenCriteria) or is_limit(each, max_length) for each in criteria)
    return known and all(is_one_of(each, *SCORES_ONLY) for each in processors)


def is_limit(criterion: object, max_length: int) -> bool:
    """Return whether all that a criterion does is to end a text at max_length tokens, or behind them."""
    return is_one_of(criterion, MaxLengthCriteria) and criterion.max_length >= max_length  # type: ignore[attr-defined]


def limit_refusal(criteria: StoppingCriteriaList, max_length: int) -> str | None:
    """Return why texts may go on beyond max_length, for which there is room, as one clause; None if they do not.

    A MaxLengthCriteria of the user takes the place of the one that transformers makes of max_length.
    """
    if any(is_one_of(each, MaxLengthCriteria) and each.max_length <= max_length for each in criteria):
        return None
    return f"no MaxLengthCriteria ends its texts at max_length={max_length}"


def way_back(processors: LogitsProcessorList) -> Callable[[], None]:
    """Return what sets random numbers and processors that depend on their earlier calls to what they are now."""
    stateful = [each for each in processors if type(each).__name__ in STATEFUL]
    models = {id(value): value for each in stateful for value in vars(each).values() if isinstance(value, nn.Module)}
    states = [(each, copy.deepcopy(vars(each), models)) for each in stateful]
    random_state = torch.get_rng_state()

    def go_back() -> None:
        torch.set_rng_state(random_state)
        for processor, state in states:
            for name, value in state.items():
                setattr(processor, name, value)

    return go_back


def needs_all_rows(processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, batch_size: int) -> str | None:
    """Return why these need all rows of the batch together, as one clause; None if they do not.

    Code of the user gets what transformers gives it, once for each step, also where there is one row: it may count
    its calls, or return scores of another dtype.
    """
    for each in (*processors, *criteria):
        if not (is_stock(each) or isinstance(each, ConstraintProcessor)):
            return f"{type(each).__name__} may depend on the batch"
        if type(each).__name__ in BY_ROW and batch_size > 1:
            return f"{type(each).__name__} may depend on the batch"
    if batch_size == 1:
        return None
    stops = any(isinstance(criterion, stopping_criteria.StopStringCriteria) for criterion in criteria)
    if stops and not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return "without an eos_token_id, transformers lets rows that have stopped go on until all have stopped"
    return None


def is_stock(processor: object) -> bool:
    """Return whether this processor or criterion is one of transformers' own, with their code."""
    kind = type(processor)
    own = kind.__module__ in (logits_process.__name__, stopping_criteria.__name__)
    return own and not is_replaced_method(kind, "__call__")


def is_one_of(processor: object, *kinds: type) -> bool:
    """Return whether this processor or criterion does what one of these classes does. A class of the user that is
    made of one may do anything.
    """
    return type(processor) in kinds and is_stock(processor)


def is_users(processor: object) -> bool:
    """Return whether this processor runs code of the user: its own, or a function that was given to one of
    transformers'.
    """
    if isinstance(processor, ConstraintProcessor):
        return False
    return not is_stock(processor) or isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor)


@dataclass(frozen=True)
class Batched(Processor):
    """Calls transformers' processors on rows with prefixes of any length.

    Rows of equal length are processed together. Each prefix has the padding that it would have in transformers' batch.
    processors: a LogitsProcessorList. scores_only: whether they use only the scores. settings: are equal for
    processors that compute the same.
    """

    processors: Any = field(compare=False)
    scores_only: bool
    settings: tuple[Hashable, ...]

    @property
    def uses_prefix(self) -> bool:  # type: ignore[override]
        return not self.scores_only

    def __call__(self, scores: Tensor, prefixes: abc.Sequence[Prefix]) -> Tensor:
        if self.scores_only:
            empty = torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
            return self.processors(empty, scores.clone())
        by_length: dict[int, list[int]] = {}
        columns = [prefix.columns for prefix in prefixes]
        for row, ids in enumerate(columns):
            by_length.setdefault(len(ids), []).append(row)
        out = torch.empty_like(scores)
        for rows in by_length.values():
            ids = sent(torch.stack([columns[row] for row in rows]), scores)
            own = sent(integers(rows), scores)
            processed = self._for([prefixes[row].sequence for row in rows])(ids, scores[own])
            out[own] = processed.to(out.dtype) if isinstance(processed, Tensor) else processed
        return out

    def _for(self, sequences: abc.Sequence[Tokens | None]) -> Any:
        """Return the processors for these sequences. A setting that has a value for each row of the batch is indexed
        by their rows."""
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
    takes_drafts: bool = True,
) -> Sampling:
    """Make a Sampling from a LogitsProcessorList. Processors that have a fast form are replaced by it."""
    steps: list[Processor] = []
    for processor in processors:
        step = processor if isinstance(processor, Processor) else _fast_form(processor) or _batched(processor)
        last = steps[-1] if steps else None
        if isinstance(step, TopKTopP) and isinstance(last, TopKTopP) and last.p is None and step.k is None:
            steps[-1] = TopKTopP(last.k, step.p)
        elif isinstance(step, Batched) and isinstance(last, Batched):
            together = LogitsProcessorList([*last.processors, *step.processors])
            steps[-1] = Batched(together, last.scores_only and step.scores_only, last.settings + step.settings)
        else:
            steps.append(step)
    return Sampling(steps, greedy=greedy, num_logprobs=num_logprobs, draw=draw, takes_drafts=takes_drafts)


def _batched(processor: Any) -> Batched:
    scores_only = is_one_of(processor, *SCORES_ONLY)
    if is_one_of(processor, logits_process.SequenceBiasLogitsProcessor, logits_process.NoBadWordsLogitsProcessor):
        scores_only = all(len(sequence) == 1 for sequence in processor.sequence_bias)
    settings = (type(processor), _frozen(vars(processor))) if is_stock(processor) else _frozen(processor)
    return Batched(LogitsProcessorList([processor]), scores_only, (settings,))


def _frozen(value: Any) -> Hashable:
    """Return a hashable value that is equal for equal plain settings, and for nothing else that lives now."""
    if isinstance(value, dict):
        return frozenset((name, _frozen(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, Tensor):
        return value.dtype, _frozen(value.tolist())
    return value if isinstance(value, int | float | str | None) else (object, id(value))


def _fast_form(processor: Any) -> Processor | None:
    """Return our form of a transformers processor with the settings of generate(); None for any other processor."""
    kind, settings = type(processor), vars(processor)
    if kind is ConstraintProcessor:
        return Constrained()
    if (
        not is_stock(processor)
        or settings.get("filter_value", -math.inf) != -math.inf
        or settings.get("min_tokens_to_keep", 1) != 1
    ):
        return None
    if kind is logits_process.TemperatureLogitsWarper:
        return Temperature(processor.temperature)
    if kind is logits_process.TopKLogitsWarper:
        return TopKTopP(k=processor.top_k)
    if kind is logits_process.TopPLogitsWarper:
        return TopKTopP(p=processor.top_p)
    if kind is logits_process.MinPLogitsWarper:
        return MinP(processor.min_p)
    if kind is logits_process.MinNewTokensLengthLogitsProcessor:
        return MinNewTokens(processor.min_new_tokens, tuple(processor.eos_token_id.flatten().tolist()))
    if kind is logits_process.RepetitionPenaltyLogitsProcessor and settings.get("prompt_ignore_length") is None:
        return RepetitionPenalty(processor.penalty)
    return None


class BatchDraws:
    """Draws tokens for the sequences of one generate() as transformers does with torch.multinomial over all rows.

    Random numbers are made for all rows of a step at once, also for finished rows. A sequence uses those of its own
    step, because chunked prefill and preemption may let sequences be at different steps.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._noise: dict[int, Tensor] = {}  # [B, V] for each step that a sequence may still need
        self._num_steps = 0

    def __call__(self, probabilities: Tensor, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Draw a token for each sequence as argmax(p / e), where e is exponentially distributed.

        probabilities: [n, V], one row for each of `sequences`.
        """
        steps = [sequence.num_new for sequence in sequences]
        first_needed = min(sequence.num_new for sequence in self.sequences if not sequence.is_finished)
        self._noise = {step: noise for step, noise in self._noise.items() if step >= first_needed}
        while self._num_steps <= max(steps):
            noise = probabilities.new_empty(len(self.sequences), probabilities.shape[1])
            self._noise[self._num_steps] = noise.exponential_()
            self._num_steps += 1
        noises = [self._noise[step][sequence.index] for step, sequence in zip(steps, sequences, strict=True)]
        return (probabilities / torch.stack(noises)).argmax(-1).tolist()


def stop_rules(criteria: StoppingCriteriaList, *, max_length: int) -> StopRules:
    """Make StopRules from stopping criteria, which are called after every token as in transformers.

    The limit by max_length is left out, because RequestSettings.max_new_tokens has the same effect.
    """
    ends: set[int] = set()
    others = []
    for criterion in criteria:
        if is_one_of(criterion, EosTokenCriteria):
            ends.update(criterion.eos_token_id.flatten().tolist())
        elif not is_limit(criterion, max_length):
            others.append(functools.partial(_is_met, criterion))
    return StopRules(frozenset(ends), tuple(others))


def _is_met(criterion: Any, sequence: Sequence) -> bool:
    met = criterion(prefix_of(sequence).columns[None].clone(), None)
    return bool(torch.as_tensor(met).all())
