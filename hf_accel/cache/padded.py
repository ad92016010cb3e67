"""Sequences that come as the columns of a padded rectangle, over shared pages.

A column is a position of the padded [B, T] input that transformers works with; a token is a column that
is not padding. Only tokens have a slot.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .group import Step
from .pages import CachedSequence, Pages, TokenRange


class PaddedBatch:
    """Which tokens of B sequences stand in which columns. All writes of bookkeeping happen in `prepare`."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.sequences: list[CachedSequence] = []
        self.num_columns = 0
        self.real: Tensor | None = None  # [B, num_columns] bool, False is padding; None: no padding at all
        # For take_back: what was there before the pass that was prepared last, and the blocks that it published.
        self._before: tuple[list[CachedSequence], list[int], int, Tensor | None] = ([], [], 0, None)
        self._published: list[int] = []

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
        """Make room for `num_new` columns in each of `batch_size` sequences and describe the pass.

        mask: [B, num_columns + num_new] bool or None, False where padding stands.
        token_ids: [B, num_new] or None; with known ids, equal beginnings share blocks.
        Raises OutOfBlocksError when a fixed pool is exhausted, with the sequences as they were, as after any error.
        """
        if self.sequences and len(self.sequences) != batch_size:
            raise UnsupportedError(
                f"the cache holds {len(self.sequences)} sequences and the input has {batch_size}; "
                "call cache.reset(), or give a cache to each batch"
            )
        real = self._extended_mask(batch_size, num_new, mask)
        new_real = None if real is None else real[:, self.num_columns :]
        counts = [num_new] * batch_size if new_real is None else new_real.sum(1).tolist()
        ids = [None] * batch_size if token_ids is None else _ids_per_sequence(token_ids, new_real)
        starts = [sequence.num_tokens for sequence in self.sequences] or [0] * batch_size
        self._before, self._published = (self.sequences, starts, self.num_columns, self.real), []
        try:
            ranges = self._append(starts, counts, ids) if any(starts) else self._begin(counts, ids)
            step = self.pages.step(ranges, device)
            step.num_columns, step.fresh = num_new, not any(starts)
            step.token_columns = None if new_real is None else new_real.flatten().nonzero().squeeze(1).to(device)
            step.contiguous = [self._contiguous(real, num_new, group.window) for group in self.pages.groups]
        except BaseException:
            self.take_back()
            raise
        self.num_columns += num_new
        self.real = real
        return step

    def take_back(self) -> None:
        """Undo the last `prepare`, whose pass did not come to its end: nobody finds the blocks that it published."""
        sequences, starts, self.num_columns, self.real = self._before
        self.pages.withdraw(self._published)
        for sequence, start in zip(self.sequences, starts, strict=False):  # an error may have left fewer sequences
            sequence.truncate(start)
        self.sequences = sequences

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
        """Whether bottom-right causal attention over a sequence's tokens equals attention over its columns.

        The new tokens of each sequence must be at the end of the new columns; where a window counts columns,
        no padding may stand between tokens at all.
        """
        if real is None:
            return True
        if not bool((real[:, -1] | ~real.any(1)).all()):
            return False
        span = real if window is not None else real[:, -num_new:]
        return not bool((span[:, :-1] & ~span[:, 1:]).any())

    def _begin(self, counts: list[int], ids: Sequence[list[int] | None]) -> list[TokenRange]:
        """New sequences of counts[i] tokens, in known blocks as far as there are any; equal ones share all."""
        self.sequences, ranges = [], []
        twins: dict[tuple[int, ...], CachedSequence] = {}
        for count, new_ids in zip(counts, ids, strict=True):
            twin = twins.get(tuple(new_ids or ()))
            if twin is None:
                blocks = self.pages.known(new_ids or ())
                self.sequences.append(self.pages.begin(blocks, len(blocks) * self.pages.block_size))
            else:
                self.sequences.append(twin.fork())
            ranges.append(self._extend(self.sequences[-1], 0, count, new_ids))
            if new_ids:
                twins[tuple(new_ids)] = self.sequences[-1]
        return ranges

    def _append(self, starts: list[int], counts: list[int], ids: Sequence[list[int] | None]) -> list[TokenRange]:
        """Room for counts[i] more tokens in each sequence.

        Blocks behind the windows are released here, and not earlier, so that a crop can go back.
        """
        for sequence, start in zip(self.sequences, starts, strict=True):
            self.pages.slide(sequence, start)
        return [self._extend(*each) for each in zip(self.sequences, starts, counts, ids, strict=True)]

    def _extend(self, sequence: CachedSequence, start: int, count: int, ids: list[int] | None) -> TokenRange:
        """Slots for the tokens from `start` on, of which the sequence may hold some already."""
        tokens = TokenRange(sequence, start, count, stored=sequence.num_tokens)
        self.pages.append(sequence, tokens.num_written, start=start)
        if ids is None:
            sequence.epoch = None
            return tokens
        sequence.token_ids[start:] = ids
        if (start + count) // self.pages.block_size > start // self.pages.block_size:
            self._published += self.pages.publish(sequence, sequence.token_ids)
        return tokens

    def column_slots(self, index: int, device: torch.device) -> Tensor:
        """The slot of each column, [B, num_columns] int64; -1 for padding and for what lies behind the window."""
        out = torch.full((len(self.sequences), self.num_columns), -1, dtype=torch.int64)
        for number, sequence in enumerate(self.sequences):
            table = sequence.tables[index]
            dropped = table.num_dropped_blocks * self.pages.block_size
            slots = [-1] * dropped + table.slots(dropped, table.num_tokens)
            where = slice(None) if self.real is None else self.real[number].cpu()
            out[number, where] = torch.tensor(slots, dtype=torch.int64)
        return out.to(device)

    # -- changes between passes ------------------------------------------------------------------------

    def adopt_prefix(self, token_ids: Tensor, mask: Tensor | None) -> int:
        """Start empty sequences from known blocks; returns how many columns need not be computed.

        All sequences must skip equally many columns, since the input stays a rectangle, and at least one
        column is left to compute. token_ids, mask: [B, T].
        """
        real = None if mask is None or bool(mask.all()) else mask.bool()
        if self.sequences or (real is not None and bool((real[:, :-1] & ~real[:, 1:]).any())):
            return 0
        sequences = _ids_per_sequence(token_ids, real)
        blocks = [self.pages.known(ids) for ids in sequences]
        pads = [token_ids.shape[1] - len(ids) for ids in sequences]
        reach = [pad + len(found) * self.pages.block_size for pad, found in zip(pads, blocks, strict=True)]
        skipped = min([*reach, token_ids.shape[1] - 1])
        if skipped <= 0:
            return 0
        for ids, pad, found in zip(sequences, pads, blocks, strict=True):
            sequence = self.pages.begin(found, max(0, skipped - pad))
            sequence.token_ids = ids[: sequence.num_tokens]
            self.sequences.append(sequence)
        self.num_columns, self.real = skipped, None if real is None else real[:, :skipped]
        return skipped

    def crop(self, num_removed: int) -> None:
        """Take back the last `num_removed` columns of every sequence.

        Raises UnsupportedError, with nothing changed, if a sliding window has let go of what is left in it.
        """
        keep = max(0, self.num_columns - num_removed)
        kept = [keep] * len(self.sequences) if self.real is None else self.real[:, :keep].sum(1).tolist()
        for sequence, num_tokens in zip(self.sequences, kept, strict=True):
            self.pages.require_held(sequence, num_tokens)
        for sequence, num_tokens in zip(self.sequences, kept, strict=True):
            sequence.truncate(num_tokens)
        self.num_columns = keep
        self.real = None if self.real is None else self.real[:, :keep]

    def select(self, indices: Sequence[int]) -> None:
        """Keep the sequences `indices`, in that order, repeated where an index is repeated (beams, n-best)."""
        chosen = [self.sequences[i].fork() for i in indices]
        for sequence in self.sequences:
            sequence.release()
        self.sequences = chosen
        if self.real is not None:
            self.real = self.real[torch.tensor(indices, dtype=torch.int64, device=self.real.device)]

    def fork(self) -> PaddedBatch:
        """The same sequences over the same pages; what either writes from here on is copied first."""
        other = PaddedBatch(copy.copy(self.pages))
        other.sequences = [sequence.fork() for sequence in self.sequences]
        other.num_columns, other.real = self.num_columns, self.real
        return other

    def reset(self) -> None:
        """Forget the sequences. Known blocks stay for a later prompt that begins as they do, until they are needed."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences, self.num_columns, self.real = [], 0, None


def _ids_per_sequence(token_ids: Tensor, real: Tensor | None) -> list[list[int]]:
    if real is None:
        return token_ids.tolist()
    return [ids[keep].tolist() for ids, keep in zip(token_ids, real.to(token_ids.device), strict=True)]
