"""Tools and thoughts, by the parser that transformers has for Qwen3, for a model that was taught to call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hf_accel.serving.api_errors import ApiError
from hf_accel.serving.hf.completions import MessageParser
from hf_accel.serving.hf.responses import Answer, events_of
from hf_accel.serving.service import Event

from .checkpoint import QUESTION, SAID, THOUGHT, TOOLS, save_talker
from .running import Running, serving

CALLS = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
ASKED: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "temperature": 0}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("talker")
    save_talker(path)
    with serving(path, chat_template=None) as running:
        yield running


@pytest.mark.parametrize("n", [1, 2])
def test_a_call(client: openai.OpenAI, n: int) -> None:
    choices = client.chat.completions.create(**ASKED, n=n).choices
    assert len(choices) == n
    for choice in choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == SAID
        assert getattr(choice.message, "reasoning_content") == THOUGHT  # noqa: B009
        calls: list[Any] = list(choice.message.tool_calls or ())
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
    ids = [call.id for choice in choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 2 * n


def test_a_call_streams(client: openai.OpenAI) -> None:
    content, thought, calls = "", "", list[Any]()
    reasons = []
    for chunk in client.chat.completions.create(**ASKED, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning_content", None) or ""
        calls += delta.tool_calls or ()
        reasons.append(chunk.choices[0].finish_reason)
    assert (content, thought) == (SAID, THOUGHT)
    assert [(call.index, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        (index, *call) for index, call in enumerate(CALLS)
    ]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


@pytest.mark.parametrize("given", [{"tools": None}, {"tool_choice": "none"}, {"tools": []}], ids=str)
def test_no_tools(client: openai.OpenAI, given: dict[str, Any]) -> None:
    choice = client.chat.completions.create(**{**ASKED, **given}).choices[0]
    assert choice.message.content == "no tools" and not choice.message.tool_calls
    assert choice.finish_reason == "stop"


def test_a_call_that_is_cut_off(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED)
    assert whole.usage is not None
    cut = client.chat.completions.create(**ASKED, max_tokens=whole.usage.completion_tokens - 8)
    calls: list[Any] = list(cut.choices[0].message.tool_calls or ())
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}]
    assert cut.choices[0].message.content == SAID


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_that_is_cut_off_in_a_call_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    """The first call is whole, the second is left out."""
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    given: dict[str, Any] = {"model": "tiny", "input": QUESTION[0]["content"], "tools": flat, "temperature": 0}
    whole: Any = client.responses.create(**given)
    assert whole.status == "completed"
    given["max_output_tokens"] = whole.usage.output_tokens - 8
    response: Any = client.responses.create(**given) if not stream else None
    if stream:
        events = list(client.responses.create(**given, stream=True))
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo"}]
    assert response.output_text == SAID


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_calls(client: openai.OpenAI, stream: bool) -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    given: dict[str, Any] = {"model": "tiny", "input": QUESTION[0]["content"], "tools": flat, "temperature": 0}
    if stream:
        events = list(client.responses.create(**given, stream=True))
        assert events[-1].type == "response.completed"
        response = events[-1].response
    else:
        response = client.responses.create(**given)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert response.output_text == SAID
    assert response.status == "completed" and response.incomplete_details is None
    assert {item.status for item in response.output} == {"completed"}


class Unfinished:
    """A parser of transformers whose text ends within a call."""

    initial_events: tuple[Any, ...] = ()

    def feed(self, text: str) -> list[dict[str, Any]]:
        return [{"type": "region_chunk", "field": "content", "text": text}]

    def finalize(self) -> Any:
        raise ValueError("unclosed region")


@pytest.mark.parametrize(("reason", "last"), [("stop", None), ("length", "response.incomplete")])
def test_a_response_that_ends_by_itself_within_a_call_is_an_error(reason: str, last: str | None) -> None:
    """It would say that it is complete, and the call would be missing."""

    async def news(*, keep_special: bool) -> AsyncIterator[Event]:
        yield Event(0, "so", [])
        yield Event(0, " far", [], reason)

    async def run() -> list[dict[str, Any]]:
        head = {
            "id": "resp_1", "created_at": 0, "model": "tiny", "object": "response", "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": False,
        }  # fmt: skip
        job: Any = SimpleNamespace(events=news, num_prompt_tokens=1, num_new_tokens=2)
        answer = Answer(request_id="1", response_defaults=head)
        return [event async for event in events_of(job, MessageParser(Unfinished(), "1", 0), answer)]

    if last is None:
        with pytest.raises(ApiError, match="ends within a call"):
            asyncio.run(run())
    else:
        assert asyncio.run(run())[-1]["type"] == last
