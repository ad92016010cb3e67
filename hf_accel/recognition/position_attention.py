"""Recognition of attention whose scores also depend on the positions of tokens (He et al. 2020, "DeBERTa", arXiv
2006.03654): its code is tried against the formula.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .call_form import EMBEDDINGS, POSITIONS
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

POSITION_ATTENTION = "DisentangledSelfAttention"
SMALL = {
    "num_attention_heads": 2, "attention_head_size": 8, "all_head_size": 16, "pos_ebd_size": 6, "position_buckets": 6,
    "max_relative_positions": 12,
}  # fmt: skip
BOTH = {"c2p", "p2c"}  # kinds of scores
READ_SETTINGS = (*SMALL, "share_att_key", "pos_att_type", "relative_attention")  # the module's, which must stay
_tried: dict[tuple[object, ...], bool] = {}


class PositionAttention(NamedTuple):
    """The names of a module's linear layers: of queries, keys, values; and of keys and queries of positions."""

    query: str
    key: str
    value: str
    position_key: str
    position_query: str


def position_attention(module: nn.Module) -> PositionAttention | None:
    """Return the parts of a module that attends with both kinds of scores of positions; None for any other.

    With q, k of tokens i, j and a, b made of the embedding of row r = clamp(position[i, j] + span), scores are
    (q k + q a + k b) / sqrt(3 dim). Positions must be odd functions of i - j.
    """
    own = vars(module)
    if type(module).__name__ != POSITION_ATTENTION or not own.keys() >= SMALL.keys() | {"share_att_key"}:
        return None
    shares, kinds = own["share_att_key"], own.get("pos_att_type")
    if not isinstance(kinds, list) or {*kinds} != BOTH or own.get("relative_attention") is not True:
        return None
    positions = ("key_proj", "query_proj") if shares else ("pos_key_proj", "pos_query_proj")
    parts = PositionAttention("query_proj", "key_proj", "value_proj", *positions)
    kind = (type(module), type(module).forward, bool(shares))
    if kind not in _tried:
        _tried[kind] = _agrees(module, parts)
    return parts if _tried[kind] else None


def _agrees(module: nn.Module, parts: PositionAttention) -> bool:
    """Return whether the code computes the formula, with small weights."""
    numbers, tokens = RandomNumbers(), 7
    linears = {name: _small(numbers) for name in set(parts)}
    twin = unwatched_twin(module, _modules={**linears, "dropout": nn.Identity(), "pos_dropout": nn.Identity()})
    vars(twin).update(SMALL)
    x, table = numbers(2, tokens, 16), numbers(12, 16)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    positions = (distance.sign() * (distance.abs() * 1.5).long()).clamp(-9, 9)
    seen = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    seen[1, ..., 4:] = False

    def theirs() -> Tensor:
        given = {POSITIONS: positions[None], EMBEDDINGS: table}
        result: Tensor = type(module).forward(twin, x, seen, **given)[0]
        return result

    def ours() -> Tensor:
        q, k, v, a, b = (
            linears[name](each).unflatten(-1, (2, 8)).transpose(-2, -3)
            for name, each in zip(parts, (x, x, x, table, table), strict=True)
        )  # fmt: skip
        rows = (positions + 6).clamp(0, 11)
        scores = q @ k.mT + torch.einsum("bhid,hijd->bhij", q, a[:, rows])
        scores = scores + torch.einsum("bhjd,hijd->bhij", k, b[:, rows])
        weights = (scores / 24**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        attended: Tensor = (weights @ v).transpose(1, 2).flatten(2)
        return attended

    return agree(theirs, ours, Tolerance(of_largest=1e-5))


def _small(numbers: RandomNumbers) -> Any:
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, 16, 16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(numbers(*parameter.shape) * 0.25)
    return linear
