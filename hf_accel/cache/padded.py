"""Sequences over shared pages that are given as a padded batch.

A column is a position of the padded [B, T] input of transformers. A token is a column that is not padding.
Only tokens have slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError
from .cached_sequence import CachedSequence
from .pages import Pages
from .prefixes import NO_MATCH
from .step import Step, TokenRange


class PaddedBatch:
    """Maps the columns of a padded batch to the tokens of B sequences.

    token_mask: [B, num_columns] bool, False for padding; None if there is no padding.
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.sequences: list[CachedSequence] = []
        self.num_columns = 0
        self.token_mask: Tensor | None = None
        # take_back restores what was here before the last prepare: sequences, their lengths, num_columns, token_mask.
        self._before: tuple[list[CachedSequence], list[int], int, Tensor | None] = ([], [], 0, None)
        self._published: list[tuple[int, int]] = []

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
        """Allocate slots for `num_new` more columns of `batch_size` sequences, and describe the pass over them.

        mask: [B, num_columns + num_new] bool, False for padding, or None. token_ids: [B, num_new], or None if the ids
        are not known; sequences with equal prefixes share blocks only if the ids are given.
        Raises OutOfBlocksError when a pool of fixed size is exhausted, and UnsupportedError for a batch that does not
        continue the cached one. After any error the sequences are as they were.
        """
        if self.sequences and len(self.sequences) != batch_size:
            raise UnsupportedError(
                f"the cache holds {len(self.sequences)} sequences and the input has {batch_size}; "
                "call cache.reset(), or give a cache to each batch"
            )
        token_mask = self._extended_mask(batch_size, num_new, mask)
        self._refuse_gaps(token_mask)
        new_mask = None if token_mask is None else token_mask[:, self.num_columns :]
        counts = [num_new] * batch_size if new_mask is None else new_mask.sum(1).tolist()
        contiguous = [self._contiguous(token_mask, num_new, group.window) for group in self.pages.groups]
        # A window counts padding between tokens, so keys and values behind it do not follow from token ids.
        if token_ids is None or not (self.pages.keeps_all or all(contiguous)):
            ids: Sequence[list[int] | None] = [None] * batch_size
        else:
            ids = _ids_per_sequence(token_ids, new_mask)
        starts = [sequence.num_tokens for sequence in self.sequences] or [0] * batch_size
        self._before, self._published = (self.sequences, starts, self.num_columns, self.token_mask), []
        try:
            ranges = self._append(starts, counts, ids) if any(starts) else self._begin(counts, ids)
            if num_new == 1 and any(starts):  # by which transformers' layers tell that a token was generated
                ranges = [replace(each, num_prompt=each.start) for each in ranges]
            step = self.pages.step(ranges, device)
            step.num_columns, step.fresh = num_new, not any(starts)
            step.token_columns = None if new_mask is None else new_mask.flatten().nonzero().squeeze(1).to(device)
            step.contiguous = contiguous
        except BaseException:
            self.take_back()
            raise
        self.num_columns += num_new
        self.token_mask = token_mask
        return step

    def mask_with(self, num_new: int) -> Tensor | None:
        """Return the mask of all columns if `num_new` more of them hold tokens; None if there is no padding."""
        if self.token_mask is None:
            return None
        return torch.cat([self.token_mask, self.token_mask.new_ones(len(self.token_mask), num_new)], 1)

    def take_back(self) -> None:
        """Undo the last `prepare`, because its pass failed. The blocks that it published leave the prefix index."""
        sequences, starts, self.num_columns, self.token_mask = self._before
        self.pages.withdraw(self._published)
        # zip is not strict here, because after an error there may be fewer sequences than starts.
        for sequence, start in zip(self.sequences, starts, strict=False):
            sequence.truncate(start)
        self.sequences = sequences

    def _extended_mask(self, batch_size: int, num_new: int, mask: Tensor | None) -> Tensor | None:
        past, total = self.num_columns, self.num_columns + num_new
        if mask is None:
            if self.token_mask is not None:
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
        cached_mask = mask.new_ones(batch_size, past) if self.token_mask is None else self.token_mask
        if past and not torch.equal(mask[:, :past], cached_mask):
            raise UnsupportedError(
                "attention_mask hides or shows cached columns that it did not before; a paged cache stores no "
                "padding, so the mask of cached columns cannot change: start from an empty cache"
            )
        return None if self.token_mask is None and bool(mask.all()) else mask

    def _refuse_gaps(self, token_mask: Tensor | None) -> None:
        """Raise UnsupportedError if padding stands between tokens, and would change what is kept of them."""
        if token_mask is None or not any(group.sees_padding for group in self.pages.groups):
            return
        begun, left = token_mask.bool().cummax(1).values, token_mask.bool().flip(1).cummax(1).values.flip(1)
        if bool((begun & left & ~token_mask.bool()).any()):
            raise UnsupportedError(
                "attention_mask hides columns between tokens, and in transformers padding changes the states of this "
                "model's recurrent layers; pad on the left, or use transformers' own cache"
            )

    @staticmethod
    def _contiguous(token_mask: Tensor | None, num_new: int, window: int | None) -> bool:
        """Return whether bottom-right causal attention over a sequence's tokens equals attention over its columns.

        This requires the new tokens of each sequence to be the last of the new columns. A sliding window counts
        columns, so with a window no padding at all may be between tokens.
        """
        if token_mask is None:
            return True
        if not bool((token_mask[:, -1] | ~token_mask.any(1)).all()):
            return False
        span = token_mask if window is not None else token_mask[:, -num_new:]
        return not bool((span[:, :-1] & ~span[:, 1:]).any())

    def _begin(self, counts: list[int], ids: Sequence[list[int] | None]) -> list[TokenRange]:
        """Start sequences of counts[i] tokens with cached blocks of their prefixes. Equal prompts share all blocks."""
        self.sequences, ranges = [], []
        sequence_of_ids: dict[tuple[int, ...], CachedSequence] = {}
        for count, new_ids in zip(counts, ids, strict=True):
            equal = sequence_of_ids.get(tuple(new_ids or ()))
            if equal is None:
                # The pass computes all tokens, so layers must hold all of them.
                match = self.pages.match_prefix(new_ids or ()) if self.pages.keeps_all else NO_MATCH
                self.sequences.append(self.pages.begin(match))
            else:
                self.sequences.append(equal.fork())
            ranges.append(self._extend(self.sequences[-1], 0, count, new_ids))
            if new_ids:
                sequence_of_ids[tuple(new_ids)] = self.sequences[-1]
        return ranges

    def _append(self, starts: list[int], counts: list[int], ids: Sequence[list[int] | None]) -> list[TokenRange]:
        """Allocate slots for counts[i] more tokens of each sequence.

        Blocks behind the sliding windows are released here and not earlier, so that `crop` can still remove tokens.
        """
        for sequence, start in zip(self.sequences, starts, strict=True):
            self.pages.slide(sequence, start)
        return [self._extend(*each) for each in zip(self.sequences, starts, counts, ids, strict=True)]

    def _extend(self, sequence: CachedSequence, start: int, count: int, ids: list[int] | None) -> TokenRange:
        """Allocate slots for tokens start..start+count-1; the sequence may already hold some of them."""
        tokens = TokenRange(sequence, start, count, write_from=sequence.num_tokens)
        self.pages.append(sequence, tokens.num_written, start=start)
        if ids is None:
            sequence.epoch = None
            return tokens
        sequence.token_ids[start:] = ids
        size = self.pages.sharing_size
        if (start + count) // size > start // size:
            self._published += self.pages.publish(sequence, sequence.token_ids)
        return tokens

    def column_slots(self, index: int, device: torch.device) -> Tensor:
        """Return the slot of each column, [B, num_columns] int64; -1 for padding and for columns behind the window."""
        out = torch.full((len(self.sequences), self.num_columns), -1, dtype=torch.int64, device="cpu")
        for number, sequence in enumerate(self.sequences):
            table = sequence.tables[index]
            dropped = table.num_dropped_blocks * self.pages.block_size
            slots = [-1] * dropped + table.slots(dropped, table.num_tokens)
            where = slice(None) if self.token_mask is None else self.token_mask[number].cpu()
            out[number, where] = torch.tensor(slots, dtype=torch.int64, device="cpu")
        return out.to(device)

    def fills_blocks(self, num_new: int) -> bool:
        """Return whether a pass over so many more columns begins the sequences, or may fill a block of one of them."""
        size = self.pages.sharing_size
        counts = [sequence.num_tokens % size for sequence in self.sequences]
        return not counts or max(counts) + num_new >= size

    # -- changes between passes ------------------------------------------------------------------------

    def adopt_prefix(self, token_ids: Tensor, mask: Tensor | None) -> int:
        """Start sequences with the cached blocks of their prefixes, and return how many columns are skipped.

        All sequences skip the same number of columns, because the input must stay a rectangle; with windows or states,
        each must then know a prefix that ends there. At least one column is left to compute. token_ids: [B, T]. mask:
        [B, T], False for padding, or None. Returns 0, with nothing changed, if no column can be skipped, if the batch
        is not empty, or if padding follows a token.
        """
        token_mask = None if mask is None or bool(mask.all()) else mask.bool()
        if self.sequences or (token_mask is not None and bool((token_mask[:, :-1] & ~token_mask[:, 1:]).any())):
            return 0
        sequences = _ids_per_sequence(token_ids, token_mask)
        keeps_all = self.pages.keeps_all
        matches = [self.pages.match_prefix(ids, keeps_last=not keeps_all) for ids in sequences]
        pads = [token_ids.shape[1] - len(ids) for ids in sequences]
        reach = [pad + len(match.digests) * self.pages.sharing_size for pad, match in zip(pads, matches, strict=True)]
        skipped = min([*reach, token_ids.shape[1] - 1])
        if skipped <= 0 or not (keeps_all or len(set(reach)) == 1):
            return 0
        for ids, pad, found in zip(sequences, pads, matches, strict=True):
            sequence = self.pages.begin(found, max(0, skipped - pad))
            sequence.token_ids = ids[: sequence.num_tokens]
            self.sequences.append(sequence)
        self.num_columns, self.token_mask = skipped, None if token_mask is None else token_mask[:, :skipped]
        return skipped

    def crop(self, num_removed: int) -> None:
        """Remove the last `num_removed` columns of every sequence.

        Raises UnsupportedError, with nothing changed, if a block was released that the sliding window needs again.
        """
        keep = max(0, self.num_columns - num_removed)
        kept = [keep] * len(self.sequences) if self.token_mask is None else self.token_mask[:, :keep].sum(1).tolist()
        for sequence, num_tokens in zip(self.sequences, kept, strict=True):
            self.pages.require_held(sequence, num_tokens)
        for sequence, num_tokens in zip(self.sequences, kept, strict=True):
            sequence.truncate(num_tokens)
        self.num_columns = keep
        self.token_mask = None if self.token_mask is None else self.token_mask[:, :keep]

    def select(self, indices: Sequence[int]) -> None:
        """Replace the sequences by those at `indices`, in that order. An index may be repeated (beams, n-best)."""
        chosen = [self.sequences[i].fork() for i in indices]
        for sequence in self.sequences:
            sequence.release()
        self.sequences = chosen
        if self.token_mask is not None:
            self.token_mask = self.token_mask[torch.tensor(indices, dtype=torch.int64, device=self.token_mask.device)]

    def fork(self) -> PaddedBatch:
        """Return a second batch that shares the pages. A shared block is copied before either batch writes to it."""
        other = PaddedBatch(copy.copy(self.pages))
        other.sequences = [sequence.fork() for sequence in self.sequences]
        other.num_columns, other.token_mask = self.num_columns, self.token_mask
        return other

    def reset(self) -> None:
        """Release the sequences. Blocks in the prefix index stay cached for later prompts until they are evicted."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences, self.num_columns, self.token_mask = [], 0, None


def _ids_per_sequence(token_ids: Tensor, token_mask: Tensor | None) -> list[list[int]]:
    if token_mask is None:
        return token_ids.tolist()
    return [ids[keep].tolist() for ids, keep in zip(token_ids, token_mask.to(token_ids.device), strict=True)]


def last_columns(slots: Tensor, count: int, window: int) -> Tensor:
    """Return the slots [B, T] of the `window` columns up to each of the last `count` ones: [B, count, window].

    -1 stands before the first column.
    """
    last = slots[:, -(count + window - 1) :]
    return F.pad(last, (count + window - 1 - last.shape[1], 0), value=-1).unfold(1, window, 1)
