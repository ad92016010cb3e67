"""When a sequence ends by what was generated: stop tokens, stop strings, and whatever else is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...errors import UnsupportedError
from ..sequence import Sequence

REPLACEMENT = "\ufffd"  # what tokenizers write for bytes that are not, or not yet, a character
CONTEXT_TOKENS = 6  # before the first new token, so that it is decoded as inside a text and not as its beginning
CHANGEABLE = 16  # characters at the end that a tokenizer may still change, as when it removes spaces before a "."
MAX_PENDING = 16  # tokens that may wait for the rest of a character


Stop = Callable[[Sequence], bool]  # asked after each new token: whether the sequence ends there


@dataclass(frozen=True)
class StopRules:
    """Called with a sequence after each new token: "stop" if it ends there, else None.

    token_ids: those that end it. others: what else is asked.
    """

    token_ids: frozenset[int] = frozenset()
    others: tuple[Stop, ...] = ()

    def __call__(self, sequence: Sequence) -> str | None:
        ends = sequence.tokens[-1] in self.token_ids or any(other(sequence) for other in self.others)
        return "stop" if ends else None


class StopStrings:
    """Whether one of some strings is in the text of the generated tokens; it may begin and end inside a token.

    decode: token ids -> text; whether special tokens have text is its own affair. The tokens of what was found stay in
    the sequence, as in transformers; `cut` takes the text before it.

    Cost of a call: two decodes of a few tokens, whatever the length of the sequence. A tail of tokens does not decode
    to the tail of the text: a tokenizer may leave out the space before the first token (SentencePiece), and show the
    bytes of an unfinished character, or a whole run of byte tokens, as U+FFFD. So what a token adds is the difference
    of two decodes that begin at the same token, where a character began: decode(tokens[first:]) beyond what it shares
    with decode(tokens[first:read]). The window moves on when the text ends in a whole character, or when MAX_PENDING
    tokens did not bring one. Of the text before it as much is kept as a stop string can reach back to, and CHANGEABLE
    characters.
    """

    def __init__(self, strings: str | Iterable[str], decode: Callable[[list[int]], str] | None) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not all(self.strings):
            raise UnsupportedError("stop= has an empty string, which is everywhere; leave it out")
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


class TextTail:
    """The last characters of a growing text, and the window of tokens whose decodes say what comes next.

    text: the last `reach` characters of what was generated up to tokens[read]. The window begins at tokens[first].
    """

    def __init__(self, decode: Callable[[list[int]], str], tokens: list[int], read: int, reach: int) -> None:
        self.decode, self.reach, self.read = decode, reach, read
        self.first = self._whole_character(tokens, max(0, read - CONTEXT_TOKENS))
        self.known = decode(tokens[self.first : read])
        self.text = ""  # a stop string is looked for in what is generated, not in the prompt

    def _whole_character(self, tokens: list[int], place: int) -> int:
        """The last place up to this one, of a few, where a character begins."""
        for first in range(place, max(-1, place - 4), -1):
            if not self.decode(tokens[first : self.read]).startswith(REPLACEMENT):
                return first
        return place

    def read_on(self, tokens: list[int]) -> tuple[str, int]:
        """Take in the tokens that are new. Returns the text with what they add, and where that begins."""
        new = self.decode(tokens[self.first :])
        shared = _shared(self.known, new)
        seen = max(0, len(self.text) - (len(self.known) - shared))  # what follows changed what came before
        text = self.text[:seen] + new[shared:]
        if not new.endswith(REPLACEMENT) or len(tokens) - self.read > MAX_PENDING:
            self.first, self.read = self.read, len(tokens)
            self.known = self.decode(tokens[self.first :])
            self.text = text[-self.reach :]
        return text, seen


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
