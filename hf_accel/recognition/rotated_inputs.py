"""Recognition of attention that rotates its inputs ahead of the products of queries and keys, as that of Conformers
(Wang et al. 2020, "fairseq S2T", arXiv 2010.05171): its code is tried against the formula.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..undo.journal import original_class
from .call_form import MASK
from .distance_attention import DIM, DISTANCES, EAGER, HEADS, SPEECH
from .gated_bias import small_linear
from .known_module import KnownModule, Said, note_parts, tried
from .operation import Operation, UntraceableError
from .stand_ins import ATTENTION_KEPT, StandIn, require
from .symbols import BATCH, TOKENS, WEIGHTS_OF_ATTENTION, Opaque
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

KIND_OF_POSITIONS = "position_embeddings_type"
ROTARY_SETTINGS: dict[str, Any] = {
    "num_heads": HEADS, "head_size": DIM, "scaling": DIM**-0.5, KIND_OF_POSITIONS: "rotary", "training": False,
}  # fmt: skip
PROJECTIONS, OUT = SPEECH


def rotates_inputs(module: nn.Module) -> bool:
    """Return whether a module attends with queries and keys of rotated inputs, and computes nothing else."""
    own, kind = vars(module), original_class(module)
    held = {name for name, part in own["_modules"].items() if not isinstance(part, nn.Dropout)}
    if held != {*PROJECTIONS, OUT} or own["_parameters"] or own["_buffers"] or own.get(KIND_OF_POSITIONS) != "rotary":
        return False
    if not own.keys() >= ROTARY_SETTINGS.keys() or not hasattr(own.get("config"), "to_dict"):
        return False
    methods = tuple(value for name, value in vars(kind).items() if name.startswith("_apply"))
    return tried((kind, kind.forward, methods), lambda: all(_agrees(module, tokens) for tokens in (7, 3)))


def _agrees(module: nn.Module, tokens: int) -> bool:
    """Return whether the code computes the formula for so many tokens, with small weights, with a mask and without."""
    kind, numbers, width = original_class(module), RandomNumbers(), HEADS * DIM
    linears = {name: small_linear(numbers, width, width) for name in (*PROJECTIONS, OUT)}
    twin, config = unwatched_twin(module, _modules=linears), copy.copy(vars(module)["config"])
    config.__dict__.update({ATTENTION_KEPT: EAGER, "num_attention_heads": HEADS})
    twin.__dict__.update(ROTARY_SETTINGS | {"config": config})
    x, angles = numbers(2, tokens, width), numbers(tokens, DIM // 2).repeat(1, 2) * 3
    given = torch.stack([angles.cos(), angles.sin()])[:, :, None, None]
    hidden = torch.zeros(2, 1, tokens, tokens)
    hidden[1, ..., tokens // 2 :] = torch.finfo(torch.float32).min

    def theirs(mask: Tensor | None) -> Tensor:
        out: Tensor = kind.forward(twin, x, **{MASK: mask, DISTANCES: given})[0]
        return out

    def ours(mask: Tensor | None) -> Tensor:
        heads = x.view(2, tokens, HEADS, DIM).transpose(1, 2)
        rotated = rotated_halves(heads, heads, angles.cos()[None], angles.sin()[None])[0].transpose(1, 2).flatten(2)
        inputs = (rotated, rotated, x)
        q, k, v = (
            linears[name](each).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            for name, each in zip(PROJECTIONS, inputs, strict=True)
        )
        scores = q @ k.mT / DIM**0.5
        found: Tensor = F.softmax(scores if mask is None else scores + mask, -1) @ v
        return linears[OUT](found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    near = Tolerance(of_largest=1e-5)
    return all(agree(lambda mask=mask: theirs(mask), lambda mask=mask: ours(mask), near) for mask in (None, hidden))  # type: ignore[misc]


def rotated_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate [B, heads, T, dim] by tables [B, T, dim]."""
    cos, sin = cos[:, None], sin[:, None]
    ends = (torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) for x in (q, k))
    first, second = (x * cos + end * sin for x, end in zip((q, k), ends, strict=True))
    return first, second


def recorded_rotation(
    record: Any, known: tuple[nn.Module, bool], x: Any = None, attention_mask: Any = None, **given: Any
) -> tuple[StandIn, Opaque]:
    """Record the attention of a module that `rotates_inputs`; return what its code does."""
    (module, _), own, held = known, vars(known[0]), vars(known[0])["_modules"]
    x = given.pop("hidden_states", x)
    note_parts(record, module)
    record.note(vars(own["config"]), "num_attention_heads", vars(own["config"]).get("num_attention_heads"))
    rotations = given.pop(DISTANCES, None)
    if rotations is None or rotations is not record.given.get(DISTANCES):
        raise UntraceableError("it does not rotate by the places of tokens")
    if any(given.values()) or attention_mask not in (None, record.mask) or own["training"]:
        raise UntraceableError("it attends in a way of its own")
    require(x, heads=False)
    heads, dim, scale = own["num_heads"], own["head_size"], own["scaling"]
    if x.width != heads * dim:
        raise UntraceableError("it rotates heads of another size")
    values = {
        "read": read_rotations, "table_dtype": record.dtype, "function": rotated_halves, "heads": heads,
        "kv_heads": heads, "dim": dim, "partial": False,
    }  # fmt: skip
    outs = [record.buffer(x.width) for _ in range(2)]  # one for the queries, and the same for the keys
    record.operations.append(Operation("rope", [x.span, x.span], outs, values=values))
    inputs = (*(replace(x, span=out) for out in outs), x)
    q, k, v = (
        record.linear(held[name], each).view(BATCH, TOKENS, heads, dim).transpose(1, 2)
        for name, each in zip(PROJECTIONS, inputs, strict=True)
    )
    attended = record.attend_to_all((q, k, v), scale, (module,), masked=attention_mask is not None)
    return record.linear(held[OUT], attended.view(BATCH, TOKENS, heads * dim)), WEIGHTS_OF_ATTENTION


def read_rotations(operation: Operation, layout: Any, said: Said, tensors: Any) -> Any:
    """Read cos and sin of each token, [2, T, 1, 1, dim]."""
    table, values = said(DISTANCES), operation.values
    shape = (2, layout.shape[1], 1, 1, values["dim"])
    if not isinstance(table, Tensor) or table.shape != shape or table.dtype is not values["table_dtype"]:
        return None
    tables = layout.tables(tuple(each[None] for each in table[:, :, 0, 0]))
    return None if tables is None else tensors._replace(tables=tables)


ROTATED_MODULES = KnownModule(rotates_inputs, recorded_rotation, inputs=(DISTANCES,))
