"""Recognition of attention whose scores also depend on the positions of tokens (He et al. 2020, "DeBERTa", arXiv
2006.03654): its code is tried against the formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .known_module import PAIRS, KnownModule, PositionRows, Said, note_parts, tried
from .operation import Operation, UntraceableError
from .stand_ins import StandIn
from .symbols import BATCH, TOKENS, Vector
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

POSITIONS, EMBEDDINGS = "relative_pos", "rel_embeddings"
POSITION_ATTENTION = "DisentangledSelfAttention"
HEAD_SETTINGS = {"num_attention_heads": 2, "attention_head_size": 8, "all_head_size": 16}
BOTH = {"c2p", "p2c"}  # kinds of scores
ABSENT_PARTS = ("head_logits_proj", "head_weights_proj")  # by which heads would see the scores of others


class PositionAttention(NamedTuple):
    """The names of a module's parts, and of the setting that is half of the rows of positions.

    linears: the layers of queries, of keys and of values; or the one whose results have those of each head side by
    side. biases: the parameters that are added to queries and to values, if there are any. position_key,
    position_query: the layers of positions. by_tokens: whether a sequence with fewer tokens has fewer rows.
    """

    linears: tuple[str, ...]
    biases: tuple[str, ...]
    position_key: str
    position_query: str
    span: str
    by_tokens: bool

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of all linear layers, each once."""
        return tuple(dict.fromkeys((*self.linears, self.position_key, self.position_query)))

    def recorded(self, record: Any, x: StandIn, module: nn.Module, sizes: tuple[int, int]) -> list[StandIn]:
        """Record the queries, keys and values of a module that is known, [B, heads, T, dim]; sizes: heads and dim."""
        (heads, dim), held = sizes, vars(module)["_modules"]
        products: list[StandIn] = [record.linear(held[name], x) for name in self.linears]
        if len(products) == 1:
            parts = products[0].view(BATCH, TOKENS, heads, 3 * dim).parts(3)
            products = [record.put("take_heads", [part], part.width, heads=heads, dim=dim) for part in parts]
            products = [replace(part, heads=None) for part in products]
        for place, name in zip((0, 2), self.biases, strict=False):
            part, bias = products[place], Vector(module._parameters, name, module._parameters[name])  # type: ignore[arg-type]
            if bias.parameter.shape != (part.width,) or bias.parameter.dtype is not record.dtype:
                raise UntraceableError("it adds a parameter of another size or dtype")
            products[place] = record.put("affine", [part], part.width, vector=None, bias=bias, dim=part.width)
        return [each.view(BATCH, TOKENS, heads, dim).transpose(1, 2) for each in products]


SEPARATE = ("query_proj", "key_proj", "value_proj")
FIRST = PositionAttention(("in_proj",), ("q_bias", "v_bias"), "pos_proj", "pos_q_proj", "max_relative_positions", True)
POSITION_KINDS = (
    PositionAttention(SEPARATE, (), "key_proj", "query_proj", "pos_ebd_size", by_tokens=False),
    PositionAttention(SEPARATE, (), "pos_key_proj", "pos_query_proj", "pos_ebd_size", by_tokens=False),
    FIRST,
)


def position_attention(module: nn.Module) -> PositionAttention | None:
    """Return the parts of a module that attends with both kinds of scores of positions; None for any other.

    With q, k of tokens i, j and a, b made of the embedding of row r = clamp(position[i, j] + span), scores are
    (q k + q a + k b) / sqrt(3 dim). Positions must be odd functions of i - j.
    """
    own = vars(module)
    held = {name for name, part in own["_modules"].items() if isinstance(part, nn.Linear)}
    parts = next((each for each in POSITION_KINDS[::-1] if held == {*each.layers}), None)
    if type(module).__name__ != POSITION_ATTENTION or parts is None or not own.keys() >= {*HEAD_SETTINGS, parts.span}:
        return None
    kinds, shares = own.get("pos_att_type"), own.get("share_att_key")
    if not isinstance(kinds, list) or {*kinds} != BOTH or own.get("relative_attention") is not True:
        return None
    kind = (type(module), type(module).forward, parts, bool(shares))
    return parts if tried(kind, lambda: all(_agrees(module, parts, tokens) for tokens in (7, 4))) else None


