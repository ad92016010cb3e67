"""Find what a module of experts computes between its weights, by calling its code: the kernels compute it too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels.cpu.float_linear import FloatExperts
from ..kernels.cpu.library import FLOATS, native, refusal
from ..kernels.cpu.mixture import Gate, mixture
from ..recognition.trial import PLAIN_ACTIVATIONS, RandomNumbers, Tolerance, agree
from ..recognition.unchanged import PLAIN_TYPES, Read, Reads, is_unobserved, replaced_in

INNER = 24  # numbers of an expert in a trial
IMPLEMENTATION = "_experts_implementation_internal"  # what transformers sets to let experts run by other code
EXPERTS_FORWARDS = (None, "eager", "batched_mm", "grouped_mm")  # those that compute the same


class KnownGate:
    """The Gate of a module of experts, None if it is none; it is tried again when something has changed that it read.

    A copy or a pickle has tried nothing.
    """

    def __init__(self) -> None:
        self._gate: Gate | None = None
        self._reads: Reads | None = None
        self._parts: list[nn.Module] = []

    def of(self, module: nn.Module, kind: type[nn.Module]) -> Gate | None:
        """Return the gate of a module with the code of the class `kind`; None if a hook wants its activation."""
        if self._reads is None or not self._reads.hold():
            self._parts = list(module._modules.values())  # type: ignore[arg-type]
            self._reads = Reads(_reads(module))
            known = _is_known(module) and replaced_in([module, *self._parts]) is None and refusal() is None
            self._gate = tried_gate(module, kind) if known else None
        return self._gate if all(map(is_unobserved, self._parts)) else None

    def __reduce__(self) -> Any:
        return KnownGate, ()


def takes(x: Tensor, chosen: Tensor, scores: Tensor) -> bool:
    """Return whether `mixture` may stand for torch's operators on these."""
    shapes = x.ndim == 2 and chosen.ndim == 2 and chosen.shape == scores.shape and len(chosen) == len(x)
    return shapes and chosen.dtype is torch.int64 and scores.dtype in FLOATS and native(x)


def activated(module: nn.Module, kind: type[nn.Module], hidden: Tensor) -> Tensor:
    """Apply the activation of the experts' class `kind` to the result of its first weights, with the settings of
    `module`.
    """
    made: Any = cast(Any, kind)._apply_gate(module, hidden) if module.has_gate else cast(Any, module).act_fn(hidden)
    return cast(Tensor, made)


def tried_gate(module: nn.Module, kind: type[nn.Module]) -> Gate | None:
    """Return the gate that gives what the code of `kind` gives, on random numbers that reach beyond its limits."""
    for gate in _candidates(module):
        x = RandomNumbers()(64, gate.width * INNER) * 5
        same = agree(
            lambda x=x: activated(module, kind, x.clone()),  # type: ignore[misc]
            lambda gate=gate, x=x: _by_kernel(gate, x),  # type: ignore[misc]
            Tolerance(relative=1e-5, absolute=1e-4),
        )
        if same:
            return gate
    return None


def _is_known(module: nn.Module) -> bool:
    """Return whether the module's experts are computed by code of transformers that computes what `mixture` does."""
    config = vars(module).get("config")
    return config is None or vars(config).get(IMPLEMENTATION) in EXPERTS_FORWARDS


def _candidates(module: nn.Module) -> Iterator[Gate]:
    has_gate = bool(getattr(module, "has_gate", False))
    yield from (Gate(int(has_gate), name) for name in PLAIN_ACTIVATIONS)
    alpha, limit = vars(module).get("alpha"), vars(module).get("limit")
    if has_gate and isinstance(alpha, float | int) and isinstance(limit, float | int):
        yield Gate(2, alpha=alpha, limit=limit)


def _by_kernel(gate: Gate, x: Tensor) -> Tensor:
    """Compute the gate by one expert whose weights change nothing."""
    wide, inner = (FloatExperts(torch.eye(size, device="cpu")[None], None) for size in (x.shape[1], INNER))
    chosen, scores = torch.zeros(len(x), 1, dtype=torch.int64, device="cpu"), torch.ones(len(x), 1, device="cpu")
    return mixture((wide, inner), gate, x, (chosen, scores))


def _reads(module: nn.Module) -> Iterator[Read]:
    """Yield what the code of experts may read besides weights: settings, and the activation with its own."""
    for each in (module, *(part for part in module._modules.values() if part is not None)):
        own = vars(each)
        yield Read(each, "__class__", type(each))
        yield from (Read(own, name, value) for name, value in own.items() if isinstance(value, PLAIN_TYPES))
    yield from (Read(module._modules, name, part) for name, part in module._modules.items())
    config = vars(module).get("config")
    if config is not None:
        yield Read(vars(config), IMPLEMENTATION, vars(config).get(IMPLEMENTATION))
