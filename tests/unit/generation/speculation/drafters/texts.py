from __future__ import annotations

import random

from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sequence import Sequence


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(list(tokens), RequestSettings(10**9, sampling=None))


def texts(length: int) -> dict[str, list[int]]:
    """Texts that repeat themselves in different ways; 0 is a token like others."""
    dice = random.Random(0)
    copied = [dice.randrange(9) for _ in range(length // 3)]
    return {
        "one token": [0] * length,
        "periodic": [i % 7 for i in range(length)],
        "two tokens": [dice.randrange(2) for _ in range(length)],
        "many tokens": [dice.randrange(40) for _ in range(length)],
        "copied": copied + [dice.randrange(9) for _ in range(length - 2 * len(copied))] + copied,
        "fibonacci": fibonacci(length),
    }


def fibonacci(length: int) -> list[int]:
    """The word whose repetitions overlap most without being periodic."""
    before, word = [0], [0, 1]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


def latest_repeat(tokens: list[int], length: int) -> int | None:
    """By brute force: where the latest earlier occurrence of the last `length` tokens ends."""
    ending = tokens[-length:]
    ends = range(len(tokens) - 1, length - 1, -1)
    return next((end for end in ends if tokens[end - length : end] == ending), None)


def longest_repeat(tokens: list[int], most: int) -> tuple[int, int]:
    """By brute force: length of the longest ending, up to `most`, that occurred before, and its latest earlier end."""
    found = (0, 0)
    for length in range(1, min(most, len(tokens) - 1) + 1):
        end = latest_repeat(tokens, length)
        if end is None:
            break
        found = (length, end)
    return found


def continued(tokens: list[int], start: int, count: int) -> list[int]:
    """Token by token: what follows `start`, drafted tokens included once the text ends."""
    text = list(tokens)
    for i in range(count):
        text.append(text[start + i])
    return text[len(tokens) :]
