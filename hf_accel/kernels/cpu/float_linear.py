"""Linear layers with float weights. One call computes several layers with the same input, such as q, k and v."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .library import DTYPES, FLOATS, ExpertsCall, Linear, LinearCall, Matrix, epilogue_number, kernel, threads

_float_linear = kernel("float_linear", LinearCall)
_float_experts = kernel("float_experts", ExpertsCall)


class FloatLinear:
    """Computes x @ W.T + b for every weight, side by side; or act(gate) * up of two weights if it has an `epilogue`.

    weights: [N, K] each, contiguous, of one dtype of FLOATS; or [K, N] for x @ W + b, if `by_inputs`. biases: [N] of
    any of these dtypes, or None.
    epilogue: None, "silu", "gelu" (with erf) or "gelu_tanh". activation: None, or the name in structs.ACTIVATIONS of a
    function of each output, for any number of weights without an epilogue. Sums are in float32, and the result is
    rounded once, to the dtype of x. The bits of a row of the result depend neither on other rows nor on the number of
    threads.

    tile_rows: the fewest rows of bfloat16 that tiles multiply, on a CPU that has them (AMX). With more than 1, as in
    benchmarks, the bits of a row depend on whether there are as many, because tiles add in another order than vectors
    do; and tiles were as fast with one row, and faster from 4 on.

    The weights are not copied: each call reads them where they are. Raises UnsupportedError for weights that the
    kernel cannot read.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], epilogue: str | None = None, *,
        activation: str | None = None, tile_rows: int = 1, by_inputs: bool = False,
    ) -> None:  # fmt: skip
        number = epilogue_number(epilogue, activation)
        check_weights(weights, biases, epilogue, by_inputs=by_inputs)
        self.tile_rows, self.by_inputs = tile_rows, by_inputs
        self.weights = list(weights)
        self.biases = list(biases)
        self._epilogue = epilogue
        self._shapes = [tuple(weight.shape) for weight in weights]
        self._strides = [weight.stride() for weight in weights]
        sizes = [weight.shape[by_inputs] for weight in weights]
        self.out_features = sizes[0] if epilogue else sum(sizes)
        self.in_features = weights[0].shape[not by_inputs]
        self._matrices = (Matrix * len(sizes))()
        self._sources = [(m, "weight", t) for m, t in zip(self._matrices, self.weights, strict=True)]
        self._sources += [(m, "bias", t) for m, t in zip(self._matrices, self.biases, strict=True) if t is not None]
        self._pointers: list[int] = []
        for i, matrix in enumerate(self._matrices):
            matrix.out_features = sizes[i]
            matrix.column = 0 if epilogue else sum(sizes[:i])
        self._linear = Linear(0, 0, self.in_features, len(sizes), number, by_inputs, self._matrices)
        self._address = ctypes.addressof(self._linear)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, K] of a dtype of FLOATS. Returns [rows, N] of the same dtype, where N counts all outputs.

        Raises UnsupportedError if a gradient is needed.
        """
        if torch.is_grad_enabled() and (x.requires_grad or self._trains()):
            raise UnsupportedError("float linear: the kernel has no gradient; run it under torch.no_grad()")
        if x.stride(1) != 1:
            x = x.contiguous()
        address = self.address()
        rows, dtype = x.shape[0], DTYPES[x.dtype]
        out = x.new_empty(rows, self.out_features)
        _float_linear(
            address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.out_features, dtype, dtype, threads(),
            self.tile_rows,
        )  # fmt: skip
        return out

    def address(self) -> int:
        """The address of the C struct, which names the memory that weights and biases have now."""
        pointers = [tensor.data_ptr() for _, _, tensor in self._sources]
        if pointers != self._pointers:
            self._point(pointers)
        return self._address

    def has_shapes(self) -> bool:
        """Return whether its weights have the shapes, in the layouts, that they had when it was made."""
        layouts = zip(self.weights, self._shapes, self._strides, strict=True)
        return all(weight.shape == shape and weight.stride() == stride for weight, shape, stride in layouts)

    def _trains(self) -> bool:
        return any(tensor.requires_grad for _, _, tensor in self._sources)

    def _point(self, pointers: list[int]) -> None:
        """Update the pointers, because tensors have other memory than before. Their dtypes may have changed too.

        Raises UnsupportedError if their shapes have changed.
        """
        check_weights(self.weights, self.biases, self._epilogue, by_inputs=self.by_inputs)
        if [tuple(weight.shape) for weight in self.weights] != self._shapes:
            raise UnsupportedError(f"float linear: weights of another shape than when it was made, {self._shapes}")
        self._linear.format = DTYPES[self.weights[0].dtype]
        for matrix, bias in zip(self._matrices, self.biases, strict=True):
            matrix.bias_dtype = 0 if bias is None else DTYPES[bias.dtype]
        for (matrix, name, _), pointer in zip(self._sources, pointers, strict=True):
            setattr(matrix, name, pointer)
        self._pointers = pointers


class FloatExperts:
    """The weights of experts for `mixture`, of one dtype of FLOATS, which are read where they are.

    weights: [experts, out, in], contiguous; or [experts, in, out], if `by_inputs`. biases: [experts, out] of a dtype
    of FLOATS, the last stride 1, or None. Raises UnsupportedError for weights that the kernel cannot read.
    """

    tile_rows = 1  # as FloatLinear's: tiles of bfloat16 multiply any number of rows

    def __init__(self, weights: Tensor, biases: Tensor | None, *, by_inputs: bool = False) -> None:
        self.weights, self.biases, self.by_inputs = weights, biases, by_inputs
        self._shape = weights.shape
        self.count, self.out_features, self.in_features = weights.shape
        if by_inputs:
            self.out_features, self.in_features = self.in_features, self.out_features
        readable = weights.is_contiguous() and weights.dtype in FLOATS and weights.device.type == "cpu"
        held = biases is None or (biases.shape == (self.count, self.out_features) and biases.stride(1) == 1)
        if not readable or not held or not (biases is None or biases.dtype in FLOATS):
            raise UnsupportedError(
                f"float experts: weights of {weights.dtype} {tuple(weights.shape)}, strides {weights.stride()}"
            )
        self._matrices = (Matrix * self.count)()
        self._linear = Linear(
            DTYPES[weights.dtype], 0, self.in_features, self.count, epilogue_number(None, None), by_inputs,
            self._matrices,
        )  # fmt: skip
        self._address, self._pointers = ctypes.addressof(self._linear), (0, 0)

    def is_current(self) -> bool:
        """Return whether the weights have the shape and the dtype that they had when it was made."""
        return self.weights.shape == self._shape and DTYPES[self.weights.dtype] == self._linear.format

    def address(self) -> int:
        """The address of the C struct, which names the memory that weights and biases have now."""
        biases = self.biases
        pointers = self.weights.data_ptr(), 0 if biases is None else biases.data_ptr()
        if pointers != self._pointers:
            step = self.weights.stride(0) * self.weights.itemsize
            bias_step = 0 if biases is None else biases.stride(0) * biases.itemsize
            for index, matrix in enumerate(self._matrices):
                matrix.out_features, matrix.weight = self.out_features, pointers[0] + index * step
                if biases is not None:
                    matrix.bias, matrix.bias_dtype = pointers[1] + index * bias_step, DTYPES[biases.dtype]
            self._pointers = pointers
        return self._address

    def grouped(self, x: Tensor, starts: Tensor) -> Tensor:
        """x: [rows, in], contiguous; rows starts[e] to starts[e + 1], int64 [experts + 1], go to weight e."""
        out, dtype = x.new_empty(len(x), self.out_features), DTYPES[x.dtype]
        _float_experts(
            self.address(), x.data_ptr(), x.stride(0), len(x), out.data_ptr(), self.out_features, starts.data_ptr(),
            dtype, dtype, threads(), self.tile_rows,
        )  # fmt: skip
        return out


def check_weights(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], epilogue: str | None, *, by_inputs: bool
) -> None:
    """Raise UnsupportedError, which says what is wrong, for tensors that the kernel cannot read."""
    if len(weights) != len(biases) or not weights or (epilogue and len(weights) != 2):
        raise UnsupportedError(f"float linear: {len(weights)} weights and {len(biases)} biases for {epilogue=}")
    first, outputs, inputs = weights[0], int(by_inputs), int(not by_inputs)
    for weight in weights:
        if weight.dtype not in FLOATS or weight.dtype != first.dtype or weight.device.type != "cpu":
            raise UnsupportedError(
                f"float linear: weights of {weight.dtype} on {weight.device}; it takes one of {FLOATS}"
            )
        if weight.ndim != 2 or not weight.is_contiguous() or weight.shape[inputs] != first.shape[inputs]:
            raise UnsupportedError(f"float linear: a weight of shape {tuple(weight.shape)}, strides {weight.stride()}")
    if epilogue and weights[1].shape != first.shape:
        raise UnsupportedError(f"float linear: gate {tuple(first.shape)} and up {tuple(weights[1].shape)} differ")
    for weight, bias in zip(weights, biases, strict=True):
        size = weight.shape[outputs]
        if bias is not None and (bias.dtype not in FLOATS or bias.shape != (size,) or not bias.is_contiguous()):
            raise UnsupportedError(f"float linear: a bias of {bias.dtype} {tuple(bias.shape)} for {size} outputs")
