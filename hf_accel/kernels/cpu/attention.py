"""Calls the kernels for attention, and for writing K and V to pages."""

from __future__ import annotations

from ctypes import Structure
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..layouts import KV, AttentionOptions, PositionBias, Ragged
from .library import DTYPES, ScoreBias, fields, kernel, page_dtype, threads

EVERY_KEY = -1  # of kernels.h
NO_BIAS = (0, 0, 0, 0)  # the fields of ScoreBias


class Rows(Structure):
    _fields_ = fields(pointers="data", sizes="batch head token")


class AttentionCall(Structure):
    """It describes K and V in pages, dense or packed; fields that one of these does not need are 0."""

    _fields_ = [
        ("q", Rows), ("k", Rows), ("v", Rows),
        *fields(
            pointers="k_scales v_scales out lse sinks gates block_table cu_q cu_k kv_len",
            sizes="sequences heads kv_heads head_dim value_dim num_queries num_keys",
            sizes_="table_stride block_size window ahead",
        ),
        ("bias", ScoreBias),
        *fields(
            floats="scale softcap",
            ints="q_dtype k_dtype v_dtype scale_dtype sink_dtype threads",
        ),
    ]  # fmt: skip


class GatedBias(NamedTuple):
    """A bias of `attend`, and gates float32 [N, Hq], contiguous, by which that of each query is multiplied."""

    table: Tensor | None
    gates: Tensor


class PageWrite(Structure):
    _fields_ = fields(pointers="states", sizes="head token", pointers_="pages scales", sizes_="dim")


class WriteCall(Structure):
    _fields_ = [
        ("keys", PageWrite), ("values", PageWrite),
        *fields(pointers="slots written", sizes="tokens heads block_size", ints="dtype page_dtype threads"),
    ]  # fmt: skip


class PositionScoresCall(Structure):
    _fields_ = fields(
        pointers="q k keys queries rows starts out", sizes="q_token k_token sequences heads dim size", floats="scale",
        ints="dtype threads",
    )  # fmt: skip


class BiasGatesCall(Structure):
    _fields_ = fields(
        pointers="x weight bias factors out", sizes="x_stride rows heads dim terms", ints="dtype weight_dtype threads"
    )


_attention = kernel("attention", AttentionCall)
_bias_gates = kernel("bias_gates", BiasGatesCall)
_position_scores = kernel("position_scores", PositionScoresCall)
_write_pages = kernel("write_pages", WriteCall)


def attend(
    q: Tensor, kv: KV, options: AttentionOptions, ragged: Ragged | None = None, *, ahead: int | None = None,
    bias: Tensor | GatedBias | None = None,
) -> Tensor:  # fmt: skip
    """Attention over dense or packed K and V, see layouts.KV; the result is that of attention/contract.py.

    Without `ragged`: q [B, Hq, Q, D] and dense kv; returns [B, Q, Hq, Dv]. With `ragged`: q [N, Hq, D] and packed kv;
    returns [N, Hq, Dv]. Dtypes are those of FLOATS. options.dropout is not applied.

    ahead: how many keys after its own a query sees that is not causal, None for all. options.window counts the keys up
    to its own, so window=w + 1 and ahead=w is a window on both sides (Beltagy et al. 2020, "Longformer").
    bias: float32, added to the scores after they are scaled and capped. [Hq, P, P] by the positions of query and key,
    which begin at 0 in each sequence; [B, Hq, P, P], of each sequence its own; or [Hq, 2 M - 1], whose column
    M - 1 + key - query holds the bias of a distance (Raffel et al. 2020, "Exploring the Limits of Transfer Learning",
    section 2.1). -inf hides a key. If a sequence has
    more queries than keys, as where padding is computed too, it is its first queries that have the positions of the
    keys. Raises UnsupportedError if it is not as large as the longest sequence.
    """
    bias, gates = bias if isinstance(bias, GatedBias) else (bias, None)
    if options.causal and ahead is not None:
        raise UnsupportedError(f"attention: causal, and {ahead=} keys after a query's own; give one of them")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, kv.k, kv.v))
    cu_q, cu_k = (None, None) if ragged is None else (_starts(ragged.cu_q), _starts(ragged.cu_k))
    if cu_q is None:
        batch, num_heads, num_queries, dim = q.shape
        num_keys, sequences, q_stride = k.shape[2], batch, q.stride()
        out = q.new_empty(batch, num_queries, num_heads, v.shape[3])
        (k_batch, k_head, k_token, _), (v_batch, v_head, v_token, _) = k.stride(), v.stride()
        q_batch, q_head, q_token, _ = q_stride
    else:
        (_, num_heads, dim), num_queries, num_keys, sequences = q.shape, 0, 0, len(cu_q) - 1
        out = q.new_empty(q.shape[0], num_heads, v.shape[2])
        (q_token, q_head, _), (k_token, k_head, _), (v_token, v_head, _) = q.stride(), k.stride(), v.stride()
        q_batch = k_batch = v_batch = 0
    _check_heads(num_heads, k.shape[1])
    sinks = None if options.sinks is None else options.sinks.contiguous()
    sees_ahead = 0 if options.causal else EVERY_KEY if ahead is None else ahead
    if bias is not None:
        lengths = [(num_queries, num_keys)] * sequences
        if cu_q is not None and cu_k is not None:
            lengths = list(zip(lengths_of(cu_q), lengths_of(cu_k), strict=True))
        bias = checked_bias(bias, num_heads, lengths)
    _attention(
        q.data_ptr(), q_batch, q_head, q_token, k.data_ptr(), k_batch, k_head, k_token,
        v.data_ptr(), v_batch, v_head, v_token, 0, 0, out.data_ptr(), 0, 0 if sinks is None else sinks.data_ptr(),
        0 if gates is None else gates.data_ptr(), 0,
        0 if cu_q is None else cu_q.data_ptr(), 0 if cu_k is None else cu_k.data_ptr(), 0,
        sequences, num_heads, k.shape[1], dim, v.shape[-1], num_queries, num_keys, 0, 0,
        options.window or 0, sees_ahead, *bias_fields(bias), options.scale, options.softcap or 0.0,
        DTYPES[q.dtype], DTYPES[k.dtype], DTYPES[v.dtype], 0, 0 if sinks is None else DTYPES[sinks.dtype], threads(),
    )  # fmt: skip
    return out


