"""Streamers of transformers for any number of rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError


class RowStreams:
    """What stock's generate takes for a streamer, and hands each row's tokens on as they come.

    A list has a streamer for each row. A streamer whose `put` takes `row` gets each row's tokens with its number.
    Any other gets what stock's loop would give it: one row's tokens, or a column [B] once every row has one.
    """

    def __init__(self, streamer: Any) -> None:
        self.each: list[Any] | None = list(streamer) if isinstance(streamer, list | tuple) else None
        self.one: Any = streamer
        self.takes_row = self.each is None and "row" in inspect.signature(self.one.put).parameters
        self.columns: list[list[int]] = []  # what a plain streamer is still owed
        self.finished: set[int] = set()
        self.num_put = 0
        self.num_tokens = 0
        self.padding = 0
        self.ends: frozenset[int] = frozenset()
        self.prompted = False

    @property
    def has_streamed(self) -> bool:
        """Whether more than the prompt was handed out."""
        return self.num_tokens > 0

    def expect(self, generation_config: Any) -> None:
        """What stock's loops end a row with, and put behind it."""
        pad, ends = generation_config._pad_token_tensor, generation_config._eos_token_tensor
        self.padding = 0 if pad is None else int(pad)
        self.ends = frozenset() if ends is None else frozenset(ends.flatten().tolist())

    def put(self, value: Tensor) -> None:
        """Stock's own loops: the prompt [B, T], then columns [B], or a run of one row's tokens when assisted."""
        if not self.prompted:
            self.prompt(value)
        elif self.each is None and not self.takes_row:
            self.one.put(value)
        elif len(self.columns) == 1:
            self.tokens(0, value.flatten().tolist(), finished=False)
        else:
            for row, token in enumerate(value.flatten().tolist()):
                if row not in self.finished:
                    self.tokens(row, [token], finished=token in self.ends)

    def prompt(self, ids: Tensor) -> None:
        self.prompted = True
        if self.each is not None and len(self.each) != len(ids):
            raise UnsupportedError(f"streamer= has {len(self.each)} streamers for {len(ids)} rows; give one for each")
        self.columns = [[] for _ in ids]
        if self.each is None and not self.takes_row:
            self.one.put(ids)
        else:
            for row, tokens in enumerate(ids):
                self._to_row(row, tokens)

    def tokens(self, row: int, tokens: Sequence[int], finished: bool) -> None:
        """New tokens of one row; ragged passes bring some rows more than others."""
        self.num_tokens += len(tokens)
        if self.each is not None or self.takes_row:
            for token in tokens:
                self._to_row(row, torch.tensor([token]))
            if finished:
                self._end(row)
            return
        self.columns[row] += tokens
        if finished:
            self.finished.add(row)

    def flush(self) -> None:
        """After a pass: the columns that are complete, with padding where a row has ended."""
        number = self.num_put
        while any(len(column) > number for column in self.columns):
            if any(len(column) <= number and row not in self.finished for row, column in enumerate(self.columns)):
                break
            column = [ids[number] if len(ids) > number else self.padding for ids in self.columns]
            self.one.put(torch.tensor(column))
            number += 1
        self.num_put = number

    def _to_row(self, row: int, tokens: Tensor) -> None:
        if self.each is not None:
            self.each[row].put(tokens)
        elif self.takes_row:
            self.one.put(tokens, row=row)

    def _end(self, row: int) -> None:
        if row not in self.finished:
            self.finished.add(row)
            if self.each is not None:
                self.each[row].end()

    def end(self) -> None:
        if self.each is None:
            self.one.end()
        else:
            for row in range(len(self.each)):
                self._end(row)
