"""The experts of a mixture with float weights, read in place: those that tokens chose, in one native call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..kernels.cpu.float_linear import FloatExperts
from ..kernels.cpu.library import FLOATS
from ..kernels.cpu.mixture import mixture
from ..linear.experts import WEIGHT_MODULES
from ..linear.gates import KnownGate, takes
from ..tensors import is_plain_tensor
from ..undo.journal import Mixin, original_class
from ..undo.state import FUSED


class ExpertsState:
    """The native call of one module of experts, made again when its weights are others.

    rows: the most rows of an expert, on average, that are multiplied natively. A copy or a pickle starts without the
    call, which holds addresses.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.gate = KnownGate()
        self._held: list[Tensor | None] = []
        self._weights: tuple[FloatExperts, FloatExperts] | None = None

    def weights_for(self, module: nn.Module, x: Tensor, choices: int) -> tuple[FloatExperts, FloatExperts] | None:
        """Return both weights for so many choices of the tokens x; None if torch is to multiply by them."""
        own = module._parameters
        names = [name for name in WEIGHT_MODULES if name in own]
        held: list[Tensor | None] = [own.get(name) for each in names for name in (each, f"{each}_bias")]
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            self._held, self._weights = held, _made(module, held)
        if self._weights is None or self._weights[0].weights.dtype is not x.dtype:
            return None
        up, down = self._weights
        if not (up.is_current() and down.is_current() and up.in_features == x.shape[1]):
            return None
        return self._weights if choices <= self.rows * up.count else None

    def __reduce__(self) -> Any:
        return ExpertsState, (self.rows,)


def _made(module: nn.Module, held: list[Tensor | None]) -> tuple[FloatExperts, FloatExperts] | None:
    tensors = [tensor for tensor in held if tensor is not None]
    plain = all(is_plain_tensor(t) and t.is_cpu and t.is_contiguous() and t.dtype in FLOATS for t in tensors)
    if not plain or len(held) != 4 or held[0] is None or held[2] is None or held[0].dtype is not held[2].dtype:
        return None
    if bool(vars(module).get("has_bias")) is not (held[1] is not None and held[3] is not None):
        return None  # prune and parametrize take away what they compute
    by_inputs = bool(vars(module).get("is_transposed"))
    return (
        FloatExperts(held[0], held[1], by_inputs=by_inputs),
        FloatExperts(held[2], held[3], by_inputs=by_inputs),
    )


class NativeExperts(Mixin):
    """A mixin for a module of experts, whose forward is that of transformers' experts interface."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden]."""
        if len(args) == 3 and not kwargs and takes(*args):
            state: ExpertsState = self.__dict__[FUSED]
            weights = state.weights_for(self, args[0], args[1].numel())  # type: ignore[arg-type]
            gate = None if weights is None else state.gate.of(self, original_class(self))  # type: ignore[arg-type]
            if weights is not None and gate is not None:
                return mixture(weights, gate, args[0], args[1:])
        return super().forward(*args, **kwargs)  # type: ignore[misc]
