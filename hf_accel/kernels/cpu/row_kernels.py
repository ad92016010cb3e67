"""Kernels over the rows of a tensor: norms, rotary embeddings, sums, activation functions, and the largest logits.
One reads numbers that are spread over many tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .library import ACTIVATIONS, DTYPES, FLOATS, as_rows, fields, kernel, refuse_gradients, shared_struct, threads


class NormCall(Structure):
    _fields_ = fields(
        pointers="x out weight", sizes="x_stride rows size", floats="eps offset",
        ints="round_first dtype weight_dtype out_dtype threads",
    )  # fmt: skip


class Rotated(Structure):
    _fields_ = fields(pointers="x out", sizes="x_batch x_head x_token out_batch out_head out_token heads")


class RopeCall(Structure):
    _fields_ = [
        ("q", Rotated), ("k", Rotated),
        *fields(
            pointers="cos sin", sizes="table_batch table_token batch tokens size",
            ints="interleaved round_each dtype table_dtype threads",
        ),
    ]  # fmt: skip


class AddCall(Structure):
    _fields_ = fields(
        pointers="x y scale out", sizes="rows size x_stride", floats="factor", ints="dtype y_dtype threads one_scale"
    )


class ActivateCall(Structure):
    _fields_ = fields(
        pointers="x y out", sizes="x_stride y_stride out_stride rows size", ints="kind dtype out_dtype threads"
    )


class LayerNormCall(Structure):
    _fields_ = fields(
        pointers="x y sum out weight bias", sizes="x_stride y_stride sum_stride out_stride rows size",
        floats="eps offset", ints="dtype weight_dtype bias_dtype threads",
    )  # fmt: skip


class LogitsCall(Structure):
    _fields_ = fields(pointers="logits", sizes="stride rows size k", pointers_="values indices", ints="dtype threads")


_argmax = kernel("argmax", LogitsCall)
_topk = kernel("topk", LogitsCall)
_activate = kernel("activate", ActivateCall)
_add = kernel("add", AddCall)
_layer_norm = kernel("layer_norm", LayerNormCall)
_norm = kernel("norm", NormCall)
_rope = kernel("rope", RopeCall)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * (offset + weight), [..., H] (Zhang and Sennrich 2019, "Root Mean Square
    Layer Normalization").

    x: [..., H] of a dtype of FLOATS. weight: [H] of any of them. round_first: whether the normalized x is rounded to
    its dtype before it is multiplied, as in Llama. Gemma has round_first=False and offset=1. The result has the bits
    of transformers' modules, because the squares are added in the order of torch. Raises UnsupportedError if a
    gradient is needed.
    """
    refuse_gradients("norm", x, weight)
    x, stride = as_rows(x)
    size, dtype = x.shape[-1], x.dtype
    out_dtype = torch.promote_types(dtype, weight.dtype) if round_first and weight.dtype is not dtype else dtype
    out = x.new_empty(x.shape, dtype=out_dtype)
    weight = weight if weight.is_contiguous() else weight.contiguous()
    _norm(
        x.data_ptr(), out.data_ptr(), weight.data_ptr(), stride, x.numel() // size if size else 0, size, eps, offset,
        round_first, DTYPES[dtype], DTYPES[weight.dtype], DTYPES[out_dtype], threads(),
    )  # fmt: skip
    return out


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: int = False, round_each: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute q * cos + rotate_half(q) * sin, and the same for k. The results have the memory order of q and k.

    q, k: [B, H, T, D] of one dtype; the last stride is 1. cos, sin: [B or 1, T, D] or [T, D].
    interleaved: whether the rotated pairs are (0, 1), (2, 3), ..., as in GPT-J and Cohere; otherwise they are
    (i, i + D / 2), as in GPT-NeoX and Llama; 2 if number i of a table is for pair (2 i, 2 i + 1), as in GLM;
    3 if the results of that pair are i and i + D / 2, as in DeepSeek; 4 if the pairs are those of Llama, and cos and
    sin have D / 2 numbers, as in gpt-oss.
    round_each: whether both products are rounded to the dtype before they are added, as in Llama; otherwise only the
    sum is rounded, as in Cohere. If cos and sin have a wider dtype than q, only the sum is rounded. Raises
    UnsupportedError if a gradient is needed.
    """
    refuse_gradients("rope", q, k)
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    dtype, table_dtype = q.dtype, cos.dtype
    round_each = rounds_each(dtype, table_dtype, round_each=round_each)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, heads, tokens, size = q.shape
    _rope(
        q.data_ptr(), q_out.data_ptr(), *q.stride()[:3], *q_out.stride()[:3], heads,
        k.data_ptr(), k_out.data_ptr(), *k.stride()[:3], *k_out.stride()[:3], k.shape[1],
        cos.data_ptr(), sin.data_ptr(), cos.stride(0) if cos.ndim == 3 and cos.shape[0] > 1 else 0, cos.stride(-2),
        batch, tokens, size, interleaved, round_each, DTYPES[dtype], DTYPES[table_dtype], threads(),
    )  # fmt: skip
    return q_out, k_out


def rounds_each(dtype: torch.dtype, table_dtype: torch.dtype, *, round_each: bool) -> bool:
    """Return whether a rotation rounds both products to `dtype`: never if the tables are wider, as the products then
    are.
    """
    return round_each and (dtype is table_dtype or torch.promote_types(dtype, table_dtype) is dtype)


def add(x: Tensor, y: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """Compute x + y * factor, [..., H]; the product is rounded to the dtype before it is added, as torch does it.

    x, y: of one shape and one dtype of FLOATS. factor: a number, or a tensor [H] of this dtype; then x may be one row
    [H] for all of y. Raises UnsupportedError if a gradient is needed.
    """
    x, y, scale, size = x.contiguous(), y.contiguous(), 0, y.numel()
    if isinstance(factor, Tensor):
        refuse_gradients("add", x, y, factor)
        factor, size = factor.contiguous(), y.shape[-1]
        if factor.shape != y.shape[-1:] or factor.dtype is not x.dtype:
            raise UnsupportedError("add: the factors must be one for each column, of the dtype of x")
        scale = factor.data_ptr()
    else:
        refuse_gradients("add", x, y)
    out = torch.empty_like(y)
    _add(
        x.data_ptr(), y.data_ptr(), scale, out.data_ptr(), y.numel() // size if size else 0, size,
        size if x.shape == y.shape else 0, 1.0 if scale else factor, DTYPES[x.dtype], DTYPES[x.dtype], threads(), 0,
    )  # fmt: skip
    return out


def activate(x: Tensor, activation: str, *, y: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Apply a function to each number of x, [..., H] of a dtype of FLOATS; the result is rounded to it once.

    out: what the result is written to, contiguous, of the shape and the dtype of x, which may be x; None makes one.

    y: of the shape and the dtype of x; the rounded result is multiplied by it, and rounded again.
    activation: "relu"; "relu_squared", its square; "silu", with torch's bits; "gelu" (Hendrycks and Gimpel 2016, arXiv
    1606.08415); "gelu_tanh", its approximation by tanh, which transformers calls gelu_new and gelu_pytorch_tanh; or
    "gelu_quick", x * sigmoid(1.702 x), with the bits of transformers in float32. "gelu" is relatively within 3e-7 of
    the true value if x > 0, and within 2e-6 for x down to -3.5. It differs from torch's by 1.5e-6 at most, which is
    torch's error. "gelu_tanh" is computed as in torch and differs from it by 5e-7 at most. NaN stays NaN, and zeros
    keep their sign, but in a square.
    Infinity stays infinity, and -infinity becomes 0 by "relu", its square and "gelu", and NaN by the others. Raises
    UnsupportedError for another name, and if a gradient is needed.
    """
    refuse_gradients("activate", *(each for each in (x, y) if each is not None))
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"activate: {activation!r} is not known; choose one of {list(ACTIVATIONS)}")
    if y is not None and (y.shape != x.shape or y.dtype is not x.dtype):
        raise UnsupportedError("activate: x and y must have one shape and one dtype")
    x, stride = as_rows(x)
    y, y_stride = (None, 0) if y is None else as_rows(y)
    size = x.shape[-1]
    out = x.new_empty(x.shape) if out is None else out
    _activate(
        x.data_ptr(), 0 if y is None else y.data_ptr(), out.data_ptr(), stride, y_stride, size,
        x.numel() // size if size else 0, size, ACTIVATIONS[activation], DTYPES[x.dtype], DTYPES[x.dtype],
        threads(),
    )  # fmt: skip
    return out


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, y: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """Compute LayerNorm(x), or LayerNorm(x + y) (Ba, Kiros and Hinton 2016, arXiv 1607.06450).

    x, y: [..., H] of one shape and one dtype of FLOATS. weight, bias: [H] of any of them, None for ones and zeros.
    offset: what is added to the weight, in its dtype. x + y is rounded to the dtype, as a model does it that adds
    before it calls the norm. Mean and variance are float32 sums in an order that depends on H alone. Returns [..., H]
    of the dtype of x. Raises UnsupportedError if a gradient is needed, and for operands of other shapes.
    """
    return _normalized(x, (weight, bias), (eps, offset), y, keep=False)[0]


