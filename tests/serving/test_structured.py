"""Answers that must match a schema, a regex, a grammar, a choice or calls of tools, for the openai package."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from hf_accel.serving.limits import Limits

from .running import Running, serving, until

pytest.importorskip("llguidance")
InTurns = Callable[[Callable[[], Iterable[Any]]], list[Any]]
PROMPT, MESSAGES = "import re\n\ndef ", [{"role": "user", "content": "class Reader:\n    def "}]
COLOUR = {"enum": ["red", "green", 3, None]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": COLOUR, "minItems": 1, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SCHEMA["properties"]["inner"]["additionalProperties"] = False  # type: ignore[index]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
FLAT: Any = {"type": "json_schema", **FORMAT["json_schema"]}
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"]}
CITY |= {"additionalProperties": False, "$defs": {"c": {"enum": ["Oslo", "Rome"]}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": 'say "hi"'}},
]
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(limits=Limits(max_body_bytes=2**21)) as running:
        yield running


class Place(BaseModel):
    city: str = Field(max_length=10)
    kind: Literal["town", "village"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema(client: openai.OpenAI, in_turns: InTurns, stream: bool, temperature: int) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": temperature}
    given |= {"response_format": FORMAT, "seed": 5}
    if stream:
        chunks = in_turns(lambda: client.chat.completions.create(**given, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reasons = {chunk.choices[0].finish_reason for chunk in chunks}
        assert reasons == {None, "stop"} and len(chunks) > 5
        texts = [text]
    else:
        choices = client.chat.completions.create(**given, n=3).choices
        assert {choice.finish_reason for choice in choices} == {"stop"}
        texts = [choice.message.content or "" for choice in choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_parse_of_chats_and_responses(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Place, temperature=1, seed=1)
    assert isinstance(chat.choices[0].message.parsed, Place)
    response = client.responses.parse(model="tiny", input=PROMPT, text_format=Place, max_output_tokens=100)
    assert isinstance(response.output_parsed, Place)


def test_a_json_object(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "temperature": 1, "response_format": {"type": "json_object"}}
    ended = 0
    for seed in range(4):
        choice = client.chat.completions.create(**given, messages=MESSAGES, max_tokens=120, seed=seed).choices[0]
        if choice.finish_reason == "stop":
            ended += isinstance(json.loads(choice.message.content or ""), dict)
    assert ended


OURS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ({"json": json.dumps(COLOUR)}, lambda text: json.loads(text) in COLOUR["enum"]),
    ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]{2}", text) is not None),
    ({"choice": ["good", "bad"]}, lambda text: text in ("good", "bad")),
    ({"grammar": 'root ::= "a" [0-9] ("b" | "c")'}, lambda text: re.fullmatch("a[0-9][bc]", text) is not None),
]


@pytest.mark.parametrize(("asked", "is_right"), OURS, ids=[next(iter(asked)) for asked, _ in OURS])
def test_structured_outputs_everywhere(
    client: openai.OpenAI, asked: dict[str, Any], is_right: Callable[[str], bool]
) -> None:
    more: dict[str, Any] = {"model": "tiny", "temperature": 1, "extra_body": {"structured_outputs": asked}}
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=200, **more)
    completion = client.completions.create(prompt=[PROMPT, "x"], max_tokens=200, n=2, **more)
    response = client.responses.create(input=PROMPT, max_output_tokens=200, **more)
    texts = [chat.choices[0].message.content or "", response.output_text, *(c.text for c in completion.choices)]
    assert len(texts) == 6 and all(map(is_right, texts)), texts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_that_must_come(client: openai.OpenAI, choice: str, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    given: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 1, "seed": 0, "max_tokens": 300,
        "tool_choice": named if choice == "named" else "required", "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(**given, stream=True))
        calls: list[Any] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        reason = chunks[-1].choices[0].finish_reason
    else:
        (answer,) = client.chat.completions.create(**given).choices
        calls, reason = list(answer.message.tool_calls or ()), answer.finish_reason
        assert answer.message.content is None
    assert len(calls) == 1 and reason == "tool_calls"
    arguments = json.loads(calls[0].function.arguments)
    if calls[0].function.name == "weather":
        jsonschema.validate(arguments, CITY)
    else:
        assert (calls[0].function.name, arguments) == ('say "hi"', {}) and choice == "required"


def test_several_calls_of_a_response(client: openai.OpenAI) -> None:
    found = set()
    for seed in range(3):
        more: Any = {"temperature": 1, "extra_body": {"seed": seed}, "max_output_tokens": 400}
        response = client.responses.create(
            model="tiny", input=PROMPT, tools=FLAT_TOOLS, tool_choice="required", **more
        )
        if response.status == "completed":
            calls = [item for item in response.output if item.type == "function_call"]
            found.add(len(calls))
            assert calls and {call.name for call in calls} <= {"weather", 'say "hi"'}
            assert all(json.loads(call.arguments) in ({}, {"city": "Oslo"}, {"city": "Rome"}) for call in calls)
    assert found


def test_an_answer_that_is_cut_off(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 5}
    (choice,) = client.chat.completions.create(**given, tool_choice="required").choices
    assert choice.finish_reason == "length" and not choice.message.tool_calls and not choice.message.content
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Place, max_tokens=3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_a_stop_string_ends_is_handed_out_as_text(client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS[:1], "max_tokens": 100}
    given |= {"tool_choice": "required", "stop": "parameters"}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        (choice,) = client.chat.completions.create(**given).choices
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == ('[{"name": "weather", "', "stop")


def test_any_json(client: openai.OpenAI) -> None:
    """By the schema true; and one by the schema false, which allows no value, is refused."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "any", "schema": True}}
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "max_tokens": 60, "n": 8}
    choices = client.chat.completions.create(**given, seed=0, response_format=form).choices
    ended = [json.loads(one.message.content or "") for one in choices if one.finish_reason == "stop"]
    assert ended
    form["json_schema"]["schema"] = False
    with pytest.raises(openai.BadRequestError, match="allows no value"):
        client.chat.completions.create(**given, response_format=form)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


