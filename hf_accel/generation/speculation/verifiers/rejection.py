"""Rejection sampling, which token and block verification share, and token verification.

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
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ....kernels.cpu.draws import INVERSE
from ....tensors import Unread, all_unread, integers, is_remote, sent
from ...sequence import Draft
from . import noise
from .inverse import inverse_draw
from .noise import Purpose
from .verifier import Place, Verifier, accepted_of, first_rows, row_places

Uniform = Callable[[int, int, int, int], float]  # seed, position, purpose, offset


class Given(NamedTuple):
    """Drafts that were drawn. starts: of each, the first of its rows of the model's `probabilities`."""

    probabilities: Tensor
    drafts: list[Draft]
    places: list[Place]
    starts: list[int]

    def kept(self, counts: abc.Sequence[int], last: abc.Sequence[int]) -> list[list[int]]:
        """Return the first `count` tokens of each draft, and one more."""
        each = zip(self.drafts, counts, last, strict=True)
        return [[*draft.tokens[:count], token] for draft, count, token in each]


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


@dataclass(frozen=True)
class DrawnDrafts:
    """n drafts of up to k tokens, all of which were drawn, on a device whose numbers the host does not read.

    lengths: the number of tokens of each draft, above 0. starts: the row of p and q of its first one.
    p, q: for each drafted token of all drafts, end to end, the model's and the draft's probabilities, [sum, V].
    p_drafted, q_drafted, uniforms: the probabilities of the drafted token, and a number in [0, 1), [n, k] float64.
        Beyond the end of a draft p is 0 and q is 1, so that no token is accepted there.
    """

    lengths: list[int]
    starts: list[int]
    p: Tensor
    q: Tensor
    p_drafted: Tensor
    q_drafted: Tensor
    uniforms: Tensor