def _check_heads(heads: int, kv_heads: int) -> None:
    """Raise UnsupportedError unless each K/V head serves equally many query heads."""
    if not kv_heads or heads % kv_heads:
        raise UnsupportedError(f"attention: {heads} query heads cannot share {kv_heads} heads of keys and values")


def _starts(offsets: Tensor) -> Tensor:
    return offsets.to(torch.int32).contiguous()


def lengths_of(starts: Tensor) -> list[int]:
    """The lengths of sequences that begin at `starts` [B + 1], whose last is where they end."""
    lengths: list[int] = starts.diff().tolist()
    return lengths


def checked_bias(bias: Tensor, heads: int, lengths: list[tuple[int, int]]) -> Tensor:
    """`bias` as the kernel reads it. lengths: the queries and the keys of each sequence."""
    longest = max(map(max, lengths), default=0)
    size = (bias.shape[-1] + 1) // 2 if bias.ndim == 2 else min(bias.shape[-2:], default=0)
    odd, own = bias.ndim == 2 and bias.shape[1] % 2 == 1, bias.ndim == 4 and len(bias) == len(lengths)
    known = (odd or own or bias.ndim == 3) and bias.shape[1 if own else 0] == heads
    if not known or bias.dtype is not torch.float32 or size < longest:
        raise UnsupportedError(
            f"attention: a bias of {bias.dtype} {tuple(bias.shape)} for {heads} heads and {longest} tokens; it takes "
            "torch.float32 [heads, tokens, tokens], [sequences, heads, tokens, tokens] or [heads, 2 * tokens - 1]"
        )
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def bias_fields(bias: Tensor | None) -> tuple[int, int, int, int]:
    """The fields of ScoreBias."""
    if bias is None:
        return NO_BIAS
    if bias.ndim == 2:
        return bias.data_ptr() + bias.shape[1] // 2 * bias.itemsize, 0, bias.stride(0), -1
    return bias.data_ptr(), 0 if bias.ndim == 3 else bias.stride(0), bias.stride(-3), bias.stride(-2)


def position_scores(
    q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor | None, Tensor], starts: Tensor, *, scale: float
) -> Tensor:
    """Compute scale * (q_i . keys[r] + k_j . queries[r]) for tokens i and j of each sequence, a bias for `attend`.

    q, k: [N, H, D], sequences end to end, each head behind the one before. positions: keys and queries, [R, H * D] of
    their dtype, and r of each distance i - j, int32 [2 M - 1]; M is the length of the longest sequence. Without
    queries there is no second product. starts: int32 [B + 1]. Returns [B, H, M, M] float32, where only entries within
    sequences mean something.
    """
    (keys, queries, rows), (_, heads, dim), size = positions, q.shape, (len(positions[2]) + 1) // 2
    out = torch.empty(len(starts) - 1, heads, size, size, dtype=torch.float32, device="cpu")
    _position_scores(
        q.data_ptr(), k.data_ptr(), keys.data_ptr(), 0 if queries is None else queries.data_ptr(), middle(rows),
        starts.data_ptr(),
        out.data_ptr(), q.stride(0), k.stride(0), len(out), heads, dim, size, scale, DTYPES[q.dtype], threads(),
    )  # fmt: skip
    return out


