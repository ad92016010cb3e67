"""Numbers that are functions of seed, position and purpose: uniform, independent, the same everywhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hf_accel.generation.speculation.verifiers.noise import Purpose, exponentials, gumbel, race_key, uniform

from ...chi_square import chi_square, critical

COUNT = 20_000
FIXED = [0.13870941014555427, 0.9711020828012883, 0.2778328726049074, 0.9026010321439424]
FIXED_LATER = [0.8202581606910613, 0.08867014895836833]
FIXED_GUMBEL = [-0.5676024480588345, -0.10853671930662899, 0.0335718637100703]
STEPS = {
    "seeds": lambda n: (n, 5, Purpose.DRAFT, 0),
    "large seeds": lambda n: (2**63 + n, 5, Purpose.DRAFT, 0),
    "seeds far apart": lambda n: (n << 40, 5, Purpose.DRAFT, 0),
    "positions": lambda n: (0, n, Purpose.ACCEPT, 0),
    "offsets": lambda n: (0, 3, Purpose.ACCEPT, n),
    "seeds and positions": lambda n: (n % 100, n // 100, Purpose.TARGET, 0),
}


def reference(state: int, steps: int) -> int:
    """Output of SplitMix64 as its authors print it."""
    state = (state + steps * 0x9E3779B97F4A7C15) % 2**64
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_splitmix_is_that_of_its_authors() -> None:
    assert [reference(1234567, n) for n in (1, 2, 3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (12345, 678), (2**64 - 1, 2**31)])
def test_numbers_are_three_rounds_of_splitmix(seed: int, position: int) -> None:
    state = reference(reference(seed, 1), position + 1)
    for purpose in Purpose:
        for offset in (0, 7):
            assert (
                uniform(seed, position, purpose, offset) == (reference(state, 4 * offset + purpose + 1) >> 11) / 2**53
            )
    key = reference(state, 4)
    assert race_key(seed, position) % 2**64 == key
    bits = [reference(key, token + 1) >> 11 for token in range(100)]
    expected = torch.tensor([-math.log((b + 0.5) / 2**53) for b in bits], dtype=torch.float64)
    got = exponentials(torch.tensor(race_key(seed, position)), torch.arange(100))
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


def test_fixed_values() -> None:
    assert [uniform(0, 0, purpose) for purpose in Purpose] == FIXED
    assert [uniform(42, 1000, Purpose.ACCEPT, offset) for offset in range(2)] == FIXED_LATER
    torch.testing.assert_close(
        gumbel(42, 1000, 3), torch.tensor(FIXED_GUMBEL, dtype=torch.float64), rtol=1e-13, atol=0
    )


def test_seeds_count_modulo_64_bits() -> None:
    assert uniform(-1, 3, 0) == uniform(2**64 - 1, 3, 0) != uniform(1, 3, 0)


@pytest.mark.parametrize("name", STEPS)
def test_uniform(name: str) -> None:
    values = [uniform(*STEPS[name](n)) for n in range(COUNT)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == COUNT
    counts = [0] * 64
    for value in values:
        counts[int(value * 64)] += 1
    assert chi_square(counts, [COUNT / 64] * 64) < critical(63)


@pytest.mark.parametrize("name", STEPS)
def test_neighbours_are_independent(name: str) -> None:
    values = [uniform(*STEPS[name](n)) for n in range(COUNT + 1)]
    pairs = [0] * 256
    for a, b in itertools.pairwise(values):
        pairs[16 * int(a * 16) + int(b * 16)] += 1
    assert chi_square(pairs, [COUNT / 256] * 256) < critical(255)


@pytest.mark.parametrize("other", [Purpose.ACCEPT, Purpose.TARGET, Purpose.RACE])
def test_purposes_are_independent(other: Purpose) -> None:
    pairs = [0] * 256
    for n in range(COUNT):
        pairs[16 * int(uniform(7, n, Purpose.DRAFT) * 16) + int(uniform(7, n, other) * 16)] += 1
    assert chi_square(pairs, [COUNT / 256] * 256) < critical(255)


def test_gumbel_is_gumbel_and_independent_over_positions() -> None:
    here, there = (torch.exp(-torch.exp(-gumbel(3, position, COUNT))) for position in (10, 11))
    assert chi_square(torch.histc(here, 64, 0, 1).tolist(), [COUNT / 64] * 64) < critical(63)
    pairs = torch.bincount((here * 16).long() * 16 + (there * 16).long(), minlength=256)
    assert chi_square(pairs.tolist(), [COUNT / 256] * 256) < critical(255)
    after = torch.bincount((here[:-1] * 16).long() * 16 + (here[1:] * 16).long(), minlength=256)
    assert chi_square(after.tolist(), [(COUNT - 1) / 256] * 256) < critical(255)


def test_exponentials_do_not_depend_on_how_they_are_asked_for() -> None:
    keys = torch.tensor([race_key(1, 2), race_key(1, 3)])
    ids = torch.arange(1000)
    table = exponentials(keys[:, None], ids)
    assert torch.equal(table[1, 500:501], exponentials(keys[1:], ids[500:501]))
    assert (table > 0).all()
