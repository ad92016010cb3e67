"""The sequences of a paged cache: block tables per group of layers, what each column holds, and the next Step.

A column is a position of the padded [B, T] input that transformers works with; a token is a column that
is not padding. Only tokens have a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .group import PageGroup
from .prefix import PrefixIndex
from .rows import Row, num_live_tokens
from .step import GroupStep, Step, offsets
from .table import BlockTable


class Sequences:
    """B sequences over shared pages. All writes of bookkeeping happen in `prepare`, before a forward pass."""

    def __init__(self, groups: list[PageGroup]) -> None:
        self.groups = groups
        self.rows: list[Row] = []
        self.num_columns = 0
        self.real: Tensor | None = None  # [B, num_columns] bool, False is padding; None: no padding at all
        self.salt = b""
        self._published: list[tuple[PrefixIndex, int]] = []  # by the pass that is being prepared

    # -- the next forward pass -------------------------------------------------------------------------

    def prepare(
        self,
        batch_size: int,
        num_new: int,
        *,
        device: torch.device,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Step:
        """Make room for `num_new` columns in each of `batch_size` rows and describe the pass.

        mask: [B, num_columns + num_new] bool or None, False where padding stands.
        token_ids: [B, num_new] or None; known ids let rows share blocks.
        Raises OutOfBlocksError when a fixed pool is exhausted, with the sequences as they were, as after any error.
        """
        if self.rows and len(self.rows) != batch_size:
            raise UnsupportedError(
                f"the cache holds {len(self.rows)} sequences and the input has {batch_size}; "
                "call cache.reset(), or give a cache to each batch"
            )
        real = self._extended_mask(batch_size, num_new, mask)
        new_real = None if real is None else real[:, self.num_columns :]
        counts = [num_new] * batch_size if new_real is None else new_real.sum(1).tolist()
        starts = [row.num_tokens for row in self.rows] or [0] * batch_size
        ids = _ids_per_row(token_ids, new_real)
        with self._takes_back(starts):
            first_written = self._append_rows(counts, starts, ids)
            step = Step(
                groups=[
                    self._group_step(index, starts, counts, written, device)
                    for index, written in enumerate(first_written)
                ],
                cu_q=offsets(counts, device),
                max_q=max(counts, default=0),
                num_columns=num_new,
                rows=None if new_real is None else new_real.flatten().nonzero().squeeze(1).to(device),
                fresh=not any(starts),
                contiguous=[self._contiguous(real, num_new, g.window) for g in self.groups],
            )
        self.num_columns += num_new
        self.real = real
        return step

    @contextmanager
    def _takes_back(self, starts: list[int]) -> Iterator[None]:
        """If the block fails, the rows are as long as they were, and nobody finds blocks that will not be written."""
        self._published = []
        before = self.rows
        self.rows = before or [Row([BlockTable(g.pool) for g in self.groups]) for _ in starts]
        try:
            yield
        except BaseException:
            for index, block in self._published:
                index.forget(block)
            for row, start in zip(self.rows, starts, strict=True):
                row.truncate(start)
            self.rows = before
            raise
        finally:
            self._published = []

    def _extended_mask(self, batch_size: int, num_new: int, mask: Tensor | None) -> Tensor | None:
        past, total = self.num_columns, self.num_columns + num_new
        if mask is None:
            if self.real is not None:
                raise UnsupportedError(
                    "the cache holds padded sequences but this call has no attention_mask; "
                    f"pass attention_mask [{batch_size}, {total}] as in the first call"
                )
            return None
        if tuple(mask.shape) != (batch_size, total):
            raise UnsupportedError(
                f"attention_mask has shape {tuple(mask.shape)}; with {past} cached columns and {num_new} new ones "
                f"it must be ({batch_size}, {total})"
            )
        known = mask.new_ones(batch_size, past) if self.real is None else self.real
        if past and not torch.equal(mask[:, :past], known):
            raise UnsupportedError(
                "attention_mask hides or shows cached columns that it did not before; a paged cache stores no "
                "padding, so the mask of cached columns cannot change: start from an empty cache"
            )
        return None if self.real is None and bool(mask.all()) else mask

    @staticmethod
    def _contiguous(real: Tensor | None, num_new: int, window: int | None) -> bool:
        """Whether bottom-right causal attention over a row's tokens equals attention over its columns.

        The new tokens of each row must be at the end of the new columns; where a window counts columns,
        no padding may stand between tokens at all.
        """
        if real is None:
            return True
        if not bool((real[:, -1] | ~real.any(1)).all()):
            return False
        span = real if window is not None else real[:, -num_new:]
        return not bool((span[:, :-1] & ~span[:, 1:]).any())

    def _append_rows(self, counts: list[int], starts: list[int], ids: list[list[int]] | None) -> list[list[int]]:
        """Room for counts[r] tokens in every row; per group and row, the first token that is to be written."""
        sharing = ids is not None and not any(starts)
        first_written: list[list[int]] = [[] for _ in self.groups]
        twins: dict[tuple[int, ...], Row] = {}
        for number, (count, start) in enumerate(zip(counts, starts, strict=True)):
            new_ids = ids[number] if ids is not None else None
            self._behind_window(self.rows[number])
            twin = twins.get(tuple(new_ids)) if sharing and new_ids else None
            if twin is not None:
                self.rows[number] = twin.fork()
                firsts = [twin.num_tokens] * len(self.groups)
            else:
                firsts = self._append_row(self.rows[number], count, start, new_ids, sharing)
                if sharing and new_ids:
                    twins[tuple(new_ids)] = self.rows[number]
            for group, first in zip(first_written, firsts, strict=True):
                group.append(first)
        return first_written

    def _append_row(self, row: Row, count: int, start: int, ids: list[int] | None, sharing: bool) -> list[int]:
        firsts = []
        for group, table in zip(self.groups, row.tables, strict=True):
            if sharing and ids and group.index is not None and group.index.salt == self.salt:
                shared = group.index.match(ids)
                table.adopt(shared, len(shared) * group.pool.block_size)
            first = table.num_tokens
            group.append(table, start + count - first)
            firsts.append(first)
        if row.token_ids is not None and ids is not None:
            row.token_ids.extend(ids)
            self._index(row, start)
        else:
            row.token_ids = None
        return firsts

    def _index(self, row: Row, start: int) -> None:
        assert row.token_ids is not None
        for group, table in zip(self.groups, row.tables, strict=True):
            index, size = group.index, group.pool.block_size
            if index is None or index.salt != self.salt:  # a fork may have taken the index on to another salt
                continue
            if table.num_tokens // size > start // size:
                self._published += [(index, block) for block in index.insert(row.token_ids, table.blocks)]

    def _behind_window(self, row: Row) -> None:
        """Release the blocks that no later query can see; here, and not earlier, so that a crop can go back."""
        for group, table in zip(self.groups, row.tables, strict=True):
            if group.window is not None:
                table.drop_before(table.num_tokens - group.window + 1)

    def _group_step(
        self, index: int, starts: list[int], counts: list[int], first_written: list[int], device: torch.device
    ) -> GroupStep:
        group = self.groups[index]
        tables = [row.tables[index] for row in self.rows]
        slots: list[int] = []
        written: list[int] = []
        position = 0
        for table, start, count, first in zip(tables, starts, counts, first_written, strict=True):
            slots += table.slots(first, start + count)
            written += range(position + first - start, position + count)
            position += count
        held = [t.num_tokens - t.num_dropped_blocks * group.pool.block_size for t in tables]
        return GroupStep(
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            written=None if len(written) == position else torch.tensor(written, dtype=torch.int64, device=device),
            block_table=group.table_tensor(tables, device),
            kv_len=torch.tensor(held, dtype=torch.int32, device=device),
            max_kv=max(held, default=0),
        )

    def column_slots(self, index: int, device: torch.device) -> Tensor:
        """The slot of each column, [B, num_columns] int64; -1 for padding and for what lies behind the window."""
        size = self.groups[index].pool.block_size
        out = torch.full((len(self.rows), self.num_columns), -1, dtype=torch.int64)
        for number, row in enumerate(self.rows):
            table = row.tables[index]
            dropped = table.num_dropped_blocks * size
            slots = [-1] * dropped + table.slots(dropped, table.num_tokens)
            where = slice(None) if self.real is None else self.real[number].cpu()
            out[number, where] = torch.tensor(slots, dtype=torch.int64)
        return out.to(device)

    def num_live_tokens(self, index: int) -> int:
        """Tokens that a group holds, those of a shared block counted once."""
        return num_live_tokens(self.rows, index)

    # -- changes between passes ------------------------------------------------------------------------

    def use_salt(self, salt: bytes) -> None:
        """What K and V depend on besides the tokens; what was computed under another salt is no prefix any more."""
        if salt != self.salt:
            for row in self.rows:
                row.token_ids = None
            self.salt = salt
        for group in self.groups:
            if group.index is not None:
                group.index.use_salt(salt)

    def adopt_prefix(self, token_ids: Tensor, mask: Tensor | None) -> int:
        """Start empty sequences from indexed blocks; returns how many columns need not be computed.

        All rows must skip equally many columns, since the input stays a rectangle, and at least one
        column is left to compute. token_ids, mask: [B, T]. Groups with a window have no index: no skipping.
        """
        if self.rows or any(g.index is None for g in self.groups):
            return 0
        real = None if mask is None or bool(mask.all()) else mask.bool()
        if real is not None and bool((real[:, :-1] & ~real[:, 1:]).any()):
            return 0
        rows = _ids_per_row(token_ids, real)
        assert rows is not None
        total = token_ids.shape[1]
        matches = [[g.index.match(ids) for g in self.groups if g.index is not None] for ids in rows]
        size = self.groups[0].pool.block_size
        reach = [total - len(ids) + min(map(len, m)) * size for ids, m in zip(rows, matches, strict=True)]
        skipped = min(*reach, total - 1) if reach else 0
        if skipped <= 0:
            return 0
        self.rows = [
            self._adopt_row(ids[: max(0, skipped - total + len(ids))], m) for ids, m in zip(rows, matches, strict=True)
        ]
        self.num_columns, self.real = skipped, None if real is None else real[:, :skipped]
        return skipped

    def _adopt_row(self, ids: list[int], matches: list[list[int]]) -> Row:
        row = Row([BlockTable(g.pool) for g in self.groups], list(ids))
        for group, table, blocks in zip(self.groups, row.tables, matches, strict=True):
            table.adopt(blocks[: -(-len(ids) // group.pool.block_size)], len(ids))
        return row

    def crop(self, num_removed: int) -> None:
        """Take back the last `num_removed` columns of every row.

        Raises UnsupportedError, with nothing changed, if a sliding window has let go of what is left in it.
        """
        keep = max(0, self.num_columns - num_removed)
        kept = [keep] * len(self.rows) if self.real is None else self.real[:, :keep].sum(1).tolist()
        for row, num_tokens in zip(self.rows, kept, strict=True):
            self._check_window(row, num_tokens)
        for row, num_tokens in zip(self.rows, kept, strict=True):
            row.truncate(num_tokens)
        self.num_columns = keep
        self.real = None if self.real is None else self.real[:, :keep]

    def _check_window(self, row: Row, num_tokens: int) -> None:
        for group, table in zip(self.groups, row.tables, strict=True):
            held = table.num_dropped_blocks * group.pool.block_size
            needed = 0 if group.window is None else max(0, num_tokens - group.window + 1)
            if num_tokens and held > needed:
                raise UnsupportedError(
                    f"cannot go back to {num_tokens} tokens: a sliding window of {group.window} needs those from "
                    f"{needed} on, and the cache holds those from {held} on; crop less, or reset() the cache"
                )

    def select(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order, repeated where an index is repeated (beams, n-best)."""
        chosen = [self.rows[i].fork() for i in indices]
        for row in self.rows:
            row.release()
        self.rows = chosen
        if self.real is not None:
            self.real = self.real[torch.tensor(indices, dtype=torch.int64, device=self.real.device)]

    def fork(self) -> Sequences:
        """The same sequences over the same pages; what either writes from here on is copied first."""
        other = Sequences(self.groups)
        other.rows = [row.fork() for row in self.rows]
        other.num_columns, other.real, other.salt = self.num_columns, self.real, self.salt
        return other

    def reset(self) -> None:
        """Forget the sequences. Indexed blocks stay for a later prompt that begins alike, until they are needed."""
        for row in self.rows:
            row.release()
        self.rows, self.num_columns, self.real = [], 0, None


def _ids_per_row(token_ids: Tensor | None, real: Tensor | None) -> list[list[int]] | None:
    if token_ids is None:
        return None
    if real is None:
        return token_ids.tolist()
    return [ids[keep].tolist() for ids, keep in zip(token_ids, real.to(token_ids.device), strict=True)]
