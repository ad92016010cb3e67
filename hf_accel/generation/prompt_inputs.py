"""The inputs of a prompt that do not follow from its token ids: embeddings of images or of a user, and positions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CONTENT_BYTES = 8


@dataclass(frozen=True)
class PassRows:
    """Tokens of a pass whose inputs do not follow from their ids.

    first: the index of the first of them among the tokens of the pass. count: n, their number. embeddings: [n, D], on
    the model's device; None for those of their ids. positions: [P, n] int64, on the host, or None for those that
    the pass has.
    """

    first: int
    count: int
    embeddings: Tensor | None
    positions: Tensor | None


@dataclass(frozen=True)
class PromptInputs:
    """The inputs of the T tokens of one prompt, as the model's own code has made them.

    embeddings: [T, D], on the model's device. positions: [P, T] int64, on the host, with P coordinates for each token;
    None if each stands at its index. shifts: what is added to the index of a token behind the prompt, for each
    coordinate. contents: for each token, the number by which the prefix index knows it: its id, or a negative number
    that is another one for other inputs.
    """

    embeddings: Tensor
    positions: Tensor | None
    shifts: tuple[int, ...]
    contents: list[int]

    def rows(self, first: int, start: int, count: int) -> Iterator[PassRows]:
        """Yield the inputs of the tokens start..start+count-1, of which the pass has the first one at `first`."""
        end = len(self.contents)
        given = max(0, min(start + count, end) - start)
        if given:
            stop = start + given
            positions = None if self.positions is None else self.positions[:, start:stop]
            yield PassRows(first, given, self.embeddings[start:stop], positions)
        if self.positions is not None and given < count:
            later = torch.arange(start + given, start + count)
            yield PassRows(first + given, count - given, None, later + torch.tensor(self.shifts)[:, None])


def contents_of(ids: list[int], is_plain: list[bool], embeddings: Tensor, positions: Tensor | None) -> list[int]:
    """Return a number for each token, which is another one for other inputs; see PromptInputs.contents.

    is_plain: whether a token is embedded as its id is, and stands at its index. embeddings: [T, D]. positions: [P, T].
    The numbers are BLAKE2 digests of 63 bits; a prefix is known by those of all its tokens.
    """
    rows = embeddings.detach().contiguous().cpu().view(torch.uint8).numpy()
    places = [] if positions is None else positions.T.tolist()
    contents = []
    for index, token in enumerate(ids):
        if not is_plain[index]:
            digest = hashlib.blake2b(rows[index].tobytes(), digest_size=CONTENT_BYTES)
            digest.update(repr(places[index] if places else index).encode())
            token = -1 - (int.from_bytes(digest.digest(), "little") >> 1)
        contents.append(token)
    return contents
