"""Clients that come by a Poisson process, ask for different things, and of whom some leave before the end."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from hf_accel.generation.engine.stream import Request
from hf_accel.generation.sequence import Sequence
from hf_accel.serving.row_queue import RowRequest
from hf_accel.serving.rows import RowJob
from hf_accel.serving.service import Job

from .running import WAIT, Running, until

SHARED = "import re\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
PROMPTS = [
    SHARED, SHARED + "    def read(", SHARED + "    def close(", "import re\n\ndef ", "def main(", "class Error(",
    "x = [", "# a ",
]  # fmt: skip
LENGTHS = (1, 7, 16, 64)
LEAVING = 0.3  # the share of clients who do not wait for the end


@dataclass(frozen=True)
class Question:
    """What a client asks. check: whether the whole answer, as JSON, is right; None if nobody knows."""

    body: dict[str, Any]
    check: Callable[[dict[str, Any]], bool] | None = None
    path: str = "/v1/completions"


@dataclass
class Outcome:
    """What became of the clients. wrong: questions with whole answers that are not right."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


class Load:
    """Clients of one server. clients: the most at a time; rate: arrivals a second."""

    def __init__(self, running: Running, *, seed: int, clients: int = 64, rate: float = 200.0) -> None:
        self.running, self.random = running, random.Random(seed)
        self.clients, self.rate = asyncio.Semaphore(clients), rate
        self.outcome = Outcome()
        self.kinds: list[Callable[[], Question]] = [self.completion]
        tokenizer = running.service.tokenizer
        self.expected = {
            (prompt, length): tokenizer.decode(tokens[:length], skip_special_tokens=True)
            for prompt in PROMPTS
            for tokens in [running.generated(prompt, max(LENGTHS))]
            for length in LENGTHS
        }

    async def run(self, seconds: float, enough: Callable[[], bool] = lambda: True) -> Outcome:
        """Let clients come for so long, then until it was enough (on a slow machine), and wait until all have gone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        async with httpx.AsyncClient(base_url=self.running.root, timeout=60, limits=limits) as http:
            tasks = set[asyncio.Task[None]]()
            while loop.time() < end or (loop.time() < end + WAIT and not enough()):
                await self.clients.acquire()
                task = asyncio.create_task(self._client(http))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: self.clients.release())
                await asyncio.sleep(self.random.expovariate(self.rate))
            await asyncio.gather(*tasks)
        return self.outcome

    def completion(self) -> Question:
        """Ask for a text, greedy or not."""
        choose = self.random
        prompt, length = choose.choice(PROMPTS), choose.choice(LENGTHS)
        body: dict[str, Any] = {"model": self.running.service.name, "prompt": prompt, "max_tokens": length}
        body |= {"temperature": choose.choice([0, 0, 0, 0.9]), "stream": choose.random() < 0.6}
        if body["temperature"]:
            return Question(body | {"n": choose.choice([1, 3]), "top_p": 0.9, "logprobs": 1})
        return Question(body, lambda answer: answer["choices"][0]["text"] == self.expected[prompt, length])

    async def _client(self, http: httpx.AsyncClient) -> None:
        choose = self.random
        asked = choose.choice(self.kinds)()
        patience = choose.expovariate(4.0) if choose.random() < LEAVING else None
        try:
            async with asyncio.timeout(patience):
                answer = await (self._streamed if asked.body.get("stream") else self._whole)(http, asked)
        except TimeoutError:
            self.outcome.counts["left"] += 1
            return
        if answer is None:
            self.outcome.counts["told to come later"] += 1
            return
        self.outcome.counts["answered"] += 1
        if asked.check is not None:
            self.outcome.counts["compared"] += 1
            if not asked.check(answer):
                self.outcome.wrong.append((asked.body, answer))

    async def _whole(self, http: httpx.AsyncClient, asked: Question) -> dict[str, Any] | None:
        answer = await http.post(asked.path, json=asked.body)
        if answer.status_code == 429:
            return None
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def _streamed(self, http: httpx.AsyncClient, asked: Question) -> dict[str, Any] | None:
        """Return the first choice of a stream, as a whole answer has it."""
        text, reason = "", None
        async with http.stream("POST", asked.path, json=asked.body) as answer:
            if answer.status_code == 429:
                return None
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in (one for one in event["choices"] if one["index"] == 0):
                        text, reason = text + choice["text"], choice["finish_reason"]
            assert line == "" or line == "data: [DONE]"
        return {"choices": [{"text": text, "finish_reason": reason}]}


def left_behind(running: Running, before: Counter[str]) -> Counter[str]:
    """What was not there before the load, as `census` counts; empty without a leak.

    The engine remembers its last pass, so that as many Sequences as can run are no leak.
    """
    until(running.is_idle)
    found = census() - before
    if found["Sequence"] <= len(running.models.services) * running.service.limits.max_running:
        del found["Sequence"]
    return found


def census() -> Counter[str]:
    """Objects of requests, and threads beyond the first of a name, in this whole process."""
    gc.collect()
    kinds = (Job, Request, RowJob, RowRequest, Sequence)
    found = Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)
    threads = Counter(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())
    return found + Counter({name: count - 1 for name, count in threads.items() if name != "tqdm_monitor"})
