"""A pass that is launched before the tokens of the one before it are read: the same tokens, whatever happens then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel.cache.pages import Pages
from hf_accel.cache.step import Step
from hf_accel.generation.ahead import PassAhead, can_go_ahead
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.hf.graphed_runner import GraphedRunner
from hf_accel.generation.hf.session import Session
from hf_accel.generation.request_settings import RequestSettings, StopRules
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.speculation import Speculation
from hf_accel.generation.speculation.verifiers import verifier
from tests.parity.families import build

from .asking import request_sampling
from .tape import install
from .toy import VOCABULARY, ToyDrafter, ToyRunner, sequential, toy_pages

PLAIN = Sampling()
TOKEN = verifier("token")


class FarRunner(ToyRunner):
    """A toy that takes tokens which the host has not read. ahead: how many of its passes did."""

    goes_ahead = True

    def __init__(self, pages: Pages, raises: Any = lambda when: None) -> None:
        super().__init__(pages, raises)
        self.ahead = 0

    def __call__(self, ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int]) -> Tensor:
        if isinstance(ids, Tensor):
            self.ahead += 1
            ids = ids.tolist()
        return super().__call__(ids, positions, step, keep)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts by whether a launched pass was the next one."""
    counts: Counter[bool] = Counter()
    take = PassAhead.logits_for

    def counted(self: PassAhead, chunks: Any, drafts: Any) -> Tensor | None:
        was_launched = self.is_launched
        found = take(self, chunks, drafts)
        if was_launched:
            counts[found is not None] += 1
        return found

    monkeypatch.setattr(PassAhead, "logits_for", counted)
    return counts


def batcher_of(num_blocks: int = 200, *, block_size: int = 4, window: int | None = None, **options: Any) -> Batcher:
    growable = options.pop("growable", False)
    pages = toy_pages(num_blocks, block_size=block_size, window=window, growable=growable)
    return Batcher(FarRunner(pages), pages, **options)


def asked(numbers: random.Random, *, most: int = 12, **settings: Any) -> Sequence:
    prompt = [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 9))]
    ends = StopRules(frozenset(numbers.sample(range(VOCABULARY), numbers.choice([0, 1, 2]))))
    settings = {"sampling": PLAIN, "stop": ends} | settings
    return Sequence(prompt, RequestSettings(numbers.randint(1, most), **settings))


def alone(sequence: Sequence, window: int | None = None) -> list[int]:
    prompt = sequence.tokens[: sequence.num_prompt]
    return sequential(prompt, sequence.settings, seed=sequence.seed, verifier=TOKEN, window=window)[0]


