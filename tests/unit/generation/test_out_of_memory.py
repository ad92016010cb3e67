"""A device that has too little memory for some passes: they become smaller, and no request's tokens change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.cache.pages import Pages
from hf_accel.cache.step import Step
from hf_accel.errors import HfAccelError, HfAccelWarning
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.speculation import Speculation
from hf_accel.generation.speculation.verifiers import verifier

from .asking import request_sampling
from .programme import check_blocks
from .toy import VOCABULARY, ToyDrafter, ToyRunner, sequential, toy_pages

RULE = verifier("seeded")
NONE_FITS = 10**9


class SmallDevice(ToyRunner):
    """most: the rows of a pass that fits. fails: numbers of passes that do not fit, whatever they are."""

    def __init__(self, pages: Pages, most: int = NONE_FITS, fails: tuple[int, ...] = ()) -> None:
        super().__init__(pages)
        self.most, self.fails = most, fails
        self.largest = 0

    def __call__(self, ids: list[int], positions: list[int], step: Step, keep: list[int]) -> Tensor:
        too_large = len(ids) > self.most or self.num_calls + 1 in self.fails
        if too_large and self.num_calls % 2:
            self.num_calls += 1
            raise torch.OutOfMemoryError("before K and V are written")
        logits = super().__call__(ids, positions, step, keep)
        if too_large:
            raise torch.OutOfMemoryError("after K and V are written")
        self.largest = max(self.largest, len(ids))
        return logits


def batcher_of(runner: SmallDevice, *, drafts: bool, **settings: Any) -> Batcher:
    drafters = [ToyDrafter(0, RULE, None, drawn=True)] if drafts else []
    return Batcher(runner, runner.pages, Speculation(RULE, drafters, Controller(3)), **settings)


def requests(count: int) -> list[Sequence]:
    draw = random.Random(count)
    made = []
    for number in range(count):
        prompt = [1, 2, 3, 4, 5][: draw.choice([0, 5])] + [
            draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 9, 30]))
        ]
        sampling = request_sampling(vocabulary_size=VOCABULARY, temperature=draw.choice([0.0, 1.0]))
        seeds = range(10 * number, 10 * number + draw.choice([1, 1, 2]))
        made += Sequence.samples(prompt, RequestSettings(15, sampling), seeds, inputs=None)
    return made


def check(batcher: Batcher, sequences: list[Sequence]) -> None:
    followers = {follower for sequence in sequences for follower in sequence.followers}
    for sequence in sequences:
        if sequence not in followers:
            batcher.add(sequence)
    while batcher.has_work:
        assert not [each.error for each in batcher.step() if each.error is not None]
        check_blocks(batcher.pages, batcher.scheduler.running)
    for each in sequences:
        prompt = each.tokens[: each.num_prompt]
        alone = sequential(prompt, each.settings, seed=each.seed, verifier=RULE, window=None)
        assert each.tokens[each.num_prompt :] == alone[0]
    assert all(group.pool.num_used == 0 for group in batcher.pages.groups)


@pytest.mark.filterwarnings("ignore:a pass of .* does not fit")
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("num_blocks", [25, 400])
@pytest.mark.parametrize("most", [1, 2, 7, 40])
def test_passes_become_smaller(most: int, num_blocks: int, drafts: bool) -> None:
    runner = SmallDevice(toy_pages(num_blocks, block_size=4, window=None), most)
    batcher = batcher_of(runner, drafts=drafts)
    check(batcher, requests(9))
    assert runner.largest <= most
    assert batcher.token_budget is not None and 0 < batcher.token_budget <= most
    assert batcher.statistics()["out_of_memory"] == batcher.num_out_of_memory > 0


@pytest.mark.filterwarnings("ignore:a pass of .* does not fit")
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("number", range(1, 12, 2))
def test_one_pass_does_not_fit(number: int, drafts: bool) -> None:
    """Wherever it is: no block leaks, and no token changes."""
    runner = SmallDevice(toy_pages(400, block_size=4, window=None), fails=(number, number + 4))
    batcher = batcher_of(runner, drafts=drafts, token_budget=24)
    check(batcher, requests(7))
    assert batcher.num_out_of_memory == 2


def test_what_it_says() -> None:
    runner = SmallDevice(toy_pages(400, block_size=4, window=None), fails=(2,))
    batcher = batcher_of(runner, drafts=False, token_budget=64)
    settings = RequestSettings(5, request_sampling(vocabulary_size=VOCABULARY, temperature=0.0))
    for _ in range(8):
        batcher.add(Sequence([1, 2], settings))
    batcher.step()
    words = (
        r"a pass of 8 tokens does not fit into the memory of cpu; passes have at most 4 from now on, .* Lower "
        r"token_budget=, max_running=, or max_tokens= of the cache, or quantize the weights"
    )
    with pytest.warns(HfAccelWarning, match=words):
        batcher.step()
    assert len(batcher.scheduler.running) == 2 and len(batcher.scheduler.waiting) == 6


def test_nothing_fits() -> None:
    runner = SmallDevice(toy_pages(400, block_size=4, window=None), most=0)
    batcher = batcher_of(runner, drafts=False)
    settings = RequestSettings(5, request_sampling(vocabulary_size=VOCABULARY, temperature=0.0))
    batcher.add(Sequence([1], settings))
    words = (
        r"one token of one sequence does not fit into the memory of cpu, .*; lower max_tokens= .*dtype='int8'.*int4"
    )
    with pytest.raises(HfAccelError, match=words) as caught:
        batcher.step()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    batcher.close()
    assert all(group.pool.num_used == 0 for group in batcher.pages.groups)


def test_what_can_be_freed_is_freed_first() -> None:
    runner = SmallDevice(toy_pages(400, block_size=4, window=None), fails=(2, 5))
    batcher = batcher_of(runner, drafts=False)
    batcher._free_memory = lambda: True  # type: ignore[method-assign]
    check(batcher, requests(5))
    assert batcher.token_budget is None and batcher.num_out_of_memory == 2
