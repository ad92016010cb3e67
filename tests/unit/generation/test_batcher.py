"""The Batcher with a model that hashes what it reads in its pages: outputs are those of each request alone."""

from __future__ import annotations

import hashlib
import random
from array import array
from typing import Any

import pytest

from hf_accel.cache.pages import Pages
from hf_accel.errors import OutOfBlocksError
from hf_accel.generation.batcher import Batcher, Progress
from hf_accel.generation.request_settings import RequestSettings, StopRules
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.drafters.drafter import Drafter
from hf_accel.generation.speculation.speculation import Speculation
from hf_accel.generation.speculation.verifiers import verifier as verifier_named

from .asking import request_sampling
from .programme import check_blocks
from .toy import VOCABULARY, ToyDrafter, ToyRunner, sequential, toy_pages

GREEDY = Sampling()


class Broken(RuntimeError):
    pass


def batcher_of(
    pages: Pages,
    *drafters: Drafter,
    verify: str = "token",
    num_draft: Any = 4,
    raises: Any = lambda when: None,
    **more: Any,
) -> Batcher:
    speculation = Speculation(verifier_named(verify), drafters, Controller(num_draft))
    return Batcher(ToyRunner(pages, raises), pages, speculation, **more)


def run(batcher: Batcher) -> list[Progress]:
    progress = []
    while batcher.has_work:
        progress += batcher.step()
    return progress


# -- random programmes ------------------------------------------------------------------------------------


class Programme:
    """Arrivals, families, cancels, priorities, bad requests, failing passes and drafters, in a random order."""

    def __init__(self, seed: int, *, block_size: int, num_blocks: int, window: int | None, verify: str, **more: Any):
        self.random = random.Random(seed)
        self.window, self.verify = window, verify
        self.pages = toy_pages(num_blocks, block_size=block_size, window=window, growable=more.pop("growable", False))
        rule = verifier_named(verify)
        # what a drawn draft is verified to depends on it, unless numbers are shared
        self.drafter = ToyDrafter(seed, rule, window, drawn=verify == "seeded", trees=more.pop("trees", False))
        self.fails_when: str | None = None
        self.batcher = batcher_of(
            self.pages, self.drafter, verify=verify, num_draft=more.pop("num_draft", 4), raises=self.raises, **more
        )
        self.expected: dict[Sequence, tuple[list[int], Exception | None]] = {}
        self.streamed: dict[Sequence, list[int]] = {}
        self.alive: list[Sequence] = []
        self.contents: dict[bytes, list[tuple[int, int]]] = {}  # of every full block of final tokens
        self.counts = {"finished": 0, "failed": 0, "cancelled": 0, "broken": 0, "accepted": 0}

    # -- events ----------------------------------------------------------------------------------------

    def raises(self, when: str) -> None:
        if when == self.fails_when:
            self.fails_when = None
            raise Broken(when)

    def arrive(self) -> None:
        draw = self.random
        shared = [1, 2, 3, 4, 5, 6, 7, 8, 9][: draw.choice([0, 4, 9])]  # many begin alike
        prompt = shared + [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 3, 12]))]
        limit = draw.choice([1, 2, 9, 25])
        end = draw.randrange(VOCABULARY)
        sampling = request_sampling(
            vocabulary_size=VOCABULARY,
            num_prompt=len(prompt),
            temperature=draw.choice([0.0, 0.0, 1.0, 0.7]),
            top_k=draw.choice([None, 4]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.7]),
            min_new_tokens=draw.choice([0, 3]),
            stop_token_ids=(end,),
            processors=draw.choice([(), (), (), (parity,), (Bad(len(prompt) + draw.randrange(6)),)]),
        )
        stop = draw.choice([stops_at(end), StopRules()])
        if draw.random() < 0.05:
            stop = StopRules(others=(stop_that_raises,))
        priority, first = draw.choice([0, 0, 1]), draw.randrange(1000)
        settings = RequestSettings(limit, sampling, stop, priority)
        family = Sequence.samples(prompt, settings, range(first, first + draw.choice([1, 1, 3])), inputs=None)
        try:
            self.batcher.add(family[0])
        except OutOfBlocksError:
            capacity = self.pages.capacity
            assert capacity is not None and len(prompt) + limit > capacity
            return
        self.alive += family
        for each in family:
            self.streamed[each] = []
            rule = verifier_named(self.verify)
            self.expected[each] = sequential(prompt, settings, seed=each.seed, verifier=rule, window=self.window)

    def step(self, *, arrivals: bool) -> None:
        draw = self.random.random()
        if arrivals and draw < 0.25 and len(self.alive) < 12:
            self.arrive()
        elif arrivals and draw < 0.28 and self.alive:
            gone = self.random.choice(self.alive)
            self.batcher.remove(gone, "cancelled")
            self.end(gone, "cancelled")
        else:
            self.run_pass(broken=arrivals and draw > 0.97)
        self.check()

    def run_pass(self, *, broken: bool) -> None:
        if broken:
            self.fails_when = self.random.choice(["before", "after", None])
            self.drafter.fails = self.fails_when is None
        before = {s: len(s.tokens) for s in self.alive}
        try:
            progress = self.batcher.step()
        except RuntimeError:
            self.counts["broken"] += 1
            assert all(len(s.tokens) == before[s] and s.cached is None for s in self.alive)
            return
        for each in progress:
            sequence = each.sequence
            self.streamed[sequence] += each.tokens
            if sequence.is_finished:
                alone, error = self.expected[sequence]
                assert self.streamed[sequence] == sequence.tokens[sequence.num_prompt :] == alone
                assert type(each.error) is type(error) and str(each.error) == str(error)
                self.end(sequence, "failed" if error else "finished")

    def end(self, sequence: Sequence, how: str) -> None:
        self.alive.remove(sequence)
        self.counts[how] += 1
        assert sequence.cached is None and sequence.is_finished
        self.learn(sequence)

    def learn(self, sequence: Sequence) -> None:
        self.contents |= blocks_of(sequence.tokens, self.pages.block_size)

    # -- what must hold --------------------------------------------------------------------------------

    def check(self) -> None:
        check_blocks(self.pages, self.batcher.scheduler.running)
        assert self.drafter.known <= set(self.alive)
        for sequence in self.alive:
            new = sequence.tokens[sequence.num_prompt :]
            assert new == self.expected[sequence][0][: len(new)]
            assert self.streamed[sequence] == new
            self.learn(sequence)
        self.check_published()

    def check_published(self) -> None:
        """A block that others may find holds the committed tokens it is known by, and so never changes."""
        for group in self.pages.groups:
            slots: Any = group.storages[0]
            for digest, block in ({} if group.index is None else group.index._blocks).items():
                assert slots.of_block(block) == self.contents[digest]

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.alive:
                break
            self.step(arrivals=False)
        assert not self.alive and not self.batcher.has_work and not self.batcher.step()
        assert not self.drafter.known
        for group in self.pages.groups:
            assert group.pool.num_used == 0 and group.pool.num_free == group.pool.num_blocks
        self.counts["accepted"] = self.batcher.speculation.statistics.accepted


