"""measure_acceptance against laws that are known, and against real runs of generate."""

from __future__ import annotations

import copy
from math import sqrt
from typing import Any

import pytest
import torch

import hf_accel
from hf_accel import SpeculativeConfig, UnsupportedError
from hf_accel.distill.drafts.measuring import Watch, _by_length, measure_acceptance
from hf_accel.distill.drafts.student import init_student
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.acceptance import gains
from hf_accel.undo.state import state_of

from .families import V, llama, made
from .test_student import assert_same, snapshot

P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)
QUIET: dict[str, Any] = {"progress_bar": False}


def constant(law: tuple[float, ...]) -> Any:
    """A model that says the same whatever came before."""
    model = llama(vocab_size=len(law), num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        rows = torch.tensor(law).log()[:, None] / model.config.hidden_size
        model.lm_head.weight.copy_(rows.expand(-1, model.config.hidden_size))
    return model


def within(rate: float, expected: float, count: int) -> bool:
    return abs(rate - expected) <= 4 * sqrt(expected * (1 - expected) / count)


def test_acceptance_of_known_laws() -> None:
    rows = [[0, 1, 2, 0, 1, 2, 2, 1]] * 40
    report = measure_acceptance(
        constant(P), constant(Q), rows, max_draft=3, max_tokens=900, max_new_tokens=100, batch_size=2, **QUIET
    )
    assert report.text_acceptance == pytest.approx(0.7, abs=1e-5)
    assert report.text_error == pytest.approx(0, abs=1e-3)
    assert report.text_same_top == 0
    assert report.text_positions == 320 and report.tokens >= 900 and report.prompts >= 9
    assert report.verified[0] > 200
    for rate, count in zip(report.acceptances, report.verified, strict=True):
        assert within(rate, 0.7, count)
    assert report.expected_tokens(2) == pytest.approx(2.19, rel=0.1)
    assert report.verify_costs[0] == 1 and list(report.verify_costs) == sorted(report.verify_costs)
    assert report.draft_costs[0] == 0 < report.draft_costs[1] and report.step_seconds > 0
    assert list(report.draft_costs) == sorted(report.draft_costs)
    assert report.setting == "patched(weights=None) target, patched(weights=None) draft"


@pytest.mark.parametrize(("draft", "rate"), [(P, 1.0), (Q, 0.0)])
def test_greedy_acceptance_is_agreement(draft: tuple[float, ...], rate: float) -> None:
    rows = [[0, 1, 2, 0]] * 8
    report = measure_acceptance(
        constant(P), constant(draft), rows, temperature=0, max_draft=2, max_tokens=200, batch_size=2, **QUIET
    )
    assert set(report.acceptances) == {rate} and report.text_acceptance == rate == report.text_same_top
    assert report.batch_size == 2 and "greedy" in str(report)


def pair() -> tuple[Any, Any, list[list[int]]]:
    """A target of some variety, a draft that agrees with it in part, and prompts."""
    target = llama(hidden_size=64, intermediate_size=96)
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
        target.lm_head.weight.mul_(1.5)
    return target, init_student(target, num_layers=1), torch.randint(1, V, (24, 24)).tolist()


def test_predictions_hold_in_generate() -> None:
    """Another run, through the public door, with one draft length, and what it counts."""
    target, draft, rows = pair()
    report = measure_acceptance(
        target, draft, rows, max_draft=3, max_tokens=1800, max_new_tokens=80, batch_size=8, **QUIET
    )
    hf_accel.patch(target, weights=None)
    ids = torch.tensor(rows)[:, :12]
    for length in (1, 3):
        target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=80,
            speculative=SpeculativeConfig(drafter=draft, num_draft=length),
        )  # fmt: skip
        counts = hf_accel.stats(target)
        assert report.expected_tokens(length) == pytest.approx(counts["tokens_per_pass"], rel=0.1)
        predicted = gains(report.acceptances[:length])
        for chance, seen in zip(predicted, counts["acceptance_at"], strict=True):
            error = sqrt(chance * (1 - chance) * (1 / counts["drafted_at"][0] + 1 / report.verified[0]))
            assert abs(chance - seen) < 4 * error
    assert 0.2 < report.text_acceptance < 0.9, "else the test says little"


@pytest.mark.parametrize("patched", [False, True])
def test_both_models_stay_as_they_were(patched: bool) -> None:
    target, draft, rows = pair()
    if patched:
        hf_accel.patch(target, weights="int8")
    target.train()
    draft.model.layers[0].eval()
    known: dict[Any, Any] = {}
    if patched:  # what the target has learnt of this draft stays, too
        draft = hf_accel.patch(draft, weights=None)
        target.generate(torch.tensor([[1, 2]]), max_new_tokens=4, speculative=draft)
        known = dict(state_of(target).generation.controllers)
        assert known
    before = snapshot(target), snapshot(draft)
    report = measure_acceptance(target, draft, rows, max_draft=1, max_tokens=100, **QUIET)
    after = snapshot(target), snapshot(draft)
    for one, other in zip(before, after, strict=True):
        assert_same(one, other)
    assert hf_accel.is_patched(target) == patched == hf_accel.is_patched(draft)
    assert report.setting.startswith("patched(int8) target" if patched else "patched(weights=None) target")
    if patched:
        assert state_of(target).generation.controllers == known


