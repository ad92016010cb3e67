"""The oracles of test_exact.py reject verifiers and drafters that break a rule."""

from __future__ import annotations

from collections import abc

import pytest
import torch
from torch import Tensor

from hf_accel.generation.sequence import Draft
from hf_accel.generation.speculation.verifiers import BlockVerifier, Place, TokenVerifier, rejection
from hf_accel.generation.speculation.verifiers.block import likelihoods
from hf_accel.generation.speculation.verifiers.rejection import Drawn

from .enumeration import Kind, Tokens, error, law_of_pass
from .test_exact import EXACT, KINDS, ONE, P, always, impossible_tokens, random_law


def test_a_greedy_draft_told_as_a_drawn_one() -> None:
    """Tokens that q does not stand for: (.8333, 0, .1667) instead of (.5, .3, .2)."""
    q = always([0.6, 0.3, 0.1])
    law = law_of_pass(TokenVerifier, always(P), q, 1, drawn_from=always([1.0, 0.0, 0.0]))
    first = [sum(value for tokens, value in law.items() if tokens[0] == token) for token in range(3)]
    assert first == pytest.approx([5 / 6, 0, 1 / 6], abs=EXACT)
    assert error(law, always(P), 2) > 0.1


def test_a_drawn_token_dropped_for_its_own_sake() -> None:
    """Confidence below 0.4 cuts the draft: (.91, .09) instead of (.7, .3)."""
    p = always([0.7, 0.3])

    def confident(tokens: Tokens) -> Tokens:
        return tokens if p(())[tokens[0]] >= 0.4 else ()

    law = law_of_pass(TokenVerifier, p, p, 1, edit=confident)
    first = [sum(value for tokens, value in law.items() if tokens[0] == token) for token in range(2)]
    assert first == pytest.approx([0.91, 0.09], abs=EXACT)
    assert error(law, p, 2) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_chosen_before_drawing_does_no_harm(kind: Kind) -> None:
    """What the drop above is not: where the law that stands before decides, the output keeps its law."""
    p, q = random_law(1, 3), random_law(2, 3)
    law = law_of_pass(kind, p, q, 2, edit=lambda tokens: tokens if max(q(())) > 0.5 else tokens[:1])
    assert error(law, p, 3) < EXACT


class NotStrict(TokenVerifier):
    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        counts = []
        for draft in drawn:
            stays = [u * q <= p for p, q, u in zip(draft.p_drafted, draft.q_drafted, draft.uniforms, strict=True)]
            counts.append([*stays, False].index(False))
        return [(count, 1.0) for count in counts]


def test_a_comparison_that_is_not_strict() -> None:
    assert impossible_tokens(NotStrict, 0.0)


def test_a_residual_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(p: Tensor, q: Tensor, factors: Tensor) -> Tensor:
        return (p * factors.to(p.dtype)[:, None] - q).clamp(min=0)

    monkeypatch.setattr(rejection, "residual", bare)
    assert impossible_tokens(TokenVerifier, ONE)


class Recovered(TokenVerifier):
    """Samples from p after a rejection, not from what is left of it."""

    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        return [(count, 0.0) for count, _ in super().accept(drawn)]


class AlwaysBonus(TokenVerifier):
    """Takes the last row's token although a draft was rejected."""

    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        kept = super().verify(probabilities, drafts, places)
        ends = torch.tensor([len(draft) + 1 for draft in drafts]).cumsum(0) - 1
        bonus = super().verify(probabilities[ends], [Draft()] * len(drafts), places)
        return [[*tokens[:-1], *last] for tokens, last in zip(kept, bonus, strict=True)]


class TwoAfterRejection(TokenVerifier):
    """Adds the token of the row after the rejected one as well."""

    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        kept, starts, row = super().verify(probabilities, drafts, places), [], 0
        for draft in drafts:
            starts.append(row)
            row += len(draft) + 1
        return [
            [*tokens, int(probabilities[start + len(tokens)].argmax())] if len(tokens) <= len(draft) else tokens
            for tokens, draft, start in zip(kept, drafts, starts, strict=True)
        ]


class ProductOfRatios(BlockVerifier):
    """Accepts a beginning with its likelihood ratio, whatever could still follow."""

    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        results = []
        for draft in drawn:
            factors = likelihoods(draft)
            stays = [count for count in range(1, len(factors)) if draft.uniforms[count - 1] < factors[count]]
            results.append((max(stays, default=0), factors[max(stays, default=0)]))
        return results


class UnscaledResidual(BlockVerifier):
    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        return [(count, 1.0) for count, _ in super().accept(drawn)]


@pytest.mark.parametrize("kind", [Recovered, AlwaysBonus, TwoAfterRejection, ProductOfRatios, UnscaledResidual])
def test_wrong_verifiers_have_another_law(kind: Kind) -> None:
    p = random_law(1, 3)
    assert error(law_of_pass(kind, p, random_law(2, 3), 2), p, 3) > 1e-4
