"""The launches of one call of attention: the tiles, the split of the keys, and the arguments of each launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..layouts import KV, AttentionOptions, Ragged
from .launch import Launch
from .programs.attend import INT4, PLAIN, SCALED, attend, merge

SPLIT = 256  # keys; fixed, so that a query's parts do not depend on the other queries
FEW_QUERIES = 16  # up to here a sequence's keys are shared among programs


@dataclass(frozen=True)
class Tile:
    """The shape of one program's work: rows (queries x heads of a key head) by keys, and the compiler's options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def few_rows_tile(dim: int, dtype: torch.dtype, kind: int) -> Tile:
    """Return the tile for decoding and verification, where memory is the limit: as few rows as a product of tiles
    allows. dim: the size of the heads. kind: PLAIN, SCALED or INT4. The tiles are the largest with which no GPU runs
    out of registers.
    """
    if dtype is torch.float32:
        if dim <= 64:
            return Tile(16, 32, 8, 1)
        return Tile(16, 16, 16 if dim > 128 and kind == SCALED.value else 8, 1)
    if kind == INT4.value:
        return Tile(16, 64 if dim <= 64 else 32, 8, 2) if dim <= 128 else Tile(16, 32, 4, 3)
    num_warps = 4 if dim <= 64 or kind == PLAIN.value else 8
    return Tile(16, 64 if dim <= 128 else 32, num_warps, 3)


def many_rows_tile(dim: int, dtype: torch.dtype, kind: int) -> Tile:
    """Return the tile for prompts, where arithmetic is the limit; see few_rows_tile."""
    if dtype is torch.float32:
        return few_rows_tile(dim, dtype, kind)
    if dim > 128:
        return Tile(64, 32, 8, 1)
    if dim > 64 and kind == INT4.value:
        return Tile(32, 32, 4, 2)
    if kind == SCALED.value:
        return Tile(64, 64, 8, 1 if dim > 64 else 2)
    return Tile(64 if kind == INT4.value else 128, 64, 8, 2)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The operands of one call, see AttentionBackend.paged and .packed, and what they are written to.

    fixed_tiles: whether all rows go through the same tiles, so that a query's bits do not depend on other queries.
    """

    q: Tensor
    kv: KV
    ragged: Ragged
    options: AttentionOptions
    out: Tensor
    lse: Tensor | None
    fixed_tiles: bool = False

    @property
    def group(self) -> int:
        """The query heads of a key head."""
        return self.q.shape[1] // self.kv.k.shape[1]

    @property
    def kind(self) -> int:
        """The kind of the pages: PLAIN, SCALED or INT4."""
        kind = INT4 if self.kv.is_int4 else SCALED if self.kv.k_scales is not None else PLAIN
        return int(kind.value)

    @property
    def num_sequences(self) -> int:
        return len(self.ragged.kv_len)


def attention(
    q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool, fixed_tiles: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over pages or, without a block table, over packed keys; see AttentionBackend.paged.

    fixed_tiles: see Operands. Returns [N, Hq, Dv] in q's dtype and lse [N, Hq] float32, or None.
    """
    q = q if q.stride(2) == 1 else q.contiguous()
    if ragged.block_table is None:
        kv = KV(*(x if x.stride(2) == 1 else x.contiguous() for x in (kv.k, kv.v)))
    # Rows of no sequence, which a graph's padding has, are zeros.
    out = q.new_zeros(*q.shape[:2], kv.value_dim)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device) if return_lse else None
    fixed_tiles = fixed_tiles or has_odd_values(kv.key_dim, kv.value_dim)
    operands = Operands(q=q, kv=kv, ragged=ragged, options=options, out=out, lse=lse, fixed_tiles=fixed_tiles)
    for launch in launches(operands):
        launch.run()
    return out, lse


def has_odd_values(key_dim: int, value_dim: int) -> bool:
    """Return whether values are padded to a power of two that is not the keys'.

    Tiles of many queries gave wrong numbers for such heads (40 and 24) in 16 bits on an H200, with Triton 3.6; those
    of few queries gave the right ones.
    """
    return value_dim.bit_count() > 1 and key_dim.bit_length() != value_dim.bit_length()


def launches(operands: Operands) -> list[Launch]:
    """Return the launches of one call, in order.

    Sequences of up to FEW_QUERIES queries share their keys among programs. Those of more queries have enough
    programs, and their parts would need much memory; with fixed tiles they are parts of FEW_QUERIES queries.
    """
    max_q = operands.ragged.max_q
    if operands.fixed_tiles:
        starts = range(0, max_q, FEW_QUERIES)
        return [one for start in starts for one in _few_queries(operands, start, most_queries=2**30)]
    found = _few_queries(operands, 0, most_queries=FEW_QUERIES)
    if max_q > FEW_QUERIES:
        found.append(_many_queries(operands))
    return found


