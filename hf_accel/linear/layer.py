"""A Linear whose weight is quantized."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..config import Activations
from ..errors import UnsupportedError
from ..tensors import product_dtype
from . import layer_state
from .backends.backend import LinearSpec
from .backends.reference import differentiable_linear
from .backends.registry import BackendChoice, choose
from .changes import Changes
from .formats import FLOAT8, Layout, QuantizedWeight, kind_of, readable, state, zeros
from .formats.blocks import Blocks, tensors_of
from .methods.rtn import quantize_like
from .replacement import Replacement, empty_linear
from .writable import WritableWeight, nobody, plain

SHARED = ("choice", "_input_order", "row_invariant", "finds_rows", "activations", "experts", "writes")  # by siblings


class QuantModule(nn.Module):
    """Holds a quantized weight [out, in] once: packed for a backend, or as buffers that a checkpoint is loaded into.

    state_dict, pickle and deepcopy carry the stored form either way. `.to(dtype)` converts the scales and never the
    integers; the backend is chosen and packed for again.
    """

    plural = "linears"  # by which the plan counts such layers
    multiplies = True  # whether inputs are multiplied by the weight; from a table rows are looked up alone
    experts = 1  # whose weights are stored one after the other
    in_features: int
    out_features: int
    kind: type[Any]  # of the stored weight
    dtype: torch.dtype  # of the activations
    activations: Activations
    requested_backend: str
    row_invariant: bool  # whether a row-invariant backend was asked for
    finds_rows: bool  # whether an embedding looks its rows up in it
    choice: BackendChoice | None
    _packed: Any
    _input_order: Tensor | None  # of the packed weight
    part: layer_state.RankPart | None  # which one this is, if other processes hold the others
    writes: int  # times that another weight was put into it
    changes: Changes  # what was added to the weight and not taken out again
    _lent: Callable[[], WritableWeight | None]  # graphs look at plain values, None too: it is never one
    layout_of_blocks: Layout | None  # of the stored weight, while the buffers are blocks

    def _describe(self, spec: LinearSpec, backend: str) -> None:
        nn.Module.__init__(self)
        vars(self).update(  # all at once, since nn.Module looks at each attribute that is set alone
            in_features=spec.in_features, out_features=spec.out_features, kind=kind_of(spec.layout), dtype=spec.dtype,
            activations=spec.activations, requested_backend=backend, row_invariant=False, finds_rows=False,
            choice=None, _packed=None, _input_order=None, part=None, writes=0, changes=Changes(), _lent=nobody,
            layout_of_blocks=None,
        )  # fmt: skip

    def sibling(self, memo: dict[int, Any] | None = None) -> Self:
        """Make a second layer over the same packed weight, to which neither ever writes. memo: as deepcopy's."""
        self.pack()
        made = type(self).__new__(type(self))
        made._describe(self.spec, self.requested_backend)
        vars(made).update({name: vars(self)[name] for name in SHARED if name in vars(self)})
        made._packed, made.changes = self._shared(), self.changes.shared()
        made._parameters.update(copy.deepcopy(self._parameters, memo))
        return made

    def _shared(self) -> Any:
        return self._packed

    @property
    def held(self) -> WritableWeight | None:
        """The float copy of the weight that was lent, if somebody still holds it."""
        return None if self._lent is nobody else self._lent()

    def settle(self) -> None:
        """Take in what was written to the float copy without notice."""
        if (held := self.held) is not None:
            held.settle()

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight in its stored form; unpacked from the backend's form if it is packed."""
        self.settle()
        if self.choice is not None:
            weight = self._unpack(self.choice)
            return weight if self._input_order is None else weight.changed(input_order=self._input_order)
        return layer_state.not_packed(self)

    @property
    def layout(self) -> Layout:
        """The layout of the stored weight."""
        ordered = self._input_order is not None or self._buffers.get("input_order") is not None
        layout = self.spec.layout
        return replace(layout, ordered=True) if ordered else layout

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def spec(self) -> LinearSpec:
        """The spec for the choice of a backend, with the dtype and the device that the layer has now."""
        if self.choice is not None:
            return self.choice.spec
        return layer_state.spec_of_blocks(self) or LinearSpec.of_stored(self.quantized, self.activations, self.dtype)

    @property
    def packed_spec(self) -> LinearSpec:
        """The spec that the backend was chosen for."""
        return self.spec

    @property
    def chosen(self) -> BackendChoice:
        asked = {"row_invariant": self.row_invariant, "finds_rows": self.finds_rows}
        return self.choice or choose(self.packed_spec, self.requested_backend, **asked)

    def _pack(self, choice: BackendChoice, weight: QuantizedWeight) -> Any:
        return choice.backend.pack(weight)

    def _unpack(self, choice: BackendChoice) -> QuantizedWeight:
        return choice.backend.unpack(self._packed)

    def pack(self) -> Self:
        """Turn the buffers into the backend's form. The first forward calls it."""
        if self.choice is None:
            blocks, choice, order = layer_state.loaded_blocks(self), self.chosen, self._buffers.get("input_order")
            packed = None if blocks is None else self._adopt(choice, blocks)
            if packed is None:
                packed = self._pack(choice, self.unpack().quantized.changed(input_order=None))
            for name in layer_state.weight_names(self):
                del self._buffers[name]
            self._packed, self.choice, self._input_order, self.layout_of_blocks = packed, choice, order, None
        return self

    def _adopt(self, choice: BackendChoice, blocks: Blocks) -> Any:
        return choice.backend.adopt(blocks, choice.spec.layout, (self.out_features, self.in_features))

    def _to_blocks(self) -> Blocks | None:
        return None if self.choice is None else self.choice.backend.blocks(self._packed)

    def expect_blocks(self, layout: Layout, device: str) -> Self:
        """Get empty buffers that blocks are loaded into. layout: of the stored weight."""
        self.layout_of_blocks = layout
        self._buffers.update(tensors_of(layer_state.empty_blocks(self, layout=layout, device=device)))
        return self

    def unpack(self) -> Self:
        """Turn the backend's form, or blocks, into buffers of the stored form."""
        if self.choice is not None or self.layout_of_blocks is not None:
            layer_state.put_stored(self, self.quantized)
            self.choice = self._packed = self._input_order = self.layout_of_blocks = None
        return self

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Replace the weight by a float weight [out, in], rounded to nearest in the same format.

        Its own present weight is not rounded again, and what takes all changes back brings the very weight back that
        was there before. Raises UnsupportedError for another shape and for NaN and infinity, with the layer as it was.
        """
        if tuple(value.shape) != (self.out_features, self.in_features):
            raise UnsupportedError(
                f"a weight {list(value.shape)} cannot be written to a layer [{self.out_features}, {self.in_features}]"
            )
        stored = self.pack().quantized
        before = stored.dequantize(torch.float32)
        value = value.to(before.device, self.dtype)
        if torch.equal(value, before.to(self.dtype)):
            return
        weight = quantize_like(value, stored)
        weight = self.changes.note(value, before, stored=stored, dtype=self.dtype) or weight
        self.unpack()
        layer_state.put_stored(self, weight)  # rounded to nearest, it has zero points in place of minima
        self.pack()
        self.writes += 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        packed = self.choice is not None
        self.unpack()
        before = torch.empty(0, dtype=self.dtype, device=self._buffers["weight_scale"].device)  # type: ignore[union-attr]
        after = fn(before)
        self.dtype = after.dtype
        if (before.dtype, before.device) != (after.dtype, after.device):
            self.changes.forget()
            if self.held is not None:
                self.held.let_go()
        stored = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        kept = {name: t.dtype for name, t in stored.items() if t.dtype is FLOAT8 or name in self.kind.kept}
        self._buffers.update({name: stored[name].view(torch.uint8) for name in kept})  # else fn would convert them
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in kept.items():
            self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]
        return self.pack() if packed else self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        prefix = self._own_prefix(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.choice is not None:
            blocks = layer_state.writing.get().get(id(self))
            tensors = state(self.quantized) if blocks is None else tensors_of(blocks)
            destination.update({prefix + name: tensor for name, tensor in tensors.items()})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        packed = self.choice is not None
        self.unpack()
        given, prefix = prefix, self._own_prefix(prefix)
        wrong = layer_state.wrong_tensors(self.quantized, state_dict, given, prefix)
        error_msgs.extend(wrong)
        if not wrong:
            before = {name: tensor.clone() for name, tensor in self._buffers.items() if tensor is not None}
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            after = ((readable(tensor), self._buffers[name]) for name, tensor in before.items())
            if not all(new is not None and torch.equal(old, readable(new)) for old, new in after):
                self.writes += 1
                self.changes.note_other_weight()
                if self.held is not None:
                    self.held.refresh()
        if packed:
            self.pack()

    def _own_prefix(self, prefix: str) -> str:
        """The prefix of the names of its tensors. Parts of different ranks must not have the same names."""
        return prefix if self.part is None else f"{prefix}{self.part}."

    def __getstate__(self) -> dict[str, Any]:
        """Backends hold opaque tensors that cannot be copied; the stored form can."""
        others = {name: tensor for name, tensor in self._buffers.items() if name not in layer_state.weight_names(self)}
        stored = others | state(self.quantized)
        buffers = {name: None if tensor is None else readable(tensor) for name, tensor in stored.items()}
        layer_state.keep_for_child(buffers)
        packed = self.choice is not None
        bytewise = [name for name, tensor in stored.items() if tensor is not None and tensor.dtype is FLOAT8]
        gone = {"choice": None, "_input_order": None, "_lent": nobody, "layout_of_blocks": None}
        return self.__dict__ | {"_buffers": buffers, "_packed": packed, "_bytewise": bytewise, **gone}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        packed, buffers = attributes["_packed"], dict(attributes["_buffers"])
        for name in attributes.pop("_bytewise"):  # torch can write FP8 as a pickle and not read it
            buffers[name] = buffers[name].view(FLOAT8)
        super().__setstate__(attributes | {"_packed": None, "_buffers": buffers})  # type: ignore[no-untyped-call]
        if packed:
            self.pack()


class QuantLinear(QuantModule, Replacement, nn.Linear):
    """Computes x @ W^T + bias with W in INT8, FP8 or INT4; x [..., in] -> [..., out] in x's dtype, or autocast's.

    An nn.Linear, so that what looks for Linears (LoRA, hooks by type) finds it.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, *, activations: Activations, backend: str,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """dtype: of the activations; None: the scales'."""
        self._describe(LinearSpec.of_stored(weight, activations, dtype), backend)
        self._buffers.update(state(weight))
        self._set_bias(bias)

    def _set_bias(self, bias: Tensor | None) -> None:
        self.register_parameter("bias", bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias))

    @classmethod
    def from_packed(
        cls, packed: Any, bias: Tensor | None, *, choice: BackendChoice, backend: str = "auto",
        input_order: Tensor | None = None,
    ) -> Self:  # fmt: skip
        """A layer over what `choice.backend.quantize` made of a weight of `choice.spec`.

        A Parameter given as bias is kept as it is.
        """
        layer = cls.__new__(cls)
        layer._describe(choice.spec, backend)
        layer.choice, layer._packed, layer._input_order = choice, packed, input_order
        layer.row_invariant = choice.row_invariant
        layer._set_bias(bias)
        return layer

    @classmethod
    def empty(
        cls, spec: LinearSpec, *, bias: bool = False, ordered: bool = False, blocks: bool = False,
        backend: str = "auto",
    ) -> QuantLinear:  # fmt: skip
        """A layer of zeros, unpacked, to load a checkpoint into; `spec.device_type` may be "meta".

        ordered: whether the inputs of the stored weight have an order of their own. blocks: whether the checkpoint
        holds blocks; what these hold before is not defined.
        """
        shape, device, layout = (spec.out_features, spec.in_features), spec.device_type, spec.layout
        biases = torch.zeros(shape[0], dtype=spec.dtype, device=device) if bias else None
        if blocks:
            layer = cls.__new__(cls)
            layer._describe(spec, backend)
            layer._set_bias(biases)
            return layer.expect_blocks(replace(layout, ordered=True) if ordered else layout, device)
        weight = zeros(replace(layout, ordered=ordered), shape, dtype=spec.dtype, device=device)
        return cls(weight, biases, activations=spec.activations, backend=backend, dtype=spec.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.settle()
        choice = self.choice or self.pack().chosen
        rows = x.reshape(-1, self.in_features).to(choice.spec.dtype)
        rows = rows.contiguous() if self._input_order is None else rows.index_select(1, self._input_order)
        if torch.is_grad_enabled() and (rows.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            out: Tensor = differentiable_linear(rows, self.added_bias, choice.backend, self._packed)
        else:
            out = choice.backend.run(rows, self._packed, self.added_bias)
        return out.view(*x.shape[:-1], self.out_features).to(product_dtype(x))

    def packed_for(self, x: Tensor) -> Any:
        """Return the packed weight by which forward multiplies x [..., in] as it is; None if it changes x before."""
        self.settle()
        choice = self.choice or self.pack().chosen
        return self._packed if self._input_order is None and x.dtype is choice.spec.dtype else None

    @property
    def added_bias(self) -> nn.Parameter | None:
        """The tensor that forward adds to the product."""
        return self.bias

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight" or not isinstance(value, Tensor) or "weight" in self._buffers:
            super().__setattr__(name, value)
        elif isinstance(value, WritableWeight) and value.is_weight_of(self):
            self.changes.forget()  # PEFT does so where an adapter goes, and nothing will be taken out
        else:
            self.write(plain(value))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [out, in]: a copy, but writes to it go to `write`.

        It is one tensor for as long as somebody holds it, with the numbers that were written to it unrounded.
        """
        held = self.held
        if held is None or not held.is_weight_of(self):
            held = WritableWeight.of(self)
            self._lent = weakref.ref(held)  # torch.utils.swap_tensors refuses a tensor that has one
        return held

    def original(self, *, device: str | None = None) -> nn.Linear:
        made = empty_linear(self)
        if device is None:
            made._parameters.update(weight=nn.Parameter(self.quantized.dequantize(self.dtype)), bias=self.bias)
        return made.train(self.training)

    def extra_repr(self) -> str:
        backend = self.choice.backend.name if self.choice else "not packed"
        return f"{super().extra_repr()}, {self.layout}, backend={backend}"
