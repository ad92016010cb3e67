"""The inputs that a request brings besides its tokens: images, embeddings, positions, or those of an encoder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..cache.kinds import SourceRows
from ..cache.prefixes import CONTENT_BYTES, content_number
from .marked_inputs import MarkedInputs
from .token_arguments import TokenArguments, as_bytes

# What generate() prepares for a text.
TEXT_INPUTS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict", "logits_to_keep",
    "labels", "output_attentions", "output_hidden_states", "num_items_in_batch", "cache_position", "synced_gpus",
    "cache", "cache_params", "state",
}  # fmt: skip


@dataclass(frozen=True)
class PassRows:
    """Tokens of a pass whose inputs do not follow from their ids.

    first: the index of the first of them among the tokens of the pass. count: n, their number. embeddings: [n, D], on
    the model's device; None for those of their ids. positions: [P, n] int64, on the host, or None for those that
    the pass has. marked: the features of those that are marked; None if none of them is. arguments: what else the
    decoder is given for each of them; None for what their ids say.
    """

    first: int
    count: int
    embeddings: Tensor | None
    positions: Tensor | None
    marked: MarkedInputs | None = None
    arguments: TokenArguments | None = None


Rows = Sequence[PassRows]


@dataclass(frozen=True)
class PromptInputs:
    """The inputs of the T tokens of one prompt, as the model's own code has made them.

    embeddings: [T, D], on the model's device; None for those of the ids. positions: [P, T] int64, on the host, with P
    coordinates for each token; None if each stands at its index. shifts: what is added to the index of a token behind
    the prompt, for each coordinate. contents: for each token, the number by which the prefix index knows it: its id,
    or a negative number that is another one for other inputs.
    seen: for each token, how many of the first tokens it sees; None if each sees those up to itself. seen_in_windows:
    whether only layers with a sliding window let tokens see later ones.
    marked: the features that the decoder is given for some of the tokens; None if it is given none.
    arguments: what else the decoder is given for each token; None for what follows from the ids.
    source: what the tokens attend to besides each other, such as images; None if there is nothing.
    asks: whether the last token is there to choose the first new one by, and no token sees it: padding on the right.
    """

    embeddings: Tensor | None
    positions: Tensor | None
    shifts: tuple[int, ...]
    contents: list[int]
    seen: list[int] | None = None
    marked: MarkedInputs | None = None
    arguments: TokenArguments | None = None
    seen_in_windows: bool = False
    source: SourceRows | None = None
    asks: bool = False

    def without_asked(self) -> PromptInputs:
        """Return the inputs of the tokens that others see, once the last one was asked."""
        positions = None if self.positions is None else self.positions[:, :-1]
        return replace(self, positions=positions, contents=self.contents[:-1], seen=None, asks=False)

    @property
    def is_of_ids(self) -> bool:
        """Return whether the decoder is given for each token, at its index, what its id says."""
        return self.embeddings is None and self.positions is None and self.marked is None and not self.arguments

    def seen_by(self, start: int, count: int) -> list[int] | None:
        """Return how many tokens each of the tokens start..start+count-1 sees; None if it sees those up to itself."""
        if self.seen is None or start >= len(self.seen):
            return None
        return self.seen[start : start + count] + list(range(len(self.seen) + 1, start + count + 1))

    def chunk(self, start: int, count: int) -> int:
        """Return how many tokens from `start` on a pass takes where there is room for `count`.

        Tokens that see each other are computed together: there are fewer, or more if the first of them need it.
        """
        if self.seen is None:
            return count
        whole = 0
        for stop in _whole_stops(self.seen, start):
            if stop - start > count and whole:
                return whole
            whole = stop - start
            if whole >= count:
                return whole
        return count

    def rows(self, first: int, start: int, count: int) -> Iterator[PassRows]:
        """Yield the inputs of the tokens start..start+count-1, of which the pass has the first one at `first`."""
        if self.is_of_ids:
            return
        end = len(self.contents)
        given = max(0, min(start + count, end) - start)
        if given:
            stop = start + given
            positions = None if self.positions is None else self.positions[:, start:stop]
            embeddings = None if self.embeddings is None else self.embeddings[start:stop]
            marked = None if self.marked is None else self.marked.part(start, stop)
            arguments = self.arguments and {name: value[start:stop] for name, value in self.arguments.items()}
            yield PassRows(first, given, embeddings, positions, marked, arguments)
        if self.positions is not None and given < count:
            later = torch.arange(start + given, start + count)
            yield PassRows(first + given, count - given, None, later + torch.tensor(self.shifts)[:, None])


@dataclass(eq=False)
class RequestInputs:
    """The inputs of a request besides the tokens that its sequences begin with. All its samples share one.

    unread: inputs that the model's own code has still to read, by name, as a processor makes them for one prompt:
        pixel_values, or the input_ids of an encoder; None if there are none.
    prompt: what the decoder is given for the prompt besides its ids; None for a text.
    source: the output of an encoder that the tokens attend to; None without an encoder.
    encoder_ids: the token ids that the encoder reads, which are those that the user gave.
    num_hidden: how many of the first tokens have no ids that anybody gave; logits processors do not see them.
    """

    unread: Mapping[str, Any] | None = None
    prompt: PromptInputs | None = None
    source: SourceRows | None = None
    encoder_ids: Sequence[int] = ()
    num_hidden: int = 0


def other_input(inputs: Mapping[str, Any]) -> str | None:
    """The name of an input other than token ids on which keys and values may depend; None if there is none."""
    return next((name for name, value in inputs.items() if name not in TEXT_INPUTS and not _says_nothing(value)), None)


def positions_count_tokens(position_ids: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether each token's position is the number of tokens before it, so that equal token ids have equal keys.

    position_ids: [B, Q] or None. mask: [B, Q] bool, False for padding, or None.
    """
    if position_ids is None:
        return mask is None or bool(mask.all())
    if position_ids.ndim != 2:
        return False
    if mask is None or bool(mask.all()):
        return bool((position_ids == torch.arange(position_ids.shape[1], device=position_ids.device)).all())
    expected = mask.long().cumsum(1) - 1
    return bool(((position_ids == expected) | ~mask).all())


