"""Recognition of attention whose bias of positions is multiplied by a number of each query and head (Chi et al. 2022,
"XLM-E", arXiv 2106.16138; Chen et al. 2022, "WavLM", arXiv 2110.13900): its code is tried against the formula.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..undo.journal import original_class
from .known_module import ONES, KnownModule, note_parts, tried
from .operation import UntraceableError
from .stand_ins import StandIn, require
from .symbols import BATCH, TOKENS, WEIGHTS_OF_ATTENTION, Computed, Opaque
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

PROJECTIONS, OUT = ("q_proj", "k_proj", "v_proj"), "out_proj"
GATE, FACTORS = "gru_rel_pos_linear", "gru_rel_pos_const"  # the linear layer of the gates, and a factor of each head
GATE_SETTINGS = ("embed_dim", "num_heads", "head_dim", "dropout", "training", "num_buckets", "max_distance")
TABLE = "rel_attn_embed"  # of the module that computes the bias for all layers
GATE_OUTPUTS = 8  # of the linear layer of the gates


def attends_with_gates(module: nn.Module) -> bool:
    """Return whether a module attends with a gated bias, and computes nothing else.

    Of a head x of a token's input, a and b are the sigmoids of the sums of the first and of the last four of eight
    numbers that a linear layer makes of it. The bias of its scores is multiplied by a * (b * factor - 1) + 2.
    """
    own = vars(module)
    named = {name for name in own["_modules"] if name != TABLE}
    if named != {*PROJECTIONS, OUT, GATE} or own["_parameters"].keys() != {FACTORS} or own["_buffers"]:
        return False
    if not own.keys() >= {*GATE_SETTINGS} or not hasattr(original_class(module), "compute_bias"):
        return False
    kind = original_class(module)
    return tried((kind, kind.forward, kind.compute_bias), lambda: _computes(module))


def _computes(module: nn.Module) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the kinds of masks that the code gives it
        return all(_agrees(module, count, masked=masked) for count in (7, 4) for masked in (False, True))


def _agrees(module: nn.Module, tokens: int, *, masked: bool) -> bool:
    """Return whether the code computes the formula, and gives on the bias that it made, with small weights."""
    kind, numbers = original_class(module), RandomNumbers()
    linears = {name: small_linear(numbers, 16, 16) for name in (*PROJECTIONS, OUT)} | {
        GATE: small_linear(numbers, 8, GATE_OUTPUTS)
    }
    table = nn.Embedding(12, 2, _weight=numbers(12, 2))
    factors = nn.Parameter(numbers(1, 2, 1, 1), requires_grad=False)
    twin = unwatched_twin(module, _modules={**linears, TABLE: table}, _parameters={FACTORS: factors})
    vars(twin).update(
        embed_dim=16, num_heads=2, head_dim=8, scaling=8**-0.5, dropout=0.0, training=False, num_buckets=12,
        max_distance=9,
    )  # fmt: skip
    x, seen = numbers(2, tokens, 16), None
    if masked:
        seen = torch.ones(2, tokens, dtype=torch.bool)
        seen[1, tokens // 2 :] = False

    def theirs(position_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        out, _, kept = kind.forward(twin, x, attention_mask=seen, position_bias=position_bias, index=1)
        return out, kept

    def ours(bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (_in_heads(linears[name](x)) for name in PROJECTIONS)
        a, b = linears[GATE](_in_heads(x)).unflatten(-1, (2, GATE_OUTPUTS // 2)).sum(-1).sigmoid().unbind(-1)
        gates = a * (b * factors[..., 0] - 1) + 2
        scores = q @ k.mT / 8**0.5 + gates[..., None] * bias
        scores = scores if seen is None else scores.masked_fill(~seen[:, None, None], -torch.inf)
        attended = (F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
        return linears[OUT](attended), bias.expand(2, 2, tokens, tokens).reshape(4, tokens, tokens)

    near, given = Tolerance(of_largest=1e-5), numbers(2, 2, tokens, tokens)
    merged = given[:1].expand(2, -1, -1, -1).reshape(4, tokens, tokens)
    makes = agree(lambda: theirs(None), lambda: ours(kind.compute_bias(twin, tokens, tokens)[None]), near)
    return makes and agree(lambda: theirs(merged), lambda: ours(given[:1]), near)


def _in_heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 2, 8).transpose(1, 2)


def small_linear(numbers: RandomNumbers, inputs: int, outputs: int) -> Any:
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(numbers(*parameter.shape) * 0.5)
    return linear


def recorded_gates(
    record: Any, known: tuple[nn.Module, Any], x: Any, attention_mask: Any = None, *,
    position_bias: Any = None, **others: Any,
) -> tuple[StandIn, Opaque, Any]:  # fmt: skip
    """In place of the weights of its attention stands what no code may read."""
    module, _ = known
    own, held = vars(module), vars(module)["_modules"]
    note_parts(record, module)
    record.note(held, TABLE, held.get(TABLE))
    require(x, heads=False)
    heads, dim = own["num_heads"], own["head_dim"]
    others.pop("index", None)
    if any(others.values()) or attention_mask not in (None, record.mask) or (own["training"] and own["dropout"]):
        raise UntraceableError("it attends in a way of its own")
    if position_bias is None:
        record.bias = Computed(module, original_class(module).compute_bias, (TOKENS, TOKENS), {})
    elif position_bias is not record.bias:
        raise UntraceableError("it adds another bias to its scores")
    # Gates are float32, whatever the dtype of the layer: a result of so many bytes.
    width, values = heads * 4 // record.dtype.itemsize, {"heads": heads, "dim": dim, "terms": GATE_OUTPUTS // 2}
    record.visit(held[GATE])
    gates = record.put("bias_gates", [x], width, modules=(held[GATE], module), factors=FACTORS, **values)
    q, k, v = (record.linear(held[name], x).view(BATCH, TOKENS, heads, dim).transpose(1, 2) for name in PROJECTIONS)
    values = {"masked": attention_mask is not None, "places": ONES, "biased": True, "merges_bias": True}
    attended = record.attend_to_all((q, k, v), dim**-0.5, **values)
    record.operations[-1].inputs.append(gates.span)
    out = record.linear(held[OUT], attended.view(BATCH, TOKENS, heads * dim))
    return out, WEIGHTS_OF_ATTENTION, record.bias


GATED_MODULES = KnownModule(attends_with_gates, recorded_gates, attends=True)
