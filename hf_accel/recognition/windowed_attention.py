"""Recognition of attention to the tokens near a query on both sides (Beltagy et al. 2020, "Longformer", arXiv
2004.05150): its code is tried against the formula, as long as no token sees all others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tensors import PLAIN
from ..undo.journal import original_class
from .call_form import MASK
from .gated_bias import small_linear
from .known_module import KnownModule, Said, TokenPlaces, note_parts, tried
from .operation import Operation, UntraceableError
from .stand_ins import StandIn, require
from .symbols import BATCH, TOKENS
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

PROJECTIONS = ("query", "key", "value")
OF_GLOBAL = tuple(f"{name}_global" for name in PROJECTIONS)  # for tokens that see all others
HIDDEN, GLOBAL, ANY_GLOBAL = "is_index_masked", "is_index_global_attn", "is_global_attn"
SIDE, CONFIG = "one_sided_attn_window_size", "config"
WINDOW_SETTINGS: dict[str, Any] = {
    "num_heads": 2,
    "head_dim": 8,
    "embed_dim": 16,
    "dropout": 0.0,
    SIDE: 2,
    "training": False,
}
EXPORT = "onnx_export"  # a setting of a config that changes the code


def attends_in_windows(module: nn.Module) -> bool:
    """Return whether a module attends to the tokens within a distance of each, where none sees all others."""
    own, kind = vars(module), original_class(module)
    if own["_modules"].keys() != {*PROJECTIONS, *OF_GLOBAL} or own["_parameters"] or own["_buffers"]:
        return False
    if not own.keys() >= {*WINDOW_SETTINGS, CONFIG} or getattr(own[CONFIG], EXPORT, False):
        return False
    methods = tuple(value for name, value in vars(kind).items() if name.startswith("_") and callable(value))
    return tried((kind, kind.forward, methods), lambda: all(_agrees(module, tokens) for tokens in (12, 4)))


def _agrees(module: nn.Module, tokens: int) -> bool:
    """Return whether the code computes the formula for so many tokens, with small weights, some of them padding."""
    kind, numbers = original_class(module), RandomNumbers()
    linears = {name: small_linear(numbers, 16, 16) for name in (*PROJECTIONS, *OF_GLOBAL)}
    twin = unwatched_twin(module, _modules=linears)
    twin.__dict__.update(WINDOW_SETTINGS)
    x, last = numbers(2, tokens, 16), tokens // 2 + 1
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, last:] = False
    mask = torch.zeros(2, tokens).masked_fill(~real, torch.finfo(torch.float32).min)

    def at_tokens(out: Tensor) -> tuple[Tensor, Tensor]:
        return out[0], out[1, :last]

    def theirs() -> tuple[Tensor, Tensor]:
        given = {MASK: mask, HIDDEN: ~real, GLOBAL: mask > 0, ANY_GLOBAL: False}
        return at_tokens(kind.forward(twin, x, **given)[0])

    def ours() -> tuple[Tensor, Tensor]:
        q, k, v = (linears[name](x).unflatten(-1, (2, 8)).transpose(1, 2) for name in PROJECTIONS)
        places = torch.arange(tokens)
        near = (places[:, None] - places).abs() <= WINDOW_SETTINGS[SIDE]
        scores = (q @ k.mT / 8**0.5).masked_fill(~(near & real[:, None, None]), torch.finfo(torch.float32).min)
        return at_tokens((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))

    return agree(theirs, ours, Tolerance(of_largest=1e-5))


def recorded_windows(
    record: Any, known: tuple[nn.Module, bool], x: Any, attention_mask: Any = None, **given: Any
) -> tuple[StandIn]:
    """Record the attention of a module that `attends_in_windows`; return what its code does."""
    (module, _), own, held = known, vars(known[0]), vars(known[0])["_modules"]
    note_parts(record, module)
    record.note(vars(own[CONFIG]), EXPORT, vars(own[CONFIG]).get(EXPORT))
    passed = {name: given.pop(name, None) for name in (HIDDEN, GLOBAL)}
    if given.pop(ANY_GLOBAL, None):
        raise UntraceableError("some of its tokens see all others")
    same = all(each is not None and each is record.given.get(name) for name, each in passed.items())
    if not same or any(given.values()) or attention_mask is not record.mask or (own["training"] and own["dropout"]):
        raise UntraceableError("it attends in a way of its own")
    require(x, heads=False)
    heads, dim = own["num_heads"], own["head_dim"]
    q, k, v = (record.linear(held[name], x).view(BATCH, TOKENS, heads, dim).transpose(1, 2) for name in PROJECTIONS)
    options = {"scaling": dim**-0.5, "is_causal": False, "sliding_window": own[SIDE] + 1}
    values = {"options": options, "masked": True, "places": TokenPlaces(_of_zeros), "read": read_hidden}
    attended = record.attend_to_all((q, k, v), options["scaling"], **values)
    return (attended.view(BATCH, TOKENS, heads * dim),)


def _of_zeros(mask: Any, batch: int, tokens: int) -> Tensor | None:
    """Return the places where a mask [B, T] is 0, bool [B, T]; None if it has another form, or positive numbers."""
    known = type(mask) in PLAIN and mask.is_cpu and mask.shape == (batch, tokens) and mask.is_floating_point()
    return mask == 0 if known and not bool((mask > 0).any()) else None


def read_hidden(operation: Operation, layout: Any, said: Said, tensors: Any) -> Any:
    """Look whether the rows that the code makes zeros are those of padding alone."""
    hidden = said(HIDDEN)
    return tensors if type(hidden) in PLAIN and hidden.dtype is torch.bool and layout.shows(~hidden) else None


WINDOW_MODULES = KnownModule(
    attends_in_windows, recorded_windows, inputs=(HIDDEN, GLOBAL), attends=True,
    others="tokens that see all others",
)  # fmt: skip
