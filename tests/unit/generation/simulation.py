"""A decoding run in which time is what a curve says and drafts are accepted by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.drafters.drafter import FEW

Curve = Callable[[int], float]
PROMPT = 128  # tokens

CURVES: dict[str, Curve] = {
    "flat": lambda rows: 1 + 0.002 * rows,
    "mild": lambda rows: 0.9 + 0.1 * rows,
    "rising": lambda rows: 0.7 + 0.3 * rows,
    "steep": lambda rows: 1.0 * rows,
    "step": lambda rows: 1.0 if rows == 1 else 1.5 + 0.01 * rows,
    "tiles": lambda rows: 1 + 0.5 * ((rows - 1) // 4),
}


class Simulation:
    """seconds: of a pass, over rows. acceptance: of a drafted token, in each sequence. calling, drafting: seconds of
    a draft, and of each of its levels. reading: seconds in which a drafter reads a prompt, and as many for as many
    tokens that came while it rested. keeping: those that a pass takes longer while drafts do not rest. searching:
    seconds of each question for drafts. What the controller is told of the time is off by up to `noise`, or ten times
    too much by chance `outliers`. room, expected: see Controller.lengths.
    """

    def __init__(
        self,
        seconds: Curve,
        acceptance: list[float],
        *,
        controller: Controller | None = None,
        calling: float = 0.0,
        drafting: float = 0.0,
        reading: float = 0.0,
        keeping: float = 0.0,
        searching: float = 0.0,
        noise: float = 0.0,
        outliers: float = 0.0,
        seed: int = 0,
        max_draft: int = 8,
        expected: float | None = None,
        **settings: Any,
    ) -> None:
        self.seconds, self.acceptance, self.drafting = seconds, acceptance, drafting
        self.calling, self.reading, self.keeping, self.searching = calling, reading, keeping, searching
        self.read: dict[Sequence, int] = {}
        self.settings = settings
        self.noise, self.outliers, self.dice = noise, outliers, random.Random(seed)
        self.controller = controller or Controller("auto", max_draft)
        self.sequences = [Sequence([1] * PROMPT, RequestSettings(10**9, sampling=None)) for _ in acceptance]
        self.time, self.tokens = 0.0, 0
        if expected is not None:
            self.controller.expect(expected)

    def measured(self, seconds: float) -> float:
        if self.dice.random() < self.outliers:
            return 10 * seconds
        return seconds * (1 + self.dice.uniform(-self.noise, self.noise))

    def step(self, other_rows: int = 0) -> list[int]:
        many = len(self.sequences)
        lengths = self.controller.lengths(
            self.sequences, [100] * many, other_rows=other_rows, is_free=not self.drafting, **self.settings
        )
        asked = [sequence for sequence, length in zip(self.sequences, lengths, strict=True) if length]
        if asked:
            missing = [len(sequence.tokens) - self.read.get(sequence, 0) for sequence in asked]
            read = self.reading / PROMPT * sum(count for count in missing if count > FEW)
            self.controller.observe_reading(asked, self.measured(read))
            spent = self.searching + (self.calling + self.drafting * max(lengths) if self.drafting else 0.0)
            self.controller.observe_drafting(sum(lengths), max(lengths), self.measured(spent))
            self.time += read + spent
        for sequence, length, chance in zip(self.sequences, lengths, self.acceptance, strict=True):
            accepted = 0
            while accepted < length and self.dice.random() < chance:
                accepted += 1
            sequence.tokens += [1] * (accepted + 1)
            if length:
                self.read[sequence] = len(sequence.tokens)
            self.controller.observe_drafts(sequence, length, accepted)
            self.tokens += accepted + 1
        rows = many + other_rows + sum(lengths)
        kept = 0.0 if self.controller.rests("") else self.keeping
        if kept:
            self.controller.observe_keeping(self.measured(kept))
        self.time += self.seconds(rows) + kept
        self.controller.observe_pass(rows, self.measured(self.seconds(rows) + kept))
        return lengths

    def run(self, steps: int) -> list[list[int]]:
        return [self.step() for _ in range(steps)]
