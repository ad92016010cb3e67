"""The forwards that patch() gives to norms, attention modules and MLPs: a native call, or the original forward."""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from ..kernels.cpu.library import native
from ..recognition.unchanged import is_unobserved
from ..tensors import PLAIN
from ..undo.journal import Mixin
from ..undo.state import FUSED
from .forms import (
    ACTIVATIONS,
    ROTATION,
    GatedNames,
    NormForm,
    Rotation,
    computes,
    form_of_rotation,
    gated,
    norm_form,
    rms_norm,
    rope,
    with_rotation,
)
from .projections import Pending, is_bare_linear

# -- norms ---------------------------------------------------------------------------------------------


class NormForms:
    """The form of one norm for each dtype, since a form that fits in float32 need not fit in bfloat16.

    None: no form fits.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], NormForm | None] = {}
        self._pending: Pending | None = None

    def form(self, module: nn.Module, kind: type, x: Tensor) -> NormForm | None:
        """Return the form of `module`, whose class was `kind`, for inputs like x [..., n]; it is found at the first
        call.
        """
        own = module.__dict__
        weight = own["_parameters"].get("weight")  # None where it is computed: prune, parametrize
        if weight is None or x.shape[-1:] != weight.shape or weight.device != x.device:
            return None
        key = x.dtype, weight.dtype, x.device.type, own.get("variance_epsilon") or own.get("eps")
        if key not in self._known:
            self._known[key] = norm_form(module, kind, dtype=x.dtype)
        return self._known[key]

    def leave(self, x: Tensor, normed: Tensor) -> None:
        """Keep the norm of x, which was computed with x, until the module is called. torch counts the writes to x."""
        self._pending = Pending(x, x._version, {0: normed})

    def take(self, x: Tensor) -> Tensor | None:
        """Return the norm that was left for x; None if x is another tensor, or was written to since."""
        pending, self._pending = self._pending, None
        if pending is None or pending.x is not x or pending.version != x._version:
            return None
        return pending.results[0]

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_pending": None}


class NativeNorm(Mixin):
    """Is mixed into an RMSNorm: one native call instead of six operators."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and computes(args[0]):
            own, x = self.__dict__, args[0]
            left = own[FUSED].take(x)
            if left is not None:
                return left
            form = own[FUSED].form(self, self.original_class, x)
            if form is not None:
                weight = own["_parameters"]["weight"]
                return rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


# -- rotations -----------------------------------------------------------------------------------------


class NativeRotary(Mixin):
    """Is mixed into an attention module: its rotation is one native call.

    The original forward runs unchanged, except for the name `apply_rotary_pos_emb`, which it finds in globals of its
    own: a copy of its function with our rotation under that name. Neither the class nor its module is touched.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # a compiler could not follow into a function that was made here
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return _rewritten(self.original_class)(self, *args, **kwargs)


@lru_cache(maxsize=256)
def _rewritten(original: type) -> FunctionType:
    """Return the class's forward with our rotation, which calls the original one where ours does not apply."""
    forward: Any = original.forward  # type: ignore[attr-defined]
    stock: Rotation = forward.__globals__[ROTATION]

    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _is_usual(*args):
            q, k, cos, sin = args
            # A form that rounds as stock does in one dtype need not in another, which a patched model can be given.
            form = form_of_rotation(stock, q.dtype, cos.dtype, q.device.type)
            if form is not None:
                return rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each)
        return stock(*args, **kwargs)

    return with_rotation(forward, rotate)


def _is_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether these are what the form was tried on: whole heads, and a row of the tables for each token."""
    if not (computes(q) and type(k) in PLAIN and type(cos) in PLAIN and type(sin) in PLAIN):
        return False
    if not (k.device == cos.device == sin.device == q.device and q.ndim == k.ndim == 4 and cos.ndim == 3):
        return False
    batch, _, tokens, size = q.shape
    return (
        q.dtype is k.dtype
        and cos.dtype is sin.dtype
        and k.shape[0] == batch
        and k.shape[2:] == q.shape[2:]
        and cos.shape == sin.shape
        and cos.shape[0] in (1, batch)
        and cos.shape[1:] == (tokens, size)
        and q.stride(-1) == k.stride(-1) == 1
        and q.numel() > 0
    )


# -- gated MLPs ----------------------------------------------------------------------------------------


class NativeGatedMLP(Mixin):
    """Is mixed into down(act(gate(x)) * up(x)): gate, up and the activation are one native call.

    Adapters or hooks on its parts bring the original forward back.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x [..., in] -> [..., in]."""
        if len(args) == 1 and not kwargs and native(args[0]):
            own, x = self.__dict__, args[0]
            parts: GatedNames = own[FUSED]
            modules: dict[str, nn.Module] = own["_modules"]
            gate, up = modules[parts.gate], modules[parts.up]
            if is_bare_linear(gate) and is_bare_linear(up) and _is_held(parts.activation, own):
                call = parts.call.ready((gate, up), x)
                if call is not None:
                    hidden = call(x.reshape(-1, x.shape[-1]))
                    return modules[parts.down](hidden.view(*x.shape[:-1], -1))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class FusedGate(Mixin):
    """Is mixed into down(act(gate(x)) * up(x)): the activation and the product are one call. The linears are called.

    For GPUs, where a linear layer is a kernel of its own anyway.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x [..., in] -> [..., in]."""
        if len(args) == 1 and not kwargs and computes(args[0]):
            own = self.__dict__
            parts: GatedNames = own[FUSED]
            if _is_held(parts.activation, own):
                modules: dict[str, nn.Module] = own["_modules"]
                gate, up, name = modules[parts.gate](args[0]), modules[parts.up](args[0]), str(parts.call.epilogue)
                return modules[parts.down](gate_and_multiply(gate, up, name))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def gate_and_multiply(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up, in one call if it takes these tensors. activation: a name of ACTIVATIONS."""
    if gate.dtype is up.dtype and gate.shape == up.shape and computes(gate) and type(up) in PLAIN:
        return gated(gate, up, activation=activation)
    return ACTIVATIONS[activation](gate) * up


def _is_held(activation: tuple[str, Any] | None, own: dict[str, Any]) -> bool:
    """Return whether the activation is unchanged since it was tried, and has no hooks."""
    if activation is None:
        return True
    name, tried = activation
    if isinstance(tried, nn.Module):
        return own["_modules"].get(name) is tried and is_unobserved(tried)
    return own.get(name) is tried
