"""Replicas of `hf-accel serve` behind Ray Serve: prompts that begin alike go to the replica that has computed it.

python examples/ray_serve.py MODEL --replicas 2 --port 8000     an OpenAI-compatible server, until Ctrl-C
python examples/ray_serve.py --demo                             two replicas of the small model; asks, and ends

A client talks to Ray's proxy, that to a Front, and a Front to the replica that Ray's router chooses. Each replica runs
the application of `hf-accel serve`. When one dies, an answer of which nothing was sent is asked for again, and a
stream that had begun ends with an error event. It connects to the cluster that RAY_ADDRESS names, or starts Ray here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "stdlib-tiny"
ROUTERS = (  # the public name asks for vLLM or SGLang, which the class does not need
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
NEEDED = ("ray", "fastapi", "uvicorn", "openai", "prometheus_client")
OWN_STORE = 2**28  # bytes of the object store of a Ray that is started here: only requests and answers go through it
TRIES = 3  # of a request whose replicas die
LONGEST_PROMPT = 8192  # characters of a prompt that the router compares
ROUTING = {  # PrefixCacheAffinityRouter: without an eviction its tree of prompts grows for ever
    "imbalanced_threshold": 8,  # requests: a replica that has so many more than another is not chosen for its prefix
    "do_eviction": True,
    "eviction_threshold_chars": 40_000_000,
    "eviction_target_chars": 30_000_000,
}


@dataclass(frozen=True)
class Asked:
    """A request on its way to a replica. prompt: what Ray's router reads; never empty, or it divides by zero."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str