# llguidance follows such rules by its own stack, and at 3,000 of them the process ends.
CHAIN = "start: r0\n" + "\n".join(f'r{n}: "x" r{n + 1} "z"' for n in range(6000)) + '\nr6000: "y"'
BAD: dict[str, tuple[Any, str]] = {
    "unknown keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "no answer": ({"$ref": "#"}, "no text"),
    "remote": ({"$ref": "https://example.com/a.json"}, "example.com"),
    "depth": (deep(200), "recursion"),
    "size": ({"enum": ["x" * 100 + str(n) for n in range(4000)]}, "at most"),
    "product of alternatives": (
        {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"], "type": "object"} for j in range(9)]} for i in range(9)]},
        "large",
    ),
    "huge multiple": ({"type": "integer", "multipleOf": 999983}, "multipleOf"),
    "multiples together": ({"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83)]}, "multipleOf"),
    "wide": ({"type": "object", "properties": {f"p{n}": {} for n in range(2500)}}, "properties"),
    "patterns": (
        {"type": "object", "patternProperties": {f"^a{{{n}}}b*$": {} for n in range(201)}},
        "patternProperties",
    ),
    "references": (
        {"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(4000)} | {"d4000": {}}},
        "$ref",
    ),
    "no schema": ("x", "schema"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_schema_that_is_refused(running: Running, name: str) -> None:
    schema, words = BAD[name]
    body = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    answer = httpx.post(f"{running.url}/chat/completions", json=body, timeout=30)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": TOOLS, "response_format": FORMAT}, "call tools too"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "names no tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f'"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of"),
        ({"structured_outputs": {}}, "one of"),
        ({"structured_outputs": {"grammar": CHAIN}}, "at most 1000"),
        ({"structured_outputs": {"regex": "["}}, "unclosed"),
        ({"structured_outputs": {"json": "{"}}, "no JSON"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "both"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern is not served"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(running: Running, more: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{running.url}/chat/completions", json={"messages": MESSAGES, **more}, timeout=30)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_no_other_request_waits_for_a_schema_that_is_slow(running: Running, client: openai.OpenAI) -> None:
    """While a schema is compiled, another client has a whole answer."""
    entered, go_on = threading.Event(), threading.Event()
    engine, compile_it = running.service.engine, running.service.engine.constraint

    def slow(**asked: Any) -> Any:
        if any(asked.values()):
            entered.set()
            assert go_on.wait(30)
        return compile_it(**asked)

    engine.constraint = slow  # type: ignore[method-assign]
    found: list[Any] = []
    body = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200}
    thread = threading.Thread(target=lambda: found.append(client.chat.completions.create(**body)))
    try:
        thread.start()
        assert entered.wait(30)
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4).choices[0].text
        assert not found
    finally:
        go_on.set()
        thread.join(30)
        del engine.constraint
    jsonschema.validate(json.loads(found[0].choices[0].message.content), SCHEMA)
    until(running.is_idle)