def _few_queries(operands: Operands, first_query: int, *, most_queries: int) -> list[Launch]:
    tile = few_rows_tile(operands.kv.key_dim, operands.q.dtype, operands.kind)
    rows = min(operands.ragged.max_q - first_query, FEW_QUERIES)
    splits = _num_splits(operands, rows)
    bounds = {"first_query": first_query, "rows_of_part": rows, "least_queries": 0, "most_queries": most_queries}
    whole = _attend(operands, tile, bounds, splits=splits)
    if splits == 1:
        return [whole]
    q, options = operands.q, operands.options
    shared = {name: whole.arguments[name] for name in ("parts", "part_lse", "out", "lse", "sinks", "cu_q", "kv_len")}
    merging = Launch(
        kernel=merge,
        grid=(operands.num_sequences * rows * q.shape[1],),
        arguments={
            **shared, "num_heads": q.shape[1], "num_splits": splits, "first_query": first_query, "rows_of_part": rows,
            "most_queries": most_queries, "window": options.window or 0,
        },
        constants={
            "VALUE_DIM": operands.kv.value_dim, "BLOCK_V": triton.next_power_of_2(operands.kv.value_dim),
            "SPLIT_KEYS": SPLIT, "WINDOWED": options.window is not None,
        },
        num_warps=1,
    )  # fmt: skip
    return [whole, merging]


def _num_splits(operands: Operands, rows: int) -> int:
    """Return the number of parts that hold the keys of `rows` neighbouring queries."""
    splits, window = -(-operands.ragged.max_kv // SPLIT), operands.options.window
    if window is not None:
        splits = min(splits, (window + rows - 2) // SPLIT + 2)
    return max(1, splits)


def _many_queries(operands: Operands) -> Launch:
    tile = many_rows_tile(operands.kv.key_dim, operands.q.dtype, operands.kind)
    bounds = {
        "first_query": 0, "rows_of_part": operands.ragged.max_q, "least_queries": FEW_QUERIES + 1,
        "most_queries": 2**30,
    }  # fmt: skip
    return _attend(operands, tile, bounds, splits=1)


def _attend(operands: Operands, tile: Tile, bounds: dict[str, int], *, splits: int) -> Launch:
    q, kv, ragged, options = operands.q, operands.kv, operands.ragged, operands.options
    table, is_fp8 = ragged.block_table, kv.k.dtype is torch.float8_e4m3fn
    (k_block, k_head, k_token), (v_block, v_head, v_token) = (_strides(x) for x in (kv.k, kv.v))
    rows, num_heads = bounds["rows_of_part"], q.shape[1]
    part_rows = operands.num_sequences * rows * num_heads * splits if splits > 1 else 0
    parts = q.new_empty(part_rows, kv.value_dim, dtype=torch.float32) if part_rows else None
    part_lse = q.new_empty(part_rows, dtype=torch.float32) if part_rows else None
    num_row_blocks = -(-rows * operands.group // tile.rows)
    return Launch(
        kernel=attend,
        grid=(operands.num_sequences * kv.k.shape[1] * num_row_blocks, splits),
        arguments={
            "q": q, "k": _as_bytes(kv.k), "v": _as_bytes(kv.v), "k_scales": kv.k_scales, "v_scales": kv.v_scales,
            "out": operands.out, "lse": operands.lse, "parts": parts, "part_lse": part_lse, "sinks": options.sinks,
            "block_table": table, "cu_q": ragged.cu_q, "kv_len": ragged.kv_len,
            "cu_k": ragged.cu_k if table is None else None,
            "q_token": q.stride(0), "q_head": q.stride(1), "k_block": k_block, "k_head": k_head, "k_token": k_token,
            "v_block": v_block, "v_head": v_head, "v_token": v_token,
            "table_row": 0 if table is None else table.stride(0), "num_heads": num_heads,
            "num_row_blocks": num_row_blocks, "num_splits": splits, **bounds, "scale": float(options.scale),
            "softcap": float(options.softcap or 0.0), "window": options.window or 0,
        },
        constants={
            "GROUP": operands.group, "PAGE": 0 if table is None else kv.k.shape[2],
            "HEAD_DIM": kv.key_dim, "VALUE_DIM": kv.value_dim,
            "BLOCK_D": _block(kv.k.shape[-1]), "BLOCK_V": _block(kv.v.shape[-1]),
            "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "SPLIT_KEYS": SPLIT, "IS_SPLIT": splits > 1,
            "KIND": operands.kind, "FP8": is_fp8,
            "CAUSAL": options.causal, "WINDOWED": options.window is not None, "CAPPED": options.softcap is not None,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def _block(dim: int) -> int:
    """Return the columns of a tile that holds `dim` numbers: a power of two, and at least the least of a product of
    tiles.
    """
    return max(16, int(triton.next_power_of_2(dim)))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of a page, a head and a token; pages are [blocks, heads, block_size, D], packed keys [M,
    heads, D].
    """
    return (x.stride(0), x.stride(1), x.stride(2)) if x.dim() == 4 else (0, x.stride(1), x.stride(0))


def _as_bytes(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages
