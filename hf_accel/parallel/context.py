"""Context parallel: each rank of a process group holds a share of the KV cache's blocks, and all hold the weights.

All ranks compute the same passes over the same tokens. In each layer a rank attends over its own blocks; the partial
results and the log-sum-exp of their scores go to all ranks, which merge them.

Block b of a pool is block b // size of rank b % size. All ranks keep the same records of all blocks, so each knows
where every token is, and neighbouring blocks of a sequence usually belong to different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..attention.contract import AttentionBackend, empty_lse
from ..attention.masking import visible
from ..attention.paged_kv import gather, rotated_like
from ..attention.sdpa import grouped_attention
from ..cache.hf import sharing_refusal
from ..cache.pool import BlockTable
from ..cache.step import GroupStep, SharedContext
from ..config import PatchConfig
from ..errors import LostRankError, UnsupportedError
from ..kernels.layouts import KV, AttentionOptions, Ragged
from ..models import spans_processes
from ..tensors import integers
from .rank_agreement import RankAgreement

SHARING = "they shared out the context"


class ContextParallel(SharedContext):
    """The ranks of a process group as holders of one KV cache.

    Every rank has to run the same calls with the same inputs. A rank that dies, or that is more than the group's
    timeout behind, makes the others raise LostRankError.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """Raises UnsupportedError for what is no process group with this process in it."""
        if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
            raise UnsupportedError(
                f"context_parallel={group!r} must be a process group of torch.distributed, as "
                "torch.distributed.group.WORLD is after init_process_group()"
            )
        self.ranks = RankAgreement(group, device)
        self.rank, self.size = self.ranks.rank, self.ranks.size

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """A copy of the model shares its pages out among the same ranks."""
        return self

    # -- what ranks say to each other ------------------------------------------------------------------

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Return what each rank gave, in the order of ranks. All ranks give one shape and dtype, which may be any."""
        own = x.contiguous().view(torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self.ranks.watching(SHARING):
            distributed.all_gather(found, own, group=self.ranks.group)
        return [each.view(x.dtype) for each in found]

    def check_same(self, *inputs: Tensor | None) -> None:
        """Raise LostRankError unless all ranks give the same: otherwise the keys of different texts would be mixed."""
        device = next(x.device for x in inputs if x is not None)
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        digests = self.exchange(torch.stack([nothing if x is None else _digest(x) for x in inputs]))
        if any(not torch.equal(digests[0], other) for other in digests):
            raise LostRankError(
                "the ranks of context_parallel= do not compute the same tokens; give all of them the same inputs and, "
                "before a call that samples, the same torch.manual_seed()"
            )

    # -- blocks ----------------------------------------------------------------------------------------

    def num_own(self, num_blocks: int) -> int:
        return num_own(num_blocks, self.size)

    def narrow(
        self, step: GroupStep, tables: Sequence[BlockTable], spans: Sequence[range], window: int | None
    ) -> GroupStep:
        return own_step(step, tables, spans, window=window, rank=self.rank, size=self.size)

    def copy(self, pages: KV, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for tensor in pages:
                if tensor is not None:
                    self._copy(tensor, source, destination)

    def _copy(self, pages: Tensor, source: int, destination: int) -> None:
        holder, taker = source % self.size, destination % self.size
        block = pages[source // self.size].contiguous() if self.rank == holder else torch.empty_like(pages[0])
        if holder != taker:
            with self.ranks.watching(SHARING):
                distributed.broadcast(block.view(torch.uint8), group=self.ranks.group, group_src=holder)
        if self.rank == taker:
            pages[destination // self.size] = block

    # -- attention -------------------------------------------------------------------------------------

    def attend(
        self, backend: AttentionBackend, q: Tensor, pages: KV, *, step: GroupStep, options: AttentionOptions
    ) -> Tensor:
        own = options if self.rank == 0 else options._replace(sinks=None)  # one part only counts the sinks
        out, lse = attend_own(backend, q, pages, part=step.own, options=own)
        # One message a layer: the bytes of the results, and behind them those of the log-sum-exp.
        message = torch.cat([out.flatten().view(torch.uint8), lse.float().flatten().view(torch.uint8)])
        split = out.numel() * out.element_size()
        found = self.exchange(message)
        outs = [each[:split].view(out.dtype).view(out.shape) for each in found]
        lses = [each[split:].clone().view(torch.float32).view(lse.shape) for each in found]
        return merge_ranks(outs, lses)[0]


def context_parallel(model: nn.Module, config: PatchConfig, refusal: str | None) -> ContextParallel:
    """Return the ranks that share out the KV cache, for a config that asks for it.

    refusal: why the model has no pages or no ragged passes, as one clause. Raises UnsupportedError for a model or an
    option that context parallel cannot serve.
    """
    own: Any = model.config
    refusal = refusal or sharing_refusal(own)
    if config.weights is not None and config.weights.only_if_faster:
        refusal = refusal or "weights='auto' would be measured by each rank for itself"
    if spans_processes(model):
        refusal = refusal or "its weights are split over ranks already"
    if refusal is not None:
        raise UnsupportedError(f"context_parallel= was asked for, but {refusal}; leave one of them out")
    device: Any = model.device
    return ContextParallel(config.context_parallel, device)


def _digest(x: Tensor) -> Tensor:
    """Return a hash of the numbers and of their order."""
    numbers = x.reshape(-1)
    numbers = numbers.to(torch.int64) if not numbers.is_floating_point() else numbers.float().view(torch.int32).long()
    factors = torch.arange(1, len(numbers) + 1, device=x.device) * 2654435761 + 40503
    return (numbers * factors).sum() + len(numbers)


# -- attention over a rank's own blocks, and the merging of results ------------------------------------

MOST_BYTES = 2**26  # bytes of K and V that are gathered at a time
MOST_SCORES = 2**24  # bounds the float32 scores of a product: 64 MB


def merge_ranks(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from parts over disjoint ones: outs [N, H, Dv], lses [N, H] -> out, lse float32.

    Each part has the weight exp(lse), as in Flash-Decoding (Dao 2023); one with lse -inf has seen no key. Sums are in
    float32, in the order given, so that all ranks that merge the same parts get the same bits.
    """
    stacked = torch.stack([lse.float() for lse in lses])
    total = stacked.logsumexp(0)
    weights = (stacked - total.masked_fill(total.isneginf(), 0.0)).exp()
    merged = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, weight in zip(outs, weights, strict=True):
        merged += out.float() * weight.unsqueeze(-1)
    return merged.to(outs[0].dtype), total


