"""The tokenizers here are the two kinds whose tail of tokens is not the tail of the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.generation.request_settings import StopRules
from hf_accel.generation.sampling.stopping import MAX_PENDING, StopStrings

from ..programme import sequence_of


class ByteLevel:
    """As GPT-2's: every token is a few bytes, which may be any part of a character."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def __call__(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


class SentencePiece:
    """As Llama 2's: "▁" begins a word, the first space is left out, and bytes stand for what has no token: a run of
    them that is no text becomes U+FFFD for each byte."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = pieces

    def __call__(self, tokens: list[int]) -> str:
        text, run = "", b""
        for piece in [*(self.pieces[token] for token in tokens), ""]:
            if isinstance(piece, bytes):
                run += piece
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            text, run = text + piece.replace("▁", " "), b""
        return text.removeprefix(" ")


def first_stop(rules: StopRules, prompt: list[int], generated: list[int]) -> int | None:
    """After how many generated tokens the rules say stop."""
    sequence = sequence_of(list(prompt), 10**6, stop=rules)
    for count, token in enumerate(generated, start=1):
        sequence.tokens.append(token)
        if sequence.stop_reason() == "stop":
            return count
    return None


def strings(wanted: str | list[str], decode: Callable[[list[int]], str]) -> StopRules:
    return StopRules(others=(StopStrings(wanted, decode),))


def test_stop_tokens() -> None:
    rules = StopRules(frozenset({5, 7}))
    assert first_stop(rules, [5, 1], [2, 1, 7]) == 3  # not what stands in the prompt
    assert first_stop(rules, [0], [1, 2]) is None


def test_whatever_else_is_asked_after_each_token() -> None:
    rules = StopRules(frozenset({5}), (lambda sequence: sequence.num_new == 3, lambda sequence: False))
    assert first_stop(rules, [5], [1, 2, 1, 5]) == 3
    assert first_stop(rules, [5], [1, 5, 1]) == 2


@pytest.mark.parametrize(
    ("pieces", "string", "count"),
    [
        (["Hello", " wor", "ld!"], "world", 3),  # spans tokens
        (["xxst", "opped"], "stop", 2),  # begins and ends inside tokens
        (["ab", "a", "b", "c"], "abc", 4),
        (["a", "b", "c"], "d", None),
        (["é"[:1], "!"], "é!", 2),
        ([b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", "."], "你", 2),  # complete, though the text ends in half a character
        ([b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", "."], "好", 3),
        ([b"\xff", b"\xff", "stop"], "stop", 3),  # bytes that never become text
    ],
)
def test_stop_strings_of_bytes(pieces: list[str | bytes], string: str, count: int | None) -> None:
    decode = ByteLevel("prompt ", *pieces)
    assert first_stop(strings([string], decode), [0], numbers(pieces)) == count


@pytest.mark.parametrize(
    ("pieces", "string", "count"),
    [
        (["▁wor", "ld"], " world", 2),  # the space before the first token counts: there is a prompt before it
        (["▁a", "▁b", "▁c"], "b c", 3),
        (["▁a", "▁b", "▁c"], "bc", None),  # decoded alone, "▁c" has no space
        ([b"\xe4", b"\xbd", b"\xa0", b"\xe5", b"\xa5", b"\xbd"], "你好", 6),
        ([b"\xe4", b"\xbd", b"\xa0", b"\xe5", "x"], "x", 5),
    ],
)
def test_stop_strings_of_pieces(pieces: list[str | bytes], string: str, count: int | None) -> None:
    decode = SentencePiece("▁prompt", *pieces)
    assert first_stop(strings(string, decode), [0], numbers(pieces)) == count


def numbers(pieces: list[str | bytes]) -> list[int]:
    return list(range(1, len(pieces) + 1))


def test_a_prompt_that_ends_in_a_run_of_byte_tokens_is_decoded_from_a_whole_character() -> None:
    prompt = [bytes([b]) for b in "你好é".encode()]
    decode = SentencePiece("▁prompt", *prompt, b"\xc3", b"\xa9")
    rules = strings(["é"], decode)
    assert first_stop(rules, list(range(len(prompt) + 1)), [len(prompt) + 1, len(prompt) + 2]) == 2


def test_a_tokenizer_may_change_what_came_before() -> None:
    """As clean_up_tokenization_spaces does."""

    def decode(tokens: list[int]) -> str:
        return "".join(["prompt ", "a", " ", "."][token] for token in tokens).replace(" .", ".")

    assert first_stop(strings(["a."], decode), [0], [1, 2, 3]) == 3


def test_a_stop_string_does_not_begin_in_the_prompt() -> None:
    decode = ByteLevel("one\n", "\n", "END", "x")
    assert first_stop(strings(["\n\n"], decode), [3] * 40 + [0], [1, 1]) == 2


def test_text_is_cut_before_the_first_stop_string() -> None:
    ends = StopStrings(["END", "\n\n"], ByteLevel())
    assert ends.cut("one\n\ntwo END") == "one"
    assert ends.cut("END") == "" and ends.cut("one\n") == "one\n"
    assert StopStrings([], None).cut("all") == "all"


@pytest.mark.parametrize(
    ("arguments", "message"), [((["a"], None), r"stop=\['a'\] needs the text"), ((["a", ""], str), "an empty string")]
)
def test_strings_that_cannot_be_found_are_refused(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        StopStrings(*arguments)


def test_only_a_few_tokens_are_decoded_at_a_time() -> None:
    """Whatever is written: words, single bytes, or bytes that never become a character."""
    for pieces in (["word "], ["▁w"], [b"\xff"], [b"\xa0\xe5"]):
        lengths = []
        decode = ByteLevel("prompt", *pieces)

        def counted(
            tokens: list[int], decode: Callable[[list[int]], str] = decode, lengths: list[int] = lengths
        ) -> str:
            lengths.append(len(tokens))
            return decode(tokens)

        assert first_stop(strings(["no such"], counted), [0] * 50, [1] * 300) is None
        assert max(lengths) <= 2 * (MAX_PENDING + 2) and len(lengths) <= 2 * 300 + 60


ALPHABET = "ab é你好"


def random_case(generator: random.Random) -> tuple[Callable[[list[int]], str], list[int], list[int], list[str]]:
    text = lambda most: "".join(generator.choice(ALPHABET) for _ in range(generator.randint(1, most)))  # noqa: E731
    if generator.random() < 0.5:
        data = text(60).encode()
        cuts = sorted({0, len(data), *(generator.randrange(len(data) + 1) for _ in range(40))})
        decode: Callable[[list[int]], str] = ByteLevel(*(data[a:b] for a, b in pairwise(cuts)))
        count = len(cuts) - 1
    else:
        pieces: list[str | bytes] = []
        for letter in text(40):
            as_bytes = ord(letter) > 127 and generator.random() < 0.7
            pieces += [bytes([b]) for b in letter.encode()] if as_bytes else [letter.replace(" ", "▁")]
        decode, count = SentencePiece(*pieces), len(pieces)
    split = generator.randint(0, count - 1) if count > 1 else 0
    tokens = list(range(count))
    return decode, tokens[:split], tokens[split:], [text(4) for _ in range(2)]


def test_random_texts_stop_where_decoding_everything_says() -> None:
    """Against the whole text decoded anew for every token. A prompt that ends inside a character is left out, as
    there no text belongs to it alone."""
    generator = random.Random(0)
    stops = 0
    for _ in range(3000):
        decode, prompt, generated, wanted = random_case(generator)
        before = decode(prompt)
        if "\ufffd" in before or not prompt:
            continue
        rules = strings(wanted, decode)
        expected = None
        for count in range(1, len(generated) + 1):
            text = decode(prompt + generated[:count])
            assert "\ufffd" in text or text.startswith(before)
            if any(text.find(s, len(before)) >= 0 for s in wanted):
                expected = count
                break
        assert first_stop(rules, prompt, generated) == expected
        stops += expected is not None
    assert stops > 500
