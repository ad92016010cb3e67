"""The experts of a mixture with quantized weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Activations
from ..errors import UnsupportedError
from ..kernels.cpu.mixture import mixture
from .backends.backend import Backend, GroupedExperts, LinearSpec
from .backends.reference import differentiable_linear
from .backends.registry import BackendChoice
from .formats import QuantizedWeight, state, zeros
from .formats.blocks import Blocks
from .gates import KnownGate, activated, takes
from .layer import QuantModule
from .replacement import Replacement

# The parameters of transformers' fused experts, and the names of the modules that hold them quantized. These names are
# others, because transformers cuts and renames what is called like the parameters while it saves and loads.
WEIGHT_MODULES = {"gate_up_proj": "quantized_gate_up", "up_proj": "quantized_up", "down_proj": "quantized_down"}


@dataclass(eq=False)
class PackedExperts:
    """parts: each expert's weight, packed. call: over all of them, None if the backend has none."""

    parts: list[Any]
    call: GroupedExperts | None = field(compare=False)

    @classmethod
    def of(cls, backend: Backend, parts: Sequence[Any]) -> PackedExperts:
        call = backend.experts(parts)
        return cls(list(parts) if call is None else call.parts, call)


class ExpertWeights(QuantModule):
    """One weight [out, in] of each of several experts, stored as one [experts * out, in], packed one by one."""

    plural = "weights of experts"

    def __init__(
        self, weight: QuantizedWeight, experts: int, *, activations: Activations, backend: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """dtype: of the activations; None: the scales'."""
        self._describe(LinearSpec.of_stored(weight, activations, dtype), backend)
        self.experts = experts
        self._buffers.update(state(weight))

    @classmethod
    def from_packed(cls, packed: Sequence[Any], *, choice: BackendChoice, backend: str = "auto") -> ExpertWeights:
        """Over what `choice.backend.quantize` made of each expert's weight, of `choice.spec`."""
        layer = cls.__new__(cls)
        layer._describe(replace(choice.spec, out_features=len(packed) * choice.spec.out_features), backend)
        layer.experts, layer.choice, layer._packed = len(packed), choice, PackedExperts.of(choice.backend, packed)
        layer.row_invariant = choice.row_invariant
        return layer

    @classmethod
    def empty(cls, spec: LinearSpec, experts: int, *, blocks: bool = False) -> ExpertWeights:
        """Zeros, unpacked, to load a checkpoint into. spec: of one expert. blocks: as in QuantLinear.empty."""
        shape = (experts * spec.out_features, spec.in_features)
        if blocks:
            layer = cls.__new__(cls)
            layer._describe(replace(spec, out_features=shape[0]), "auto")
            layer.experts = experts
            return layer.expect_blocks(spec.layout, spec.device_type)
        weight = zeros(spec.layout, shape, dtype=spec.dtype, device=spec.device_type)
        return cls(weight, experts, activations=spec.activations, dtype=spec.dtype)

    @property
    def bias(self) -> None:
        """Biases belong to the experts' module."""

    @property
    def spec(self) -> LinearSpec:
        """The spec of the stored weight."""
        if self.choice is None:
            return super().spec
        return replace(self.choice.spec, out_features=self.out_features)

    @property
    def packed_spec(self) -> LinearSpec:
        """The spec of one expert's weight."""
        return replace(self.spec, out_features=self.out_features // self.experts)

    def _pack(self, choice: BackendChoice, weight: QuantizedWeight) -> Any:
        return PackedExperts.of(choice.backend, [choice.backend.pack(p) for p in parts_of(weight, self.experts)])

    def _unpack(self, choice: BackendChoice) -> QuantizedWeight:
        made: QuantizedWeight = self.kind.joined([choice.backend.unpack(packed) for packed in self._packed.parts])
        return made

    def _adopt(self, choice: BackendChoice, blocks: Blocks) -> PackedExperts | None:
        shape = (choice.spec.out_features, self.in_features)
        parts = [choice.backend.adopt(part, choice.spec.layout, shape) for part in blocks.parts(self.experts)]
        return None if None in parts else PackedExperts.of(choice.backend, parts)

    def _to_blocks(self) -> Blocks | None:
        if self.choice is None:
            return None
        parts = [self.choice.backend.blocks(packed) for packed in self._packed.parts]
        return None if None in parts else Blocks.joined([part for part in parts if part is not None])

    def forward(self, x: Tensor, expert: int, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] -> [rows, out] of one expert, in the dtype of the activations. bias: [out]."""
        choice = self.choice or self.pack().chosen
        rows, packed = x.to(choice.spec.dtype).contiguous(), self._packed.parts[expert]
        if torch.is_grad_enabled() and (rows.requires_grad or (bias is not None and bias.requires_grad)):
            out: Tensor = differentiable_linear(rows, bias, choice.backend, packed)
        else:
            out = choice.backend.run(rows, packed, bias)
        return out

    def runs_together(self, x: Tensor) -> bool:
        """Return whether `together` may replace calls of this module with parts of x, which no hook must see."""
        choice = self.choice or self.pack().chosen
        call, seen = self._packed.call, self._forward_pre_hooks or self._forward_hooks
        return call is not None and call.serves(x) and choice.spec.dtype is x.dtype and not seen

    def together(self, x: Tensor, starts: Tensor, biases: Tensor | None) -> Tensor:
        """x [rows, in] -> [rows, out] of all experts in one call. starts, biases: see `GroupedExperts.run`."""
        out: Tensor = self._packed.call.run(x, starts, biases)
        return out

    def native(self, biases: Tensor | None) -> Any:
        """Return the weights as `kernels.cpu.mixture` reads them, where `runs_together`; None if it cannot."""
        return self._packed.call.native(biases)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weights, [experts, out, in]."""
        weight = self.quantized.dequantize(dtype)
        return weight.view(self.experts, -1, self.in_features)

    def _shared(self) -> PackedExperts:
        shared: PackedExperts = replace(self._packed, call=copy.copy(self._packed.call))
        return shared

    def extra_repr(self) -> str:
        backend = self.choice.backend.name if self.choice else "not packed"
        shape = f"in_features={self.in_features}, out_features={self.out_features // self.experts}"
        return f"experts={self.experts}, {shape}, {self.layout}, backend={backend}"


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module has the weights of fused experts, [experts, out, in] or [experts, in, out]."""
    weights = [module._parameters.get(name) for name in WEIGHT_MODULES]
    return module._parameters.get("down_proj") is not None and all(w is None or w.dim() == 3 for w in weights)


class QuantExperts(Replacement, nn.Module):
    """Stands for fused experts of transformers: the same settings, activation and biases, with quantized weights.

    Called like these: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden].
    An expert's results have the bits of a QuantLinear with its weight, if the backend is row-invariant. They are
    weighted and added up as by transformers' grouped_mm, k numbers at a time, in the dtype of results times weights.
    """

    has_gate: bool
    num_experts: int

    def __init__(self, original: nn.Module, weights: Mapping[str, ExpertWeights]) -> None:
        """original: accepted by `experts_refusal`. weights: by the names of the parameters that they replace."""
        super().__init__()
        own = vars(self)
        vars(self).update({name: value for name, value in vars(original).items() if name not in own})
        self.original_class, self._gate = type(original), KnownGate()
        self._modules.update(original._modules)
        self._parameters.update({name: p for name, p in original._parameters.items() if name not in weights})
        for name, weight in weights.items():
            self.add_module(WEIGHT_MODULES[name], weight)
        self.train(original.training)

    @property
    def weights(self) -> dict[str, ExpertWeights]:
        """By the names of the parameters that they replace."""
        found = {name: self._modules.get(module) for name, module in WEIGHT_MODULES.items()}
        return {name: cast(ExpertWeights, module) for name, module in found.items() if module is not None}

    @property
    def compute_dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        up, down = self.weights.items()
        is_one_call = all(held.runs_together(hidden_states) for _, held in (up, down))
        if is_one_call and takes(hidden_states, top_k_index, top_k_weights):
            calls = up[1].native(self._biases(up[0])), down[1].native(self._biases(down[0]))
            gate = None if None in calls else self._gate.of(self, self.original_class)
            if gate is not None:
                return mixture(calls, gate, hidden_states, (top_k_index, top_k_weights))

        def compute(rows: Tensor, starts: Tensor) -> Tensor:
            if is_one_call:
                hidden = activated(self, self.original_class, up[1].together(rows, starts, self._biases(up[0])))
                return down[1].together(hidden, starts, self._biases(down[0]))
            return one_by_one(rows, starts, expert)

        def expert(index: int, rows: Tensor) -> Tensor:
            hidden = self._product(up, index, rows)
            return self._product(down, index, activated(self, self.original_class, hidden))

        return grouped(hidden_states, top_k_index, top_k_weights, experts=self.num_experts, compute=compute)

    def _biases(self, name: str) -> Tensor | None:
        held = self._parameters.get(f"{name}_bias")
        if held is None and vars(self).get("has_bias"):  # prune and parametrize take away what they compute
            held = getattr(self, f"{name}_bias")
        return held

    def _product(self, named: tuple[str, ExpertWeights], index: int, rows: Tensor) -> Tensor:
        name, weights = named
        biases = self._biases(name)
        out: Tensor = weights(rows, index, None if biases is None else biases[index])
        return out

    def original(self, *, device: str | None = None) -> nn.Module:
        made = self.original_class.__new__(self.original_class)
        nn.Module.__init__(made)
        own = vars(made)
        skipped = {*own, "original_class", "_gate"}
        own.update({name: value for name, value in vars(self).items() if name not in skipped})
        made._modules.update({n: m for n, m in self._modules.items() if n not in WEIGHT_MODULES.values()})
        for name, weights in self.weights.items():
            shape = (weights.experts, weights.out_features // weights.experts, weights.in_features)
            empty = torch.empty(shape, dtype=weights.dtype, device="meta")
            dense = empty if device == "meta" else weights.dense(weights.dtype)
            if getattr(self, "is_transposed", False):
                dense = dense.transpose(1, 2).contiguous()
            made._parameters[name] = nn.Parameter(dense, requires_grad=False)
        made._parameters.update(self._parameters)
        return made.train(self.training)


def grouped(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, experts: int,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Return the weighted sums of the results of each token's experts, [tokens, hidden] in the dtype of hidden_states.

    compute: gets the rows of the tokens, in the order of the experts that they chose, and where those of each expert
    start, int64 [experts + 1]; returns the experts' results for them.
    """
    tokens, top_k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    if not len(chosen):
        return torch.zeros_like(hidden_states)
    order = chosen.argsort(stable=True)
    if chosen.is_cuda:  # where bincount would wait for the GPU
        counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    else:
        counts = chosen.bincount(minlength=experts)
    if len(counts) > experts:
        raise UnsupportedError(f"expert {len(counts) - 1} was chosen, but there are {experts}")
    starts = F.pad(counts.cumsum(0), (1, 0))
    found = compute(hidden_states[order // top_k], starts)
    weighted = found[order.argsort()] * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def one_by_one(rows: Tensor, starts: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return the experts' results for the rows of `grouped`: each is called once, or not at all without rows."""
    parts = torch.split(rows, starts.diff().tolist())
    return torch.cat([expert(index, part) for index, part in enumerate(parts) if len(part)])


def parts_of(weight: QuantizedWeight, count: int) -> list[QuantizedWeight]:
    """Split a weight [count * out, in] into `count` weights [out, in]."""
    size = weight.shape[0] // count
    return [weight.part(slice(i * size, (i + 1) * size)) for i in range(count)]


def is_mixture(module: nn.Module) -> bool:
    """Return whether fused experts are among the parts of a module, which depends on its input alone."""
    return any(isinstance(part, QuantExperts) or holds_experts(part) for part in module.children())
