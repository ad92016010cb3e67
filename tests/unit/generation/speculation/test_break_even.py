from __future__ import annotations

from math import inf, isinf

import pytest

from hf_accel.generation.speculation.break_even import break_even_acceptance, expected_tokens, gains, speed_up


@pytest.mark.parametrize(("count", "tokens"), [(1, 1.7), (2, 2.19), (3, 2.533), (4, 2.7731), (8, 3.19882131)])
def test_expected_tokens(count: int, tokens: float) -> None:
    assert expected_tokens([0.7] * count) == pytest.approx(tokens, abs=1e-8)
    assert expected_tokens([0.7] * count) == pytest.approx((1 - 0.7 ** (count + 1)) / (1 - 0.7))


def test_acceptances_may_differ_by_position() -> None:
    assert gains([0.5, 0.8, 1.0]) == pytest.approx([0.5, 0.4, 0.4])
    assert expected_tokens([0.5, 0.8, 1.0]) == pytest.approx(2.3)
    assert expected_tokens([]) == 1.0


@pytest.mark.parametrize(("count", "factor"), [(1, 1.136), (2, 1.129), (3, 1.080), (5, 0.956)])
def test_speed_up_of_an_8b_model_with_a_1b_draft(count: int, factor: float) -> None:
    """Measured elsewhere: a draft step costs .596 of a target step, .813 of the drafts are accepted."""
    assert speed_up([0.813] * count, 0.596) == pytest.approx(factor, abs=5e-4)


def test_break_even() -> None:
    assert break_even_acceptance(5, 0.596) == pytest.approx(0.832, abs=5e-4)
    acceptance = break_even_acceptance(3, 0.2, 1.1)
    assert speed_up([acceptance] * 3, 0.2, 1.1) == pytest.approx(1.0)
    assert isinf(break_even_acceptance(1, 0.2, 2.0)) and break_even_acceptance(2, 1.5) == inf
    assert break_even_acceptance(4, 0.0) == pytest.approx(0.0, abs=1e-9)
