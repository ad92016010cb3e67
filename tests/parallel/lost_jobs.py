"""What ranks do of which one is lost in the middle."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch import Tensor, distributed
from transformers import LogitsProcessor, LogitsProcessorList

import hf_accel

from .tensor_jobs import generated, load, message_of, prompts, used_blocks, wait_at_most

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


class EndOfRank(LogitsProcessor):
    """Ends or stops the process of rank 1 at its n-th token."""

    def __init__(self, tokens: int, number: int) -> None:
        self.tokens, self.number = tokens, number

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.tokens -= 1
        if distributed.get_rank() == 1 and self.tokens == 0:
            os.kill(os.getpid(), self.number)
        return scores


def job_other_prompts(path: str) -> str:
    model = load(path)
    hf_accel.patch(model)
    wait_at_most(model, 3.0)
    return message_of(lambda: generated(model, [[1, 2, 3, 4]] if distributed.get_rank() else [[1, 2, 3]]))


def job_lost_in_generate(path: str, number: int) -> dict[str, Any]:
    """What rank 0 sees when rank 1 gets a signal in the middle of generate()."""
    model = load(path)
    hf_accel.patch(model)
    cache = hf_accel.PagedCache(model.config)
    ends = LogitsProcessorList([EndOfRank(4, number)])
    start = time.monotonic()
    message = message_of(lambda: generated(model, prompts()[:1], past_key_values=cache, logits_processor=ends))
    seconds = time.monotonic() - start
    cache.reset()
    return {"message": message, "seconds": seconds, "blocks": used_blocks(cache.pages)}


def job_lost_while_idle(path: str, victim: int, number: int, seconds: float) -> dict[str, Any]:
    """Rank `victim` gets a signal while the Engines of both have nothing to do. Then the other one has a request."""
    model = load(path)
    hf_accel.patch(model)
    wait_at_most(model, seconds)
    with hf_accel.Engine(model) as engine:
        engine.submit(prompts()[0], max_new_tokens=2).result()
        distributed.barrier()
        if distributed.get_rank() == victim:
            os.kill(os.getpid(), number)
        start = time.monotonic()
        message = message_of(engine.submit(prompts()[1], max_new_tokens=2).result)
        seconds = time.monotonic() - start
    return {"message": message, "seconds": seconds, "blocks": used_blocks(engine.session.pages)}


def job_lost_in_engine(path: str, number: int, count: int, seconds: float) -> dict[str, Any]:
    """The same in an Engine with `count` requests, which breaks and tells all of them. seconds: that it waits."""
    model = load(path)
    hf_accel.patch(model)
    wait_at_most(model, seconds)
    start = time.monotonic()
    with hf_accel.Engine(model) as engine:
        ends = EndOfRank(4, number)
        requests = [engine.submit(row, max_new_tokens=50, processors=[ends]) for row in prompts()[:count]]
        messages = [message_of(request.result) for request in requests]
        after = message_of(lambda: engine.submit(prompts()[0], max_new_tokens=2))
    seconds = time.monotonic() - start
    return {"messages": messages, "after": after, "seconds": seconds, "blocks": used_blocks(engine.session.pages)}