def bias_gates(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor) -> Tensor:
    """Compute a * (b * factors - 1) + 2 of each row and head: the gates of a GatedBias. a and b are the sigmoids of
    the sums of the first and of the second half of what a linear layer makes of a head.

    x: [N, H * D]. weight: [2 * terms, D], bias: [2 * terms] or None, factors: [H], of one dtype, contiguous. Each
    dtype is one of FLOATS. Returns [N, H] float32.
    """
    heads, (count, dim) = factors.numel(), weight.shape
    out = torch.empty(len(x), heads, dtype=torch.float32, device="cpu")
    _bias_gates(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), factors.data_ptr(), out.data_ptr(),
        x.stride(0), len(x), heads, dim, count // 2, DTYPES[x.dtype], DTYPES[weight.dtype], threads(),
    )  # fmt: skip
    return out


def middle(rows: Tensor) -> int:
    """Return the address of the entry of distance 0."""
    return rows.data_ptr() + len(rows) // 2 * rows.itemsize


def attend_pages(
    q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention over contiguous pages, as AttentionBackend.paged describes it. return_lse: whether the logsumexp
    [N, Hq] float32 is returned too."""
    (k_pages, v_pages, k_scales, v_scales), block_table, sinks = kv, ragged.block_table, options.sinks
    assert block_table is not None
    q = q if q.stride(2) == 1 else q.contiguous()
    num_tokens, num_heads, dim = q.shape
    kv_heads, block_size, value_dim = v_pages.shape[1], v_pages.shape[2], kv.value_dim
    _check_heads(num_heads, kv_heads)
    out = q.new_empty((num_tokens, num_heads, value_dim))
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32) if return_lse else None
    sinks = sinks if sinks is None else sinks.contiguous()
    k_block, k_head, k_token, _ = k_pages.stride()
    v_block, v_head, v_token, _ = v_pages.stride()
    q_token, q_head, _ = q.stride()
    _attention(
        q.data_ptr(), 0, q_head, q_token, k_pages.data_ptr(), k_block, k_head, k_token,
        v_pages.data_ptr(), v_block, v_head, v_token,
        0 if k_scales is None else k_scales.data_ptr(), 0 if v_scales is None else v_scales.data_ptr(),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        0, block_table.data_ptr(), ragged.cu_q.data_ptr(), 0, ragged.kv_len.data_ptr(),
        len(ragged.kv_len), num_heads, kv_heads, dim, value_dim, 0, 0, block_table.stride(0), block_size,
        options.window or 0, 0 if options.causal else EVERY_KEY,
        *position_bias_fields(options.bias, num_heads, ragged.max_kv),
        options.scale, options.softcap or 0.0, DTYPES[q.dtype], DTYPES[k_pages.dtype], DTYPES[v_pages.dtype],
        0 if k_scales is None else DTYPES[k_scales.dtype], 0 if sinks is None else DTYPES[sinks.dtype], threads(),
    )  # fmt: skip
    return out, lse


def position_bias_fields(bias: PositionBias | None, heads: int, longest: int) -> tuple[int, int, int, int]:
    """Return the fields of ScoreBias. longest: the keys of the longest sequence.

    Raises UnsupportedError if the table is not as large as that.
    """
    if bias is None:
        return NO_BIAS
    table = bias.table
    if table.shape[0] != heads or table.shape[1] < longest or table.dtype is not torch.float32 or table.stride(1) != 1:
        raise UnsupportedError(
            f"attention: a bias of {table.dtype} {tuple(table.shape)} for {heads} heads and {longest} tokens; it "
            "takes torch.float32 [heads, tokens] with its numbers side by side"
        )
    if bias.by_distance:
        return table.data_ptr() + (table.shape[1] - 1) * table.itemsize, 0, table.stride(0), -1
    return table.data_ptr(), 0, table.stride(0), 0


def write_pages(keys: Tensor, values: Tensor, pages: KV, slots: Tensor) -> None:
    """Write keys [N, H, Dk] and values [N, H, Dv] to `slots` [N] int64 of contiguous pages; see KVStorage.write.

    Keys and values have one dtype of FLOATS. Pages of each have this dtype too, or int8, float8_e4m3fn or uint8 (int4)
    with scales of this dtype, or of float32 for float16.
    """
    k_pages, v_pages, k_scales, v_scales = pages
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    (k_token, k_head, _), (v_token, v_head, _) = keys.stride(), values.stride()
    num_tokens, heads, key_dim = keys.shape
    _write_pages(
        keys.data_ptr(), k_head, k_token, k_pages.data_ptr(), 0 if k_scales is None else k_scales.data_ptr(), key_dim,
        values.data_ptr(), v_head, v_token, v_pages.data_ptr(), 0 if v_scales is None else v_scales.data_ptr(),
        values.shape[2], slots.data_ptr(), 0, num_tokens, heads, k_pages.shape[2],
        DTYPES[keys.dtype], page_dtype(k_pages, v_pages), threads(),
    )  # fmt: skip
