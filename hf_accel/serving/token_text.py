"""The text of one choice while its tokens come: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from ..generation.sampling.choice import TokenLogprobs
from ..generation.sampling.stopping import plain_token, text_behind


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
    before: tokens behind which the text goes on, as `context_of` returns them. with_space: whether a space with which
    it begins behind them stays, where the text of its tokens alone has none (SentencePiece).

    All pieces together are tokenizer.decode() of all tokens, with that space, up to the first stop string; but where
    bytes that are no character change a character before them, that one stays as it was handed out. A token's entry
    comes with the piece in which its text begins; a token without text, such as that which ends a text, has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        *,
        keep_special: bool,
        before: Sequence[int] = (),
        with_space: bool = False,
    ) -> None:
        self.tokenizer, self.stops, self.keep_special = tokenizer, list(stops), keep_special
        self.num_tokens = 0
        self._before, self._with_space = list(before), with_space
        self._decoder = DecodeStream(self._before, skip_special_tokens=not keep_special)
        self._plain: list[int] | None = None  # found when the first entry is made
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
            self._text += self._step(token)
        return self._release(is_end=False)

    def end(self) -> tuple[str, list[ScoredToken]]:
        """Return the text that was held back, and the entries of its tokens."""
        if self._stopped:
            return "", []
        self._text += self._rest()  # the bytes of an unfinished character come too, as U+FFFD
        return self._release(is_end=True)

    def _step(self, token: int) -> str:
        """Return the text that the last one of the tokens brings, which may be that of several."""
        try:
            return self._decoder.step(self.tokenizer._tokenizer, token) or ""
        except Exception:  # bytes that are no character have changed the text of a byte before them
            self._decoder = DecodeStream([token], skip_special_tokens=not self.keep_special)
            return self._rest()

    def _rest(self) -> str:
        """Return the text of all tokens behind what is known of it, which may have been handed out and stays."""
        return text_behind(self._decode, self._before, self._tokens)[len(self._text) :]

    def _release(self, *, is_end: bool) -> tuple[str, list[ScoredToken]]:
        found = [place for stop in self.stops if (place := self._text.find(stop, self._released)) >= 0]
        if found:
            self._stopped, end = True, min(found)
        else:
            end = len(self._text) - (0 if is_end else self._held())
        begin = self._released
        if begin == 0 and not self._with_space and self._text.startswith(" ") and self._is_space_dropped():
            begin = 1
        piece, self._released = self._text[begin:end], max(self._released, end)
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

    def _is_space_dropped(self) -> bool:
        """Return whether the text of the tokens alone begins without the space that they have behind others."""
        return not self._decode(self._tokens).startswith(" ")

    def _decode(self, tokens: list[int]) -> str:
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=not self.keep_special)
        return found

    def _entry(self, given: TokenLogprobs) -> ScoredToken:
        top = [(self._text_of(token), logprob) for token, logprob in given.top]
        return ScoredToken(self._text_of(given.token), given.logprob, top, len(self._text))

    def _text_of(self, token: int) -> str:
        """Return the text of one token, with the space that it begins with."""
        if self._plain is None:
            self._plain = plain_token(self.tokenizer)
        return text_behind(self.tokenizer.decode, self._plain, [token])