def blocks_of(tokens: list[int], size: int) -> dict[bytes, list[tuple[int, int]]]:
    """Digest of each full block and all before it -> (position, token) of its slots."""
    blocks, previous = {}, b""
    for end in range(size, len(tokens) + 1, size):
        data = previous + array("q", tokens[end - size : end]).tobytes()
        previous = hashlib.blake2b(data, digest_size=16).digest()
        blocks[previous] = list(enumerate(tokens[:end]))[end - size :]
    return blocks


def parity(ids: Any, scores: Any) -> Any:
    """Depends on everything before."""
    scores[:, int(ids.sum()) % VOCABULARY] += 5
    return scores


class Bad:
    """A processor that breaks once the text has `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: Any, scores: Any) -> Any:
        if ids.shape[1] == self.length:
            raise Broken("processor")
        return scores


def stops_at(token: int) -> StopRules:
    return StopRules(others=(lambda sequence: sequence.tokens[-1] == token and sequence.num_new > 1,))


def stop_that_raises(sequence: Sequence) -> bool:
    if sequence.num_new == 3:
        raise Broken("stop")
    return False


PROGRAMMES: dict[str, dict[str, Any]] = {
    "scarce": {"block_size": 4, "num_blocks": 14, "window": None, "verify": "token"},
    "tokens": {"block_size": 1, "num_blocks": 60, "window": None, "verify": "seeded", "token_budget": 7},
    "one a pass": {"block_size": 4, "num_blocks": 20, "window": None, "verify": "block", "token_budget": 1},
    "window": {"block_size": 4, "num_blocks": 16, "window": 6, "verify": "seeded"},
    "narrow": {"block_size": 1, "num_blocks": 50, "window": 5, "verify": "token", "token_budget": 9},
    "growing": {"block_size": 16, "num_blocks": 1, "window": None, "verify": "block", "growable": True},
    "few": {"block_size": 4, "num_blocks": 30, "window": None, "verify": "seeded", "max_running": 3},
    "trees": {"block_size": 4, "num_blocks": 30, "window": None, "verify": "token", "trees": True},
    "scarce trees": {"block_size": 4, "num_blocks": 14, "window": None, "verify": "seeded", "trees": True},
    "trees of single tokens": {
        "block_size": 1,
        "num_blocks": 90,
        "window": 5,
        "verify": "block",
        "trees": True,
        "token_budget": 19,
    },
    "trees in windows": {"block_size": 4, "num_blocks": 24, "window": 6, "verify": "seeded", "trees": True},
    "growing trees": {
        "block_size": 16,
        "num_blocks": 1,
        "window": None,
        "verify": "token",
        "trees": True,
        "growable": True,
    },
}


def play(seed: int, steps: int, settings: dict[str, Any]) -> Programme:
    programme = Programme(seed, **settings)
    for _ in range(steps):
        programme.step(arrivals=True)
    programme.drain()
    return programme


@pytest.mark.parametrize("name", PROGRAMMES)
def test_random_programmes(name: str) -> None:
    programme = play(1, 300, PROGRAMMES[name])
    if PROGRAMMES[name].get("token_budget") == 1:  # no room for drafts
        assert programme.counts.pop("accepted") == 0
    assert min(programme.counts.values()) > 0
    assert (programme.batcher.speculation.statistics.branched > 5) is ("trees" in name)
    if name in ("scarce", "window", "narrow"):
        assert programme.batcher.scheduler.num_preempted > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PROGRAMMES)
def test_long_random_programmes(name: str, seed: int) -> None:
    assert play(100 + seed, 2000, PROGRAMMES[name]).counts["finished"] > 90