def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(x + y), and x + y itself, which a model needs that normalizes before its sublayers.

    The operands are those of `layer_norm`.
    """
    out, total = _normalized(x, (weight, bias), (eps, offset), y, keep=True)
    assert total is not None
    return out, total


def _normalized(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    numbers: tuple[float, float],
    y: Tensor | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    refuse_gradients("layer norm", x, y, *affine)
    size = x.shape[-1]
    for name, factor in zip(("weight", "bias"), affine, strict=True):
        if factor is not None and (factor.shape != (size,) or factor.dtype not in FLOATS):
            raise UnsupportedError(
                f"layer norm: a {name} of {factor.dtype} {tuple(factor.shape)} for rows of {size} numbers"
            )
    if y is not None and (y.shape != x.shape or y.dtype != x.dtype):
        raise UnsupportedError(
            f"layer norm: a sum of {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}; "
            "give it two of one shape and dtype"
        )
    (x, x_stride), (y, y_stride) = as_rows(x), (None, 0) if y is None else as_rows(y)
    weight, bias = (factor if factor is None else factor.contiguous() for factor in affine)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape) if keep else None
    _layer_norm(
        x.data_ptr(), *[0 if tensor is None else tensor.data_ptr() for tensor in (y, total, out, weight, bias)],
        x_stride, y_stride, size, size, x.numel() // size if size else 0, size, *numbers, DTYPES[x.dtype],
        *[0 if factor is None else DTYPES[factor.dtype] for factor in (weight, bias)], threads(),
    )  # fmt: skip
    return out, total


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row of [..., V], [...] int64; the lowest index among equal logits.

    NaN counts as the largest. Raises UnsupportedError if V is 0.
    """
    if not logits.shape[-1]:
        raise UnsupportedError("argmax: a row of no logits has no largest")
    logits, stride = as_rows(logits)
    size = logits.shape[-1]
    indices = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    _argmax(
        logits.data_ptr(), stride, indices.numel(), size, 1, 0, indices.data_ptr(), DTYPES[logits.dtype], threads()
    )
    return indices


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row of [..., V] and their indices, both [..., k], indices int64.

    They are in descending order; equal logits are in the order of their indices. NaN counts as the largest. Raises
    UnsupportedError if k is not from 0 to V, and if a gradient is needed.
    """
    refuse_gradients("topk", logits)
    if not 0 <= k <= logits.shape[-1]:
        raise UnsupportedError(f"topk: k={k} of {logits.shape[-1]} logits; choose k from 0 to that number")
    logits, stride = as_rows(logits)
    values = logits.new_empty((*logits.shape[:-1], k))
    indices = values.new_empty(values.shape, dtype=torch.int64)
    _topk(
        logits.data_ptr(), stride, indices.numel() // k if k else 0, logits.shape[-1], k, values.data_ptr(),
        indices.data_ptr(), DTYPES[logits.dtype], threads(),
    )  # fmt: skip
    return values, indices


# -- numbers of many tensors -------------------------------------------------------------------------------


@shared_struct
class SampledTensor(Structure):
    _fields_ = fields(pointers="numbers", sizes="step count size")


class SamplesCall(Structure):
    _fields_ = fields(pointers="tensors out", sizes="count")


_samples = kernel("samples", SamplesCall)


class SampleTable:
    """Says where numbers of tensors are in memory. It keeps no tensor alive."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """parts: views [n] of the tensors, of any stride and of 1, 2, 4 or 8 bytes a number."""
        places = [
            SampledTensor(each.data_ptr(), each.stride(0) * each.itemsize, len(each), each.itemsize) for each in parts
        ]
        self._places = (SampledTensor * len(places))(*places)
        self._nbytes = sum(each.nbytes for each in parts)

    def read(self) -> bytes:
        """Return the bytes of all numbers as they are now. All tensors must still be where they were."""
        if not self._nbytes:
            return b""
        out = (ctypes.c_uint8 * self._nbytes)()
        _samples(ctypes.addressof(self._places), ctypes.addressof(out), len(self._places))
        return bytes(out)
