"""The text of a choice, piece by piece: together the pieces are what the tokenizer decodes, up to a stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_accel.generation.sampling.choice import TokenLogprobs
from hf_accel.generation.sampling.stopping import context_of
from hf_accel.serving.token_text import ScoredToken, TokenText
from tests.unit.generation.sampling.test_constraint import sentence_piece

from .running import SHIPPED

TEXT = "def naïve(x):\n    return 'é€😀' * x  # 日本語\n"
END = 0  # <|endoftext|>


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


def pieces(text: TokenText, tokens: list[int], chooser: random.Random) -> tuple[list[str], list[ScoredToken]]:
    """Feed the tokens in groups of random sizes, as drafts bring them."""
    found, entries, place = [], list[ScoredToken](), 0
    while place < len(tokens):
        size = chooser.randint(1, 4)
        group = tokens[place : place + size]
        piece, new = text.feed(group, [TokenLogprobs(token, -float(token), []) for token in group])
        found.append(piece)
        entries += new
        place += size
    piece, new = text.end()
    return [*found, piece], entries + new


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_text(tokenizer: Any, seed: int) -> None:
    chooser = random.Random(seed)
    tokens = tokenizer(TEXT)["input_ids"] + [chooser.randrange(tokenizer.vocab_size) for _ in range(30)]
    chooser.shuffle(tokens)
    for keep in (False, True):
        found, entries = pieces(TokenText(tokenizer, [], keep_special=keep), tokens, chooser)
        whole = tokenizer.decode(tokens, skip_special_tokens=not keep)
        assert "".join(found) == whole
        assert [entry.start for entry in entries] == sorted(entry.start for entry in entries)
        assert all(0 <= entry.start < len(whole) for entry in entries)


def test_no_half_characters(tokenizer: Any) -> None:
    tokens = tokenizer(TEXT)["input_ids"]
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokens), "some tokens are parts of characters"
    found, _ = pieces(TokenText(tokenizer, [], keep_special=False), tokens, random.Random(0))
    assert "".join(found) == TEXT and not any("\ufffd" in piece for piece in found)


def test_an_unfinished_character_comes_at_the_end(tokenizer: Any) -> None:
    tokens = tokenizer("a😀")["input_ids"][:-1]
    found, _ = pieces(TokenText(tokenizer, [], keep_special=False), tokens, random.Random(0))
    assert "".join(found) == tokenizer.decode(tokens) and "".join(found).startswith("a\ufffd")


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings(tokenizer: Any, seed: int) -> None:
    chooser = random.Random(seed)
    tokens = tokenizer(TEXT)["input_ids"]
    start = chooser.randrange(len(TEXT) - 4)
    stops = [TEXT[start : start + chooser.randint(1, 4)], "return 'no", "no such"]
    found, entries = pieces(TokenText(tokenizer, stops, keep_special=False), tokens, chooser)
    expected = TEXT[: min(place for stop in stops if (place := TEXT.find(stop)) >= 0)]
    assert "".join(found) == expected
    assert all(entry.start < len(expected) for entry in entries)


def test_what_may_begin_a_stop_string_is_held_back(tokenizer: Any) -> None:
    stop = "return 'yesX"
    text = TokenText(tokenizer, [stop], keep_special=False)
    seen = ""
    for token in tokenizer("x = 1\nreturn 'yes'")["input_ids"]:
        piece, _ = text.feed([token])
        seen += piece
        assert not any(seen.endswith(stop[:length]) for length in range(1, len(stop)))
    assert seen + text.end()[0] == "x = 1\nreturn 'yes'"


def test_special_tokens(tokenizer: Any) -> None:
    tokens = [*tokenizer("x = 1")["input_ids"], END]
    for keep, expected in ((False, "x = 1"), (True, "x = 1<|endoftext|>")):
        text = TokenText(tokenizer, [], keep_special=keep)
        piece, entries = text.feed(tokens, [TokenLogprobs(token, -1.0, [(token, -1.0)]) for token in tokens])
        assert piece + text.end()[0] == expected and text.num_tokens == len(tokens)
        assert "".join(entry.text for entry in entries) == expected


# -- SentencePiece: the space of a word is a part of its token, and dropped from the first one ----------------------


@pytest.mark.parametrize(("before", "expected"), [("abc", " a ab"), ("", "a ab"), ("x\u00e9", " a ab")])
@pytest.mark.parametrize("size", [1, 9])
def test_a_text_goes_on_with_the_space_before_it(before: str, expected: str, size: int) -> None:
    made = sentence_piece()
    prompt = made(before)["input_ids"] if before else [made.bos_token_id]
    new = made("a ab", add_special_tokens=False)["input_ids"]
    context = context_of(lambda ids: str(made.decode(ids, skip_special_tokens=True)), prompt)
    assert made.decode(prompt + new, skip_special_tokens=True) == before + expected
    for with_space in (True, False):
        text = TokenText(made, [], keep_special=False, before=context, with_space=with_space)
        parts = [text.feed(new[at : at + size])[0] for at in range(0, len(new), size)]
        assert "".join([*parts, text.end()[0]]) == (expected if with_space else "a ab")


@pytest.mark.parametrize("with_space", [True, False])
def test_a_stop_string_may_begin_with_that_space(with_space: bool) -> None:
    made = sentence_piece()
    prompt, new = made("abc")["input_ids"], made("a ab", add_special_tokens=False)["input_ids"]
    context = context_of(lambda ids: str(made.decode(ids)), prompt)
    for stop, expected in ((" a", ""), (" ab", " a")):
        text = TokenText(made, [stop], keep_special=False, before=context, with_space=with_space)
        found = "".join([*(text.feed([token])[0] for token in new), text.end()[0]])
        assert found == (expected if with_space else expected.strip()), stop


def test_scored_tokens_have_their_spaces() -> None:
    made = sentence_piece()
    prompt, new = made("abc")["input_ids"], made("a ab", add_special_tokens=False)["input_ids"]
    context = context_of(lambda ids: str(made.decode(ids)), prompt)
    text = TokenText(made, [], keep_special=False, before=context, with_space=True)
    piece, entries = text.feed(new, [TokenLogprobs(token, -1.0, [(token, -1.0)]) for token in new])
    assert piece == " a ab" == "".join(entry.text for entry in entries)
    assert all(piece[entry.start :].startswith(entry.text) and entry.top[0][0] == entry.text for entry in entries)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_character_end_no_text(seed: int) -> None:
    """With them, the tokenizer writes U+FFFD for a byte before them too, whose text was handed out already."""
    made, chooser = sentence_piece(), random.Random(seed)
    newline, half, word = (made.convert_tokens_to_ids(name) for name in ("<0x0A>", "<0xF0>", "\u2581abc"))
    tokens = [word, newline, half, word]
    assert made.decode(tokens) == "abc\ufffd\ufffd abc"
    found, _ = pieces(TokenText(made, [], keep_special=False), tokens[:2], chooser)
    text = TokenText(made, [], keep_special=False)
    assert "".join([*(text.feed([token])[0] for token in tokens), text.end()[0]]) == "abc\n\ufffd abc"
    assert "".join(found) == "abc\n"
    tokens = [chooser.choice([newline, half, word, chooser.randrange(3, 259)]) for _ in range(30)]
    found, _ = pieces(TokenText(made, [], keep_special=False), tokens, chooser)
    assert "".join(found).count("abc") == tokens.count(word)
