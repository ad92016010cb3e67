"""Reads what a decoder without an encoder is given to attend to besides its tokens: images, and which of them a token
sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...cache.kinds import SourceRows
from ...errors import NotRaggedError

LOW = -1e4  # what masks add to the scores of hidden keys is lower


@dataclass(frozen=True, eq=False)
class GivenSource:
    """The arguments of a decoder's call about what B rows attend to.

    argument: the name of `states` [B, S, C], which are None behind a prompt. shown: [B, T, S] bool, on the host, which
    of them each token sees. numbers: the other arguments, [B, T] each, by name.
    """

    argument: str
    states: Tensor | None
    shown: Tensor
    numbers: dict[str, Tensor]

    def row(self, row: int, tokens: Tensor) -> SourceRows:
        """Return the source of a row whose tokens stand where `tokens`, [T] bool, is True."""
        assert self.states is not None
        shown, states = self.shown[row, tokens], self.states[row]
        views, places = shown.unique(dim=0, return_inverse=True)
        counts = views.sum(dim=1).tolist()
        is_first = [bool(view[:count].all()) for view, count in zip(views, counts, strict=True)]
        most = max((count for count, first in zip(counts, is_first, strict=True) if first), default=0)
        parts, kept, seen = [most] if most else [], [states[:most]], []
        for view, count, first in zip(views, counts, is_first, strict=True):
            seen.append((0 if first else len(parts), count))
            if not first:
                parts.append(count)
                kept.append(states[view.to(states.device)])
        numbers = {name: each[row, tokens] for name, each in self.numbers.items()}
        seen_by = tuple(seen[place] for place in places.tolist())
        return SourceRows(torch.cat(kept), self.argument, tuple(parts), seen_by, numbers)


def taken_source(others: dict[str, Any], argument: str | None, given: Mapping[str, Any]) -> GivenSource | None:
    """Take what a decoder attends to besides tokens out of the arguments of its call; None if it is given nothing.

    others: the arguments that are not known otherwise, by name. argument: see DecoderForm.source. given: all of them.
    Raises NotRaggedError for what is of another form.
    """
    if argument is None:
        return None
    tokens = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
    rows, columns = tokens.shape[:2]
    states = others.pop(argument, None)
    named = {
        name: value for name, value in others.items()
        if isinstance(value, Tensor) and value.ndim == 4 and value.shape[:3] == (rows, 1, columns)
    }  # fmt: skip
    numbers = {name: value for name, value in named.items() if value.shape[3] == 1}
    masks = {name: value for name, value in named.items() if name not in numbers}
    if states is None and not named:
        return None
    if len(masks) != 1:  # without one, stock's sdpa would show a token those that stand before it alone
        raise NotRaggedError(f"its decoder is given {argument} without a mask that says which tokens see it")
    mask = next(iter(masks.values()))
    if states is not None:
        states = states.reshape(rows, -1, states.shape[-1])
        if states.shape[1] != mask.shape[3]:
            raise NotRaggedError(f"its decoder is given {argument} and a mask of {mask.shape[3]} of its rows")
    shown = mask[:, 0] == 0
    if not bool((shown | (mask[:, 0] <= LOW)).all()) or not bool(shown.any(dim=-1).all()):
        raise NotRaggedError(f"its decoder is given {argument} with a mask of another form")
    for name in named:
        del others[name]
    found = {name: value[:, 0, :, 0].cpu() for name, value in numbers.items()}
    return GivenSource(argument, states, shown.cpu(), found)


def read_sources(given: GivenSource | None, tokens: Tensor) -> list[SourceRows | None]:
    """Return the source of each row. tokens: [B, T] bool, the columns that hold tokens."""
    return [None if given is None else given.row(row, own) for row, own in enumerate(tokens)]


def refuse_other_source(first: GivenSource | None, second: GivenSource | None) -> None:
    """Raise NotRaggedError unless a token behind a prompt sees of its source what the last one of the prompt does."""
    if first is None and second is None:
        return
    same = first is not None and second is not None and second.states is None
    if same:
        assert first is not None and second is not None
        same = torch.equal(first.shown[:, -1], second.shown[:, 0]) and first.numbers.keys() == second.numbers.keys()
        same = same and all(torch.equal(first.numbers[name][:, -1:], each) for name, each in second.numbers.items())
    if not same:
        raise NotRaggedError("tokens behind a prompt see other images than its last token")


def source_bytes(source: SourceRows) -> bytes:
    """Return a digest of all that is read of a source."""
    digest = hashlib.blake2b(repr((source.parts, source.seen)).encode())
    for each in (source.states, *source.numbers.values()):
        digest.update(each.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()
