"""The texts of a batch, and a name for each that depends on its content alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .teacher import LABELS, PACKING

READ = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
DIGEST_BYTES = 16
SHOWN = 8


@dataclass(frozen=True)
class Text:
    """Tokens `start` to `stop` of row `row` of a batch, without padding.

    ids: int64 [T]. types: token_type_ids, int64 [T], or None. key: a hash of its content.
    """

    row: int
    start: int
    stop: int
    ids: Tensor
    types: Tensor | None
    key: bytes

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        more = ", ..." if len(self) > SHOWN else ""
        return f"{len(self)} ids ({', '.join(map(str, self.ids[:SHOWN].tolist()))}{more})"


def batch_texts(inputs: Mapping[str, Any]) -> list[Text]:
    """The texts of a batch, in order. inputs: the keywords of a model's forward; input_ids: [B, T].

    A row is one text; where attention_mask is 0, it is padding. Without a mask, position_ids that start again at 0
    divide a row into texts, as transformers does for packed ones. token_type_ids are content, unless all are 0.

    Raises UnsupportedError for what a model reads besides, and for masks and positions that mean something else.
    """
    ids = _ids(inputs)
    _refuse_others(inputs)
    bounds = _bounds(ids, inputs.get("attention_mask"), inputs.get("position_ids"))
    types = inputs.get("token_type_ids")
    found = []
    for row, start, stop in bounds:
        own = ids[row, start:stop]
        own_types = None if types is None else torch.as_tensor(types)[row, start:stop].long().cpu()
        found.append(Text(row, start, stop, own, own_types, _key(own, own_types)))
    return found


def _ids(inputs: Mapping[str, Any]) -> Tensor:
    ids = inputs.get("input_ids")
    if ids is None:
        raise UnsupportedError("a cached teacher knows rows by their input_ids, and the batch has none")
    if ids.dim() != 2:
        raise UnsupportedError(f"input_ids of shape {tuple(ids.shape)}: a cached teacher takes [batch, tokens]")
    return ids.detach().long().cpu()


def _refuse_others(inputs: Mapping[str, Any]) -> None:
    # Where there are position_ids, PACKING adds nothing to them.
    known = {*READ, *LABELS, *(PACKING if inputs.get("position_ids") is not None else ()), "cache_position"}
    for name, value in inputs.items():
        if name not in known and (isinstance(value, Tensor) or (name == "past_key_values" and value is not None)):
            raise UnsupportedError(
                f"{name} changes a teacher's answers, and a cache knows only rows of ids; leave it out, or teach with "
                "the model itself"
            )


def _bounds(ids: Tensor, mask: Any, positions: Any) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each text."""
    if mask is None:
        whole = [(row, 0, ids.shape[1]) for row in range(len(ids)) if ids.shape[1]]
    else:
        whole = _unpadded(torch.as_tensor(mask).cpu(), ids)
    if positions is None:
        return whole
    positions = torch.as_tensor(positions).cpu()
    if positions.dim() != 2:
        raise UnsupportedError(
            f"position_ids of shape {tuple(positions.shape)}: a cached teacher takes [batch, tokens]"
        )
    positions = positions.expand(len(ids), -1)
    return [
        (row, start + a, start + b)
        for row, start, stop in whole
        for a, b in _packed(positions[row, start:stop], row, may_be_packed=mask is None)
    ]


def _unpadded(mask: Tensor, ids: Tensor) -> list[tuple[int, int, int]]:
    if mask.shape != ids.shape:
        raise UnsupportedError(
            f"attention_mask of shape {tuple(mask.shape)} for input_ids of {tuple(ids.shape)}: a cached teacher "
            "answers for plain padding only"
        )
    mask = mask.bool()
    counts, starts = mask.sum(-1), mask.int().argmax(-1)
    found = [(row, int(starts[row]), int(starts[row] + counts[row])) for row in range(len(ids))]
    for row, start, stop in found:
        if not mask[row, start:stop].all():
            raise UnsupportedError(f"attention_mask has a gap within row {row}; a cached teacher takes padding only")
    return [(row, start, stop) for row, start, stop in found if stop > start]


def _packed(here: Tensor, row: int, *, may_be_packed: bool) -> list[tuple[int, int]]:
    """(start, stop) of each text in a row whose position_ids, without padding, are `here`."""
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
    return list(pairwise([*first, len(here)]))


def _key(ids: Tensor, types: Tensor | None) -> bytes:
    digest = hashlib.blake2b(_bytes(ids), digest_size=DIGEST_BYTES)
    if types is not None and bool(types.any()):
        digest.update(_bytes(types))
    return digest.digest()


def _bytes(ids: Tensor) -> Any:
    return ids.to(torch.int32).contiguous().numpy().data
