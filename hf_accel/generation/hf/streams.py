"""transformers' streamers for any number of rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError


class RowStreams:
    """A streamer for transformers' generate() that passes each row's tokens on to the user's streamers.

    streamer: a list with a streamer for each row; or a streamer whose `put` takes `row`, which gets each row's tokens
    with the row's index; or any other streamer. The last gets what transformers' loop would give it: the tokens of a
    single row, or a column [B] as soon as every row has a token for it.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamers: list[Any] | None = list(streamer) if isinstance(streamer, list | tuple) else None
        self.streamer: Any = streamer
        self.takes_row = self.streamers is None and "row" in inspect.signature(self.streamer.put).parameters
        self.columns: list[list[int]] = []  # the new tokens of each row, for a streamer that gets columns
        self.finished: set[int] = set()
        self.num_put = 0
        self.num_tokens = 0
        self.padding = 0
        self.ends: frozenset[int] = frozenset()
        self.prompted = False

    @property
    def has_streamed(self) -> bool:
        """True if a new token was streamed."""
        return self.num_tokens > 0

    def expect(self, generation_config: Any) -> None:
        """Read from the config which tokens end a row, and which token pads it."""
        pad, ends = generation_config._pad_token_tensor, generation_config._eos_token_tensor
        self.padding = 0 if pad is None else int(pad)
        self.ends = frozenset() if ends is None else frozenset(ends.flatten().tolist())

    def put(self, value: Tensor) -> None:
        """Stream what transformers' loop passes: the prompt [B, T], then columns [B], or in assisted decoding the
        tokens of one row."""
        if not self.prompted:
            self.prompt(value)
        elif self.streamers is None and not self.takes_row:
            self.streamer.put(value)
        elif len(self.columns) == 1:
            self.tokens(0, value.flatten().tolist(), finished=False)
        else:
            for row, token in enumerate(value.flatten().tolist()):
                if row not in self.finished:
                    self.tokens(row, [token], finished=token in self.ends)

    def prompt(self, ids: Tensor) -> None:
        """Stream the prompt [B, T]. Raises UnsupportedError for a list of another number of streamers."""
        self.prompted = True
        if self.streamers is not None and len(self.streamers) != len(ids):
            raise UnsupportedError(
                f"streamer= has {len(self.streamers)} streamers for {len(ids)} rows; give one for each"
            )
        self.columns = [[] for _ in ids]
        if self.streamers is None and not self.takes_row:
            self.streamer.put(ids)
        else:
            for row, tokens in enumerate(ids):
                self._to_row(row, tokens)

    def tokens(self, row: int, tokens: Sequence[int], finished: bool) -> None:
        """Stream the new tokens of one row. In ragged passes, rows may have different numbers of new tokens."""
        self.num_tokens += len(tokens)
        if self.streamers is not None or self.takes_row:
            for token in tokens:
                self._to_row(row, torch.tensor([token]))
            if finished:
                self._end(row)
            return
        self.columns[row] += tokens
        if finished:
            self.finished.add(row)

    def flush(self) -> None:
        """Stream the columns that are complete after a pass, with padding for rows that have ended."""
        number = self.num_put
        while any(len(column) > number for column in self.columns):
            if any(len(column) <= number and row not in self.finished for row, column in enumerate(self.columns)):
                break
            column = [ids[number] if len(ids) > number else self.padding for ids in self.columns]
            self.streamer.put(torch.tensor(column))
            number += 1
        self.num_put = number

    def _to_row(self, row: int, tokens: Tensor) -> None:
        if self.streamers is not None:
            self.streamers[row].put(tokens)
        elif self.takes_row:
            self.streamer.put(tokens, row=row)

    def _end(self, row: int) -> None:
        if row not in self.finished:
            self.finished.add(row)
            if self.streamers is not None:
                self.streamers[row].end()

    def end(self) -> None:
        if self.streamers is None:
            self.streamer.end()
        else:
            for row in range(len(self.streamers)):
                self._end(row)
