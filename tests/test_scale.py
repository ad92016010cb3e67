"""Examples of more than one process: every prompt is answered once, with the text of generate(), whoever dies."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

import hf_accel

from .serving.running import SHIPPED, WAIT
from .test_examples import EXAMPLES, run

ROOT = EXAMPLES.parent
BEGINNINGS = ["import re\n\ndef ", "class Reader:\n    def ", "def main(", "import os\n", "try:\n    "]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(scope="module")
def alone() -> Callable[[str, int], str]:
    """The text of generate() of one prompt, greedy, in INT8 as the examples have it."""
    model, tokenizer = hf_accel.load(SHIPPED), AutoTokenizer.from_pretrained(SHIPPED)

    def text(prompt: str, new_tokens: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0, inputs.input_ids.shape[1] :]
        found: str = tokenizer.decode(ids, skip_special_tokens=True)
        return found

    return text


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For processes of an example. Ray's files lie in a folder of their own; no process and no file is left."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # the paths of Ray's sockets must be short
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HF_ACCEL_API"))}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": folder}
    yield {**kept, **own}
    until(lambda: not processes_of(folder))
    shutil.rmtree(folder)


def processes_of(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition; a process that ends before it holds is an error."""
    end = time.monotonic() + 2 * WAIT
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def started(arguments: Sequence[str | Path], environment: dict[str, str], **more: str) -> subprocess.Popen[str]:
    line = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        line, env={**environment, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it wrote; it must end well, and in time."""
    try:
        out, err = process.communicate(timeout=4 * WAIT)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    return out, err


# -- Ray Data ------------------------------------------------------------------------------------------


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": range(len(prompts)), "prompt": prompts}), path)


def read_answers(out: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    parts = sorted(out.glob("part-*.parquet"))
    rows: list[dict[str, Any]] = [row for part in parts for row in parquet.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"])


@needs_ray
def test_every_row_is_answered_once_though_a_worker_is_killed(
    tmp_path: Path, environment: dict[str, str], alone: Callable[[str, int], str]
) -> None:
    """Two workers, one of them killed after its first batch; what stood there before is not computed again."""
    example: Any = importlib.import_module("ray_batch")
    prompts = [f"# {number}\n{BEGINNINGS[number % len(BEGINNINGS)]}" for number in range(40)]
    file, out, new_tokens = tmp_path / "prompts.parquet", tmp_path / "answers", 160
    write_prompts(file, prompts)
    out.mkdir()
    known = {"id": [3, 4], "text": ["known", "too"], "tokens": [1, 1], "worker": ["before", "before"]}
    example.write(out, known, "id")
    line = [EXAMPLES / "ray_batch.py", file, out, "--batch-size", "4", "--max-new-tokens", str(new_tokens)]
    process = started(line, environment)
    until(lambda: len(list(out.glob("part-*.parquet"))) > 1, process)
    victim = next(row["worker"] for row in read_answers(out) if row["worker"] != "before")
    os.kill(int(victim.rpartition(":")[2]), signal.SIGKILL)
    assert len(read_answers(out)) < len(prompts) / 2
    said = json.loads(ended(process)[0].splitlines()[-1])
    assert said["rows"] == len(prompts) - 2
    rows = read_answers(out)
    assert [row["id"] for row in rows] == list(range(len(prompts)))
    assert [row["text"] for row in rows[3:5]] == ["known", "too"]
    assert all(row["text"] == alone(prompts[row["id"]], new_tokens) for row in rows if row["id"] not in (3, 4))
    assert len({row["worker"] for row in rows}) > 2 and victim in {row["worker"] for row in rows}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    again = json.loads(ended(started(line, environment))[0].splitlines()[-1])
    assert again["rows"] == 0


@pytest.mark.parametrize(
    ("rows", "arguments", "words"),
    [
        (None, [], "no file"),
        ({"id": [0], "prompt": ["a"]}, ["--prompt", "text"], "has no column 'text'"),
        ({"id": [7, 7], "prompt": ["a", "b"]}, [], "the id 7 stands there more than once"),
        ({"id": [0, 1], "prompt": ["a", ""]}, [], "the row 1 has no prompt"),
        ({"id": [0], "prompt": ["a"]}, ["--max-new-tokens", "9"], "holds answers of other settings"),
    ],
    ids=["no-file", "no-column", "twice", "empty", "settings"],
)
@needs_ray
def test_ray_batch_says_in_one_line_what_is_wrong(
    rows: dict[str, Any] | None,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pyarrow
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "settings.json").write_text("{}")
    if rows is not None:
        parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    with pytest.raises(SystemExit) as exit:
        run("ray_batch", *(["rows.parquet"] if rows else []), *arguments, monkeypatch=monkeypatch)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and words in error


@pytest.mark.parametrize("name", ["ray_batch", "ray_serve"])
def test_without_ray_a_line_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(SystemExit) as exit:
        run(name, "--demo", monkeypatch=monkeypatch)
    assert exit.value.code == 2
    extra = "ray" if name == "ray_batch" else "ray,serve"
    assert capsys.readouterr().err == f"{name}: ray is not installed: pip install 'hf_accel[{extra}]'\n"


# -- Ray Serve -----------------------------------------------------------------------------------------


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
        kill_one(served, alone)
        until(lambda: len({served.ask(f"{n} {time.time()}", 1).headers["x-replica"] for n in range(8)}) == 2)
        served.process.send_signal(signal.SIGTERM)
        ended(served.process)
    finally:
        served.http.close()
        served.process.kill()


def kill_one(served: Served, alone: Callable[[str, int], str]) -> None:
    """Kill a replica while it streams, and while answers are asked for that are sent whole."""
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
        await asyncio.sleep(0)
        return found

    start, *pieces = asyncio.run(read())
    assert (start["status"], start["headers"]) == (201, [(b"a", b"b"), (b"x-replica", b"here:1")])
    assert [piece["body"] for piece in pieces] == [b"said", b"/v1/x"] and left == [b"q=1"]


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


# -- accelerate ----------------------------------------------------------------------------------------


def test_processes_share_the_prompts(
    tmp_path: Path, environment: dict[str, str], alone: Callable[[str, int], str]
) -> None:
    """Five prompts for two processes: each is answered once, in order."""
    prompts, out = tmp_path / "prompts.json", tmp_path / "answers.json"
    prompts.write_text(json.dumps(BEGINNINGS))
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    said = ended(started([*launch, EXAMPLES / "data_parallel.py", prompts, "--out", out], environment))[0]
    assert json.loads(out.read_text()) == [alone(prompt, 32) for prompt in BEGINNINGS]
    counts = json.loads(said.splitlines()[-1])
    assert (counts["rows"], counts["workers"]) == (5, 2)


def test_one_process_needs_no_launcher(environment: dict[str, str], alone: Callable[[str, int], str]) -> None:
    out, _ = ended(started([EXAMPLES / "data_parallel.py"], environment))
    example: Any = importlib.import_module("data_parallel")
    answers = out.splitlines()[:-1]
    assert answers == [f"{number}: {alone(prompt, 32)!r}" for number, prompt in enumerate(example.PROMPTS)]


@pytest.mark.parametrize("what", ["killed", "silent"])
def test_a_process_that_does_not_answer_is_said(what: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """The second process is killed at its work, or stopped: the first one ends by itself, and says why."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(BEGINNINGS))
    line = [EXAMPLES / "data_parallel.py", prompts, "--max-new-tokens", "1500", "--timeout", "5"]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first, second = (started(line, environment, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2))
    try:
        until(lambda: [one for one in psutil.Process(second.pid).net_connections() if one.status == "ESTABLISHED"])
        second.send_signal(signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        out, err = first.communicate(timeout=2 * WAIT)
        assert first.returncode == 1 and out == ""
        said = [line for line in err.splitlines() if line.startswith("data_parallel: ")]
        assert len(said) == 1 and "another process has died, or did not answer within 5 s" in said[0]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
