"""Routes that browsers and clients ask besides those of answers, and the permission for pages of other sites."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import jsonschema
import pytest

from hf_accel.serving.limits import Limits
from hf_accel.serving.page import FILES

from .running import CHAT_TEMPLATE, Running, serving
from .test_bad_requests import BASE, CHAT, COMPLETIONS, FIELDS, RESPONSES

SITE = "http://chat.example:3000"
TEMPLATE = CHAT_TEMPLATE + "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}{% endif %}"
KEY = {"authorization": "Bearer secret"}
SAID: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    limits = Limits(ignore_unknown_fields=True)
    with serving(limits=limits, api_key="secret", origins=[SITE], chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def page(running: Running) -> Iterator[httpx.Client]:
    """What a page of the allowed site sends."""
    with httpx.Client(base_url=running.root, timeout=30, headers={"origin": SITE}) as client:
        yield client


# -- pages of other sites ------------------------------------------------------------------------------


def test_a_browser_asks_for_permission(page: httpx.Client) -> None:
    """As for a POST with a key, a type of content and a header of OpenAI's client; the key is not sent then."""
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    answer = page.options(CHAT, headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == SITE
    assert {"authorization", "content-type", "x-stainless-lang"} <= {
        name.strip() for name in answer.headers["access-control-allow-headers"].lower().split(",")
    }
    other = page.options(CHAT, headers={**asked, "origin": "http://evil.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [(COMPLETIONS, KEY, 200), (COMPLETIONS, {}, 401), ("/nothing", KEY, 404), (CHAT, KEY, 400)],
    ids=["answer", "no key", "no such path", "bad request"],
)
def test_a_page_reads_answers_and_refusals(
    page: httpx.Client, path: str, headers: dict[str, str], status: int
) -> None:
    answer = page.post(path, json={"prompt": "import re", **SAID}, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == SITE
    assert "x-request-id" in answer.headers["access-control-expose-headers"] and answer.headers["x-request-id"]


def test_a_page_reads_a_stream(page: httpx.Client, running: Running) -> None:
    with page.stream("POST", COMPLETIONS, json={"prompt": "import re", **SAID, "stream": True}, headers=KEY) as answer:
        assert answer.headers["access-control-allow-origin"] == SITE
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_another_page_reads_nothing(page: httpx.Client) -> None:
    answer = page.get("/version", headers={**KEY, "origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


# -- routes --------------------------------------------------------------------------------------------


def test_the_description_needs_no_key_and_names_every_route(page: httpx.Client, running: Running) -> None:
    described = page.get("/openapi.json").json()
    assert page.get("/docs").status_code == 200 and "/docs" in FILES
    for path, methods in described["paths"].items():
        for method in methods:
            other = {"get": "post", "post": "get"}[method]
            asked = path.replace("{name}", "tiny")
            assert page.request(other, asked, headers=KEY).status_code == 405, path
            assert page.request(method, asked, json={"no": 1}, headers=KEY).status_code in (200, 400)
    listed = page.post("/nothing", headers=KEY).json()["error"]["message"]
    posts = [path for path, methods in described["paths"].items() if "post" in methods]
    assert listed.endswith(f"POST {', '.join(posts)} are")


# How many values the server refuses by its limits, its model or other fields, which a schema does not know, and NaN.
BY_THE_SERVER = {
    "model": 2, "temperature": 1, "repetition_penalty": 1, "n": 1, "max_tokens": 2, "presence_penalty": 1,
    "logit_bias": 4, "messages": 4, "max_completion_tokens": 1, "top_logprobs": 1, "reasoning_effort": 1,
    "tool_choice": 2, "parallel_tool_calls": 1, "chat_template_kwargs": 3, "prompt": 7, "best_of": 1, "input": 5,
    "max_output_tokens": 1, "reasoning": 1,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_the_schema_refuses_what_the_server_refuses(page: httpx.Client, path: str) -> None:
    described = page.get("/openapi.json").json()
    reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": described["components"]}
    valid = jsonschema.Draft202012Validator(schema)
    assert valid.is_valid(BASE[path])
    for field, values in FIELDS[path].items():
        passed = sum(valid.is_valid({**BASE[path], field: value}) for value in values)
        assert passed <= BY_THE_SERVER.get(field, 0), field


def test_the_version(page: httpx.Client) -> None:
    assert page.get("/version", headers=KEY).json() == {"version": version("hf_accel")}


# -- tokens --------------------------------------------------------------------------------------------


def test_tokens_and_back(page: httpx.Client, running: Running) -> None:
    tokenizer = running.service.tokenizer
    text = "def f(é):\n    return 1"
    found = page.post("/tokenize", json={"prompt": text, "return_token_strs": True}, headers=KEY).json()
    assert found["tokens"] == tokenizer(text)["input_ids"] and found["count"] == len(found["tokens"])
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert found["max_model_len"] == running.service.context
    back = page.post("/detokenize", json={"tokens": found["tokens"]}, headers=KEY).json()
    assert back == {"prompt": tokenizer.decode(found["tokens"])}


def test_tokens_of_a_chat_are_those_that_it_is_answered_by(page: httpx.Client) -> None:
    messages = [{"role": "user", "content": "import re"}]
    found = page.post("/tokenize", json={"messages": messages, "model": "tiny"}, headers=KEY).json()
    answer = page.post(CHAT, json={"messages": messages, **SAID}, headers=KEY).json()
    assert found["count"] == answer["usage"]["prompt_tokens"] > 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}),
        ("/tokenize", {"prompt": "a", "tools": []}),
        ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "add_special_tokens": True}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**7]}),
        ("/detokenize", {"tokens": [1], "model": "other"}),
    ],
)
def test_what_has_no_tokens(page: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = page.post(path, content=json.dumps(body), headers={**KEY, "content-type": "application/json"})
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"]


# -- fields --------------------------------------------------------------------------------------------


def test_unknown_fields_change_nothing(page: httpx.Client) -> None:
    given = {"prompt": "import re\n\ndef ", **SAID}
    plain = page.post(COMPLETIONS, json=given, headers=KEY).json()["choices"]
    assert page.post(COMPLETIONS, json={**given, "x_extra": {"a": 1}}, headers=KEY).json()["choices"] == plain
    refused = page.post(COMPLETIONS, json={**given, "prompt_logprobs": 1}, headers=KEY)
    assert refused.status_code == 400 and "--ignore" not in refused.json()["error"]["message"]


def test_the_template_gets_the_effort(page: httpx.Client) -> None:
    """As by chat_template_kwargs, which vLLM's clients send."""
    chat = {"messages": [{"role": "user", "content": "import re"}], **SAID}
    counts = [
        page.post(CHAT, json={**chat, **more}, headers=KEY).json()["usage"]["prompt_tokens"]
        for more in ({}, {"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}})
    ]
    assert counts[0] < counts[1] == counts[2]
    response = {"input": "import re", "reasoning": {"effort": "high"}, "max_output_tokens": 4}
    assert page.post(RESPONSES, json=response, headers=KEY).json()["usage"]["input_tokens"] == counts[1]
