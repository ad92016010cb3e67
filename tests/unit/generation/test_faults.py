"""A failure ends the request it belongs to: no other one's tokens change, no block leaks, and the engine goes on."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from hf_accel.cache.group import PageGroup
from hf_accel.cache.pages import Pages
from hf_accel.cache.pool import BlockPool, BlockTable, PrefixIndex
from hf_accel.errors import HfAccelError, HfAccelWarning, OutOfBlocksError
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.engine.engine_loop import EngineLoop
from hf_accel.generation.engine.stream import Sample
from hf_accel.generation.request_settings import RequestSettings, StopRules
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.speculation import Speculation
from hf_accel.generation.speculation.verifiers import verifier as verifier_named
from hf_accel.generation.speculation.verifiers.rejection import TokenVerifier

from .asking import request_sampling
from .programme import check_blocks
from .toy import Slots, ToyDrafter, ToyRunner, sequential, toy_pages

WAIT = 20.0
SETTINGS: dict[str, dict[str, Any]] = {
    "scarce": {"block_size": 4, "num_blocks": 9, "window": None},
    "growing": {"block_size": 4, "num_blocks": 1, "window": None, "growable": True},
    "window": {"block_size": 2, "num_blocks": 14, "window": 5},
    "chunks": {"block_size": 4, "num_blocks": 9, "window": None, "token_budget": 6},
}
# what a pass allocates, copies, grows or computes with
POINTS: list[tuple[type, str]] = [
    (BlockPool, "allocate"),
    (BlockPool, "retain"),
    (BlockTable, "fork"),
    (PageGroup, "table_tensor"),
    (PrefixIndex, "find"),
    (PrefixIndex, "insert"),
    (PrefixIndex, "remove"),
    (Slots, "copy"),
    (Slots, "grow"),
    (ToyRunner, "__call__"),
    (ToyDrafter, "propose"),
    (TokenVerifier, "verify"),
]
ERRORS = (MemoryError, OutOfBlocksError, RuntimeError)


@dataclass
class Wish:
    prompt: list[int]
    limit: int
    temperature: float
    samples: int = 1


SHARED = [1, 2, 3, 4, 5, 6, 7, 8, 9]
WISHES = [
    Wish([*SHARED, 3], 9, 0.0),
    Wish([*SHARED, 3, 5], 7, 1.0, samples=3),
    Wish([4, 4], 10, 0.7),
    Wish(SHARED[:6], 3, 0.0, samples=2),
]


def params(wish: Wish, **more: Any) -> Sampling:
    return request_sampling(temperature=wish.temperature, **more)


@functools.cache
def expected(number: int, window: int | None) -> list[list[int]]:
    """What each sample of a wish generates alone."""
    wish, rule = WISHES[number], verifier_named("token")
    settings = RequestSettings(wish.limit, params(wish))
    return [
        sequential(wish.prompt, settings, seed=7 + i, verifier=rule, window=window)[0] for i in range(wish.samples)
    ]


class Faults:
    """Counts the calls of all points, and raises at one of them; before what it stands for, or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, points: list[tuple[type, str]] = POINTS) -> None:
        self.count = 0
        self.at: int | None = None
        self.error: type[BaseException] = RuntimeError
        self.names: list[str] = []
        for owner, name in points:
            monkeypatch.setattr(owner, name, self._watched(owner, name))

    def _watched(self, owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def watched(*args: Any, **keywords: Any) -> Any:
            self.count += 1
            self.names.append(f"{owner.__name__}.{name}")
            if self.count == self.at:
                raise self.error(f"injected at {self.names[-1]}")
            return original(*args, **keywords)

        return staticmethod(watched) if isinstance(vars(owner).get(name), staticmethod) else watched

    def arm(self, at: int | None, error: type[BaseException]) -> None:
        self.count, self.at, self.error, self.names = 0, at, error, []


class Served:
    """An engine in its thread, which begins when all requests are there, so that each run is the same."""

    def __init__(self, *, block_size: int, num_blocks: int, window: int | None, growable: bool = False, **more: Any):
        self.window = window
        self.pages: Pages = toy_pages(num_blocks, block_size=block_size, window=window, growable=growable)
        rule = verifier_named("token")
        self.drafter = ToyDrafter(1, rule, window, drawn=False)
        self.speculation = Speculation(rule, [self.drafter], Controller(3))
        self.runner = ToyRunner(self.pages)
        self.batcher = Batcher(self.runner, self.pages, self.speculation, **more)
        self.begins = threading.Event()
        self.loop = EngineLoop(self.batcher)
        self.loop._commands.put(lambda: self.begins.wait(WAIT) and None)

    def submit(self, wish: Wish, **more: Any) -> list[Sample]:
        stop = StopRules(others=more.pop("stop", ()))
        settings = RequestSettings(wish.limit, params(wish, **more), stop)
        family = Sequence.samples(wish.prompt, settings, range(7, 7 + wish.samples), inputs=None)
        samples = [Sample(on_wait=self.loop.refuse_own_thread) for _ in family]
        self.loop.submit(family[0], dict(zip(family, samples, strict=True)))
        return samples

    def outcome(self, sample: Sample) -> tuple[list[int], BaseException | None]:
        try:
            return sample.result(WAIT).tokens, None
        except Exception as error:
            return list(sample._tokens), error

    def close(self) -> None:
        self.begins.set()
        self.loop.close(wait=True)
        check_blocks(self.pages, [])
        assert all(group.pool.num_used == 0 for group in self.pages.groups)
        assert not self.drafter.known


def served(name: str) -> Served:
    return Served(**SETTINGS[name])


def run(name: str) -> tuple[int, int]:
    """All wishes twice, the second time over what the first has left; how many failed, and preemptions."""
    engine = served(name)
    failed = 0
    for _ in range(2):
        engine.begins.clear()
        handles = [engine.submit(wish) for wish in WISHES]
        engine.begins.set()
        for number, samples in enumerate(handles):
            for sample, alone in zip(samples, expected(number, engine.window), strict=True):
                tokens, error = engine.outcome(sample)
                if error is None:
                    assert tokens == alone
                else:
                    assert "injected at" in str(error) and tokens == alone[: len(tokens)]
                    failed += 1
    engine.close()
    return failed, engine.batcher.scheduler.num_preempted


def points_of(name: str, faults: Faults) -> list[str]:
    """Those of a run without a failure."""
    for number in range(len(WISHES)):
        expected(number, SETTINGS[name]["window"])
    faults.arm(None, RuntimeError)
    failed, preempted = run(name)
    assert failed == 0 and (preempted > 0) is (name in ("scarce", "chunks", "window"))
    return faults.names


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def check_points(name: str, faults: Faults, points: list[tuple[int, type[BaseException]]]) -> None:
    for point, error in points:
        faults.arm(point, error)
        failed, _ = run(name)
        assert failed <= 1, faults.names[point - 1]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_failure_ends_one_request(name: str, faults: Faults) -> None:
    """Injected at one call of each kind, another one in each setting."""
    calls: dict[str, list[int]] = {}
    for number, point in enumerate(points_of(name, faults), start=1):
        calls.setdefault(point, []).append(number)
    place = list(SETTINGS).index(name) + 1
    chosen = [numbers[len(numbers) * place // (len(SETTINGS) + 1)] for numbers in calls.values()]
    check_points(name, faults, [(point, ERRORS[i % len(ERRORS)]) for i, point in enumerate(chosen)])


@pytest.mark.long
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_failure_at_any_point_ends_one_request(name: str, error: type[BaseException], faults: Faults) -> None:
    check_points(name, faults, [(point, error) for point in range(1, len(points_of(name, faults)) + 1)])


@pytest.mark.parametrize("error", ERRORS)
def test_room_in_many_groups_is_given_as_a_whole_or_not_at_all(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups copy the last block; the second of them fails."""
    pages = toy_pages(8, block_size=2, window=5)
    cached = pages.begin_with_prefix([])
    pages.append(cached, 3)
    fork = cached.fork()
    used = [group.pool.num_used for group in pages.groups]
    faults = Faults(monkeypatch, [(Slots, "copy")])
    faults.arm(2, error)
    with pytest.raises(error, match="injected"):
        pages.append(fork, 2)
    assert [table.num_tokens for table in fork.tables] == [3, 3]
    assert pages.groups[1].pool.num_used == used[1] and fork.tables[1].blocks == cached.tables[1].blocks
    pages.append(fork, 2)
    assert [table.num_tokens for table in fork.tables] == [5, 5]
    for each in (cached, fork):
        each.release()
    check_blocks(pages, [])


# -- who is to blame ------------------------------------------------------------------------------------------

POISON = 11  # a token that one request alone has in its prompt
BAD = Wish([*SHARED, POISON], 9, 0.0)


def is_poisoned(sequence: Sequence) -> bool:
    return POISON in sequence.tokens[: sequence.num_prompt]


def others_beside(engine: Served, *bad: Sample) -> list[BaseException]:
    """The errors of bad requests, while those of WISHES run beside them and get what they get alone."""
    handles = [engine.submit(wish) for wish in WISHES]
    engine.begins.set()
    for number, samples in enumerate(handles):
        assert [engine.outcome(sample) for sample in samples] == [(t, None) for t in expected(number, engine.window)]
    errors = [engine.outcome(sample)[1] for sample in bad]
    engine.close()
    return [error for error in errors if error is not None]


class Poisoned(RuntimeError):
    pass


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pass_that_fails_is_computed_again_one_by_one(name: str) -> None:
    """Whoever makes it fail fails alone, however often it comes into a pass."""
    engine = served(name)

    def raises(when: str) -> None:
        if when == "after" and any(map(is_poisoned, engine.batcher.in_pass)):
            raise Poisoned

    engine.runner.raises = raises
    errors = others_beside(engine, *engine.submit(BAD), *engine.submit(BAD))
    assert [type(error) for error in errors] == [Poisoned] * 2


def test_a_drafter_that_fails_for_one_sequence_fails_it_alone() -> None:
    engine = served("chunks")
    propose = engine.drafter.propose

    def picky(sequences: Any, lengths: Any) -> Any:
        if any(map(is_poisoned, sequences)):
            raise Poisoned
        return propose(sequences, lengths)

    engine.drafter.propose = picky  # type: ignore[method-assign]
    (error,) = others_beside(engine, *engine.submit(BAD))
    assert isinstance(error, Poisoned)


def test_what_fails_when_tokens_are_final_undoes_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served("growing")
    observe = engine.speculation.observe

    def picky(sequence: Sequence, *rest: Any) -> None:
        if is_poisoned(sequence):
            raise Poisoned
        observe(sequence, *rest)

    monkeypatch.setattr(engine.speculation, "observe", picky)
    (error,) = others_beside(engine, *engine.submit(BAD))
    assert isinstance(error, Poisoned)


def test_a_drafter_that_cannot_forget_harms_nobody() -> None:
    engine = served("scarce")
    forget = engine.drafter.forget

    def picky(sequence: Sequence) -> None:
        forget(sequence)
        if is_poisoned(sequence):
            raise Poisoned

    engine.drafter.forget = picky  # type: ignore[method-assign]
    bad = engine.submit(BAD)[0]
    with pytest.warns(HfAccelWarning, match=r"'toy' raised Poisoned\(\) in forget"):
        assert others_beside(engine, bad) == []


def test_no_memory_for_drafts_means_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence can do without ends neither it nor the pass."""
    engine = served("growing")
    append = Pages.append

    def full(pages: Pages, cached: Any, count: int, *, start: int | None = None) -> None:
        if start is not None:  # a draft's
            raise RuntimeError("can't allocate memory")
        append(pages, cached, count)

    monkeypatch.setattr(Pages, "append", full)
    monkeypatch.setattr(Pages, "fill", lambda *given: False)  # no room in the blocks that there are
    assert others_beside(engine) == []
    assert engine.speculation.statistics.drafted == 0


# -- what is no Exception -------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def function(*given: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("place", ["processors", "stop"])
def test_what_is_no_exception_ends_its_request_alone(place: str, error: BaseException) -> None:
    """And is told as one: it would end the thread, or the event loop, of whoever waits for the request."""
    engine = served("scarce")
    bad = engine.submit(BAD, **{place: (raising(error),)})
    (told,) = others_beside(engine, *bad)
    assert isinstance(told, HfAccelError) and told.__cause__ is error and repr(error) in str(told)


# -- in the engine's own thread -------------------------------------------------------------------------------


def test_a_processor_may_submit_but_not_wait() -> None:
    engine = served("growing")
    found: dict[str, Any] = {}

    def process(ids: Any, scores: Any) -> Any:
        if "sample" not in found:
            found["sample"] = engine.submit(WISHES[0])[0]
            for name, wait in {
                "result": found["sample"].result,
                "iter": lambda: next(iter(found["sample"])),
                "close": lambda: engine.loop.close(wait=True),
            }.items():
                with pytest.raises(HfAccelError, match="would wait for itself for ever"):
                    wait()
                found[name] = True
        return scores

    bad = engine.submit(WISHES[2], processors=(process,))
    engine.begins.set()
    assert engine.outcome(bad[0])[1] is None
    assert engine.outcome(found["sample"]) == (expected(0, None)[0], None)
    assert {"result", "iter", "close"} < found.keys()
    engine.close()


def test_a_thread_that_cannot_start_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served("growing")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"):
            engine.submit(WISHES[0])
    samples = engine.submit(WISHES[0])
    engine.begins.set()
    assert engine.outcome(samples[0]) == (expected(0, None)[0], None)
    engine.close()


def test_two_that_close_both_wait() -> None:
    engine = served("growing")
    samples = [sample for wish in WISHES for sample in engine.submit(wish)]
    ended: list[bool] = []
    threads = [
        threading.Thread(target=lambda: (engine.loop.close(wait=True), ended.append(all(s.done for s in samples))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    engine.begins.set()
    for thread in threads:
        thread.join(WAIT)
    assert ended == [True, True]
    engine.close()