def recorded_positions(
    record: Any, known: tuple[nn.Module, PositionAttention], x: StandIn, mask: Any, *weights: Any, **given: Any
) -> tuple[StandIn, None]:
    """Record attention whose scores depend on the positions of tokens too; return what the code does."""
    module, parts = known
    given = {name: value for name, value in given.items() if value not in (None, False)}
    expected = {name: record.given.get(name) for name in (POSITIONS, EMBEDDINGS)}
    if given != expected or any(weights) or mask is not record.mask:
        raise UntraceableError("it attends in a way of its own")
    own, held = vars(module), vars(module)["_modules"]
    note_parts(record, module)
    record.note(own, "pos_att_type", own["pos_att_type"])
    for name in ABSENT_PARTS:
        record.note(held, name, held.get(name))
    for name in ("dropout", "pos_dropout"):
        record.child(held[name])
    heads, dim = own["num_attention_heads"], own["attention_head_size"]
    layers = held[parts.position_key], held[parts.position_query]
    for each in layers:
        record.visit(each)
    q, k, v = parts.recorded(record, x, module, (heads, dim))
    scale = (3 * dim) ** -0.5
    values = {
        "read": read_positions, "heads": heads, "dim": dim, "scale": scale, "span": own[parts.span],
        "kinds": own["pos_att_type"], "by_tokens": parts.by_tokens, "dtype": record.dtype,
    }  # fmt: skip
    record.operations.append(Operation("position_scores", [q.span, k.span], [], layers, values))
    attended = record.attend_to_all((q, k, v), scale, masked=True, places=PAIRS)
    return attended.view(BATCH, TOKENS, heads * dim), None


def read_positions(operation: Operation, layout: Any, said: Said, tensors: Any) -> Any:
    """Read the keys and queries of positions, by what a layer is given."""
    values, embeddings = operation.values, said(EMBEDDINGS)
    if {*values["kinds"]} != BOTH:  # the module's own list, which may change
        return None
    distances, dtype = layout.distances(said(POSITIONS)), values["dtype"]
    if distances is None or type(embeddings) not in (Tensor, nn.Parameter) or embeddings.dtype is not dtype:
        return None
    rows = rows_of_positions(distances, values["span"], layout.shape[1] if values["by_tokens"] else None)
    first, last = int(rows.min()), int(rows.max())
    table = embeddings[first : last + 1]
    if not embeddings.is_cpu or table.ndim != 2 or len(table) != last + 1 - first:
        return None
    keys, queries = (module(table).contiguous() for module in operation.modules)
    return tensors._replace(positions=PositionRows(keys, queries, (rows - first).int()))


def _agrees(module: nn.Module, parts: PositionAttention, tokens: int) -> bool:
    """Return whether the code computes the formula for so many tokens, with small weights."""
    numbers = RandomNumbers()
    linears = {name: _small(numbers, 48 if parts.linears == (name,) else 16) for name in parts.layers}
    biases = {name: nn.Parameter(numbers(16), requires_grad=False) for name in parts.biases}
    dropped = {"dropout": nn.Identity(), "pos_dropout": nn.Identity()}
    twin = unwatched_twin(module, _modules={**linears, **dropped}, _parameters=biases)
    vars(twin).update(HEAD_SETTINGS | {"position_buckets": 6, "max_relative_positions": 12, parts.span: 6})
    x, table = numbers(2, tokens, 16), numbers(12, 16)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    positions = (distance.sign() * (distance.abs() * 1.5).long()).clamp(-9, 9)
    seen = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    seen[1, ..., tokens // 2 :] = False

    def theirs() -> Tensor:
        given = {POSITIONS: positions[None], EMBEDDINGS: table}
        result: Tensor = type(module).forward(twin, x, seen, **given)[0]
        return result

    def ours() -> Tensor:
        q, k, v = _queries_keys_values(x, [linears[name] for name in parts.linears], biases)
        a, b = (_in_heads(linears[name](table), 2) for name in (parts.position_key, parts.position_query))
        rows = rows_of_positions(positions, 6, tokens if parts.by_tokens else None)
        scores = q @ k.mT + torch.einsum("bhid,hijd->bhij", q, a[:, rows])
        scores = scores + torch.einsum("bhjd,hijd->bhij", k, b[:, rows])
        weights = (scores / 24**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        attended: Tensor = (weights @ v).transpose(1, 2).flatten(2)
        return attended

    def at_tokens(result: Tensor) -> tuple[Tensor, ...]:
        return result[0], result[1, : tokens // 2]  # code need not hide keys from a query that sees none

    return agree(lambda: at_tokens(theirs()), lambda: at_tokens(ours()), Tolerance(of_largest=1e-5))


def rows_of_positions(positions: Tensor, span: int, tokens: int | None) -> Tensor:
    """Return the rows of embeddings [2 * span, width] that positions stand for.

    tokens: of a sequence, if a shorter one than `span` has no rows for positions that are as far as this.
    """
    most = span if tokens is None else min(span, tokens)
    return (positions + most).clamp(0, 2 * most - 1) + span - most


def _in_heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:-1], count, -1).transpose(-2, -3)


def _queries_keys_values(x: Tensor, linears: list[Any], biases: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    if len(linears) > 1:
        q, k, v = (_in_heads(linear(x), 2) for linear in linears)
    else:
        q, k, v = _in_heads(linears[0](x), 2).chunk(3, -1)
    if biases:
        first, last = (_in_heads(bias[None], 2) for bias in biases.values())
        q, v = q + first, v + last
    return q, k, v


def _small(numbers: RandomNumbers, outputs: int) -> Any:
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, 16, outputs)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(numbers(*parameter.shape) * 0.25)
    return linear


POSITION_MODULES = KnownModule(position_attention, recorded_positions, inputs=(POSITIONS, EMBEDDINGS))
