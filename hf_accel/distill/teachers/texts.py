"""The texts of a batch, and a name for each that depends on its content alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...cache.hf.cache_argument import CACHE_NAMES
from ...errors import UnsupportedError
from .teacher import LABELS, PACKING

READ = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
DIGEST_BYTES = 16
SHOWN = 8


@dataclass(frozen=True)
class Text:
    """Tokens of row `row` of a batch from `start` on, without padding.

    ids: int64 [T]. types: token_type_ids, int64 [T], or None. key: a hash of its content. positions: int32 [n], those
    within the text that are asked for, ascending.
    """

    row: int
    start: int
    ids: Tensor
    types: Tensor | None
    key: bytes
    positions: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        more = ", ..." if len(self) > SHOWN else ""
        return f"{len(self)} ids ({', '.join(map(str, self.ids[:SHOWN].tolist()))}{more})"

    def at(self, chosen: Tensor) -> Text:
        """The same text with the positions where `chosen`, bool [T or less], is true."""
        return replace(self, positions=chosen.nonzero().flatten().int())


def batch_texts(inputs: Mapping[str, Any]) -> list[Text]:
    """The texts of a batch, in order, each with all of its positions. inputs: the keywords of a model's forward;
    input_ids: [B, T].

    A row is one text; where attention_mask is 0, it is padding. Without a mask, position_ids that start again at 0
    divide a row into texts, as transformers does for packed ones. token_type_ids are content, unless all are 0.

    Raises UnsupportedError for what a model reads besides, and for masks and positions that mean something else.
    """
    ids, types = inputs.get("input_ids"), inputs.get("token_type_ids")
    if ids is None or ids.dim() != 2:
        found = "none" if ids is None else f"some of shape {tuple(ids.shape)}"
        raise UnsupportedError(
            f"a cached teacher knows rows by their input_ids [batch, tokens], and the batch has {found}"
        )
    _refuse_others(inputs)
    ids = ids.detach().long().cpu()
    types = None if types is None else torch.as_tensor(types).long().cpu()
    texts = []
    for row, start, stop in _bounds(ids, inputs.get("attention_mask"), inputs.get("position_ids")):
        own, own_types = ids[row, start:stop], None if types is None else types[row, start:stop]
        every = torch.arange(len(own), dtype=torch.int32)
        texts.append(Text(row, start, own, own_types, _key(own, own_types), every))
    return texts


def texts_at(select: Tensor, texts: list[Text]) -> list[Text]:
    """The texts of a batch that have a selected position, each with those. select: as in Teacher.rows."""
    select = select.detach().cpu()
    if select.dim() == 1:  # one answer for each row
        if [text.row for text in texts] != list(range(len(select))):
            raise UnsupportedError("a classifier reads one text in each row; packed or empty rows cannot be answered")
        return [text.at(torch.ones(1)) for text in texts if select[text.row]]
    found = [text.at(select[text.row, text.start : text.start + len(text)]) for text in texts]
    outside = int(select.sum()) - sum(len(text.positions) for text in found)
    if outside:
        raise UnsupportedError(
            f"{outside} labels are to be predicted from padding (left padding, and a label at the first token); pad "
            "to the right, or set the first label of each row to -100"
        )
    return [text for text in found if len(text.positions)]


def _refuse_others(inputs: Mapping[str, Any]) -> None:
    # Where there are position_ids, PACKING adds nothing to them.
    known = {*READ, *LABELS, *(PACKING if inputs.get("position_ids") is not None else ()), "cache_position"}
    for name, value in inputs.items():
        if name not in known and (isinstance(value, Tensor) or (name in CACHE_NAMES and value is not None)):
            raise UnsupportedError(
                f"{name} changes a teacher's answers, and a cache knows only rows of ids; leave it out, or teach with "
                "the model itself"
            )


def _bounds(ids: Tensor, mask: Any, positions: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, stop) of each text."""
    mask = torch.ones_like(ids) if (unmasked := mask is None) else torch.as_tensor(mask).cpu()
    if mask.shape != ids.shape:
        raise UnsupportedError(
            f"attention_mask of shape {tuple(mask.shape)} for input_ids of {tuple(ids.shape)}: a cached teacher "
            "answers for plain padding only"
        )
    if positions is not None:
        positions = torch.as_tensor(positions).cpu()
        if positions.dim() != 2:
            raise UnsupportedError(
                f"position_ids of shape {tuple(positions.shape)}: a cached teacher takes [batch, tokens]"
            )
        positions = positions.expand(len(ids), -1)
    for row, here in enumerate(mask.bool()):
        real = here.nonzero().flatten()
        if not len(real):
            continue
        start, stop = int(real[0]), int(real[-1]) + 1
        if stop - start != len(real):
            raise UnsupportedError(f"attention_mask has a gap within row {row}; a cached teacher takes padding only")
        ends = [0, stop - start]
        if positions is not None:
            ends = _packed(positions[row, start:stop], row, may_be_packed=unmasked)
        yield from ((row, start + a, start + b) for a, b in pairwise(ends))


def _packed(here: Tensor, row: int, *, may_be_packed: bool) -> list[int]:
    """The places where a text begins or ends in a row whose position_ids, without padding, are `here`."""
    first = (here == 0).nonzero().flatten().tolist()
    steps = here.diff() == 1
    steps[[at - 1 for at in first if at]] = True
    if not first or first[0] != 0 or not bool(steps.all()):
        raise UnsupportedError(f"position_ids of row {row} do not count each text from 0; leave them out")
    if len(first) > 1 and not may_be_packed:
        raise UnsupportedError(
            f"row {row} packs {len(first)} texts, and has an attention_mask, with which models let each see those "
            "before it; leave attention_mask out (padding_free=True), or pack without position_ids"
        )
    return [*first, len(here)]


def _key(ids: Tensor, types: Tensor | None) -> bytes:
    digest = hashlib.blake2b(_bytes(ids), digest_size=DIGEST_BYTES)
    if types is not None and bool(types.any()):
        digest.update(_bytes(types))
    return digest.digest()


def _bytes(ids: Tensor) -> Any:
    return ids.to(torch.int32).contiguous().numpy().data