def test_padded_vocabularies_are_cut_to_what_both_have() -> None:
    wide = (*(0.9 * q for q in Q), 0.1)
    report = measure_acceptance(constant(P), constant(wide), [[0, 1, 2, 0]] * 20, max_draft=1, max_tokens=400, **QUIET)
    assert report.text_acceptance == pytest.approx(0.7, abs=1e-5)
    assert within(report.acceptances[0], 0.7, report.verified[0])
    assert measure_acceptance(
        constant(wide), constant(P), [[0, 1, 2, 3, 3, 0]] * 9, max_draft=1, max_tokens=60, **QUIET
    ).text_acceptance == pytest.approx(0.18 + 0.3 + 0.2, abs=1e-5)


@pytest.mark.parametrize(("rows", "batch_size"), [([[1, 2, 3]] * 4, 1), ([list(range(50))] * 8, 3)])
def test_the_bar_ends_at_its_end(rows: list[list[int]], batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much text there is, and though the last pass brings more tokens than are wanted."""
    bars = []

    class Bar:
        def __init__(self, total: int, **rest: Any) -> None:
            self.total, self.n = total, 0
            bars.append(self)

        def update(self, count: int) -> None:
            assert count >= 0
            self.n += count

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *rest: Any) -> None:
            pass

    monkeypatch.setattr("hf_accel.distill.drafts.measuring.logging.tqdm", Bar)
    model = llama(num_hidden_layers=1)
    measure_acceptance(model, copy.deepcopy(model), rows, max_draft=1, max_tokens=100, batch_size=batch_size)
    assert [bar.n for bar in bars] == [bar.total for bar in bars] == [min(100, sum(map(len, rows))) + 100]


def test_what_cannot_be_measured_is_refused() -> None:
    target, draft, rows = pair()
    with pytest.raises(UnsupportedError, match="not the same tokenizer"):
        measure_acceptance(target, llama(vocab_size=4000, num_hidden_layers=1), rows, **QUIET)
    with pytest.raises(UnsupportedError, match="target itself"):
        measure_acceptance(target, target, rows, **QUIET)
    with pytest.raises(UnsupportedError, match="max_tokens=3 is too few"):
        measure_acceptance(target, draft, rows, max_tokens=3, **QUIET)
    with pytest.raises(UnsupportedError, match="max_draft"):
        measure_acceptance(target, draft, rows, max_draft=0, **QUIET)
    with pytest.raises(UnsupportedError, match="temperature"):
        measure_acceptance(target, draft, rows, temperature=-1.0, **QUIET)


def test_a_model_that_cannot_speculate_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    bloom = made(BloomForCausalLM, BloomConfig(vocab_size=V, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(UnsupportedError, match="Bloom"):
        measure_acceptance(bloom, copy.deepcopy(bloom), [[1, 2, 3, 4]] * 4, **QUIET)


# -- the watch -----------------------------------------------------------------------------------------


def test_watch_times_whole_passes_of_settled_lengths_only() -> None:
    watch = Watch(2, 2, seed=0)
    sequences = [Sequence([1, 2], RequestSettings(100, Sampling())) for _ in range(2)]
    lengths = []
    for number in range(400):
        limits = [1, 9] if number % 51 == 0 else [9, 9]
        mixed, short = number % 45 == 0, number % 47 == 0  # with a prompt; with a drafter that finds less
        granted = watch.lengths(sequences, limits, other_rows=3 if mixed else 0)
        lengths.append(max(granted))
        watch.observe_drafting(sum(granted), max(1, max(granted)), 1e-3 * max(1, max(granted)))
        for sequence, length in zip(sequences, granted, strict=True):
            watch.observe_drafts(sequence, max(0, length - short), min(1, length - short) if length else 0)
        slow = mixed or granted[0] != granted[1] or (short and max(granted))
        watch.observe_pass(sum(granted) + 2, 1.0 if slow else 1e-3 * (1 + max(granted)))
    assert _by_length(watch.verify_seconds) == pytest.approx([1e-3, 2e-3, 3e-3])
    assert max(max(times) for times in watch.verify_seconds) < 1
    assert {lengths.count(length) for length in range(3)} <= set(range(100, 180))
    assert sum(map(len, watch.verify_seconds)) < 0.76 * 400
    rates = watch.tally.acceptances([None] * watch.max_draft, 4.0)
    assert rates[0] == 1 and rates[1] < 0.05


def test_costs_of_lengths_that_were_not_timed_lie_between() -> None:
    assert _by_length([[1.0], [], [], [4.0, 5.0, 6.0]]) == pytest.approx([1, 1 + 4 / 3, 1 + 8 / 3, 5])
    assert _by_length([[], [1.0]]) is None
    assert _by_length([[1.0], []]) is None
