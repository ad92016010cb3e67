"""What is malformed, too large or not served gets a 4xx with one sentence, and nothing else changes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hf_accel.serving.limits import Limits

from .running import Running, serving, until

LIMITS = Limits(max_prompt_tokens=64, max_new_tokens=128, max_body_bytes=4096, max_choices=8)
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def "},
    CHAT: {"messages": [{"role": "user", "content": "def "}]},
    RESPONSES: {"input": "def "},
}

SHARED = {  # field -> values that are refused at every endpoint
    "model": ["other", 5, [], ""],
    "temperature": [-1, "hot", True, float("nan"), float("inf"), [0.5], 1e9],
    "top_p": [-0.1, 0, 1.1, "0.5", {}],
    "top_k": [-1, 1.5, "5"],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, -1, float("nan")],
    "seed": [1.5, "1", 2**70, [1]],
    "stream": ["yes", 1],
    "no_such_field": [1, "x", False],
    "generation_config": ["{}"],
}
OF_CHOICES = {
    "n": [0, -1, 1.5, "3", 9, 10**6],
    "max_tokens": [0, -5, 129, 10**9, 1.5, "16"],
    "stop": ["", ["a", ""], 5, [5], ["x"] * 17, "x" * 257, {}],
    "stop_token_ids": [-1, ["a"], [-1]],
    "min_tokens": [-1, "1"],
    "ignore_eos": ["yes"],
    "presence_penalty": [-3, 3, "1", float("nan")],
    "frequency_penalty": [-3, 3, None.__class__.__name__],
    "logit_bias": [[], {"a": 1}, {"1": "x"}, {"1": 101}, {"-1": 1}, {"999999": 1}, {"1": float("nan")}],
    "stream_options": [5, {"no_such": True}, {"include_usage": "yes"}],
}
FIELDS: dict[str, dict[str, list[Any]]] = {
    COMPLETIONS: {
        **SHARED,
        **OF_CHOICES,
        "prompt": [
            None, 5, "", [], [[]], [""], [1, "a"], ["a", 1], [-1], [10**7], [1.5], {"a": 1}, ["def "] * 9,
            "x = 1\n" * 200,
        ],
        "logprobs": [-1, 21, True, "2"],
        "best_of": [0, 4],
        "echo": [True],
        "suffix": ["end"],
        "messages": [[]],
    },
    CHAT: {
        **SHARED,
        **OF_CHOICES,
        "messages": [
            None, [], "def", [5], [{}], [{"role": "user"}], [{"role": "user", "content": 5}],
            [{"content": "def"}], [{"role": 5}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["def"]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            [{"role": "assistant", "tool_calls": 5}], [{"role": "", "content": "x"}],
            [{"role": "user", "content": "x = 1\n" * 200}],
        ],
        "tools": [5, [5], [{}], [{"type": "function"}], [{"type": "web"}], [{"type": "function", "function": {}}]],
        "tool_choice": ["required", 5, {"type": "function", "function": {"name": "f"}}],
        "max_completion_tokens": [0, 129],
        "logprobs": [2, "yes"],
        "top_logprobs": [3, -1, 21],
        "response_format": [{"type": "grammar"}, {"type": "json_schema"}, 5],
        "reasoning_effort": ["high"],
        "modalities": [["audio"], "text"],
        "audio": [{"voice": "x"}],
        "functions": [[]],
        "function_call": ["auto"],
        "parallel_tool_calls": [False],
        "web_search_options": [{}],
        "verbosity": ["low"],
        "chat_template_kwargs": [5, {"chat_template": "{{ 1 }}"}, {"tokenize": False}, {"return_tensors": "pt"}],
    },
    RESPONSES: {
        **SHARED,
        "input": [None, 5, [], [5], [{}], [{"type": "no_such"}], [{"type": "function_call"}],
                  [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "x = 1\n" * 200],
        "instructions": [5],
        "max_output_tokens": [0, 129, "5"],
        "tools": [5, [{"type": "web_search"}]],
        "previous_response_id": ["resp_1"],
        "background": [True],
        "truncation": ["auto"],
        "text": [{"format": {"type": "grammar"}}],
        "reasoning": [{"effort": "high"}],
        "include": [["x"]],
        "top_logprobs": [2],
        "conversation": ["x"],
        "parallel_tool_calls": [False],
        "stop": ["x"],
    },
}  # fmt: skip
RAW: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"def ",
    "half": b'{"prompt": "def ',
    "list": b"[]",
    "text": b'"def"',
    "number": b"5",
    "null": b"null",
    "not a number": b"NaN",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "zero byte": b'{"prompt": "\x00"}',
    "deep": b'{"prompt": ' + b"[" * 1900 + b"]" * 1900 + b"}",
    "long integer": b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}",
    "too large": b'{"prompt": "' + b"x" * 5000 + b'"}',
    "far too large": b'{"prompt": "' + b"x" * 100_000 + b'"}',
}
OTHERS = [
    ("POST", "/load_model"), ("POST", "/reset"), ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/systemone"),
    ("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("GET", "/redoc"),
    ("GET", "/nothing"), ("POST", "/metrics"), ("POST", "/v1/embeddings"), ("GET", "/v1/models/other"),
]  # fmt: skip


def cases() -> Iterator[Any]:
    for path, fields in FIELDS.items():
        for field, values in fields.items():
            for number, value in enumerate(values):
                body = {**BASE[path], field: value}
                yield pytest.param(path, json.dumps(body).encode(), id=f"{path[4:]}-{field}-{number}")
        missing = json.dumps({"model": "tiny"}).encode()
        yield pytest.param(path, missing, id=f"{path[4:]}-missing")
        for name, raw in RAW.items():
            yield pytest.param(path, raw, id=f"{path[4:]}-{name}")


CASES = list(cases())


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(limits=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.root, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def good(running: Running, client: httpx.Client) -> Iterator[str]:
    """The answer to a good request: at the end it is still the same."""

    def ask() -> str:
        answer = client.post(COMPLETIONS, json={"prompt": "import re\n\ndef ", "max_tokens": 12, "temperature": 0})
        assert answer.status_code == 200
        text: str = answer.json()["choices"][0]["text"]
        return text

    first = ask()
    yield first
    assert running.is_idle() and running.stats["requests"] == running.stats["finished"]
    assert ask() == first == running.text("import re\n\ndef ", 12)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 200


@pytest.mark.parametrize(("path", "body"), CASES)
def test_refused(running: Running, client: httpx.Client, good: str, path: str, body: bytes) -> None:
    before = running.stats["requests"]
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 500
    assert error["code"] == answer.status_code
    if len(body) > LIMITS.max_body_bytes:
        assert answer.status_code == 413
    assert running.stats["requests"] == before, "it reached the engine"


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        (COMPLETIONS, {"echo": True}, "echo: only false is served"),
        (COMPLETIONS, {"stop": [""]}, "stop.0: string should have at least 1 character"),
        (COMPLETIONS, {"stop": 5}, "stop: input should be a valid string"),
        (CHAT, {"tool_choice": "required"}, "tool_choice names no tool; send tools"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
         "chat_template_kwargs: chat_template is not served"),
        ("/v1/embeddings", {}, "POST /v1/embeddings is not served; POST /v1/chat/completions, /v1/completions, "
         "/v1/responses, /tokenize, /detokenize, /v1/load_lora_adapter, /v1/unload_lora_adapter are"),
    ],
    ids=["echo", "empty stop", "stop of another type", "tool choice", "chat template", "path"],
)  # fmt: skip
def test_what_is_said(client: httpx.Client, path: str, given: dict[str, Any], message: str) -> None:
    answer = client.post(path, json={**BASE.get(path, {}), **given})
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(("method", "path"), OTHERS)
def test_what_is_not_there(client: httpx.Client, good: str, method: str, path: str) -> None:
    answer = client.request(method, path, json={})
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_types_of_content(client: httpx.Client, good: str, kind: str) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example"])
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/plan"), ("POST", COMPLETIONS), ("GET", "/"), ("GET", "/health")]
)
def test_other_hosts(client: httpx.Client, good: str, method: str, path: str, host: str) -> None:
    """A web page whose name was made to point here learns nothing."""
    answer = client.request(method, path, json=BASE[COMPLETIONS], headers={"host": host, "origin": f"http://{host}"})
    assert answer.status_code == 421 and "--allow-host" in answer.json()["error"]["message"]


def test_web_pages_of_others_get_no_permission(client: httpx.Client, good: str) -> None:
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for path in (COMPLETIONS, "/plan"):
        answer = client.options(path, headers=asked)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control-")]


HALF = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{"


def test_a_client_that_leaves_while_it_sends(running: Running, good: str) -> None:
    port = int(running.root.rpartition(":")[2])
    for sent in (HALF[:20], HALF):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent)
    until(running.is_idle)


def test_a_body_that_does_not_come(running: Running, good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.serving.guard.BODY_SECONDS", 0.1)
    port = int(running.root.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HALF)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_says_it_is_huge(running: Running, good: str) -> None:
    port = int(running.root.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HALF.replace(b" 90", b" 900000000000"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_ignored_fields_change_nothing(client: httpx.Client, good: str) -> None:
    body = {"prompt": "import re\n\ndef ", "max_tokens": 12, "temperature": 0, "seed": None}
    ignored = {"user": "me", "store": True, "metadata": {"a": "b"}}
    assert client.post(COMPLETIONS, json={**body, **ignored}).json()["choices"][0]["text"] == good


def test_each_refusal_is_counted(running: Running, client: httpx.Client, good: str) -> None:
    page = client.get("/metrics").text
    client.post(COMPLETIONS, content=b"{")
    client.get("/no/such/path")
    after = client.get("/metrics").text
    for path, status in ((COMPLETIONS, 400), ("other", 404)):
        name = f'hf_accel_http_requests_total{{path="{path}",status="{status}"}} '
        counts = [float(text.partition(name)[2].partition("\n")[0] or 0) for text in (page, after)]
        assert counts[1] == counts[0] + 1
    assert "no/such" not in after
