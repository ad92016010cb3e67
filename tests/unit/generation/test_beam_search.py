"""The largest sums of beams, with torch's order of ties; processors that write scores in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_accel.cache.cached_sequence import CachedSequence
from hf_accel.generation.beam_search import BeamSearch, BeamSettings, largest_sums
from hf_accel.generation.hf.beam_scores import process_of
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence

SIZE = 60


@pytest.mark.parametrize("levels", [3, 40, 10**6])
@pytest.mark.parametrize("count", [1, 6, 59, 60, 130])
def test_the_largest_sums_are_those_of_torch(levels: int, count: int) -> None:
    """With few levels nearly all sums are equal to others; also infinite ones and NaN have torch's order."""
    generator = torch.Generator().manual_seed(levels + count)
    for case in range(20):
        scores = torch.randint(0, levels, (4, 3, SIZE), generator=generator) / levels
        before = torch.randint(0, levels, (4, 3), generator=generator) / levels
        if case % 4 == 1:
            scores[torch.rand(scores.shape, generator=generator) < 0.9] = -torch.inf
        if case % 4 == 2:
            scores[0, 1, 7] = torch.nan
        values, places = largest_sums(scores, before, count)
        expected = torch.topk((scores + before[:, :, None]).flatten(1), count)
        assert torch.equal(places, expected.indices)
        assert torch.equal(values.nan_to_num(9), expected.values.nan_to_num(9))


def test_a_search_waits_for_a_beam_that_is_computed_again() -> None:
    """Its logits came before, but it has lost its pages since, which another beam may go on with."""
    beams = [Sequence([1, 2], RequestSettings(5, Sampling())) for _ in range(3)]
    settings = BeamSettings(3, 6, 5, 1.0, early_stopping=False, samples=False, stop_ids=torch.empty(0).long())
    search = BeamSearch([beams], torch.ones(3, 2).long(), settings)
    for beam in beams:
        beam.cached, beam.num_computed = CachedSequence([], 0, 1), 2
    logits = torch.rand(3, SIZE)
    assert search.receive(beams[:2], logits[:2]) is None
    beams[1].cached, beams[1].num_computed = None, 0
    assert search.receive(beams[2:], logits[2:]) is None
    beams[1].cached, beams[1].num_computed = CachedSequence([], 0, 1), 2
    received = search.receive(beams[1:2], logits[1:2])
    assert received is not None and torch.equal(received, logits)


STOPS = torch.tensor([3, 9, SIZE + 4])
PROCESSORS: dict[str, Any] = {
    "length": lambda: logits_process.MinLengthLogitsProcessor(12, STOPS),
    "new tokens": lambda: logits_process.MinNewTokensLengthLogitsProcessor(5, 7, STOPS),
    "suppressed": lambda: logits_process.SuppressTokensLogitsProcessor([1, 2, SIZE + 1]),
    "bad words": lambda: logits_process.NoBadWordsLogitsProcessor([[4], [5]], torch.tensor([5])),
    "bad sequences": lambda: logits_process.NoBadWordsLogitsProcessor([[4], [5, 6], [1, 2, 3]]),
    "biases": lambda: logits_process.SequenceBiasLogitsProcessor([[[4], 1.5], [[6], -2.5]]),
    "one token once": lambda: logits_process.NoRepeatNGramLogitsProcessor(1),
    "pairs": lambda: logits_process.NoRepeatNGramLogitsProcessor(2),
    "triples": lambda: logits_process.NoRepeatNGramLogitsProcessor(3),
    "penalty": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.4),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_in_place_give_transformers_scores(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for length in (1, 2, 3, 11, 12, 13, 40):
        ids = torch.randint(0, 8, (6, length), generator=generator)  # few tokens, so texts repeat themselves
        scores = torch.randn(6, SIZE, generator=generator).log_softmax(-1)
        ours = process_of(LogitsProcessorList([PROCESSORS[name]()]))
        assert ours is not None
        expected = PROCESSORS[name]()(ids, scores)
        assert torch.equal(ours(ids, scores.clone()), expected)


def test_what_a_users_processor_has_seen_is_not_written_to() -> None:
    seen: list[torch.Tensor] = []

    def keeps(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return scores

    scores = torch.zeros(2, SIZE)
    process = process_of(LogitsProcessorList([keeps, PROCESSORS["suppressed"]()]))
    assert process is not None and bool((process(torch.zeros(2, 1).long(), scores) == -torch.inf).any())
    assert torch.equal(seen[0], torch.zeros(2, SIZE))


def test_no_processors_are_none() -> None:
    assert process_of(LogitsProcessorList()) is None