class RejectionVerifier(Verifier):
    """Accepts drafted tokens with a probability that leaves the output's distribution equal to the model's.

    Random numbers for DRAFT and ACCEPT depend on the offset too. In block verification, the numbers of later tokens
    decide about earlier tokens, so they must not be used again when their position is drafted again. A number for
    TARGET decides only once, because its token is final.
    """

    draws = INVERSE

    def __init__(self, uniform: Uniform = noise.uniform) -> None:
        self._uniform = uniform

    def draft_number(self, place: Place) -> float:
        return self._number(place, Purpose.DRAFT)

    @abstractmethod
    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        """For each draft, return the number of accepted tokens, and the factor of p in the residual (factor * p - q)+.

        If not all tokens are accepted, the next token is drawn from this residual.
        """

    @abstractmethod
    def accept_on_device(self, drafts: DrawnDrafts) -> tuple[Tensor, Tensor]:
        """Return what `accept` does, as [n] int64 and [n] float64, without waiting for the device.

        The host's own arithmetic is several times faster if it has the numbers.
        """

    def drawn(self, probabilities: Tensor, places: abc.Sequence[Place]) -> Unread[list[int]]:
        return inverse_draw(probabilities, self._numbers(places, Purpose.DRAFT, probabilities))

    def verified(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> Unread[list[list[int]]]:
        starts = first_rows(probabilities, drafts)
        drawn = [
            i for i, draft in enumerate(drafts) if len(draft) and draft.probabilities is not None and draft.is_chain
        ]
        if not drawn:
            return self._followed(probabilities, drafts, places)
        others = sorted(set(range(len(drafts))) - set(drawn))
        rows = [starts[i] + j for i in others for j in range(len(drafts[i]) + 1)]
        followed = self._followed(
            probabilities[sent(integers(rows), probabilities)],
            [drafts[i] for i in others],
            [places[i] for i in others],
        )
        given = Given(
            probabilities, [drafts[i] for i in drawn], [places[i] for i in drawn], [starts[i] for i in drawn]
        )
        judged = self._judged_on_device(given) if is_remote(probabilities) else self._judged_on_host(given)

        def in_order(kept: list[list[list[int]]]) -> list[list[int]]:
            found = dict(zip([*others, *drawn], [*kept[0], *kept[1]], strict=True))
            return [found[i] for i in range(len(drafts))]

        return all_unread([followed, judged]).then(in_order)

    def _followed(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> Unread[list[list[int]]]:
        """Verify drafts that were not drawn, and trees. probabilities: their rows and no others."""
        numbers = self._numbers(row_places(places, drafts), Purpose.TARGET, probabilities)
        chosen = inverse_draw(probabilities, numbers)
        return chosen.then(lambda tokens: accepted_of(drafts, tokens))

    def _judged_on_host(self, given: Given) -> Unread[list[list[int]]]:
        accepted = self.accept(self._each_drawn(given))
        counts = [count for count, _ in accepted]
        weights = given.probabilities[[start + count for start, count in zip(given.starts, counts, strict=True)]]
        cut = [row for row, draft in enumerate(given.drafts) if counts[row] < len(draft)]
        if cut:
            q = torch.stack([_distributions(given.drafts[row])[counts[row]] for row in cut])
            factors = torch.tensor([accepted[row][1] for row in cut], dtype=torch.float64)
            weights[cut] = residual(weights[cut], q, factors)
        last = [place.next(count) for place, count in zip(given.places, counts, strict=True)]
        tokens = inverse_draw(weights, self._numbers(last, Purpose.TARGET, weights))
        return tokens.then(lambda read: given.kept(counts, read))

    def _judged_on_device(self, given: Given) -> Unread[list[list[int]]]:
        """Verify as _judged_on_host does."""
        judged = self._all_drawn(given)
        counts, factors = self.accept_on_device(judged)
        lengths, firsts = (sent(integers(numbers), counts) for numbers in (judged.lengths, judged.starts))
        weights = given.probabilities[sent(integers(given.starts), counts) + counts]
        # Where all tokens are accepted there is no residual, and this row of q is not used.
        q = judged.q[firsts + torch.minimum(counts, lengths - 1)]
        weights = torch.where((counts < lengths)[:, None], residual(weights, q, factors), weights)
        numbers = self._numbers(row_places(given.places, given.drafts), Purpose.TARGET, weights)
        tokens = inverse_draw(weights, numbers[firsts + torch.arange(len(counts), device=counts.device) + counts])
        return all_unread([Unread(counts, list), tokens]).then(lambda read: given.kept(*read))

    def _number(self, place: Place, purpose: Purpose) -> float:
        offset = 0 if purpose is Purpose.TARGET else place.offset
        return self._uniform(place.seed, place.position, purpose, offset)

    def _numbers(self, places: abc.Sequence[Place], purpose: Purpose, like: Tensor) -> Tensor:
        """A number for each place, [n] float64, on the device of `like`."""
        numbers = [self._number(place, purpose) for place in places]
        return sent(torch.tensor(numbers, dtype=torch.float64), like)

    def _each_drawn(self, given: Given) -> list[Drawn]:
        looked = []
        for draft, place, start in zip(given.drafts, given.places, given.starts, strict=True):
            p, q = given.probabilities[start : start + len(draft) + 1], _distributions(draft)
            drafted = integers(draft.tokens)[:, None]
            uniforms = [self._number(place.next(j), Purpose.ACCEPT) for j in range(len(draft))]
            p_drafted, q_drafted = (each.gather(1, drafted)[:, 0].tolist() for each in (p, q))
            looked.append(Drawn(p, q, p_drafted, q_drafted, uniforms))
        return looked

    def _all_drawn(self, given: Given) -> DrawnDrafts:
        probabilities, drafts, places, starts = given
        lengths = [len(draft) for draft in drafts]
        rows = [start + j for start, length in zip(starts, lengths, strict=True) for j in range(length)]
        tokens = sent(integers([token for draft in drafts for token in draft.tokens]), probabilities)[:, None]
        p = probabilities[sent(integers(rows), probabilities)]
        q = torch.cat([_distributions(draft) for draft in drafts])
        numbers = self._numbers(_token_places(places, drafts), Purpose.ACCEPT, probabilities)
        p_drafted, q_drafted, uniforms = (
            pad_sequence(list(torch.split(values, lengths)), batch_first=True, padding_value=beyond)
            for values, beyond in (
                (p.gather(1, tokens)[:, 0].double(), 0.0), (q.gather(1, tokens)[:, 0].double(), 1.0), (numbers, 0.0),
            )
        )  # fmt: skip
        firsts = [0, *accumulate(lengths)][:-1]
        return DrawnDrafts(lengths, firsts, p, q, p_drafted, q_drafted, uniforms)


def residual(p: Tensor, q: Tensor, factors: Tensor) -> Tensor:
    """Return (factor * p - q)+ of each row, [n, V], not normalized; p for rows where only rounding errors remain."""
    rest = (p * factors.to(p.dtype)[:, None] - q).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > torch.finfo(p.dtype).tiny, rest, p)


def _token_places(places: abc.Sequence[Place], drafts: abc.Sequence[Draft]) -> list[Place]:
    return [place.next(j) for place, draft in zip(places, drafts, strict=True) for j in range(len(draft))]


def _distributions(draft: Draft) -> Tensor:
    assert draft.probabilities is not None
    return draft.probabilities


class TokenVerifier(RejectionVerifier):
    """Accepts a drafted token x with probability min(1, p(x) / q(x)). The first rejected token ends the draft."""

    name = "token"

    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        return [(num_accepted(draft), 1.0) for draft in drawn]

    def accept_on_device(self, drafts: DrawnDrafts) -> tuple[Tensor, Tensor]:
        stays = drafts.uniforms * drafts.q_drafted < drafts.p_drafted
        return stays.long().cumprod(1).sum(1), torch.ones_like(drafts.uniforms[:, 0])


def num_accepted(draft: Drawn) -> int:
    count = 0
    for p, q, u in zip(draft.p_drafted, draft.q_drafted, draft.uniforms, strict=True):
        if not u * q < p:  # not <=, because u may be 0, and a token of probability 0 must be rejected
            break
        count += 1
    return count