def attend_own(
    backend: AttentionBackend, q: Tensor, pages: KV, *, part: OwnPart, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """q [N, Hq, D] over the keys of a pass in this rank's pages -> [N, Hq, Dv], lse [N, Hq] float32.

    A query that sees no key here gets zeros, and -inf or its sink. See AttentionBackend.paged.
    """
    if part.decoding is not None and part.decoding_rows is None:
        out, lse = backend.paged(q, pages, part.decoding, options, return_lse=True)
        return out, lse
    out, lse = q.new_zeros(*q.shape[:2], pages.value_dim), empty_lse(q, options.sinks)
    if part.decoding is not None:
        rows = part.decoding_rows
        out[rows], lse[rows] = backend.paged(q[rows], pages, part.decoding, options, return_lse=True)
    for keys in part.others:
        out[keys.rows], lse[keys.rows] = _attend_sequence(q[keys.rows], pages, keys, options)
    return out, lse


def _attend_sequence(q: Tensor, pages: KV, keys: OwnKeys, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """q [Q, Hq, D] over the keys of one sequence, whose positions say who sees which. K and V are gathered."""
    block_size, block_bytes = pages.k.shape[2], pages.k[:1].nbytes + pages.v[:1].nbytes
    step = max(1, MOST_BYTES // block_bytes)
    queries = rotated_like(q, pages.k).transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
    parts = []
    for start in range(0, len(keys.blocks), step):
        positions = keys.positions[start * block_size : (start + step) * block_size]
        k, v, *_ = gather(pages, keys.blocks[None, start : start + step], q.dtype)
        used = KV(k[:, :, : len(positions)], v[:, :, : len(positions)])
        # One part only counts the sinks.
        own = options if start == 0 else options._replace(sinks=None)
        parts.append(_attend_gathered(queries, used, own, first=keys.first, positions=positions))
    out, lse = parts[0] if len(parts) == 1 else merge_ranks(*zip(*parts, strict=True))
    return rotated_like(out, pages.v), lse


def _attend_gathered(
    queries: Tensor, kv: KV, options: AttentionOptions, *, first: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """queries [1, Hq, Q, D] over kv [1, Hkv, M, ..] -> [Q, Hq, Dv], lse [Q, Hq] float32."""
    num_heads, num_queries = queries.shape[1:3]
    size = max(1, MOST_SCORES // max(1, num_heads * len(positions)))
    outs, lses = [], []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        at = torch.arange(first + start, first + stop, device=positions.device)
        seen = visible(at, positions, causal=True, window=options.window)
        out, lse = grouped_attention(queries[:, :, start:stop], kv, seen, options, return_lse=True)
        assert lse is not None
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1).float())
    return torch.cat(outs), torch.cat(lses)


# -- the blocks of a rank ------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnKeys:
    """The keys of one sequence in a rank's own blocks, which queries `rows` of a pass may see.

    first: the position of the first of these queries; the others follow it. blocks: [n] int64, numbers among the
    rank's own, in the order of their keys. positions: [M] int64, of the keys in these blocks; the slots behind them
    hold none.
    """

    rows: slice
    first: int
    blocks: Tensor
    positions: Tensor


@dataclass(frozen=True)
class OwnPart:
    """The blocks that attention over a rank's own keys reads in a pass of N queries.

    decoding: the sequences with one query that sees every key, one after the other; kernels read their blocks in
    place. None if there are none. decoding_rows: [B] int64, their queries; None if these are all N. others: the other
    sequences that have keys here.
    """

    decoding: Ragged | None
    decoding_rows: Tensor | None
    others: tuple[OwnKeys, ...]

    def to(self, device: torch.device) -> OwnPart:
        """Return a copy whose tensors are on `device`."""
        if device.type == "cpu":
            return self
        decoding, rows = self.decoding, self.decoding_rows
        if decoding is not None and decoding.block_table is not None:
            cu_q, kv_len, table = (x.to(device) for x in (decoding.cu_q, decoding.kv_len, decoding.block_table))
            decoding = decoding._replace(cu_q=cu_q, kv_len=kv_len, block_table=table)
        others = (replace(x, blocks=x.blocks.to(device), positions=x.positions.to(device)) for x in self.others)
        return OwnPart(decoding, None if rows is None else rows.to(device), tuple(others))


def num_own(num_blocks: int, size: int) -> int:
    """Return the most blocks of `num_blocks` that a rank holds.

    It is the same on all ranks, so that pages have one size.
    """
    return -(-num_blocks // size)


def own_slots(slots: Tensor, *, block_size: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Find those of the slots [W] int64 that are in this rank's blocks.

    Returns their indices [V] and their slots there [V].
    """
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    index = (blocks % size == rank).nonzero().squeeze(1)
    blocks, slots = blocks[index], slots[index]
    return index, torch.div(blocks, size, rounding_mode="floor") * block_size + slots % block_size


def own_step(
    step: GroupStep, tables: Sequence[BlockTable], spans: Sequence[range], *, window: int | None, rank: int, size: int
) -> GroupStep:
    """Narrow a GroupStep over all blocks to the blocks of one rank.

    tables, spans: the block table of each sequence, and the positions of its queries. The result's `ragged` still
    describes all blocks.
    """
    if not tables:
        return step
    block_size = tables[0].pool.block_size
    index, slots = own_slots(step.slots, block_size=block_size, rank=rank, size=size)
    written = index if step.written is None else step.written[index]
    row = 0
    decoding: list[OwnKeys] = []
    others: list[OwnKeys] = []
    for table, span in zip(tables, spans, strict=True):
        if span:
            keys = _own_keys(table, span, row, window=window, rank=rank, size=size)
            (decoding if len(span) == 1 and window is None else others).append(keys)
        row += len(span)
    part = OwnPart(
        _ragged(decoding) if decoding else None,
        None if len(decoding) == row else integers([keys.rows.start for keys in decoding]),
        tuple(keys for keys in others if len(keys.positions)),
    )
    return replace(step, slots=slots, written=written, own=part.to(slots.device))


def _own_keys(table: BlockTable, span: range, row: int, *, window: int | None, rank: int, size: int) -> OwnKeys:
    block_size, dropped = table.pool.block_size, table.num_dropped_blocks
    oldest = 0 if window is None else max(0, span.start - window + 1)
    numbers = torch.arange(max(dropped, oldest // block_size), -(-span.stop // block_size))  # in the sequence
    blocks = integers(table.blocks)[numbers - dropped]
    is_own = blocks % size == rank
    positions = (numbers[is_own].unsqueeze(1) * block_size + torch.arange(block_size)).flatten()
    # Only the last block of a sequence is partly filled.
    return OwnKeys(slice(row, row + len(span)), span.start, blocks[is_own] // size, positions[positions < span.stop])


def _ragged(decoding: Sequence[OwnKeys]) -> Ragged:
    lengths = [len(keys.positions) for keys in decoding]
    table = torch.zeros(len(decoding), max(len(keys.blocks) for keys in decoding), dtype=torch.int32)
    for number, keys in enumerate(decoding):
        table[number, : len(keys.blocks)] = keys.blocks
    return Ragged(
        integers(range(len(decoding) + 1), dtype=torch.int32),
        kv_len=integers(lengths, dtype=torch.int32),
        max_q=1,
        max_kv=max(lengths),
        block_table=table,
    )
