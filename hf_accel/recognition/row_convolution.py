"""Recognition of the module of a Conformer that convolves each channel over the rows of a sequence (Gulati et al.
2020, arXiv 2005.08100): its code is tried against the formula.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..undo.journal import original_class
from .call_form import MASK, parameter_names
from .known_module import KnownModule, Said, note_parts, tried
from .operation import Operation, UntraceableError
from .stand_ins import StandIn, require
from .trial import PLAIN_ACTIVATIONS, RandomNumbers, Tolerance, activation_name, agree, unwatched_twin

FIRST, CONVOLUTION, LAST = "pointwise_conv1", "depthwise_conv", "pointwise_conv2"
POINTWISE, ACTIVATION = (FIRST, LAST), "activation"
QUIET = (nn.Dropout, nn.GLU)  # of parts that have no numbers
CHANNELS, LENGTH = 8, 5  # of a trial
ROW_MASK = "conv_attention_mask"  # of a call of a layer: which rows hold tokens


class RowConvolution(NamedTuple):
    """The parts of a module: a LayerNorm, a product and its gate, a convolution, a norm, an activation, a product.

    ahead: the name of the LayerNorm, None without. behind: the name of the norm. before: the rows ahead of a row whose
    numbers count. mask: what a call's mask is, "tokens" [B, T] or "pairs" [B, 1, T, T], where rows that are none count
    as zeros; None if the code takes no mask.
    """

    ahead: str | None
    behind: str
    activation: str
    before: int
    mask: str | None


def is_pointwise(module: Any) -> bool:
    """Return whether a module is a convolution over single rows: a linear layer for channels that come first."""
    if not isinstance(module, nn.Conv1d):
        return False
    return (module.kernel_size, module.stride, module.groups) == ((1,), (1,), 1) and module.padding in ((0,), "same")


# How linear layers name the numbers of their inputs and outputs.
NAMES_OF_NUMBERS = (("in_features", "out_features"), ("nx", "nf"), ("in_channels", "out_channels"))


def sizes_of_linear(module: nn.Module) -> tuple[int, int]:
    own = vars(module)
    inputs, outputs = next(names for names in NAMES_OF_NUMBERS if names[0] in own)
    return own[inputs], own[outputs]


def row_convolution(module: nn.Module) -> RowConvolution | None:
    """Return the parts of a module that computes the formula, and nothing else; None for any other."""
    own = vars(module)
    held, convolution = own["_modules"], own["_modules"].get(CONVOLUTION)
    if not held.keys() >= {FIRST, CONVOLUTION, LAST} or own["_parameters"] or own["_buffers"]:
        return None
    named = held.get(ACTIVATION, own.get(ACTIVATION))
    activation = activation_name(named, PLAIN_ACTIVATIONS)
    norms = {name: part for name, part in held.items() if isinstance(part, (nn.LayerNorm, nn.BatchNorm1d))}
    others = held.keys() - norms.keys() - {FIRST, CONVOLUTION, LAST, ACTIVATION}
    if activation is None or not all(isinstance(held[name], QUIET) for name in others):
        return None
    if type(convolution) is not nn.Conv1d or not 1 <= len(norms) <= 2 or convolution.padding_mode != "zeros":
        return None
    *first, behind = norms
    ahead = first[0] if first else None
    if (ahead is not None and type(norms[ahead]) is not nn.LayerNorm) or not _is_by_channel(convolution):
        return None
    before = _rows_before(convolution)
    known = RowConvolution(ahead, behind, activation, before, None)
    kind = original_class(module)
    biases = tuple(held[name].bias is not None for name in (FIRST, CONVOLUTION, LAST))
    padding = convolution.padding if convolution.padding in ("same", (0,)) else None
    key = kind, kind.forward, known._replace(before=0), type(norms[behind]), padding, biases
    mask = tried(key, lambda: _form_of_mask(module, known))
    return None if mask is None else known._replace(mask=mask or None)


def _is_by_channel(convolution: nn.Conv1d) -> bool:
    channels, (length,) = convolution.in_channels, convolution.kernel_size
    plain = (convolution.stride, convolution.dilation) == ((1,), (1,))
    same = convolution.groups == channels == convolution.out_channels
    return plain and same and convolution.padding in ("same", (0,), ((length - 1) // 2,)) and length % 2 == 1


def _rows_before(convolution: nn.Conv1d) -> int:
    """Return the rows before a row that count: all but its own where the code puts zeros ahead by itself."""
    rows = convolution.kernel_size[0] - 1
    return rows if convolution.padding == (0,) else rows // 2


def _form_of_mask(module: nn.Module, known: RowConvolution) -> str | None:
    """Return the form of a mask that the code takes, "" if it takes none; None if it computes something else."""
    if not _agrees(module, known, None):
        return None
    if MASK not in parameter_names(original_class(module).forward):
        return ""
    return next((form for form in ("tokens", "pairs") if _agrees(module, known, form)), None)


def _agrees(module: nn.Module, known: RowConvolution, form: str | None) -> bool:
    """Return whether the code computes the formula for two sequences, with small weights."""
    kind, numbers, held = original_class(module), RandomNumbers(), vars(module)["_modules"]
    padding = held[CONVOLUTION].padding
    size = padding if isinstance(padding, str) or padding == (0,) else LENGTH // 2
    sizes = {
        FIRST: (2 * CHANNELS, 1, 0, 1),
        CONVOLUTION: (CHANNELS, LENGTH, size, CHANNELS),
        LAST: (CHANNELS, 1, 0, 1),
    }
    parts: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):  # the user's random numbers stay
        for name, (outputs, length, rows, groups) in sizes.items():
            bias = held[name].bias is not None
            parts[name] = nn.Conv1d(CHANNELS, outputs, length, padding=rows, groups=groups, bias=bias)
    parts[known.behind] = type(held[known.behind])(CHANNELS)
    if known.ahead is not None:
        parts[known.ahead] = nn.LayerNorm(CHANNELS)
    for part in parts.values():
        _fill(part, numbers)
    dropped = {name: nn.Identity() for name, part in held.items() if isinstance(part, nn.Dropout)}
    twin, x = unwatched_twin(module, _modules=parts | dropped), numbers(2, 9, CHANNELS)
    seen = torch.ones(2, 9, dtype=torch.bool)
    vars(twin)["training"] = False
    given: dict[str, Any] = {}
    if form is not None:
        seen[1, 6:] = False
        given[MASK] = seen if form == "tokens" else (seen[:, None] & seen[:, :, None])[:, None]

    def ours() -> Tensor:
        y = x if known.ahead is None else parts[known.ahead](x)
        first, second = F.linear(y, parts[FIRST].weight[..., 0], parts[FIRST].bias).chunk(2, -1)
        gated = (first * second.sigmoid() * seen[..., None]).mT
        behind = LENGTH - 1 if held[CONVOLUTION].padding == (0,) else LENGTH // 2
        rows = F.pad(gated, (behind, LENGTH - 1 - behind))
        y = F.conv1d(rows, parts[CONVOLUTION].weight, parts[CONVOLUTION].bias, groups=CHANNELS)
        norm = parts[known.behind]
        y = norm(y).mT if isinstance(norm, nn.BatchNorm1d) else norm(y.mT)
        y = PLAIN_ACTIVATIONS[known.activation](y)
        return F.linear(y, parts[LAST].weight[..., 0], parts[LAST].bias)

    return agree(lambda: kind.forward(twin, x, **given), ours, Tolerance(of_largest=1e-5))


@torch.no_grad()
def _fill(part: nn.Module, numbers: RandomNumbers) -> None:
    part.eval()
    for tensor in [*part.parameters(), *part.buffers()]:
        if tensor.is_floating_point():
            tensor.copy_(
                numbers(*tensor.shape).abs() * 0.5 + 0.1 if tensor.ndim == 1 else numbers(*tensor.shape) * 0.5
            )


def _product(record: Any, module: Any) -> nn.Module:
    """Return the linear layer that a convolution over single rows is, of which QuantConvolution holds one."""
    inner: nn.Module | None = module._modules.get("linear")
    if inner is None:
        return module  # type: ignore[no-any-return]
    record.visit(module)
    record.note(module._modules, "linear", inner)
    return inner


def recorded_convolution(
    record: Any, known: tuple[nn.Module, RowConvolution], x: Any, attention_mask: Any = None
) -> StandIn:
    """Record a module of a Conformer that convolves; return the result of its last product."""
    module, parts = known
    own, held = vars(module), vars(module)["_modules"]
    note_parts(record, module)
    for name, part in held.items():
        if name not in POINTWISE:
            record.visit(part)
        for setting, value in vars(part).items():
            if not setting.startswith("_"):
                record.note(vars(part), setting, value)
    record.note(held, ACTIVATION, held.get(ACTIVATION))
    record.note(own, ACTIVATION, own.get(ACTIVATION))
    if any(part.training for part in held.values()):
        raise UntraceableError("it drops numbers at random, or has a norm of the batch")
    require(x, heads=False)
    mask = record.mask if parts.mask == "pairs" else record.given.get(ROW_MASK)
    if attention_mask is not None and attention_mask is not mask:
        raise UntraceableError("it convolves in a way of its own")
    x = x if parts.ahead is None else record.layer_norm(held[parts.ahead], x)
    first, second = record.linear(_product(record, held[FIRST]), x).parts(2)
    width = first.width
    gated = record.put("gate", [second, first], width, activation="sigmoid", heads=1, dim=width)
    masked, convolution, norm = attention_mask is not None, held[CONVOLUTION], held[parts.behind]
    values = {"read": read_row_mask, "dim": width, "value_dim": width, "before": parts.before, "masked": masked}
    if isinstance(norm, nn.BatchNorm1d):
        values |= {"activation": parts.activation}
        out = record.put("row_conv", [gated], width, modules=(convolution, norm), **values)
    else:
        out = record.put("row_conv", [gated], width, modules=(convolution,), **values)
        out = record.layer_norm(norm, out)
        out = record.put("gate", [out], width, activation=parts.activation, heads=1, dim=width)
    last: StandIn = record.linear(_product(record, held[LAST]), out)
    return last


def read_row_mask(operation: Operation, layout: Any, said: Said, tensors: Any) -> Any:
    rows = said(ROW_MASK) if operation.values["masked"] else None
    return tensors if rows is None or layout.shows(rows) else None


CONVOLUTION_MODULES = KnownModule(row_convolution, recorded_convolution, inputs=(ROW_MASK,), products=POINTWISE)
