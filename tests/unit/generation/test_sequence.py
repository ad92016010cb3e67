"""The sequences of a request: what they share, and what each has of its own."""

from __future__ import annotations

from typing import Any

from hf_accel.generation.prompt_inputs import RequestInputs
from hf_accel.generation.request_settings import RequestSettings, StopRules
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence


class OneAnswer:
    """A constraint that one answer alone matches; what it was asked about is its own."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.asked = answer, 0

    def fork(self) -> OneAnswer:
        return OneAnswer(self.answer)

    def is_complete(self, tokens: list[int]) -> bool:
        self.asked += 1
        return tokens == self.answer


def samples(count: int, **fields: Any) -> list[Sequence]:
    settings = RequestSettings(5, Sampling(), **fields)
    return Sequence.samples((1, 2), settings, range(7, 7 + count), inputs=RequestInputs())


def test_samples_share_what_the_request_asks_for() -> None:
    first, *others = made = samples(3)
    assert first.followers == others and not any(each.followers for each in others)
    assert [each.seed for each in made] == [7, 8, 9]
    assert all(each.settings is first.settings and each.inputs is first.inputs for each in made)
    first.tokens.append(3)
    assert [each.tokens for each in made] == [[1, 2, 3], [1, 2], [1, 2]] and first.num_left == 4


def test_each_sample_has_a_constraint_of_its_own() -> None:
    one, other = samples(2, constraint=OneAnswer([4, 5]))
    one.tokens += [4, 5]
    other.tokens += [4]
    assert one.stop_reason() == "stop" and other.stop_reason() is None
    assert one.constraint is not other.constraint and one.settings.constraint.asked == 0  # type: ignore


def test_an_answer_that_a_stop_token_ends_is_asked_about_no_more() -> None:
    (one,) = samples(1, constraint=OneAnswer([4]), stop=StopRules(frozenset({9})))
    one.tokens.append(9)
    assert one.stop_reason() == "stop" and one.constraint.asked == 0  # type: ignore
