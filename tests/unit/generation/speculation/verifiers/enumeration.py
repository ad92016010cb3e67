"""The exact law of what a verifier emits, found by looking at it from outside.

Random numbers are put in by hand. Where an answer changes with one of them is found by bisection to the last bit, the
unit cube falls into cells, and the answer in each is weighed with the cell's volume. Nothing here knows how drafts are
accepted: only that an answer changes at most once with each number for acceptance, and that the last token does not
decrease with the number that draws it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_accel.generation.sequence import Draft
from hf_accel.generation.speculation.verifiers import Place, Verifier
from hf_accel.generation.speculation.verifiers.noise import Purpose

Tokens = tuple[int, ...]
Law = Callable[[Tokens], list[float]]  # of the next token after some
Kind = Callable[..., Verifier]  # made with uniform=
ONE = 1 - 2.0**-53  # the largest number that a draw can give


@dataclass(frozen=True)
class Case:
    """One sequence in one pass: the model's rows, its draft, and every random number."""

    p: Tensor
    draft: Draft
    accept: tuple[float, ...]
    target: tuple[float, ...]


def run(kind: Kind, cases: list[Case]) -> list[list[int]]:
    """All cases as the sequences of one pass; the seed says which it is."""

    def number(seed: int, position: int, purpose: int, offset: int) -> float:
        case = cases[seed]
        return (case.accept if purpose is Purpose.ACCEPT else case.target)[position]

    places = [Place(seed, 0) for seed in range(len(cases))]
    return kind(number).verify(torch.cat([case.p for case in cases]), [case.draft for case in cases], places)


def suprema(holds: Callable[[list[float]], list[bool]], count: int) -> list[float]:
    """For each of `count` questions up to where it holds, which it does from 0 on or not at all."""
    low, high = [0.0] * count, [1.0] * count
    for _ in range(54):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        for index, answer in enumerate(holds(middle)):
            (low if answer else high)[index] = middle[index]
    return high


def acceptance_thresholds(kind: Kind, cases: list[Case]) -> list[tuple[float, ...]]:
    """Below which value of each number a draft stays as far as there, with those before at 0 and those after at 1."""
    asked = [(at, j) for at, case in enumerate(cases) for j in range(len(case.draft))]

    def holds(values: list[float]) -> list[bool]:
        tried = []
        for (at, j), value in zip(asked, values, strict=True):
            numbers = [0.0] * j + [value] + [ONE] * (len(cases[at].draft) - j - 1)
            tried.append(replace(cases[at], accept=tuple(numbers)))
        return [len(kept) - 1 > j for (_, j), kept in zip(asked, run(kind, tried), strict=True)]

    found = iter(suprema(holds, len(asked)))
    return [tuple(next(found) for _ in range(len(case.draft))) for case in cases]


def cells(thresholds: list[float]) -> list[tuple[float, float]]:
    """Middle and width of the intervals that thresholds cut [0, 1) into."""
    edges = [0.0, *sorted(thresholds), 1.0]
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(edges) if b - a > 1e-14]


def last_token_edges(kind: Kind, cases: list[Case]) -> list[list[float]]:
    """For each case up to which number the last token is at most 0, 1, ..., V-1."""
    size = cases[0].p.shape[1]
    asked = [(at, token) for at in range(len(cases)) for token in range(size - 1)]

    def holds(values: list[float]) -> list[bool]:
        tried = [
            replace(cases[at], target=(value,) * len(cases[at].target))
            for (at, _), value in zip(asked, values, strict=True)
        ]
        return [kept[-1] <= token for (_, token), kept in zip(asked, run(kind, tried), strict=True)]

    found = iter(suprema(holds, len(asked)))
    return [[*(next(found) for _ in range(size - 1)), 1.0] for _ in cases]


def drafts_of(q: Law, length: int) -> Iterator[tuple[Tokens, float]]:
    """All drafts with their probabilities."""
    for tokens in itertools.product(range(len(q(()))), repeat=length):
        yield tokens, math.prod(q(tokens[:j])[token] for j, token in enumerate(tokens))


def rows(law: Law, tokens: Tokens, count: int) -> Tensor:
    return torch.tensor([law(tokens[:j]) for j in range(count)], dtype=torch.float64)


def law_of_pass(
    kind: Kind,
    p: Law,
    q: Law,
    length: int,
    *,
    drawn_from: Law | None = None,
    edit: Callable[[Tokens], Tokens] = lambda tokens: tokens,
) -> dict[Tokens, float]:
    """The exact law of the tokens that one pass emits.

    q: what the verifier is told; drawn_from: what drafts are drawn from, if that is something else. edit: what is
    done to a draft before it is verified.
    """
    weighted: list[tuple[Case, float]] = []
    for tokens, weight in drafts_of(drawn_from or q, length):
        kept = edit(tokens)
        draft = Draft(list(kept), rows(q, kept, len(kept)) if kept else None)
        weighted.append((Case(rows(p, kept, len(kept) + 1), draft, (), (0.0,) * (length + 1)), weight))
    weighted = [(case, weight) for case, weight in weighted if weight]
    split: list[tuple[Case, float]] = []
    thresholds = acceptance_thresholds(kind, [case for case, _ in weighted])
    for (case, weight), limits in zip(weighted, thresholds, strict=True):
        for combination in itertools.product(*(cells([limit]) for limit in limits)):
            volume = weight * math.prod(width for _, width in combination)
            split.append((replace(case, accept=tuple(middle for middle, _ in combination)), volume))
    only = [case for case, _ in split]
    law: dict[Tokens, float] = defaultdict(float)
    for (_, volume), kept, edges in zip(split, run(kind, only), last_token_edges(kind, only), strict=True):
        for token, (a, b) in enumerate(itertools.pairwise([0.0, *edges])):
            law[(*kept[:-1], token)] += volume * (b - a)
    return {tokens: probability for tokens, probability in law.items() if probability > 1e-14}


def completed(law: dict[Tokens, float], p: Law, length: int) -> dict[Tokens, float]:
    """The law of `length` tokens of which a pass gives the first, and the model alone the others."""
    whole: dict[Tokens, float] = defaultdict(float)
    for tokens, probability in law.items():
        if len(tokens) >= length:
            whole[tokens[:length]] += probability
            continue
        for rest in itertools.product(range(len(p(()))), repeat=length - len(tokens)):
            string = tokens + rest
            whole[string] += probability * math.prod(p(string[:j])[string[j]] for j in range(len(tokens), length))
    return whole


def error(law: dict[Tokens, float], p: Law, length: int) -> float:
    """The largest difference to the model's own law of `length` tokens."""
    whole = completed(law, p, length)
    expected = {
        string: math.prod(p(string[:j])[token] for j, token in enumerate(string))
        for string in itertools.product(range(len(p(()))), repeat=length)
    }
    return max(abs(whole.get(string, 0.0) - value) for string, value in expected.items())


def mean_length(law: dict[Tokens, float]) -> float:
    return sum(len(tokens) * probability for tokens, probability in law.items())
