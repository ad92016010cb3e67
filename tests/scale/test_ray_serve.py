"""examples/ray_serve.py: replicas answer as generate() does, and a replica that dies is said, or replaced."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from ..serving.running import SHIPPED, WAIT
from .processes import BEGINNINGS, EXAMPLES, ended, started, until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


class Served:
    """examples/ray_serve.py in a process. said: what it printed when it was ready."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        line = [EXAMPLES / "ray_serve.py", str(SHIPPED), "--name", "tiny", "--port", str(port), *arguments]
        self.process = started(line, environment)
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline() or "{}")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=2 * WAIT)

    def ask(self, prompt: str, new_tokens: int) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
        return self.http.post("/completions", json=body)

    def stream(self, prompt: str, new_tokens: int) -> Iterator[dict[str, Any]]:
        """The events of a stream."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        with self.http.stream("POST", "/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield {**json.loads(line[6:]), "replica": answer.headers["x-replica"]}


@needs_ray
@pytest.mark.long
def test_replicas_share_prompts_and_survive_one_of_them(
    environment: dict[str, str], alone: Callable[[str, int], str]
) -> None:
    served = Served(environment, "--replicas", "2")
    try:
        assert served.said.get("routing") == "prefix", served.process.communicate()
        shared = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")[:1500]
        alike = [served.ask(f"{shared}\n\ndef {name}(", 8) for name in "abcd"]
        assert len({answer.headers["x-replica"] for answer in alike}) == 1
        assert [answer.json()["choices"][0]["text"] for answer in alike] == [
            alone(f"{shared}\n\ndef {name}(", 8) for name in "abcd"
        ]
        assert served.http.get("/models").json()["data"][0]["id"] == "tiny"
        assert served.ask("a" * 2, 10**6).status_code == 400
        killed = kill_one(served, alone)
        survivor = served.ask("import re\n\ndef ", 1).headers["x-replica"]
        # A prompt like no other goes to the replica that has seen the least: to the new one, once it is there.
        until(lambda: served.ask(uuid.uuid4().hex, 1).headers["x-replica"] not in (killed, survivor))
        served.process.send_signal(signal.SIGTERM)
        ended(served.process)
    finally:
        served.http.close()
        served.process.kill()


def kill_one(served: Served, alone: Callable[[str, int], str]) -> str:
    """Kill a replica while it streams, and while answers are asked for that are sent whole; its name."""
    prompts = [f"# {number}\n{beginning}" for number in range(4) for beginning in BEGINNINGS]
    stream = served.stream("import re\n\ndef ", 1500)
    first = next(stream)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(served.ask, prompt, 100) for prompt in prompts]
        time.sleep(0.2)
        os.kill(int(first["replica"].rpartition(":")[2]), signal.SIGKILL)
        rest = list(stream)
    assert rest[-1]["error"]["message"] == "the replica died, and the answer is not complete; ask again"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.result().json()["choices"][0]["text"] == alone(prompt, 100)
    name: str = first["replica"]
    return name


def test_a_replica_hands_on_what_the_application_sends() -> None:
    """Without Ray: status, headers and pieces go on as they come, and a reader that leaves ends the application."""
    example: Any = importlib.import_module("ray_serve")
    replica = object.__new__(example.Replica)
    replica.name, replica.service = b"here:1", SimpleNamespace(close=lambda: None)
    left = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": scope["path"].encode()})
            await receive()
        finally:
            left.append(scope["query_string"])

    replica.app = application
    asked = example.Asked("POST", "/v1/x", b"q=1", [], b"said", "said")

    async def read() -> list[dict[str, Any]]:
        messages = replica.answer(asked)
        found = [await anext(messages) for _ in range(3)]
        assert not left
        await messages.aclose()
        for _ in range(3):
            await asyncio.sleep(0)
        assert left == [b"q=1"]  # asyncio.run() would end it too
        return found

    start, *pieces = asyncio.run(read())
    assert (start["status"], start["headers"]) == (201, [(b"a", b"b"), (b"x-replica", b"here:1")])
    assert [piece["body"] for piece in pieces] == [b"said", b"/v1/x"]


class Dying:
    """A handle of Ray Serve whose replicas die: the first `before` at once, the next one after a piece."""

    def __init__(self, before: int) -> None:
        self.before, self.prompts = before, list[str]()

    def options(self, **_: Any) -> Dying:
        return self

    async def remote(self, asked: Any) -> AsyncIterator[dict[str, Any]]:
        from ray.exceptions import RayActorError

        self.prompts.append(asked.prompt)
        if len(self.prompts) <= self.before:
            raise RayActorError
        yield {"type": "http.response.start", "status": 200, "headers": [(b"x-replica", b"a:1")]}
        yield {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
        raise RayActorError


@needs_ray
@pytest.mark.filterwarnings("ignore")  # ray.serve's own, at its import
@pytest.mark.parametrize("before", [0, 2, 3])
def test_an_answer_that_has_not_begun_is_asked_of_another_replica(before: int) -> None:
    """Without a cluster: three replicas are asked, and a stream that had begun ends with an error."""
    example: Any = importlib.import_module("ray_serve")
    handle = Dying(before)

    async def answer() -> tuple[Any, list[bytes]]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b'{"prompt": "import re"}', "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        found = await example.Front(handle)(Request(scope, receive))
        return found, [found.body] if before == 3 else [piece async for piece in found.body_iterator]

    found, pieces = asyncio.run(answer())
    assert handle.prompts == ["import re"] * min(3, before + 1)
    if before == 3:
        assert (found.status_code, found.headers["retry-after"]) == (503, "5")
        assert json.loads(pieces[0])["error"]["message"] == "3 replicas died while they answered; try again later"
    else:
        assert (found.status_code, found.headers["x-replica"]) == (200, "a:1")
        assert pieces[0] == b"data: {}\n\n"
        said = json.loads(pieces[1].removeprefix(b"data: "))["error"]
        assert (said["code"], said["message"]) == (503, "the replica died, and the answer is not complete; ask again")


@needs_ray
@pytest.mark.filterwarnings("ignore")  # ray.serve's own, at its import
def test_a_full_service_says_so() -> None:
    from ray.serve.exceptions import BackPressureError

    example: Any = importlib.import_module("ray_serve")

    class Full(Dying):
        async def remote(self, asked: Any) -> AsyncIterator[dict[str, Any]]:
            raise BackPressureError(num_queued_requests=2, max_queued_requests=1)
            yield {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    found = asyncio.run(example.Front(Full(0))(Request(scope, receive)))
    assert found.status_code == 429 and found.headers["retry-after"]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"prompt": "import re"}', "import re"),
        (b'{"messages": [{"role": "user", "content": "hello"}]}', '[{"role": "user", "content": "hello"}]'),
        (b'{"input": "hello"}', "hello"),
        (b'{"prompt": [1, 2]}', "[1, 2]"),
        (b"[]", ""),
        (b"no json", ""),
        (b"", ""),
    ],
)
def test_what_a_router_compares(body: bytes, prompt: str) -> None:
    example: Any = importlib.import_module("ray_serve")
    assert example.prompt_of(body) == prompt
    assert len(example.prompt_of(json.dumps({"prompt": "a" * 10**5}).encode())) == example.LONGEST_PROMPT