class Replica:
    """One model with its Engine, and the application of `hf-accel serve` over it."""

    def __init__(self, model: str, options: dict[str, Any], loading: dict[str, Any]) -> None:
        import torch

        from hf_accel import CacheConfig
        from hf_accel.serving.hf.application import make_app
        from hf_accel.serving.hf.served_model import load_service
        from hf_accel.serving.limits import Limits
        from hf_accel.serving.models import Models

        torch.set_num_threads(options["threads"])
        device = "cuda" if torch.cuda.is_available() else "cpu"  # Ray shows a replica the GPUs that it was given
        limits, cache = Limits(max_running=options["max_running"]), CacheConfig(max_tokens=options["max_tokens"])
        self.service = load_service(model, limits=limits, device_map=device, cache=cache, **loading)
        self.app = make_app(Models([self.service]), api_key=options["api_key"])
        self.name = f"{socket.gethostname()}:{os.getpid()}".encode()

    async def answer(self, asked: Asked) -> AsyncIterator[dict[str, Any]]:
        """Run the application on a request; iterate over the messages of ASGI that it sends."""
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received = iter([{"type": "http.request", "body": asked.body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in received:
                return message
            await asyncio.Event().wait()  # a client that goes away ends the task below
            raise AssertionError

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": asked.method, "path": asked.path, "query_string": asked.query, "headers": asked.headers,
        }  # fmt: skip
        task = asyncio.create_task(self.app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait({"type": "end"}))
        try:
            while (message := await sent.get())["type"] != "end":
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", self.name)]
                yield message
            await task
        finally:
            task.cancel()

    def check_health(self) -> None:
        """Ray calls it every few seconds, and replaces a replica for which it raises."""
        if not self.service.engine.is_live:
            raise RuntimeError(self.service.unready())

    def __del__(self) -> None:
        self.service.close()


class Front:
    """Sends each request to a replica, and to another one if that dies before anything was sent to the client."""

    def __init__(self, replicas: Any) -> None:
        self.replicas = replicas.options(stream=True, method_name="answer")

    async def __call__(self, request: Any) -> Any:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError
        from starlette.responses import JSONResponse, StreamingResponse

        from hf_accel.serving.api_errors import error_body

        body = await request.body()
        asked = Asked(
            request.method, request.url.path, request.url.query.encode(), request.headers.raw, body,
            prompt_of(body) or request.url.path,
        )  # fmt: skip
        for _ in range(TRIES):
            messages = aiter(self.replicas.remote(asked))
            try:
                start, first = await anext(messages), await anext(messages)
            except RayActorError:
                continue
            except BackPressureError:
                said = error_body(429, "all replicas are busy, and no more requests may wait; try again later")
                return JSONResponse(said, 429, {"Retry-After": "1"})
            answer = StreamingResponse(pieces(first, messages), start["status"])
            answer.raw_headers = start["headers"]
            return answer
        said = error_body(503, f"{TRIES} replicas died while they answered; try again later")
        return JSONResponse(said, 503, {"Retry-After": "5"})


async def pieces(first: dict[str, Any], messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """The body of an answer. A stream whose replica dies ends with an event that says so."""
    from ray.exceptions import RayActorError

    from hf_accel.serving.api_errors import error_body

    try:
        yield first["body"]
        async for message in messages:
            yield message.get("body", b"")
    except RayActorError:
        said = error_body(503, "the replica died, and the answer is not complete; ask again")
        yield f"data: {json.dumps(said)}\n\n".encode()


def prompt_of(body: bytes) -> str:
    """The text that a request's prompt begins with, of whatever endpoint; "" for a body that is not understood."""
    try:
        fields = json.loads(body)
        found = next((fields[name] for name in ("prompt", "messages", "input") if fields.get(name)), "")
    except (ValueError, AttributeError):
        return ""
    return (found if isinstance(found, str) else json.dumps(found))[:LONGEST_PROMPT]


def application(arguments: argparse.Namespace) -> Any:
    """What Ray Serve runs: replicas, and the Fronts before them."""
    from ray import serve

    routing: dict[str, Any] = {}
    if arguments.routing == "prefix":
        from ray.serve.config import RequestRouterConfig

        routing["request_router_config"] = RequestRouterConfig(
            request_router_class=f"{prefix_router()}.PrefixCacheAffinityRouter", request_router_kwargs=ROUTING
        )
    replicas = serve.deployment(
        num_replicas=arguments.replicas,
        ray_actor_options={"num_cpus": arguments.threads, "num_gpus": arguments.gpus},
        max_ongoing_requests=arguments.max_running,
        max_queued_requests=arguments.max_queue,
        health_check_period_s=5,
        **routing,
    )(Replica)
    fronts = serve.deployment(
        num_replicas=arguments.fronts, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000
    )(Front)
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model
    options = {name: getattr(arguments, name) for name in ("threads", "max_running", "max_tokens", "api_key")}
    loading = {"name": arguments.name or arguments.model}
    loading |= {"weights": arguments.weights} if arguments.weights else {}
    return fronts.bind(replicas.bind(model, options, loading))


def prefix_router() -> str | None:
    """The module of Ray that has a PrefixCacheAffinityRouter; None if this release has none."""
    for name in ROUTERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a folder, or a name on the Hub")
    parser.add_argument("--demo", action="store_true", help="ask the small model a few times, and end")
    parser.add_argument("--name", help="what clients call the model; left out, MODEL")
    parser.add_argument("--weights", help="int8, int4; left out: int8, or as the checkpoint has them")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--fronts", type=int, default=1, help="processes that read requests and choose replicas")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--max-running", type=int, default=64, help="choices computed at a time by a replica")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait at a Front; then 429")
    parser.add_argument("--max-tokens", type=int, help="in a replica's KV cache; left out, it grows as needed")
    parser.add_argument("--api-key", default=os.environ.get("HF_ACCEL_API_KEY"), help="what clients must send")
    parser.add_argument("--routing", choices=("prefix", "load"), default="prefix", help="how replicas are chosen")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(2, f"ray_serve: {missing[0]} is not installed: pip install 'hf_accel[ray,serve]'\n")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    if arguments.routing == "prefix" and prefix_router() is None:
        print("this Ray has no prefix-aware routing: replicas are chosen by load", file=sys.stderr)
        arguments.routing = "load"
    needed = arguments.replicas * arguments.threads + 1
    own = {"num_cpus": needed, "include_dashboard": False, "object_store_memory": OWN_STORE}
    here = {} if "RAY_ADDRESS" in os.environ else own
    ray.init(log_to_driver=False, logging_level="WARNING", **here)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        serve.start(http_options={"host": arguments.host, "port": arguments.port})
        serve.run(application(arguments))
        url = f"http://{arguments.host}:{arguments.port}/v1"
        print(json.dumps({"url": url, "replicas": arguments.replicas, "routing": arguments.routing}), flush=True)
        if arguments.demo:
            ask(url)
        else:
            ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(url: str) -> None:
    """Three questions that begin alike, then one that does not; each with the replica that answered it."""
    beginning = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")[:2000]
    for end in ("\n\ndef main(", "\n\nclass Error(", "\n\nimport ", None):
        prompt = "import re\n\ndef " if end is None else beginning + end
        body = json.dumps({"prompt": prompt, "max_tokens": 16, "temperature": 0}).encode()
        asked = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            print(f"{answer.headers['x-replica']}: {json.load(answer)['choices'][0]['text']!r}")


if __name__ == "__main__":
    main()
