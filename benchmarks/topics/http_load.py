"""Load over HTTP: the same requests at the same moments for hf-accel serve, transformers serve and llama.cpp's server.

Each server is a process of its own on the same weights; the client streams from all of them by one code. llama.cpp's
own llama-server takes part where it is on the PATH, or where LLAMA_SERVER names it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from hf_accel.checkpoints.writers.gguf_tokenizer import LLAMA3
from hf_accel.cli.measurement import Requests

from ..harness.bench import Bench
from ..harness.checks import WrongResultError
from ..harness.requests import poisson
from ..harness.tables import Row, Table
from ..setups.base import missing
from ..setups.gguf_file import gguf_file, gguf_refuses
from .latency import make_workload, quantile, span

STOCK_BATCHING, EXACT = "transformers serve --continuous-batching", "hf-accel serve --weights none"
TRANSFORMERS = (sys.executable, "-m", "transformers.cli.transformers", "serve")
OURS = (sys.executable, "-m", "hf_accel", "serve")


class System(NamedTuple):
    """A server. command: {path} and {port} are filled in. more: fields of each request that it needs."""

    name: str
    command: tuple[str, ...]
    more: Mapping[str, Any] = {}


SYSTEMS = (
    System("transformers serve", (*TRANSFORMERS, "{path}", "--port", "{port}", "--device", "cpu")),
    System(STOCK_BATCHING, (*TRANSFORMERS, "{path}", "--port", "{port}", "--device", "cpu", "--continuous-batching")),
    System(EXACT, (*OURS, "{path}", "--port", "{port}", "--weights", "none")),
    System("hf-accel serve --weights int8", (*OURS, "{path}", "--port", "{port}", "--weights", "int8")),
    System("hf-accel serve --weights int4", (*OURS, "{path}", "--port", "{port}", "--weights", "int4")),
)
SPACE = "\u0120"  # how a vocabulary of bytes writes it
GGUF_KINDS = ("bf16", "Q8_0", "Q4_0")
START_SECONDS = 600  # for a server to load its model
NOTE = (
    "Streams of /v1/completions, greedy, each of the length that was drawn; the same requests and the same Poisson "
    "arrivals for every server of a load; each load has other tokens. Loads: all requests at once, and shares of the "
    f"requests per second that {STOCK_BATCHING!r} served at once ({{stock:.2f}}) and {EXACT!r} ({{ours:.2f}}). First: "
    "from sending a request to its first text; between: from one piece of text to the next. Each row ran once, after "
    "one request to warm up. llama-server: continuous batching with a slot for each request, flash attention."
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
        systems = [*SYSTEMS, *llama_servers(bench, workload)]
        at_once = [run("all at once", system, path, [everything_now(workload)])[0] for system in systems]
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
        everything = list(loads.values())
        asked = systems if loads else []
        arriving = [row for system in asked for row in run("", system, path, everything, titles=list(loads))]
    arriving.sort(key=lambda row: list(loads).index(row["load"]))
    title = f"{len(workload.prompts)} requests, {workload.name} tokens each, prompts of {span(workload)} tokens"
    note = NOTE.format(stock=stock, ours=ours)
    tables = [Table(f"{title}, all at once", at_once, note), Table(f"{title}, arriving at random", arriving, note)]
    return tables if loads else tables[:1]


def save(model: Any, path: Path) -> None:
    words_tokenizer(model.config.vocab_size).save_pretrained(path)
    model.save_pretrained(path)


def words_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Each token is a word with a space before it, so that no text is held back; a kind that llama.cpp reads too."""
    words = {f"{SPACE}{word(number)}": number for number in range(vocab_size - 1)}
    first, second = f"{SPACE}{word(0)}", f"{SPACE}{word(1)}"
    words[first + second] = vocab_size - 1  # llama.cpp wants a merge; this one is in no text
    tokenizer = Tokenizer(BPE(words, [(first, second)], ignore_merges=True))
    tokenizer.pre_tokenizer = Steps(
        [Split(Regex(LLAMA3), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word(number: int) -> str:
    """Letters alone, which no tokenizer divides: a number of base 26."""
    letters = chr(ord("a") + number % 26)
    return letters if number < 26 else word(number // 26 - 1) + letters


def everything_now(workload: Requests) -> Requests:
    return Requests(workload.name, workload.prompts, workload.lengths, [0.0] * len(workload.prompts))


def shifted(workload: Requests, by: int) -> Requests:
    """Prompts of the same lengths with other tokens, so that no server finds them in its cache."""
    vocabulary = 1 + max(max(prompt) for prompt in workload.prompts)
    prompts = [[(token + by) % vocabulary for token in prompt] for prompt in workload.prompts]
    return replace(workload, prompts=prompts)


# -- servers -------------------------------------------------------------------------------------------


def llama_servers(bench: Bench, workload: Requests) -> list[System]:
    """llama.cpp's own server, once for each kind of file; none, with the reason in the result, if it cannot run."""
    program = llama_server()
    reason = llama_refusal(program, bench.model.config)
    if program is None or reason is not None:
        bench.refused |= {f"llama-server {kind}": str(reason) for kind in GGUF_KINDS}
        return []
    tokenizer = words_tokenizer(bench.model.config.vocab_size)
    longest = max(len(prompt) + new for prompt, new in zip(workload.prompts, workload.lengths, strict=True))
    slots, room = len(workload.prompts), -(-longest // 256) * 256  # a context is rounded up to 256 tokens
    threads = str(torch.get_num_threads())
    options = ("--port", "{port}", "--parallel", str(slots), "--ctx-size", str(slots * room), "--threads", threads)
    return [
        System(
            f"llama-server {kind}",
            (
                program,
                "--model",
                str(gguf_file(bench.model, kind, tokenizer=tokenizer)),
                *options,
                "--flash-attn",
                "on",
            ),
            {"ignore_eos": True},  # a file without an end-of-text token gets one from it
        )
        for kind in GGUF_KINDS
    ]


def llama_server() -> str | None:
    """Where llama.cpp's server is."""
    return os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")


def llama_refusal(program: str | None, config: PreTrainedConfig) -> str | None:
    """None, or why llama.cpp's server does not take part. llama_cpp quantizes the files."""
    if program is None:
        return "llama-server is not on the PATH, and LLAMA_SERVER does not name it"
    return missing("llama_cpp") or missing("gguf") or gguf_refuses(config)


@contextmanager
def started(system: System, path: Path) -> Iterator[str]:
    """A server in a process of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [part.format(path=path, port=port) for part in system.command]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
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
    load: str, system: System, path: Path, workloads: Sequence[Requests], *, titles: Sequence[str] | None = None
) -> list[Row]:
    """Start a server, and serve one workload after the other."""
    rows = []
    with started(system, path) as url:
        warm_up = shifted(workloads[0].first(1, most_new=2), -1)
        asyncio.run(clients(url, everything_now(warm_up), system.more))
        for title, workload in zip(titles or [load], workloads, strict=True):
            print(f"    {title}, {system.name}", flush=True)
            rows.append(row(title, system.name, workload, asyncio.run(clients(url, workload, system.more))))
    return rows


async def clients(url: str, workload: Requests, more: Mapping[str, Any]) -> list[Stream]:
    """Send each request when it arrives, whatever became of the others. more: fields of each."""
    assert workload.arrivals is not None
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        start = time.perf_counter()

        async def client(number: int, arrival: float) -> Stream:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            body = {"prompt": text(workload.prompts[number]), "max_tokens": workload.lengths[number], **more}
            return await stream(http, body)

        return await asyncio.gather(*(client(*each) for each in enumerate(workload.arrivals)))


def text(tokens: Sequence[int]) -> str:
    return "".join(f" {word(token)}" for token in tokens)


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> Stream:
    body = {**body, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
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
