"""Sequences whose next tokens are chosen together, from the logits of all: rows of a batch, or beams of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .agreement import ProcessAgreement
from .sequence import Sequence

Process = Callable[[Tensor, Tensor], Tensor]
Stops = Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]
Hears = Callable[[int, list[int], bool], None]


@dataclass(frozen=True)
class Moves:
    """The moves of a pass: for each sequence its parent, whose pages it goes on with; and those that end now."""

    sequences: list[Sequence]
    parents: list[Sequence]
    ended: list[Sequence]


class JointChoice(ABC):
    """The choice of tokens for sequences that advance together."""

    def __init__(self) -> None:
        self._held: dict[Sequence, Tensor] = {}

    @property
    @abstractmethod
    def sequences(self) -> list[Sequence]:
        """The sequences that are still computed, in order."""

    def receive(self, sequences: list[Sequence], logits: Tensor) -> Tensor | None:
        """Take the logits of some sequences, [len(sequences), V]; return those of all, in order, if none is missing.

        A sequence may come later than others if a pass has no room for all, or if it was preempted.
        """
        awaited = self.sequences
        if sequences == awaited:
            self._held.clear()
            return logits
        self._held.update(zip(sequences, logits, strict=True))
        if not all(each in self._held and _is_computed(each) for each in awaited):
            return None
        held, self._held = self._held, {}
        return torch.stack([held[each] for each in awaited])

    @abstractmethod
    def advance(self, logits: Tensor, agreement: ProcessAgreement) -> Moves:
        """Continue all sequences by their logits, [len(sequences), V], and append to each its new token.

        Who calls this gives each sequence the pages of its parent.
        """


@dataclass(frozen=True)
class RowSettings:
    """The settings of rows that advance together.

    process: makes scores [B, V] float32 of token ids [B, T] and logits [B, V] float32. stops: which of the rows with
    token ids [B, T], and scores of each pass if they are kept, end: [B] bool. pad_token: follows the end of a row;
    None if rows that have ended go on with tokens of their own. samples: whether tokens are drawn. keeps_scores,
    keeps_logits: whether those of each pass are kept. hears: is called with the index of each row that has not ended,
    its new token, and whether the row ends with it.
    """

    process: Process
    stops: Stops
    pad_token: int | None
    samples: bool
    keeps_scores: bool = False
    keeps_logits: bool = False
    hears: Hears | None = None


class JointRows(JointChoice):
    """The rows of a batch, whose scores are processed together, and which all end when the last of them ends.

    The arithmetic is that of `_sample` in transformers, operation by operation: a row that has ended is computed on,
    with padding behind its end, and processors and criteria see it.
    ids: [B, T] int64, the columns that processors see, padding included, on the model's device. scores, logits: of
    each pass, [B, V], if they are kept.
    """

    def __init__(self, rows: list[Sequence], ids: Tensor, settings: RowSettings) -> None:
        super().__init__()
        self.settings, self._rows, self._ids = settings, rows, ids
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._goes_on = torch.ones(len(rows), dtype=torch.int64, device=ids.device)
        for row in rows:
            row.joint = self

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._rows)

    def advance(self, logits: Tensor, agreement: ProcessAgreement) -> Moves:
        settings, rows = self.settings, self.sequences
        logits = logits.to(copy=True, dtype=torch.float32)
        scores = settings.process(self._ids, logits)
        if settings.keeps_scores:
            self.scores.append(scores)
        if settings.keeps_logits:
            self.logits.append(logits)
        if settings.samples:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        if agreement.size > 1:  # a rank that rounds otherwise would go on with other tokens
            tokens = tokens.new_tensor(agreement.agree(tokens.tolist()))
        if settings.pad_token is not None:
            tokens = tokens * self._goes_on + settings.pad_token * (1 - self._goes_on)
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        went_on = self._goes_on
        self._goes_on = self._goes_on & ~settings.stops(
            self._ids, tuple(self.scores) if settings.keeps_scores else None
        )
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.tokens.append(token)
        is_over = not bool(self._goes_on.any())
        self._tell(went_on, tokens, is_over)
        if is_over:
            self._rows = []
        return Moves(rows, rows, rows if is_over else [])

    def _tell(self, went_on: Tensor, tokens: Tensor, is_over: bool) -> None:
        """Call `hears` with the new tokens. went_on: which rows had not ended before these, [B]."""
        hears, pads = self.settings.hears, self.settings.pad_token is not None
        if hears is None:
            return
        goes_on = self._goes_on.tolist()
        for row, (had_gone_on, token) in enumerate(zip(went_on.tolist(), tokens.tolist(), strict=True)):
            if had_gone_on or not pads:
                hears(row, [token], is_over or (pads and not goes_on[row]))


def _is_computed(sequence: Sequence) -> bool:
    """Return whether only the last token of a sequence, which is not chosen yet, is missing in its pages."""
    return sequence.cached is not None and sequence.num_computed == len(sequence.tokens)