def _says_nothing(value: object) -> bool:
    """Return whether an input is None or an empty dict; transformers passes the latter if there are no images."""
    return value is None or (isinstance(value, Mapping) and not value)


def _whole_stops(seen: list[int], start: int) -> Iterator[int]:
    """Yield where a pass from token `start` on may stop: behind tokens that see no later ones."""
    needed = 0
    for index in range(start, len(seen)):
        needed = max(needed, seen[index])
        if needed <= index + 1:
            yield index + 1


def contents_of_wholes(contents: list[int], seen: list[int]) -> list[int]:
    """Return other numbers for tokens that see later ones, of which their keys and values then depend on.

    contents, seen: see PromptInputs.
    """
    whole, start = list(contents), 0
    for stop in _whole_stops(seen, 0):
        if stop - start > 1:
            everything = repr(contents[start:stop]).encode()
            for index in range(start, stop):
                whole[index] = content_number(everything, repr(index - start).encode())
        start = stop
    return whole


def contents_with(contents: list[int], everything: bytes) -> list[int]:
    """Return other numbers for tokens that see something besides tokens. everything: says what that is."""
    return [content_number(everything, repr(each).encode()) for each in contents]


def text_with_source(ids: list[int], source: SourceRows, everything: bytes) -> PromptInputs:
    """Return the inputs of a prompt of ids that attend to a source. everything: says what that is."""
    return PromptInputs(None, None, (0,), contents_with(ids, everything), source=source)


def is_padded_behind(mask: Tensor) -> bool:
    """Return whether each row [T] of a mask begins with a token, and some have padding behind all of their tokens."""
    return bool((mask[:, :1] != 0).all()) and bool((mask[:, 1:] <= mask[:, :-1]).all()) and not bool(mask.all())


def moved(ids: list[int], columns: int) -> PromptInputs:
    """Return the inputs of a prompt whose tokens, with those behind it, stand so many columns later."""
    contents = [content_number(repr((token, columns + index)).encode()) for index, token in enumerate(ids)]
    positions = torch.arange(columns, columns + len(ids))[None]
    return PromptInputs(None, positions, (columns,), contents)


def whole(ids: list[int], columns: int) -> PromptInputs:
    """Return the inputs of a prompt whose tokens all see each other, and stand so many columns later."""
    prompt = moved(ids, columns) if columns else PromptInputs(None, None, (0,), ids)
    seen = [len(ids)] * len(ids)
    return replace(prompt, contents=contents_of_wholes(prompt.contents, seen), seen=seen)


def asked_behind(ids: list[int], position: int) -> PromptInputs:
    """Return the inputs of a prompt of ids and a token that stands behind them, for padding on the right.

    position: of that token, which is asked, and sees all before it; new tokens stand behind this position.
    """
    count, shift = len(ids), position + 1 - len(ids)
    positions = torch.tensor([[*range(count), position]])
    contents = [content_number(repr((token, index, shift)).encode()) for index, token in enumerate(ids)]
    seen = [*range(1, count + 1), count]
    return PromptInputs(
        None, positions, (shift,), [*contents, content_number(os.urandom(CONTENT_BYTES))], seen, asks=True
    )  # fmt: skip


def contents_of(
    ids: list[int],
    is_plain: list[bool],
    embeddings: Tensor,
    positions: Tensor | None,
    *,
    marked: MarkedInputs | None = None,
    arguments: TokenArguments | None = None,
) -> list[int]:
    """Return a number for each token, which is another one for other inputs; see PromptInputs.contents.

    is_plain: whether a token is embedded as its id is, and stands at its index. embeddings: [T, D]. positions: [P, T].
    marked: the features of tokens. arguments: see PromptInputs. The numbers are BLAKE2 digests of 63 bits; a prefix
    is known by those of all its tokens.
    """
    rows = embeddings.detach().contiguous().cpu().view(torch.uint8).numpy()
    places = [] if positions is None else positions.T.tolist()
    features = [b""] * len(ids) if marked is None else marked.contents()
    others = as_bytes(arguments, len(ids))
    contents = []
    for index, token in enumerate(ids):
        if features[index] or not is_plain[index]:
            place = repr(places[index] if places else index).encode()
            token = content_number(rows[index].tobytes(), place, features[index], others[index])
        contents.append(token)
    return contents
