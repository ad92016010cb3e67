"""Load over HTTP: the same requests at the same moments, for hf-accel serve and for transformers serve.

Each server is a process of its own on the same checkpoint; the client streams from all of them by one code.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hf_accel.measuring.requests import Requests, poisson

from .bench import Bench
from .checks import WrongResultError
from .latency import make_workload, quantile, span
from .tables import Row, Table

STOCK_BATCHING, EXACT = "transformers serve --continuous-batching", "hf-accel serve --weights none"
TRANSFORMERS = ("transformers.cli.transformers", "serve")
OURS = ("hf_accel", "serve")
SYSTEMS: dict[str, tuple[str, ...]] = {  # name -> a module with its arguments; {path} and {port} are filled in
    "transformers serve": (*TRANSFORMERS, "{path}", "--port", "{port}", "--device", "cpu"),
    STOCK_BATCHING: (*TRANSFORMERS, "{path}", "--port", "{port}", "--device", "cpu", "--continuous-batching"),
    EXACT: (*OURS, "{path}", "--port", "{port}", "--weights", "none"),
    "hf-accel serve --weights int8": (*OURS, "{path}", "--port", "{port}", "--weights", "int8"),
    "hf-accel serve --weights int4": (*OURS, "{path}", "--port", "{port}", "--weights", "int4"),
}
START_SECONDS = 600  # for a server to load its model
NOTE = (
    "Streams of /v1/completions, greedy, each of the length that was drawn; the same requests and the same Poisson "
    "arrivals for every server of a load; each load has other tokens. Loads: all requests at once, and shares of the "
    f"requests per second that {STOCK_BATCHING!r} served at once ({{stock:.2f}}) and {EXACT!r} ({{ours:.2f}}). First: "
    "from sending a request to its first text; between: from one piece of text to the next. Each row ran once, after "
    "one request to warm up."
)


@dataclass
class Stream:
    """times: of each piece of text, in seconds from the sending of the request; tokens: as the server counts them."""

    sent: float
    times: list[float]
    tokens: int = 0


def measure(bench: Bench) -> list[Table]:
    workload = make_workload(bench)
    with tempfile.TemporaryDirectory(prefix="http_load") as folder:
        path = Path(folder)
        save(bench.model, path)
        at_once = [run("all at once", name, path, [everything_now(workload)])[0] for name in SYSTEMS]
        reached = {row["system"]: row["requests_per_second"] for row in at_once}
        stock, ours = reached[STOCK_BATCHING], reached[EXACT]
        rates = {
            f"{load:.0%} of {words}": load * rate
            for words, rate in (("stock's", stock), ("ours", ours))
            for load in bench.settings.latency.loads
        }
        loads = {
            title: poisson(shifted(workload, number), per_second=rate, seed=bench.settings.seed)
            for number, (title, rate) in enumerate(rates.items(), start=1)
        }
        arriving = [row for name in SYSTEMS for row in run("", name, path, list(loads.values()), titles=list(loads))]
    arriving.sort(key=lambda row: list(loads).index(row["load"]))
    title = f"{len(workload.prompts)} requests, {workload.name} tokens each, prompts of {span(workload)} tokens"
    note = NOTE.format(stock=stock, ours=ours)
    return [Table(f"{title}, all at once", at_once, note), Table(f"{title}, arriving at random", arriving, note)]


def save(model: Any, path: Path) -> None:
    """A checkpoint with a tokenizer of which each token has a text of its own, so that no text is held back."""
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    model.save_pretrained(path)


def everything_now(workload: Requests) -> Requests:
    return Requests(workload.name, workload.prompts, workload.lengths, [0.0] * len(workload.prompts))


def shifted(workload: Requests, by: int) -> Requests:
    """Prompts of the same lengths with other tokens, so that no server finds them in its cache."""
    vocabulary = 1 + max(max(prompt) for prompt in workload.prompts)
    prompts = [[(token + by) % vocabulary for token in prompt] for prompt in workload.prompts]
    return replace(workload, prompts=prompts)


# -- servers -------------------------------------------------------------------------------------------


@contextmanager
def started(name: str, path: Path) -> Iterator[str]:
    """A server in a process of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [part.format(path=path, port=port) for part in SYSTEMS[name]]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=said, stderr=said)
        try:
            url = f"http://127.0.0.1:{port}"
            await_health(process, url, said)
            yield url
        finally:
            process.kill()
            process.wait()


def await_health(process: subprocess.Popen[bytes], url: str, said: Any) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    said.seek(0)
    raise WrongResultError(f"the server did not start: {said.read().decode(errors='replace')[-2000:]}")


# -- the client ----------------------------------------------------------------------------------------


def run(
    load: str, name: str, path: Path, workloads: Sequence[Requests], *, titles: Sequence[str] | None = None
) -> list[Row]:
    """Start a server, and serve one workload after the other."""
    rows = []
    with started(name, path) as url:
        warm_up = shifted(workloads[0].first(1, most_new=2), -1)
        asyncio.run(clients(url, everything_now(warm_up)))
        for title, workload in zip(titles or [load], workloads, strict=True):
            print(f"    {title}, {name}", flush=True)
            rows.append(row(title, name, workload, asyncio.run(clients(url, workload))))
    return rows


async def clients(url: str, workload: Requests) -> list[Stream]:
    """Send each request when it arrives, whatever became of the others."""
    assert workload.arrivals is not None
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        start = time.perf_counter()

        async def client(number: int, arrival: float) -> Stream:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            return await stream(http, workload.prompts[number], workload.lengths[number])

        return await asyncio.gather(*(client(*each) for each in enumerate(workload.arrivals)))


async def stream(http: httpx.AsyncClient, prompt: Sequence[int], length: int) -> Stream:
    body = {"prompt": " ".join(f"w{token}" for token in prompt), "max_tokens": length, "temperature": 0.0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    found = Stream(time.perf_counter(), [])
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise WrongResultError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise WrongResultError(f"the server failed: {event['error']}")
            if any(choice["text"] for choice in event["choices"]):
                found.times.append(time.perf_counter() - found.sent)
            if event.get("usage"):
                found.tokens = event["usage"]["completion_tokens"]
    return found


def row(load: str, system: str, workload: Requests, streams: Sequence[Stream]) -> Row:
    """Raises WrongResultError unless each request got the tokens that it asked for."""
    if [one.tokens for one in streams] != workload.lengths:
        raise WrongResultError(f"{system}: asked for {workload.lengths} tokens, got {[s.tokens for s in streams]}")
    first = [one.times[0] for one in streams]
    between = [after - before for one in streams for before, after in pairwise(one.times)] or [0.0]
    seconds = max(one.sent + one.times[-1] for one in streams) - min(one.sent for one in streams)
    return {
        "load": load,
        "system": system,
        "requests_per_second": round(len(streams) / seconds, 3),
        "useful_tokens_per_second": workload.useful / seconds,
        "first_p50_seconds": quantile(first, 0.5),
        "first_p99_seconds": quantile(first, 0.99),
        "between_p50_seconds": quantile(between, 0.5),
        "between_p99_seconds": quantile(between, 0.99),
    }
