"""The text of one choice while its tokens come: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from ..generation.sampling.choice import TokenLogprobs


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability. start: the character of the choice's text at which it begins.

    top: the most probable tokens in its place, as (text, log-probability).
    """

    text: str
    logprob: float
    top: list[tuple[str, float]]
    start: int


class TokenText:
    """Turns the tokens of a choice into text, piece by piece.

    tokenizer: a fast one of transformers. stops: strings that end the text, and are not part of it. Text that may be
    the beginning of one is held back until more is known. keep_special: whether special tokens have text.

    All pieces together are tokenizer.decode() of all tokens, up to the first stop string. A token's entry comes with
    the piece in which its text begins; a token without text, such as that which ends a text, has none.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, keep_special: bool) -> None:
        self.tokenizer, self.stops, self.keep_special = tokenizer, list(stops), keep_special
        self.num_tokens = 0
        self._decoder = DecodeStream([], skip_special_tokens=not keep_special)
        self._tokens: list[int] = []
        self._text = ""  # of all tokens but those of an unfinished character
        self._released = 0  # characters of it that have been handed out
        self._stopped = False
        self._entries: deque[ScoredToken] = deque()

    def feed(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> tuple[str, list[ScoredToken]]:
        """Take new tokens. Returns the text that is certain now, and the entries of tokens that begin in it."""
        self.num_tokens += len(tokens)
        if self._stopped:
            return "", []
        for place, token in enumerate(tokens):
            if logprobs is not None:
                self._entries.append(self._entry(logprobs[place]))
            self._tokens.append(token)
            self._text += self._decoder.step(self.tokenizer._tokenizer, token) or ""
        return self._release(is_end=False)

    def end(self) -> tuple[str, list[ScoredToken]]:
        """Return the text that was held back, and the entries of its tokens."""
        if self._stopped:
            return "", []
        whole = self.tokenizer.decode(self._tokens, skip_special_tokens=not self.keep_special)
        if whole.startswith(self._text):  # the bytes of an unfinished character come too, as U+FFFD
            self._text = whole
        return self._release(is_end=True)

    def _release(self, *, is_end: bool) -> tuple[str, list[ScoredToken]]:
        found = [place for stop in self.stops if (place := self._text.find(stop, self._released)) >= 0]
        if found:
            self._stopped, end = True, min(found)
        else:
            end = len(self._text) - (0 if is_end else self._held())
        piece, self._released = self._text[self._released : end], max(self._released, end)
        entries = []
        while self._entries and self._entries[0].start < self._released:
            entries.append(self._entries.popleft())
        return piece, entries

    def _held(self) -> int:
        """Return the length of the longest end of the text that may be the beginning of a stop string."""
        unreleased = len(self._text) - self._released
        longest = min(unreleased, max((len(stop) - 1 for stop in self.stops), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self.stops):
                return length
        return 0

    def _entry(self, given: TokenLogprobs) -> ScoredToken:
        top = [(self.tokenizer.decode([token]), logprob) for token, logprob in given.top]
        return ScoredToken(self.tokenizer.decode([given.token]), given.logprob, top, len(self._text))
