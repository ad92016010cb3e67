"""Drafting ahead in a thread proposes what drafting in turn does, and leaves nothing behind. No clock decides."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import hf_accel
from benchmarks.topics import mirror
from benchmarks.topics.mirror import Case, Run, Way, balance, drafter_of
from benchmarks.topics.mirror_drafter import MirrorDrafter, Split
from hf_accel import Draft, SpeculativeConfig
from hf_accel.cli.measuring.served import WrongResultError
from hf_accel.errors import HfAccelError
from hf_accel.generation.speculation.drafters.model import ModelDrafter
from hf_accel.generation.speculation.verifiers import verifier

Asked = list[tuple[list[int], list[int], torch.Tensor | None]]
ONE = Split(1, 1)
PROMPTS = [[5, 6, 7, 8], [9, 3], [11, 12, 13, 14, 15, 16]]
LENGTHS = [40, 9, 27]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A target, and a draft model that often agrees with it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    draft = LlamaForCausalLM(config).eval()
    draft.load_state_dict({name: w + 0.02 * w.std() * torch.randn_like(w) for name, w in target.state_dict().items()})
    return hf_accel.patch(target, weights=None), hf_accel.patch(draft, weights=None)


def recorded(drafter: ModelDrafter, asked: Asked) -> ModelDrafter:
    """Note what each sequence was proposed, with all of its tokens before."""
    propose = drafter.propose

    def noted(sequences: Sequence[Any], lengths: Sequence[int]) -> list[Draft]:
        before = [list(sequence.tokens) for sequence in sequences]
        drafts = propose(sequences, lengths)
        asked.extend((tokens, draft.tokens, draft.probabilities) for tokens, draft in zip(before, drafts, strict=True))
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    return drafter


def generated(models: tuple[Any, Any], drafter: ModelDrafter | None, *, verify: str = "", **sampling: Any) -> Any:
    """The tokens of all prompts, which end at different times."""
    target, _ = models
    keywords = {"speculative": SpeculativeConfig(drafter=drafter, num_draft=3, verify=verify)} if drafter else {}
    configs = [
        GenerationConfig(max_new_tokens=n, pad_token_id=0, **(sampling or {"do_sample": False})) for n in LENGTHS
    ]
    torch.manual_seed(7)
    outputs = target.generate_batch(PROMPTS, generation_config=configs, **keywords)
    return [output.generated_tokens for output in outputs.values()]


def made(models: tuple[Any, Any], *, ahead: bool, verify: str = "token") -> Any:
    case: Any = SimpleNamespace(target=models[0], draft=models[1], known=None)
    drafter = drafter_of(case, Way("", ONE, ahead))
    drafter.verifier = verifier(verify)
    return drafter


@pytest.fixture
def ahead(models: tuple[Any, Any]) -> Iterator[MirrorDrafter]:
    drafter: MirrorDrafter = made(models, ahead=True)
    yield drafter
    drafter.close()


# -- the same drafts, and the same tokens ------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["greedy", "token", "block", "seeded"])
def test_what_is_drafted_ahead_is_what_would_be_drafted_in_turn(models: tuple[Any, Any], verify: str) -> None:
    rule = "token" if verify == "greedy" else verify
    sampling = {} if verify == "greedy" else {"do_sample": True, "temperature": 0.5, "top_k": 0}
    found: list[tuple[Any, Asked]] = []
    for way in (False, True):
        drafter, asked = made(models, ahead=way, verify=rule), Asked()
        found.append((generated(models, recorded(drafter, asked), verify=rule, **sampling), asked))
        if way:
            assert 0 < drafter.hits < drafter.rounds  # both kinds of verdicts came
            drafter.close()
        assert all(group.pool.num_used == 0 for group in drafter.pages.groups)
    (tokens, in_turn), (others, asked) = found
    assert tokens == others
    assert [(before, draft) for before, draft, _ in in_turn] == [(before, draft) for before, draft, _ in asked]
    for (*_, q), (*_, other) in zip(in_turn, asked, strict=True):
        assert (q is None) is (other is None) is (verify == "greedy")
        assert q is None or torch.equal(q, other)


def test_greedy_tokens_are_those_without_drafts(models: tuple[Any, Any], ahead: MirrorDrafter) -> None:
    assert generated(models, ahead, verify="token") == generated(models, None)


def test_lengths_may_change_from_round_to_round(models: tuple[Any, Any], ahead: MirrorDrafter) -> None:
    """A draft ahead is cut where fewer tokens are asked for, and goes on where more are."""
    propose, asked, lengths = ahead.propose, Asked(), [3, 1, 2, 3, 1, 3, 2]

    def changing(sequences: Sequence[Any], wanted: Sequence[int]) -> list[Draft]:
        length = lengths[len(asked) % len(lengths)]
        drafts = propose(sequences, [min(length, most) for most in wanted])
        asked.append(([], [len(draft) for draft in drafts], None))
        return drafts

    ahead.propose = changing  # type: ignore[method-assign]
    assert generated(models, ahead, verify="token") == generated(models, None)
    assert ahead.hits > 0
    assert {1, 2, 3} <= {length for _, found, _ in asked for length in found}


# -- faults ------------------------------------------------------------------------------------------------


def test_a_fault_in_the_thread_is_told_and_the_drafter_goes_on(
    models: tuple[Any, Any], ahead: MirrorDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ahead.runner

    def failing(*arguments: Any) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("out of luck")
        return runner(*arguments)

    monkeypatch.setattr(ahead, "runner", failing)
    with pytest.raises(HfAccelError, match=r"while it drafted ahead: ValueError\('out of luck'\)"):
        generated(models, ahead, verify="token")
    monkeypatch.undo()
    assert generated(models, ahead, verify="token") == generated(models, None)
    assert all(group.pool.num_used == 0 for group in ahead.pages.groups)


def test_close_ends_the_thread(models: tuple[Any, Any], ahead: MirrorDrafter) -> None:
    before = threading.active_count()
    generated(models, ahead, verify="token")
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before


def test_wrong_tokens_are_not_timed(models: tuple[Any, Any]) -> None:
    target, draft = models
    workload: Any = SimpleNamespace(prompts=PROMPTS[:1], lengths=[6])
    with pytest.raises(WrongResultError, match="case, in turn: the tokens are not those without a draft"):
        mirror.run(Case("case", target, draft, workload, [[0] * 6]), Way("in turn"), 2)


# -- threads and cores -------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_a_split_is_undone() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    one = min(cores)
    seen: list[tuple[int, set[int]]] = []
    with Split(1, 2, (one, max(cores))).applied():
        assert os.sched_getaffinity(0) == {one} and torch.get_num_threads() == 1
        draft = threading.Thread(target=lambda: seen.append(entered(Split(1, 2, (one, max(cores))))))
        draft.start()
        draft.join()
        assert seen == [(2, {max(cores)})]
        assert os.sched_getaffinity(0) == {one} and torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == cores and torch.get_num_threads() == threads


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_draft_has_the_last_core(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 10 + count)), raising=False)
    monkeypatch.setattr(mirror, "usable_cores", lambda: count)
    *_, apart, shared = mirror.ways()
    assert len({way.name for way in mirror.ways()}) == 5
    assert apart.split is not None and shared.split is not None
    target, draft = apart.split.cores[: apart.split.target], apart.split.cores[apart.split.target :]
    assert draft == (9 + count,) and target == (tuple(range(10, 9 + count)) if count > 1 else draft)
    assert (shared.split.target, shared.split.cores) == (count, ())


def entered(split: Split) -> tuple[int, set[int]]:
    split.enter_draft()
    return torch.get_num_threads(), os.sched_getaffinity(0)


# -- the terms ---------------------------------------------------------------------------------------------


def test_what_a_core_may_cost() -> None:
    """In turn 10 + 3 * 2 seconds; ahead 12, and 3 * 2.5 more after a quarter of all rounds."""
    runs = {
        "no draft": [Run(50.0)],
        "in turn": [Run(20.0, 3.0, verify=10.0, draft=2.0)],
        "in turn, a core less": [Run(25.0, 3.0, verify=12.0, draft=2.5)],
        "ahead, 1+1": [Run(16.0, 3.0, hit_share=0.75)],
        "ahead, 2+1 shared": [Run(18.0, 3.0, hit_share=0.5)],
    }
    row = balance("int8", runs, num_draft=3)
    assert row["drafting_share"] == pytest.approx(0.6)
    assert row["may_lose_share"] == pytest.approx(0.3 * (2 - 0.25 * 2.5))
    assert row["loses_share"] == pytest.approx(0.2)
    assert row["predicted_ratio"] == pytest.approx(16 / (12 + 0.25 * 7.5))
    assert row["measured_ratio"] == 1.25
    runs["in turn, a core less"] = [Run(25.0, 3.0, verify=12.0, draft=4.0)]  # four passes take 16 then
    assert balance("int8", runs, num_draft=3)["predicted_ratio"] == pytest.approx(16 / (0.75 * 16 + 0.25 * 24))