def run(batcher: Batcher, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        batcher.add(sequence)
    while batcher.has_work:
        batcher.step()
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


# -- when a pass is launched -------------------------------------------------------------------------------


def test_no_pass_is_in_vain_where_sequences_end_by_length(taken: Counter[bool]) -> None:
    batcher = batcher_of()
    sequences = [Sequence([number, 3], RequestSettings(length, PLAIN)) for number, length in enumerate((9, 4, 1, 6))]
    assert run(batcher, sequences) == [alone(sequence) for sequence in sequences]
    runner: Any = batcher.runner
    assert taken == {True: 8} and runner.ahead == 8 and runner.num_calls == batcher.num_passes == 9
    assert runner.num_rows == batcher.num_computed


def test_no_pass_goes_behind_the_table_of_positions() -> None:
    """Where a token behind it ends the sequence: a GPU that looked there would fail, and not recover."""
    batcher = batcher_of()
    runner: Any = batcher.runner
    runner.most_positions = 5
    assert len(run(batcher, [Sequence([1, 2], RequestSettings(9, PLAIN))])[0]) == 9
    assert runner.ahead == 3  # for the tokens at 2, 3 and 4
    assert batcher.ahead.statistics() == {"launched": 3, "unused": 0, "failed": {}}


@pytest.mark.parametrize(
    "sampling",
    [
        request_sampling(temperature=1.0), request_sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(num_logprobs=1),
    ],
    ids=["sampled", "processed", "logprobs"],
)  # fmt: skip
def test_other_settings_wait_for_the_tokens(sampling: Sampling) -> None:
    batcher = batcher_of()
    run(batcher, [Sequence([1, 2], RequestSettings(6, each)) for each in (PLAIN, sampling)])
    runner: Any = batcher.runner
    assert runner.ahead == 0 and runner.num_calls == 6


def test_speculation_waits_for_the_tokens() -> None:
    pages = toy_pages(50, block_size=4, window=None)
    drafter = ToyDrafter(0, TOKEN, None, drawn=False)
    batcher = Batcher(FarRunner(pages), pages, Speculation(TOKEN, [drafter], Controller(2)))
    sequence = Sequence([1, 2], RequestSettings(9, PLAIN))
    assert run(batcher, [sequence]) == [alone(sequence)]
    runner: Any = batcher.runner
    assert runner.ahead == 0


def test_what_does_not_go_ahead() -> None:
    pages, other = toy_pages(9, block_size=4, window=None), toy_pages(9, block_size=4, window=None)

    def made(**fields: Any) -> Sequence:
        settings = RequestSettings(6, PLAIN, **{"adapter": fields.pop("adapter", None)})
        return Sequence([1, 2], settings, **fields)

    assert can_go_ahead(pages, [made(), made()])
    for each in (made(adapter=object()), made(joint=object()), made(followers=[made()]), made(inputs=object())):
        assert not can_go_ahead(pages, [made(), each])

    class States(type(other.groups[0])):  # type: ignore[misc]
        pass

    other.groups[0].__class__ = States
    assert not can_go_ahead(other, [made()])


def test_a_prompt_that_is_read_in_parts_keeps_the_others_from_going_ahead(taken: Counter[bool]) -> None:
    """The next pass computes more of it, so that a pass over one token of each would be in vain."""
    batcher = batcher_of(token_budget=4)
    first, second = Sequence([1], RequestSettings(20, PLAIN)), Sequence([2] * 11, RequestSettings(6, PLAIN))
    batcher.add(first)
    batcher.step()
    assert run(batcher, [second]) == [alone(second)] and first.tokens[1:] == alone(first)
    assert taken[False] == 1  # the pass that was launched before the second one came


# -- what happens before the launched pass is the next one -------------------------------------------------


def test_sequences_that_come_and_go(taken: Counter[bool]) -> None:
    batcher = batcher_of()
    numbers = random.Random(5)
    kept, gone, late = (asked(numbers, stop=StopRules()) for _ in range(3))
    for each in (kept, gone, late):
        each.settings = RequestSettings(12, PLAIN)
    for each in (kept, gone):
        batcher.add(each)
    for _ in range(3):
        batcher.step()
    batcher.remove(gone, "cancelled")
    batcher.step()
    assert taken == {True: 3}  # of the two, and of the one that is left
    assert run(batcher, [late]) == [alone(late)]
    assert taken[False] == 1 and kept.tokens[kept.num_prompt :] == alone(kept)
    assert gone.tokens[gone.num_prompt :] == alone(gone)[:3]


def test_a_launched_pass_that_raises_is_computed_when_it_is_needed() -> None:
    """The tokens of the pass before it are final, and perhaps end all sequences."""
    batcher = batcher_of()
    runner: Any = batcher.runner
    fails: list[str] = []

    def raises(when: str) -> None:
        if when in fails:
            raise RuntimeError("the model")

    runner.raises = raises
    sequence = Sequence([1, 2], RequestSettings(8, PLAIN))
    batcher.add(sequence)
    batcher.step()
    for when in ("before", "after"):
        fails.append(when)
        if not batcher.ahead.is_launched:
            with pytest.raises(RuntimeError):
                batcher.step()
            assert not batcher.scheduler.running and batcher.pages.statistics()["blocks_used"] == 0
        else:
            [progress] = batcher.step()
            assert len(progress.tokens) == 1
        assert not batcher.ahead.is_launched
        fails.clear()
    while batcher.has_work:
        batcher.step()
    assert sequence.tokens[2:] == alone(sequence)


def test_nothing_is_in_flight_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr("hf_accel.generation.ahead.wait_for", waited.append)
    with batcher_of() as batcher:
        batcher.add(Sequence([1, 2], RequestSettings(8, PLAIN)))
        batcher.step()
        assert batcher.ahead.is_launched and not waited
    assert not batcher.ahead.is_launched and waited == [batcher.runner.device]
    assert batcher.pages.statistics()["blocks_used"] == 0


# -- random programmes ---------------------------------------------------------------------------------------


def play(seed: int) -> Counter[str]:
    """Arrivals, cancels, samples and passes that fail, in a random order: the tokens of each sequence alone."""
    draw = random.Random(seed)
    window = draw.choice([None, None, 3, 6])
    block_size = draw.choice([1, 2, 4])
    batcher = batcher_of(
        draw.choice([24, 60, 200]) // block_size, block_size=block_size, window=window,
        growable=draw.random() < 0.2, token_budget=draw.choice([None, None, 5]),
        max_running=draw.choice([None, None, 3]),
    )  # fmt: skip
    runner: Any = batcher.runner
    fails: list[str] = []

    def raises(when: str) -> None:
        if when in fails:
            fails.clear()
            raise RuntimeError("the model")

    runner.raises = raises
    alive: dict[Sequence, list[int]] = {}
    counts: Counter[str] = Counter()
    arrivals = 8
    while arrivals or alive:
        what = draw.random()
        if arrivals and (what < 0.15 or not alive):
            sequence = asked(draw, keeps_pages=draw.random() < 0.2)
            batcher.add(sequence)
            alive[sequence], arrivals = alone(sequence, window), arrivals - 1
        elif what < 0.19 and alive:
            sequence = draw.choice(list(alive))
            batcher.remove(sequence, "cancelled")
            wanted = alive.pop(sequence)
            assert sequence.tokens[sequence.num_prompt :] == wanted[: sequence.num_new]
        else:
            if what > 0.97:
                fails.append(draw.choice(["before", "after"]))
            try:
                batcher.step()
            except RuntimeError:
                counts["failed"] += 1
            fails.clear()
        for sequence in list(alive):
            found = sequence.tokens[sequence.num_prompt :]
            assert found == alive[sequence][: len(found)], "another token"
            if sequence.is_finished:
                assert found == alive.pop(sequence) and sequence.error is None
                counts["finished"] += 1
            if sequence.kept_pages is not None:
                sequence.kept_pages.release()
                sequence.kept_pages = None
    assert batcher.pages.statistics()["blocks_used"] == 0
    counts["preempted"] += batcher.scheduler.num_preempted
    counts["ahead"] += runner.ahead
    batcher.close()
    return counts


def test_random_programmes(taken: Counter[bool]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        try:
            counts += play(seed)
        except AssertionError as error:
            error.add_note(f"in the programme of seed {seed}")
            raise
    assert all(counts[name] > 0 for name in ("failed", "finished", "preempted", "ahead")), counts
    assert taken[True] > 2 * taken[False] > 0


# -- over graphs -----------------------------------------------------------------------------------------------


@pytest.fixture
def _tapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


PROMPTS = [[5, 6, 7], [9, 8], [11], [4, 4, 4, 4, 9]]


def over_graphs(
    family: str, monkeypatch: pytest.MonkeyPatch, *, ahead: bool, hooked: bool = False, **more: Any
) -> Any:
    """The tokens of a batch, its session, and how often a hook that came in the middle was called."""
    monkeypatch.setattr(GraphedRunner, "goes_ahead", GraphedRunner.goes_ahead if ahead else False)
    settings = hf_accel.CacheConfig(block_size=2, max_tokens=more.pop("max_tokens", None))
    model = hf_accel.patch(build(family), weights=None, fuse=False, attention="tape", cache=settings)
    calls: list[int] = []
    with Session(model, settings) as session:
        sequences = [Sequence(list(prompt), RequestSettings(14, PLAIN, **more)) for prompt in PROMPTS]
        for sequence in sequences:
            session.add(sequence)
        for number in range(1000):
            if hooked and number == 5:
                model.model.layers[1].register_forward_hook(lambda *args: calls.append(1))
            if not session.has_work:
                break
            session.step()
        return [sequence.tokens[sequence.num_prompt :] for sequence in sequences], session, calls


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_tokens_over_graphs(family: str, _tapes: None, taken: Counter[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are few, windows slide, and sequences end by their length and by tokens."""
    with monkeypatch.context() as without:
        plain, session, _ = over_graphs(family, without, ahead=False)
        assert not taken
    with monkeypatch.context() as patch:
        found, session, _ = over_graphs(family, patch, ahead=True)
        statistics = session.runner.statistics
        assert found == plain and taken[True] >= 11 and not taken[False]
        assert statistics.replays + sum(statistics.eager.values()) == session.num_passes
    ends = StopRules(frozenset({plain[0][4], plain[1][7], plain[2][2]}))
    with monkeypatch.context() as without:
        plain, *_ = over_graphs(family, without, ahead=False, stop=ends, max_tokens=22)
    with monkeypatch.context() as patch:
        found, session, _ = over_graphs(family, patch, ahead=True, stop=ends, max_tokens=22)
    assert found == plain and any(len(tokens) < 14 for tokens in found) and session.scheduler.num_preempted > 0


def test_a_hook_sees_the_passes_that_count_alone(_tapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that was launched before the hook came, and none behind a token that ends all sequences."""
    seen = {}
    for ahead in (True, False):
        with monkeypatch.context() as patch:
            tokens, session, calls = over_graphs("llama", patch, ahead=ahead, hooked=True)
            seen[ahead] = tokens, session.num_passes, len(calls)
            assert len(calls) == session.num_passes - 5
    assert seen[True] == seen[False]
