"""Rejection sampling, which token and block verification share.

Tokens that were drawn from a distribution q are accepted, or replaced by a token from a residual distribution.

A draft that was not drawn counts as drawn from a one-hot distribution. Rejection sampling is then equivalent to a
simpler rule, which is used: draw each token from the model's distribution, and go on while it equals the drafted
token. This needs one random number per token, and the output does not depend on the draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...sequence import Draft
from . import noise
from .inverse import inverse_draw
from .noise import Purpose
from .verifier import Place, Verifier, first_rows, follow

Uniform = Callable[[int, int, int, int], float]  # seed, position, purpose, offset


@dataclass(frozen=True)
class Drawn:
    """A draft whose tokens were drawn, with what its verification needs.

    p: the model's probabilities, [len(draft) + 1, V]. q: the draft's probabilities, [len(draft), V].
    p_drafted, q_drafted: the probabilities of the drafted tokens. uniforms: a number in [0, 1) for each drafted token.
    """

    p: Tensor
    q: Tensor
    p_drafted: list[float]
    q_drafted: list[float]
    uniforms: list[float]


class RejectionVerifier(Verifier):
    """Accepts drafted tokens with a probability that leaves the output's distribution equal to the model's.

    Random numbers for DRAFT and ACCEPT depend on the offset too. In block verification, the numbers of later tokens
    decide about earlier tokens, so they must not be used again when their position is drafted again. A number for
    TARGET is used only once, because its token is final.
    """

    def __init__(self, uniform: Uniform = noise.uniform) -> None:
        self._uniform = uniform

    @abstractmethod
    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        """For each draft, return the number of accepted tokens, and the factor of p in the residual (factor * p - q)+.

        If not all tokens are accepted, the next token is drawn from this residual.
        """

    def draw(self, probabilities: Tensor, places: abc.Sequence[Place]) -> list[int]:
        return inverse_draw(probabilities, [self._number(place, Purpose.DRAFT) for place in places])

    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        starts = first_rows(probabilities, drafts)
        drawn = [i for i, draft in enumerate(drafts) if len(draft) and draft.probabilities is not None]
        if not drawn:
            return follow(drafts, inverse_draw(probabilities, self._targets(drafts, places)))
        kept: list[list[int]] = [[]] * len(drafts)
        others = sorted(set(range(len(drafts))) - set(drawn))
        if others:
            rows = [starts[i] + j for i in others for j in range(len(drafts[i]) + 1)]
            some_drafts = [drafts[i] for i in others]
            chosen = inverse_draw(probabilities[rows], self._targets(some_drafts, [places[i] for i in others]))
            for i, tokens in zip(others, follow(some_drafts, chosen), strict=True):
                kept[i] = tokens
        accepted = self.accept(self._drawn_drafts(probabilities, drafts, places, starts, drawn=drawn))
        last_rows = [starts[i] + count for i, (count, _) in zip(drawn, accepted, strict=True)]
        weights = probabilities[last_rows]
        cut = [row for row, (i, (count, _)) in enumerate(zip(drawn, accepted, strict=True)) if count < len(drafts[i])]
        if cut:
            q = torch.stack([_distributions(drafts[drawn[row]])[accepted[row][0]] for row in cut])
            weights[cut] = residual(weights[cut], q, [accepted[row][1] for row in cut])
        last = [places[i].next(count) for i, (count, _) in zip(drawn, accepted, strict=True)]
        tokens = inverse_draw(weights, [self._number(place, Purpose.TARGET) for place in last])
        for i, (count, _), token in zip(drawn, accepted, tokens, strict=True):
            kept[i] = [*drafts[i].tokens[:count], token]
        return kept

    def _number(self, place: Place, purpose: Purpose) -> float:
        offset = 0 if purpose is Purpose.TARGET else place.offset
        return self._uniform(place.seed, place.position, purpose, offset)

    def _targets(self, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]) -> list[float]:
        return [
            self._number(place.next(j), Purpose.TARGET)
            for draft, place in zip(drafts, places, strict=True)
            for j in range(len(draft) + 1)
        ]

    def _drawn_drafts(
        self,
        probabilities: Tensor,
        drafts: abc.Sequence[Draft],
        places: abc.Sequence[Place],
        starts: abc.Sequence[int],
        *,
        drawn: abc.Sequence[int],
    ) -> list[Drawn]:
        device = probabilities.device
        rows = torch.tensor([starts[i] + j for i in drawn for j in range(len(drafts[i]))], device=device)
        tokens = torch.tensor([token for i in drawn for token in drafts[i].tokens], device=device)
        counts = [len(drafts[i]) for i in drawn]
        q = [_distributions(drafts[i]) for i in drawn]
        drafted = torch.split(tokens[:, None], counts)
        q_drafted = [row.gather(1, own)[:, 0] for row, own in zip(q, drafted, strict=True)]
        both = torch.stack([probabilities[rows, tokens].double(), torch.cat(q_drafted).double()]).tolist()
        looked, at = [], 0
        for i, count, own in zip(drawn, counts, q, strict=True):
            uniforms = [self._number(places[i].next(j), Purpose.ACCEPT) for j in range(count)]
            looked.append(
                Drawn(
                    probabilities[starts[i] : starts[i] + count + 1],
                    own,
                    both[0][at : at + count],
                    both[1][at : at + count],
                    uniforms,
                )
            )
            at += count
        return looked


def residual(p: Tensor, q: Tensor, factors: abc.Sequence[float]) -> Tensor:
    """Return (factor * p - q)+ of each row, [n, V], not normalized; p for rows where only rounding errors remain."""
    scale = torch.tensor(factors, dtype=torch.float64, device=p.device).to(p.dtype)[:, None]
    rest = (p * scale - q).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > torch.finfo(p.dtype).tiny, rest, p)


def _distributions(draft: Draft) -> Tensor:
    assert draft.probabilities is not None
    return draft.probabilities
