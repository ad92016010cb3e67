"""Short causal convolutions of each channel over inputs that are in pages, see kernels/page_conv.cpp."""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from ..layouts import KV, Ragged
from .library import DTYPES, fields, kernel, refuse_gradients, threads


class PageConvCall(Structure):
    _fields_ = fields(
        pointers="weight bias out k_pages v_pages block_table cu_q kv_len",
        sizes="out_stride table_stride sequences block_size half length", ints="dtype weight_dtype threads",
    )  # fmt: skip


_page_conv = kernel("page_conv", PageConvCall)


def page_conv(pages: KV, ragged: Ragged, weight: Tensor, bias: Tensor | None, *, num_tokens: int) -> Tensor:
    """Multiply the last L inputs of each channel by its weights, and add them up, for the tokens of B sequences.

    pages: k and v [blocks, 1, block_size, C / 2] of a dtype of FLOATS, the inputs of the first and of the last
    channels, up to the tokens' own. ragged: which of them are those of a sequence. weight: [C, L]. bias: [C] of the
    weight's dtype, or None. Returns [N, C], rounded once. Raises UnsupportedError if a gradient is needed.
    """
    refuse_gradients("page_conv", pages.k, pages.v, weight, bias)
    table = ragged.block_table
    assert table is not None
    weight = weight.contiguous()
    channels, length = weight.shape
    out = torch.empty(num_tokens, channels, dtype=pages.k.dtype, device="cpu")
    _page_conv(
        weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), pages.k.data_ptr(),
        pages.v.data_ptr(), table.data_ptr(), ragged.cu_q.data_ptr(), ragged.kv_len.data_ptr(), channels,
        table.stride(0), len(ragged.kv_len), pages.k.shape[2], channels // 2, length, DTYPES[out.dtype],
        DTYPES[weight.dtype], threads(),
    )  # fmt: skip
    return out


def reference(pages: KV, ragged: Ragged, weight: Tensor, bias: Tensor | None, *, num_tokens: int) -> Tensor:
    """Compute what `page_conv` computes, by torch's operators."""
    slots = ragged.slots_before(weight.shape[1], pages.k.shape[2])  # [N, L]
    x = torch.cat([half.flatten(0, 2)[slots.clamp(min=0)] for half in (pages.k, pages.v)], dim=-1)  # [N, L, C]
    x = x.masked_fill((slots < 0)[..., None], 0).float()
    total = x[:, 0] * weight[:, 0].float()
    for place in range(1, weight.shape[1]):
        total = total + x[:, place] * weight[:, place].float()
    return (total if bias is None else total + bias.float()).to(pages.k.dtype)
