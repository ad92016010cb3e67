"""Stop strings, which end a sequence when they are in its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...errors import UnsupportedError
from ..sequence import Sequence

REPLACEMENT = "\ufffd"  # tokenizers write this for bytes that are not a whole character
# So many prompt tokens are decoded with the first new token, because a tokenizer decodes the beginning of a text
# differently.
CONTEXT_TOKENS = 6
# A tokenizer may still change so many characters at the end of a text. For example, it removes a space before a ".".
CHANGEABLE = 16
MAX_PENDING = 16  # the most tokens that wait for the rest of a character


class StopStrings:
    """Ends a sequence when one of `strings` is in its generated text. A string may begin and end inside a token.

    decode: maps token ids to text; it decides whether special tokens have text. As in transformers, the tokens of the
    string stay in the sequence; `cut` removes the string and what follows it from the text.

    A call decodes only the last few tokens, whatever the length of the sequence. The last tokens alone do not decode
    to the end of the text: a tokenizer may drop the space before the first token (SentencePiece), and may write U+FFFD
    for the bytes of an unfinished character or for a whole run of byte tokens. So two texts are compared that begin at
    the same token, where a character begins: decode(tokens[first:read]) and decode(tokens[first:]). The new text is
    the part in which the second differs. `first` and `read` move on when the text ends with a whole character, or
    after MAX_PENDING tokens. The text before them is kept as far back as a stop string can begin, and CHANGEABLE
    characters more.
    """

    def __init__(self, strings: str | Iterable[str], decode: Callable[[list[int]], str] | None) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not all(self.strings):
            raise UnsupportedError("stop= has an empty string, which is found in every text; leave it out")
        if self.strings and decode is None:
            raise UnsupportedError(
                f"stop={self.strings} needs the text of the tokens; give a tokenizer, or stop_token_ids"
            )
        self.decode = decode

    def __call__(self, sequence: Sequence) -> bool:
        assert self.decode is not None
        tail = sequence.notes.get("text_tail")
        if not isinstance(tail, TextTail):
            longest = max(map(len, self.strings))
            tail = TextTail(self.decode, sequence.tokens, sequence.num_prompt, longest - 1 + CHANGEABLE)
            sequence.notes["text_tail"] = tail
        text, seen = tail.read_on(sequence.tokens)
        return any(text.find(string, max(0, seen - len(string) + 1)) >= 0 for string in self.strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string in it, or all of it."""
        return text[: min((place for s in self.strings if (place := text.find(s)) >= 0), default=len(text))]

    def text_of(self, sequence: Sequence, tokenizer: Any, tokens: list[int]) -> str:
        """Return the text of the tokens that a sequence has generated, without what ended it.

        What must match something is matched with the space that stands before it, whatever the prompt ends with.
        """
        goes_on = sequence.settings.constraint is not None
        prompt, decode = sequence.tokens[: sequence.num_prompt], tokenizer.decode
        before = plain_token(tokenizer) if goes_on else context_of(decode, prompt)
        return self.text(sequence.settings.stop.without_end(tokens), before=before, with_space=goes_on)

    def text(self, tokens: list[int], *, before: list[int], with_space: bool) -> str:
        """Return the text of the generated tokens before the first stop string in it, or all of it.

        before: see text_behind. with_space: whether a space with which the text begins behind them stays, where the
        text of the tokens alone has none.
        """
        assert self.decode is not None
        whole = text_behind(self.decode, before, tokens)
        found = self.cut(whole)
        return found if with_space or self.decode(tokens).startswith(" ") else found.removeprefix(" ")


def text_behind(decode: Callable[[list[int]], str], before: list[int], tokens: list[int]) -> str:
    """Return what tokens add to the text of those before them; a tokenizer may drop a space with which they begin.

    before: as `context_of` returns them.
    """
    begin, whole = decode(before) if before else "", decode([*before, *tokens])
    return whole[len(begin) :] if whole.startswith(begin) else decode(tokens)


def context_of(decode: Callable[[list[int]], str], prompt: list[int]) -> list[int]:
    """Return the last tokens of a prompt, behind which a text is decoded as it goes on; none of half characters."""
    longest = prompt[-CONTEXT_TOKENS:]
    for start in range(len(longest)):
        text = decode(longest[start:])
        if text.endswith(REPLACEMENT):
            break
        if text and not text.startswith(REPLACEMENT):
            return longest[start:]
    return []


def plain_token(tokenizer: Any) -> list[int]:
    """Return a token of plain text, behind which any token has all of its own text; none if there is no such token."""
    found: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    text = tokenizer.decode(found)
    return found if text and REPLACEMENT not in text and tokenizer.decode(found * 2).startswith(text) else []


class TextTail:
    """The end of a growing text; see StopStrings.

    text: the last `reach` characters of the text that tokens[:read] generated. decoded: the text of
    tokens[first:read].
    """

    def __init__(self, decode: Callable[[list[int]], str], tokens: list[int], read: int, reach: int) -> None:
        self.decode, self.reach, self.read = decode, reach, read
        self.first = self._whole_character(tokens, max(0, read - CONTEXT_TOKENS))
        self.decoded = decode(tokens[self.first : read])
        self.text = ""  # stop strings are searched in the generated text only, not in the prompt

    def _whole_character(self, tokens: list[int], place: int) -> int:
        """Return the last of a few tokens up to `place` at which a character begins; `place` if there is none."""
        for first in range(place, max(-1, place - 4), -1):
            if not self.decode(tokens[first : self.read]).startswith(REPLACEMENT):
                return first
        return place

    def read_on(self, tokens: list[int]) -> tuple[str, int]:
        """Decode the new tokens. Returns the text with what they add, and the index at which this begins."""
        new = self.decode(tokens[self.first :])
        shared = _shared(self.decoded, new)
        seen = max(0, len(self.text) - (len(self.decoded) - shared))  # new tokens may change the text before them
        text = self.text[:seen] + new[shared:]
        if not new.endswith(REPLACEMENT) or len(tokens) - self.read > MAX_PENDING:
            self.first, self.read = self.read, len(tokens)
            self.decoded = self.decode(tokens[self.first :])
            self.text = text[-self.reach :]
        return text, seen


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
