"""docs/serving.md's table of the fields of OpenAI's API and of vLLM's says what happens to each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from hf_accel.serving.api_errors import ApiError
from hf_accel.serving.bodies import ChatBody, Common, CompletionBody, ResponseBody, read_body
from hf_accel.serving.formats import Ignored

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
AS_THEIRS, IN_PART, NOT_READ, REFUSED, ON_REQUEST = ROWS = (
    "as theirs", "as theirs, in part", "taken, not read", "refused", "ignored on request",
)  # fmt: skip
BODIES: dict[type[Common], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "def "}], "logprobs": True},
    CompletionBody: {"prompt": "def "},
    ResponseBody: {"input": "def "},
}
OF_OPENAI = {
    ChatBody: chat_create_params.CompletionCreateParamsBase,
    CompletionBody: completion_create_params.CompletionCreateParamsBase,
    ResponseBody: response_create_params.ResponseCreateParamsBase,
}
# What vLLM has besides, by its protocol.py.
SAMPLING = {
    "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params", "ignore_eos", "include_stop_str_in_output",
    "kv_transfer_params", "length_penalty", "logprob_token_ids", "min_p", "min_tokens", "priority", "prompt_logprobs",
    "repetition_detection", "repetition_penalty", "request_id", "return_token_ids", "return_tokens_as_token_ids",
    "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "stream",
    "stream_interval", "structured_outputs", "thinking_token_budget", "top_k", "truncate_prompt_tokens",
    "truncation_side", "use_beam_search", "vllm_xargs",
}  # fmt: skip
OF_VLLM = {
    ChatBody: SAMPLING | {
        "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs",
        "continue_final_message", "documents", "echo", "include_reasoning", "media_io_kwargs", "mm_processor_kwargs",
        "return_prompt_text",
    },
    CompletionBody: SAMPLING | {"add_special_tokens", "prompt_embeds", "response_format"},
    ResponseBody: {
        "cache_salt", "chat_template_kwargs", "include_stop_str_in_output", "kv_transfer_params",
        "mm_processor_kwargs", "priority", "repetition_penalty", "request_id", "seed", "stop", "stream",
        "structured_outputs", "top_k", "vllm_xargs",
    },
}  # fmt: skip
SOME_VALUES: dict[str, Any] = {  # field -> a value of theirs that is refused
    "background": True, "best_of": 3, "echo": True, "modalities": ["audio"], "parallel_tool_calls": False,
    "include_reasoning": False, "skip_special_tokens": False, "spaces_between_special_tokens": False, "suffix": "end",
    "structured_outputs": {"regex": "a", "whitespace_pattern": " "}, "text": {"format": {"type": "grammar"}},
    "tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": [{"type": "web_search"}],
    "top_logprobs": 5, "truncation": "auto",
}  # fmt: skip


def documented(kind: type[Common]) -> dict[str, str]:
    """The row of each field in the table."""
    column = list(BODIES).index(kind)
    found: dict[str, str] = {}
    for row in ROWS:
        (line,) = re.findall(rf"^\| {row} \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line.split("|")[column]):
            assert name not in found, f"{name} stands twice"
            found[name] = row
    return found


def refused(kind: type[Common], given: dict[str, Any], *, ignore_unknown: bool) -> bool:
    try:
        asked = read_body(kind, {**BODIES[kind], **given}, ignore_unknown=ignore_unknown)
        assert asked.num_logprobs is None or kind is ChatBody  # it checks best_of
        asked.constraint()
    except ApiError as error:
        assert error.status == 400
        return True
    return False


def row_of(kind: type[Common], name: str) -> str:
    """What the code does with a field."""
    if name not in kind.model_fields:
        assert refused(kind, {name: "x"}, ignore_unknown=False)
        return REFUSED if refused(kind, {name: "x"}, ignore_unknown=True) else ON_REQUEST
    if get_type_hints(kind, include_extras=True)[name] == Ignored:
        return NOT_READ
    if name in SOME_VALUES and refused(kind, {name: SOME_VALUES[name]}, ignore_unknown=True):
        return IN_PART
    return AS_THEIRS


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_the_table(kind: type[Common]) -> None:
    theirs = {*get_type_hints(OF_OPENAI[kind]), *OF_VLLM[kind]}
    assert {name: row_of(kind, name) for name in theirs | kind.model_fields.keys()} == documented(kind)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"no_such_field": 1}, True),
        ({"stream_options": {"no_such_field": 1, "include_usage": True}}, True),
        ({"no_such_field": 1, "functions": []}, False),
        ({"no_such_field": 1, "temperature": "hot"}, False),
    ],
    ids=["unknown", "unknown within", "refused beside", "wrong beside"],
)
def test_unknown_fields(kind: type[Common], given: dict[str, Any], ignored: bool) -> None:
    assert refused(kind, given, ignore_unknown=False)
    assert refused(kind, given, ignore_unknown=True) is not ignored


def test_a_field_of_another_endpoint_is_not_ignored() -> None:
    with pytest.raises(ApiError, match="max_output_tokens is not served; leave it out"):
        read_body(ChatBody, {**BODIES[ChatBody], "max_output_tokens": 5}, ignore_unknown=True)
    with pytest.raises(ApiError, match="start the server with --ignore-unknown-fields"):
        read_body(ChatBody, {**BODIES[ChatBody], "verbosity": "low"})
