"""Recognition of attention that rotates neighbouring numbers of each head by the sine and cosine of a place (Su et al.
2021, "RoFormer", arXiv 2104.09864): its code is tried against the formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..undo.journal import original_class
from .call_form import MASK
from .gated_bias import small_linear
from .known_module import KnownModule, Said, note_parts, tried
from .operation import Operation, UntraceableError
from .stand_ins import StandIn, require
from .symbols import BATCH, TOKENS, WEIGHTS_OF_ATTENTION, Opaque
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

SINUSOIDS = "sinusoidal_pos"  # [1, 1, T, dim]: the sines of each place, and then the cosines
PROJECTIONS = ("query", "key", "value")
PAIR_SETTINGS: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_size": 8, "all_head_size": 16, "rotary_value": False,
    "is_decoder": False,
}  # fmt: skip


def rotates_pairs(module: nn.Module) -> bool:
    """Return whether a module attends with queries and keys that it rotates in pairs, and computes nothing else."""
    own, kind = vars(module), original_class(module)
    held = {name for name, part in own["_modules"].items() if not isinstance(part, nn.Dropout)}
    if held != {*PROJECTIONS} or own["_parameters"] or own["_buffers"] or not own.keys() >= PAIR_SETTINGS.keys():
        return False
    if own["rotary_value"] or own["is_decoder"] or not hasattr(kind, "apply_rotary_position_embeddings"):
        return False
    key = kind, kind.forward, kind.apply_rotary_position_embeddings
    return tried(key, lambda: all(_agrees(module, tokens) for tokens in (7, 3)))


def _agrees(module: nn.Module, tokens: int) -> bool:
    """Return whether the code computes the formula for so many tokens, with small weights, with a mask and without."""
    kind, numbers = original_class(module), RandomNumbers()
    linears = {name: small_linear(numbers, 16, 16) for name in PROJECTIONS}
    twin = unwatched_twin(module, _modules=linears)
    twin.__dict__.update(PAIR_SETTINGS)
    for name, part in vars(module)["_modules"].items():
        if name not in PROJECTIONS:
            twin._modules[name] = nn.Identity() if isinstance(part, nn.Dropout) else part
    x, angles = numbers(2, tokens, 16), numbers(tokens, 4) * 3
    table = torch.cat([angles.sin(), angles.cos()], -1)[None, None]
    hidden = torch.zeros(2, 1, 1, tokens)
    hidden[1, ..., tokens // 2 :] = torch.finfo(torch.float32).min

    def theirs(mask: Tensor | None) -> Tensor:
        result: Tensor = kind.forward(twin, x, **{MASK: mask, SINUSOIDS: table})[0]
        return result

    def ours(mask: Tensor | None) -> Tensor:
        q, k, v = (linears[name](x).unflatten(-1, (2, 8)).transpose(1, 2) for name in PROJECTIONS)
        q, k = rotated_pairs(q, k, *(each.repeat_interleave(2, -1)[None] for each in (angles.cos(), angles.sin())))
        scores = q @ k.mT / 8**0.5
        found: Tensor = F.softmax(scores if mask is None else scores + mask, -1) @ v
        return found.transpose(1, 2).flatten(2)

    near = Tolerance(of_largest=1e-5)
    return all(agree(lambda mask=mask: theirs(mask), lambda mask=mask: ours(mask), near) for mask in (None, hidden))  # type: ignore[misc]


def rotated_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate [B, heads, T, dim] by tables [B, T, dim] that hold each number twice."""
    cos, sin = cos[:, None], sin[:, None]
    halves = (torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) for x in (q, k))
    first, second = (x * cos + half * sin for x, half in zip((q, k), halves, strict=True))
    return first, second


def recorded_pairs(
    record: Any, known: tuple[nn.Module, bool], x: Any, attention_mask: Any = None, **given: Any
) -> tuple[StandIn, Opaque]:
    """Record the attention of a module that `rotates_pairs`; return what its code does."""
    (module, _), own, held = known, vars(known[0]), vars(known[0])["_modules"]
    note_parts(record, module)
    sinusoids = given.pop(SINUSOIDS, None)
    if sinusoids is None or sinusoids is not record.given.get(SINUSOIDS):
        raise UntraceableError("it does not rotate by the places of tokens")
    if any(given.values()) or attention_mask not in (None, record.mask):
        raise UntraceableError("it attends in a way of its own")
    for name, part in held.items():
        if name not in PROJECTIONS:
            record.child(part)
    require(x, heads=False)
    heads, dim = own["num_attention_heads"], own["attention_head_size"]
    q, k, v = (record.linear(held[name], x).view(BATCH, TOKENS, heads, dim).transpose(1, 2) for name in PROJECTIONS)
    values = {
        "read": read_sinusoids, "table_dtype": record.dtype, "function": rotated_pairs, "heads": heads,
        "kv_heads": heads, "dim": dim, "partial": False,
    }  # fmt: skip
    outs = [record.buffer(each.width) for each in (q, k)]
    record.operations.append(Operation("rope", [q.span, k.span], outs, values=values))
    q, k = (replace(each, span=out) for each, out in zip((q, k), outs, strict=True))
    masked = attention_mask is not None
    attended = record.attend_to_all((q, k, v), dim**-0.5, masked=masked, adds_mask=True)
    return attended.view(BATCH, TOKENS, heads * dim), WEIGHTS_OF_ATTENTION


def read_sinusoids(operation: Operation, layout: Any, said: Said, tensors: Any) -> Any:
    """Read cos and sin of each token."""
    table, values = said(SINUSOIDS), operation.values
    shape = (1, 1, layout.shape[1], values["dim"])
    if not isinstance(table, Tensor) or table.shape != shape or table.dtype is not values["table_dtype"]:
        return None
    sin, cos = (each.repeat_interleave(2, -1) for each in table[0].chunk(2, -1))
    tables = layout.tables((cos, sin))
    return None if tables is None else tensors._replace(tables=tables)


PAIR_MODULES = KnownModule(rotates_pairs, recorded_pairs, inputs=(SINUSOIDS,), attends=True)
