"""`hf-accel serve` as a process: what it refuses to begin with, and how it ends."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from hf_accel.cli.app import app

from .adapters import save_adapter
from .encoders import save_encoder
from .processes import Process, command, process
from .running import SHIPPED, serving, until

LONG: dict[str, Any] = {"model": "tiny", "prompt": "import re\n\ndef ", "temperature": 0, "stream": True}


def ready(root: str) -> bool:
    try:
        return httpx.get(f"{root}/ready").status_code == 200
    except httpx.ConnectError:
        return False


def answer(server: Process) -> str:
    with server.client() as client:
        return client.completions.create(**{**LONG, "stream": False}, max_tokens=400).choices[0].text


def test_several_models_are_drained(tmp_path: Path) -> None:
    """They answer by their names, with the adapter of one, until a SIGTERM: running requests end, new ones get 503."""
    save_adapter(tmp_path / "adapter", SHIPPED, seed=0)
    save_encoder(tmp_path / "embed")
    models = ("--model", f"tiny={SHIPPED}", "--model", f"b={SHIPPED}", "--model", f"embed={tmp_path / 'embed'}")
    adapter = ("--adapter", f"b:support={tmp_path / 'adapter'}")
    more = ("--max-tokens", "4096", "--speculative", "ngram", "--cache-dir", tmp_path / "kept")
    with process(*models, *adapter, *more, alone=False) as server, server.client() as client:
        assert server.said["models"] == ["tiny", "b", "embed"]
        until(lambda: ready(server.root))
        assert [one.id for one in client.models.list()] == ["tiny", "b", "support", "embed"]
        texts = [
            client.completions.create(**{**LONG, "stream": False, "model": name}, max_tokens=20).choices[0].text
            for name in ("tiny", "b", "support")
        ]
        assert texts[0] == texts[1] != texts[2]
        assert len(client.embeddings.create(model="embed", input="w1").data[0].embedding) == 64
        whole = answer(server)
        stream = client.completions.create(**LONG, max_tokens=400)
        text = next(iter(stream)).choices[0].text
        server.terminate()
        until(lambda: not ready(server.root))
        assert httpx.get(f"{server.root}/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="shutting down") as error:
            client.completions.create(**LONG, max_tokens=1)
        assert error.value.status_code == 503 and error.value.response.headers["retry-after"]
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == whole
        code, written = server.end()
        assert code == 0 and "Traceback" not in written


@pytest.mark.long
def test_kill_and_restart(tmp_path: Path) -> None:
    """kill -9: nothing is left that keeps the next server from the same port and the same answers, and what prompts
    begin with stays."""
    with process("--cache-dir", tmp_path) as first:
        until(lambda: ready(first.root))
        whole = answer(first)
        with first.client() as client:
            asked: dict[str, Any] = {**LONG, "stream": False, "prompt": LONG["prompt"] + whole, "max_tokens": 20}
            longer = client.completions.create(**asked).choices[0].text
        with first.client() as client:
            stream = client.completions.create(**LONG, max_tokens=1500)
            next(iter(stream))
            first.process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIConnectionError):
                list(stream)
        port = int(first.root.rpartition(":")[2])
    with process("--cache-dir", tmp_path, port=port) as second:
        until(lambda: ready(second.root))
        with second.client() as client:
            assert client.completions.create(**asked).choices[0].text == longer
        assert answer(second) == whole
        stats = httpx.get(f"{second.root}/stats").json()
        assert stats["kept_blocks_read"] > 10 and stats["kept_blocks_refused"] == 0
        refused = command(SHIPPED, "--port", str(port))
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert f":{port}: Address already in use" in refused.stderr.strip().splitlines()[-1]


def test_what_runs_on_is_cancelled_after_the_time_to_drain() -> None:
    with serving(drain_seconds=0.2) as running, running.client() as client:
        stream = client.completions.create(**LONG, max_tokens=1900)
        next(iter(stream))
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="not complete"):
            list(stream)


def test_a_second_signal_cancels_at_once() -> None:
    with serving(drain_seconds=600) as running, running.client() as client:
        stream = client.completions.create(**LONG, max_tokens=1900)
        next(iter(stream))
        running.server.handle_exit(signal.SIGTERM, None)
        until(lambda: not ready(running.root))
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="not complete"):
            list(stream)


def test_an_end_after_the_end_is_nothing() -> None:
    """A rank may be lost, or a signal come, when the server has just ended."""
    with serving() as running:
        pass
    running.server.handle_exit(signal.SIGTERM, None)


def test_a_dead_engine_is_said() -> None:
    """Whoever waits gets an error, and whoever comes gets 503: nobody hangs."""
    with serving() as running, running.client() as client:
        stream = client.completions.create(**LONG, max_tokens=1900)
        next(iter(stream))

        def broken() -> None:
            raise SystemError("the engine's thread is broken")

        running.service.engine.loop._commands.put(broken)
        with pytest.raises(openai.APIError, match="the engine has ended"):
            list(stream)
        for path in ("/health", "/ready"):
            assert httpx.get(running.root + path).status_code == 503
        with pytest.raises(openai.InternalServerError, match="must be restarted"):
            client.completions.create(**LONG, max_tokens=1)
        assert httpx.get(f"{running.root}/metrics").status_code == 200


# -- what is refused, in this process: it is the same function ------------------------------------------------


def refusal(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/model",), "/no/such/model"),
        ((SHIPPED, "--weights", "int5"), "int5"),
        ((SHIPPED, "--speculative", "magic"), "magic"),
        ((SHIPPED, "--cache-dtype", "int1"), "int1"),
        ((SHIPPED, "--dtype", "float99"), "float99"),
        ((SHIPPED, "--host", "192.0.2.1"), "192.0.2.1:0: "),
        ((SHIPPED, "--chat-template", "/no/such/file"), "/no/such/file"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else None,
)
def test_bad_arguments_are_one_line(arguments: tuple[str | Path, ...], words: str) -> None:
    error = refusal(*arguments, "--port", "0")
    lines = [line for line in error.splitlines() if line.startswith("hf-accel: ")]
    assert len(lines) == 1 and words in lines[0] and "Traceback" not in error


MODEL = ("--model", f"a={SHIPPED}", "--model", f"b={SHIPPED}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model is given; give its PATH, or --model NAME=PATH"),
        ((SHIPPED, *MODEL), "and --model are both given"),
        ((*MODEL, "--name", "x"), "--name x is for one PATH"),
        ((*MODEL, "--model", "a=x"), "two models have the name 'a'"),
        (("--model", SHIPPED), "is not NAME=PATH"),
        (("--model", "a=/no/such/model"), "/no/such/model"),
        ((*MODEL, "--adapter", "support=x"), "give --adapter MODEL:support=x, where MODEL is one of a, b"),
        ((*MODEL, "--adapter", "b:support=/no/adapter"), "/no/adapter"),
        ((*MODEL, "--chat-template", __file__), "--chat-template is for one model, and here are a, b"),
        ((*MODEL, "--speculative", SHIPPED), "--speculative PATH is for one model"),
        ((*MODEL, "--tensor-parallel", "2"), "--tensor-parallel is for one model"),
        ((*MODEL, "--max-tokens", "1"), "--max-tokens 1 are too few for the caches of 2 models"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_several_models_that_are_refused(arguments: tuple[str | Path, ...], words: str) -> None:
    error = refusal(*arguments, "--port", "0")
    lines = [line for line in error.splitlines() if line.startswith("hf-accel: ")]
    assert len(lines) == 1 and words in lines[0] and "Traceback" not in error


@pytest.mark.parametrize("arguments", [(SHIPPED, "--port", "x"), (SHIPPED, "--port", "70000"), (SHIPPED, "--no")])
def test_bad_usage(arguments: tuple[str | Path, ...]) -> None:
    assert "Traceback" not in refusal(*arguments)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path, "--port", "0")


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: Address already in use; choose another" in refusal(SHIPPED, "--port", str(port))


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.cli.serve.find_spec", lambda name: None if name == "fastapi" else object())
    expected = 'hf-accel: fastapi is not installed, which serve needs: pip install "hf_accel[serve]"\n'
    assert refusal(SHIPPED) == expected


def test_no_thread_is_left() -> None:
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hf_accel engine")]
