"""Reads the calls of a model's decoder for a batch of prompts: what ragged passes hand on for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.hf.stock import SDPA
from ...cache.hf.kinds import model_kinds
from ...cache.kinds import KeysAndValues
from ...errors import NotRaggedError
from ...models import num_embedded
from ...undo.state import find_state, state_of
from ..marked_inputs import MarkedInputs, read_marked
from ..prompt_inputs import (
    TEXT_INPUTS,
    PromptInputs,
    contents_of,
    contents_of_wholes,
    contents_with,
    text_with_source,
)
from ..token_arguments import TokenArguments, read_arguments
from .decoder_call import UpToDecoder
from .decoder_trial import (
    counted_positions,
    merged_embeddings,
    refuse_mixed_arguments,
    refuse_mixed_tokens,
    refuse_planes,
)
from .given_source import GivenSource, read_sources, refuse_other_source, source_bytes, taken_source
from .model_runner import counts_positions
from .prompt_masks import tokens_seen

PROBES = (1, 2)  # tokens for the second pass, of which one does not pad


@dataclass(frozen=True)
class _Call:
    """The arguments of a decoder: embeddings [B, T, D], positions [P, B, T] on the host, and a mask.

    positions: None if it counts them by itself. source: what its layers attend to besides tokens; None for nothing.
    planes: P where it was given positions [P, B, T]; None if they were
    [B, T]. marked: the features that it was given for some of the B * T tokens; None for none. arguments: what it was
    given for each token, [B, T, ...]. uncounted: see CountedPositions.
    """

    embeddings: Tensor
    positions: Tensor | None
    planes: int | None
    mask: Any
    marked: MarkedInputs | None
    arguments: TokenArguments
    source: GivenSource | None = None
    uncounted: int | None = None


class PromptReader:
    """The decoder's calls for a batch of prompts, checked, and read row by row. See prompts.prompt_inputs."""

    @torch.no_grad()
    def __init__(self, calls: UpToDecoder, ids: Tensor, mask: Tensor | None, inputs: Mapping[str, Any]) -> None:
        self.calls, self.ids = calls, ids
        state = find_state(calls.model)
        self.counts = counts_positions(calls.model)
        self.source_argument = None if state is None else state.generation.form.source
        self.counts_padding = state is not None and state.generation.form.counts_padding
        self.first = self._call(calls.first(ids, inputs))
        rows, self.columns = self.first.embeddings.shape[:2]
        self.tokens = torch.ones(rows, self.columns, dtype=torch.bool) if mask is None else mask.bool().cpu()
        self.sources = read_sources(self.first.source, self.tokens)
        if calls.num_learnt:
            self._read_learnt(calls.num_learnt)
        whole = state is not None and state.generation.form.whole_prompts
        self.seen = tokens_seen(calls.config, self.first.mask, self.tokens, causal=calls.is_causal, whole=whole)
        if state is not None and state.generation.form.operators is not None:
            raise NotRaggedError("its attention is by torch's operators, which ragged passes know of token ids alone")
        if state is not None and state.generation.context is not None and (any(self.seen.rows) or self.first.marked):
            raise NotRaggedError("tokens see later ones or bring features, and ranks share out its cache")
        if bool((ids >= num_embedded(calls.model)).any()):
            raise NotRaggedError("the prompt holds token ids that have no embedding")
        if self.first.uncounted is not None and not ids.shape[1]:
            raise NotRaggedError("its decoder counts the tokens that do not pad, and is given embeddings alone")
        probes = ids.new_full((rows, 1), next(token for token in PROBES if token != self.first.uncounted))
        self.second = self._call(calls.second(torch.cat([ids, probes], dim=1), inputs, self.columns))
        if self.first.embeddings.dtype is not self.second.embeddings.dtype:
            raise NotRaggedError(f"it is given embeddings of {self.first.embeddings.dtype}")
        self.of_ids = self._of_ids(ids) if self.ids.shape[1] else None
        of_probes = self._of_ids(probes)
        refuse_other_source(self.first.source, self.second.source)
        if not torch.equal(self.second.embeddings, of_probes.embeddings) or self.second.marked is not None:
            raise NotRaggedError(f"{type(calls.model).__name__} embeds the tokens behind a prompt in a way of its own")
        self._check_planes(state)
        self._check_arguments(of_probes)
        if self.first.marked is not None:
            self._check_marked(self.first.marked)

    def _read_learnt(self, count: int) -> None:
        """Read prompts behind `count` embeddings of an adapter as embeddings alone. Padding then stands between them.

        Raises NotRaggedError if a layer keeps something in which columns of padding count.
        """
        if self.ids.shape[1] + count != self.columns:
            raise NotRaggedError(f"its adapter gives it {self.columns} columns for {self.ids.shape[1]}")
        if self.tokens.shape[1] < self.columns:
            self.tokens = F.pad(self.tokens, (count, 0), value=True)
        distinct = model_kinds(self.calls.config).distinct
        if not bool(self.tokens.all()) and any(each != KeysAndValues(None) for each in distinct):
            raise NotRaggedError("padding stands between the embeddings of its adapter and its prompt")
        self.ids = self.ids[:, :0]

    def _check_planes(self, state: Any) -> None:
        """Raise NotRaggedError unless positions of so many coordinates mean the same in passes of texts."""
        if self.first.planes != self.second.planes:
            raise NotRaggedError("tokens behind a prompt have positions of another form than those of the prompt")
        if state is None or self.first.planes == state.generation.form.planes:
            return
        if self.first.planes is None:
            raise NotRaggedError("it is given positions of another form than for a text")
        refuse_planes(self.calls.decoder, self.first.planes, self.first.embeddings)

    def _check_arguments(self, of_probes: _Call) -> None:
        """Raise NotRaggedError unless the tokens behind a prompt are given what their ids say, and the decoder takes
        arguments token by token. of_probes: see _of_ids.
        """
        names = ", ".join({**self.first.arguments, **self.second.arguments})
        if not _same_arguments(self.second.arguments, of_probes.arguments):
            raise NotRaggedError(f"its decoder is given {names} in a way of its own behind a prompt")
        if names and self.of_ids is None:
            raise NotRaggedError(f"its decoder is given {names} for embeddings")
        given = {name: value.flatten(0, 1) for name, value in self.first.arguments.items()}
        if given and self.of_ids is not None and find_state(self.calls.model) is not None:
            absent = given.keys() - self.of_ids.arguments.keys()
            like = self.first.embeddings
            refuse_mixed_arguments(self.calls.decoder, given, self.first.planes, like, absent=absent)

    def _of_ids(self, ids: Tensor) -> _Call:
        """Return what the decoder is given for each token of ids [B, T] in a pass of ids alone, in which they stand
        in one row, in another order, and at other positions. Raises NotRaggedError if the positions do not reach it.
        """
        row, placed = ids.flatten().flip(0)[None], {}
        if not self.counts:
            positions = torch.arange(row.shape[1], device=row.device).flip(0)[None] + 3
            planes = self.first.planes
            placed["position_ids"] = positions if planes is None else positions.expand(planes, 1, -1)
        given = self.calls(input_ids=row, use_cache=True, **placed)
        if not all(name in given and torch.equal(given[name], value) for name, value in placed.items()):
            raise NotRaggedError("its own code changes positions that it is given")
        call = self._call(given)
        if call.marked is not None:
            raise NotRaggedError("its decoder is given features of tokens without an image")
        arguments = {name: value[0].flip(0).unflatten(0, ids.shape) for name, value in call.arguments.items()}
        return replace(call, embeddings=call.embeddings[0].flip(0).unflatten(0, ids.shape), arguments=arguments)

    def _check_marked(self, marked: MarkedInputs) -> None:
        """Raise NotRaggedError unless the decoder takes features of tokens by token, in the form of earlier ones."""
        state = state_of(self.calls.model).generation
        if state.marked_form not in (None, marked.form):
            raise NotRaggedError(f"its decoder was given {marked.form.marks} in another form before")
        refuse_mixed_tokens(self.calls.decoder, marked, self.first.planes, self.first.embeddings)
        state.marked_form = marked.form

    @property
    def makes_masks(self) -> bool:
        """Return whether the decoder is given a mask of four dimensions for texts without padding."""
        mask = self.first.mask
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        is_plain = bool(self.tokens.all()) and not any(self.seen.rows)
        is_plain = is_plain and self.calls.config._attn_implementation == SDPA
        return is_plain and any(isinstance(each, Tensor) and each.ndim == 4 for each in masks)

    def row(self, row: int) -> PromptInputs | None:
        """Return the inputs of one prompt; None if it is text alone."""
        columns = self.tokens[row].nonzero().flatten()
        count, indices = len(columns), torch.arange(len(columns))
        embeddings, positions, shifts = self._embeddings(row), self._positions(row), self._shifts(row)
        plain = torch.zeros(count, dtype=torch.bool)
        ids = plain.long()
        if self.ids.shape[1]:
            ids = self.ids[row].cpu()[columns]
            plain = self._is_as_ids_say(row)
        is_moved = bool((positions != indices).any()) or bool(shifts.any())
        marked, source = self._marked(row), self.sources[row]
        is_text = bool(plain.all()) and not is_moved and self.seen.rows[row] is None and marked is None
        if is_text:
            return None if source is None else text_with_source(ids.tolist(), source, source_bytes(source))
        is_plain = (plain & (positions == indices).all(dim=0)).tolist()
        places = positions if is_moved else None
        arguments = {
            name: value[row][self.tokens[row].to(value.device)] for name, value in self.first.arguments.items()
        }
        contents = contents_of(ids.tolist(), is_plain, embeddings, places, marked=marked, arguments=arguments)
        seen = self.seen.rows[row]
        if seen is not None:
            contents = contents_of_wholes(contents, seen)
        if source is not None:
            contents = contents_with(contents, source_bytes(source))
        if self.first.uncounted is not None:  # of equal prompts, those behind padding go on at other positions
            contents = contents_with(contents, repr(shifts.tolist()).encode())
        return PromptInputs(
            embeddings, places, tuple(shifts.tolist()), contents, seen, marked, arguments or None,
            seen_in_windows=self.seen.in_windows, source=source,
        )  # fmt: skip

    def is_moved_text(self, row: int, columns: int) -> bool:
        """Return whether a row is a text whose tokens stand, with those behind it, so many columns later."""
        positions = self._positions(row)
        moved = positions == torch.arange(positions.shape[1]) + columns
        return (
            bool(self._is_as_ids_say(row).all()) and bool(moved.all()) and bool((self._shifts(row) == columns).all())
        )

    def _call(self, given: dict[str, Any]) -> _Call:
        """Read a call. Raises NotRaggedError if the decoder reads an argument that ragged passes do not hand on."""
        others = {
            name: value
            for name, value in given.items()
            if name not in TEXT_INPUTS and name != "inputs_embeds" and value is not False and self.calls.is_read(name)
        }
        source = taken_source(others, self.source_argument, given)
        positions, embeddings = given.get("position_ids"), given.get("inputs_embeds")
        if embeddings is None:
            embeddings = self._embedded(given["input_ids"])
        rows, columns = embeddings.shape[:2]
        counted = None
        if positions is None and not self.counts:
            counted = counted_positions(self.calls.decoder, given, (rows, columns))
            positions = None if counted is None else counted.positions
        if (positions is None) is not self.counts:
            how = "no positions, and counts tokens in a way of its own" if positions is None else "positions at times"
            raise NotRaggedError(f"its decoder is given {how}")
        planes = len(positions) if positions is not None and positions.ndim == 3 else None
        if positions is not None:
            positions = (positions[None] if planes is None else positions).cpu()
        marked = read_marked(others, (rows, columns))
        arguments = {} if marked is not None else read_arguments(others, (rows, columns))
        if arguments is None:
            own = None if counted is None else counted.positions
            merged = merged_embeddings(self.calls.decoder, given, others, own)
            if merged is None:
                raise NotRaggedError(f"its decoder is given {next(iter(others))}")
            embeddings, arguments = merged
        uncounted = None if counted is None else counted.uncounted
        return _Call(
            embeddings, positions, planes, given.get("attention_mask"), marked, arguments, source, uncounted=uncounted
        )

    def _is_as_ids_say(self, row: int) -> Tensor:
        """Return for each token of a row whether the decoder is given for it what its id says, [n] bool."""
        assert self.of_ids is not None
        same = (self.of_ids.embeddings[row] == self.first.embeddings[row]).all(dim=-1).cpu()
        for name, value in self.first.arguments.items():
            own = self.of_ids.arguments.get(name)
            expected = torch.zeros_like(value[row]) if own is None else own[row]
            same &= (value[row] == expected).reshape(self.columns, -1).all(dim=1).cpu()
        return same[self.tokens[row]]

    def _embeddings(self, row: int) -> Tensor:
        embeddings = self.first.embeddings
        return embeddings[row, self.tokens[row].to(embeddings.device)]

    def _marked(self, row: int) -> MarkedInputs | None:
        """Return the features of the tokens of a row; None for none. Padding has none."""
        marked = self.first.marked
        if marked is None:
            return None
        own = marked.part(row * self.columns, (row + 1) * self.columns)
        return None if own is None else own.chosen(self.tokens[row])

    def _positions(self, row: int) -> Tensor:
        """Return the positions [P, n] of the tokens of a row."""
        positions, tokens = self.first.positions, self.tokens[row]
        if positions is None:
            columns = tokens.nonzero().flatten()
            return (columns if self.counts_padding else torch.arange(len(columns)))[None]
        return positions[:, min(row, positions.shape[1] - 1), tokens]

    def _shifts(self, row: int) -> Tensor:
        """Return what is added to the index of a token behind a row's prompt, [P]."""
        positions, count = self.second.positions, int(self.tokens[row].sum())
        if positions is None:
            return torch.tensor([self.columns - count if self.counts_padding else 0])
        return positions[:, min(row, positions.shape[1] - 1), 0] - count

    def _embedded(self, ids: Tensor) -> Tensor:
        table: Any = self.calls.model.get_input_embeddings()
        embedded: Tensor = table(ids.to(self.ids.device))
        return embedded


def _same_arguments(first: TokenArguments, second: TokenArguments) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
