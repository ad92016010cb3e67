"""measure_acceptance: how often a target accepts a draft's tokens, and what drafting costs on this machine."""

from __future__ import annotations

import random
from collections import abc
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...errors import UnsupportedError
from ...generation.hf.vocabulary import vocabulary_refusal
from ...generation.sequence import Sequence
from ...generation.speculation.acceptance import Tally
from ...generation.speculation.controller import Controller
from ...generation.speculation.costs import isotonic
from ...keywords import checked_keywords, positive_int
from ...models import evaluating, vocabulary_size
from ...patching.patch import is_patched
from ...undo.state import state_of
from ..losses.objective import agreement
from .decoding import Decoder, as_patched
from .heads import DraftHead, head_logits
from .report import AcceptanceReport
from .token_rows import prompt_of, token_rows, windows

# So many tokens of a text are read by both models in one pass.
WINDOW = 512
# Late positions are verified rarely: that each is like the one before counts as so many verified tokens of its own.
WEIGHT = 4.0
# Passes in a row with one draft length. The first run on what another length left in the caches and are not timed.
HOLD = 8
SKIP = 2


@checked_keywords()
def measure_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel | DraftHead,
    dataset: Any,
    *,
    temperature: float = 1.0,
    max_draft: int = 8,
    max_tokens: int = 2048,
    prompt_tokens: int = 32,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    tokenizer: Any = None,
    seed: int = 0,
    progress_bar: bool = True,
) -> AcceptanceReport:
    """Try a draft model out on this machine, and say whether to use it and with how many drafted tokens.

    Both models read up to max_tokens of the dataset (teacher-forced acceptance). Then the target continues the
    beginnings of its rows (prompt_tokens of them, or half a row that is shorter) by up to max_new_tokens each and
    max_tokens in all, batch_size at once, with drafts of 0 to max_draft tokens in turn: acceptance by position and
    the cost of each length come from the same passes, and the prediction for each length from both.

    draft: a model, or a head of the target, of which chains are measured, and no trees. A model that is patched runs
        as it is; one that is not as hf_accel.patch(weights=None) would run it. Both are left as they were.
    dataset: rows of token ids, dicts with input_ids, or with `tokenizer` texts. temperature: of the target and the
    draft, without top-k or top-p; 0 for greedy search.

    Raises UnsupportedError for models that cannot speculate together, and for a dataset without tokens.
    """
    counts = {"max_draft": max_draft, "max_tokens": max_tokens, "batch_size": batch_size}
    counts |= {"prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    for name, count in counts.items():
        positive_int(name, count)
    if draft is target:
        raise UnsupportedError("the draft is the target itself; give a smaller model")
    refusal = vocabulary_refusal(target, getattr(draft, "decoder", draft))
    if refusal is not None:
        raise UnsupportedError(f"{refusal}; a draft needs the target's")
    rows = token_rows(dataset, target, tokenizer=tokenizer, limit=max_tokens)
    total = min(max_tokens, sum(map(len, rows))) + max_tokens  # of what is read, and of what is decoded
    bar = logging.tqdm(total=total, desc="Measuring the draft", unit=" tokens", disable=not progress_bar)
    with bar, evaluating(target, draft):
        read = _read(target, draft, rows, temperature, most=max_tokens, bar=bar)
        bar.update(total - max_tokens - read["text_positions"])  # tokens of windows that are too short
        patched = as_patched(target)
        limit = _limit(patched, max_draft, batch_size)
        watch = Watch(limit, batch_size, seed)
        drafting = draft if isinstance(draft, DraftHead) else as_patched(draft)
        decoder = Decoder(patched, temperature=temperature, seed=seed, draft=drafting)
        prompts = [prompt_of(row, prompt_tokens) for row in rows]
        made = _decode(decoder, prompts, watch, bar, max_new_tokens=max_new_tokens, most=max_tokens)
    setting = f"{_form(target)} target, {_form(draft)} draft"
    return _report(read, watch, made, temperature=temperature, setting=setting)


def _form(model: Any) -> str:
    if not is_patched(model):
        return "patched(weights=None)"
    config = state_of(model).config
    return "patched" if config.weights is None else f"patched({config.weights.label})"


def _limit(patched: Any, max_draft: int, batch_size: int) -> int:
    """The longest draft that keeps a pass within the number of rows that are rounded in one way."""
    most = state_of(patched).generation.invariant_rows
    return max_draft if most is None else max(1, min(max_draft, most // batch_size - 1))


# -- reading -------------------------------------------------------------------------------------------


@torch.no_grad()
def _read(
    target: Any, draft: Any, rows: list[list[int]], temperature: float, *, most: int, bar: Any
) -> dict[str, Any]:
    """The numbers of a report about the dataset's text, of which at most `most` tokens are read."""
    found, left = [], most
    for window in windows(rows, WINDOW):
        ids = torch.tensor([window[:left]], device=target.device)
        if ids.shape[1] > 1 or not isinstance(draft, DraftHead):
            found.append(agreement(*_logits(target, draft, ids), temperature))
        bar.update(ids.shape[1])
        left -= ids.shape[1]
        if left <= 0:
            break
    return averaged(found)


def _logits(target: Any, draft: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [N, V] of the target and those [N, V'] of the draft about the same tokens of a text [1, T]."""
    if isinstance(draft, DraftHead):
        made, expected = head_logits(draft, target, ids)
        return expected, made
    theirs = torch.where(ids < vocabulary_size(draft), ids, 0).to(draft.device)
    made = draft(input_ids=theirs).logits[0].to(target.device)
    return target(input_ids=ids).logits[0], made


def averaged(found: abc.Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Average what `agreement` gives over all positions. The error is as if positions were independent."""
    chances, same = (torch.cat(parts).double() for parts in zip(*found, strict=True))
    return {
        "text_acceptance": chances.mean().item(),
        "text_error": chances.std(correction=0).item() / sqrt(max(1, len(chances) - 1)),
        "text_same_top": same.mean().item(),
        "text_positions": len(chances),
    }


# -- decoding ------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """The pass under way. length: of each draft. timed: whether it decodes for all sequences and does nothing else.
    lengths: of the drafts that were observed in it. kept: the seconds in which it has kept what a drafter reads."""

    length: int = 0
    timed: bool = False
    lengths: list[int] = field(default_factory=list)
    kept: float = 0.0


class Watch(Controller):
    """A Controller that drafts chains of every length in turn, whatever is accepted, and keeps the time."""

    def __init__(self, max_draft: int, batch_size: int, seed: int) -> None:
        super().__init__(max_draft, max_draft, max_nodes=1)  # a tree has more than a length
        self.batch_size, self.tally = batch_size, Tally()
        self.draft_seconds: list[list[float]] = [[0.0], *([] for _ in range(max_draft))]
        self.verify_seconds: list[list[float]] = [[] for _ in range(max_draft + 1)]
        self._random, self._turn = random.Random(seed), [max_draft, 0]  # at least these, in a short run
        self._length, self._held = 0, HOLD
        self._now = Pass()

    def lengths(
        self,
        sequences: abc.Sequence[Sequence],
        limits: abc.Sequence[int],
        *,
        other_rows: int = 0,
        is_free: bool = True,
        source: str = "",
        **settings: Any,
    ) -> list[int]:
        self._held += 1
        if self._held > HOLD:
            if not self._turn:
                self._turn = list(range(self.max_draft + 1))
                self._random.shuffle(self._turn)
            self._length, self._held = self._turn.pop(), 1
        whole = len(sequences) == self.batch_size and not other_rows and min(limits) >= self._length
        self._now = Pass(self._length, whole and self._held > SKIP)
        return [min(self._length, limit) for limit in limits]

    def observe_drafting(self, tokens: int, passes: int, seconds: float, source: str = "") -> None:
        if self._now.timed and passes == self._now.length:
            self.draft_seconds[passes].append(seconds)

    def observe_keeping(self, seconds: float, source: str = "") -> None:
        self._now.kept += seconds

    def observe_drafts(self, sequence: Sequence, drafted: int, accepted: int, source: str = "") -> None:
        self.tally.add(drafted, accepted)
        self._now.lengths.append(drafted)

    def observe_pass(self, rows: int, seconds: float) -> None:
        now, self._now = self._now, Pass()
        if now.timed and now.lengths == [now.length] * self.batch_size:
            self.verify_seconds[now.length].append(seconds if now.length else seconds - now.kept)


def _decode(
    decoder: Decoder, prompts: list[list[int]], watch: Watch, bar: Any, *, max_new_tokens: int, most: int
) -> tuple[int, int]:
    """Return how many prompts were begun and how many tokens they got: `most`, for which the prompts come again if
    there are too few."""
    begun = tokens = 0

    def progress(brought: int) -> bool:
        nonlocal tokens
        bar.update(min(brought, max(0, most - tokens)))  # the last pass may bring more than are wanted
        tokens += brought
        return tokens < most

    while tokens < most:
        wanted = [max_new_tokens] * len(prompts)
        made = decoder.run(prompts, wanted, at_once=watch.batch_size, controller=watch, progress=progress)
        begun += sum(bool(one) for one in made)
    return begun, tokens


def _report(
    read: dict[str, Any], watch: Watch, made: tuple[int, int], *, temperature: float, setting: str
) -> AcceptanceReport:
    seconds, drafting = _by_length(watch.verify_seconds), _by_length(watch.draft_seconds)
    if seconds is None or drafting is None:
        raise UnsupportedError(
            f"max_tokens={made[1]} is too few to time a batch of {watch.batch_size}; give more, or a smaller "
            "batch_size"
        )
    # A wider pass is not cheaper, nor a longer draft: where one looks so, that is noise.
    verify, drafts = (
        isotonic(found, [float(max(1, len(some))) for some in times])
        for found, times in ((seconds, watch.verify_seconds), (drafting, watch.draft_seconds))
    )
    return AcceptanceReport(
        temperature=temperature,
        batch_size=watch.batch_size,
        **read,
        acceptances=tuple(watch.tally.acceptances([None] * watch.max_draft, WEIGHT)),
        verified=tuple(map(int, [*watch.tally.verified, *[0] * watch.max_draft][: watch.max_draft])),
        prompts=made[0],
        tokens=made[1],
        step_seconds=verify[0],
        draft_costs=tuple(one / verify[0] for one in drafts),
        verify_costs=tuple(one / verify[0] for one in verify),
        setting=setting,
    )


def _by_length(times: list[list[float]]) -> list[float] | None:
    """Return medians; a length that was never timed is on the line between its neighbours. None if an end was not
    timed."""
    known = [(length, median(some)) for length, some in enumerate(times) if some]
    if not known or known[0][0] != 0 or known[-1][0] != len(times) - 1:
        return None
    seconds: list[float] = []
    for (left, low), (right, high) in pairwise(known):
        seconds += [low + (high - low) * (i - left) / (right - left) for i in range(left, right)]
    return [*seconds, known[-1][1]]
