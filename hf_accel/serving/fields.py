"""Fields of other servers' APIs that are not served here: which of them a server may leave out if it was asked to."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ValidationError

# Fields of OpenAI's API and of vLLM's, served by no endpoint here, that say what an answer is or how it is made. Their
# requests are refused, also where unknown fields are ignored: an answer without them is not what was asked for.
REFUSED = frozenset({
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "audio", "bad_words", "chat_template",
    "context_management", "continue_final_message", "conversation", "documents", "echo", "function_call", "functions",
    "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "include_stop_str_in_output",
    "length_penalty", "logprob_token_ids", "media_io_kwargs", "mm_processor_kwargs", "previous_response_id", "prompt",
    "prompt_embeds", "prompt_logprobs", "repetition_detection", "return_prompt_text",
    "return_token_ids", "return_tokens_as_token_ids", "stop", "thinking_token_budget",
    "truncate_prompt_tokens", "truncation_side", "use_beam_search", "web_search_options",
})  # fmt: skip
HINTS = ("reasoning", "stream_options", "text")  # fields whose own unknown fields may be ignored too


def without_unknown(
    body: dict[str, Any], error: ValidationError, *, refused: Collection[str]
) -> dict[str, Any] | None:
    """Return a body without the fields that its check did not know, and that may be ignored; None if it has none.

    refused: the names of the fields that may not.
    """
    places = [one["loc"] for one in error.errors(include_url=False) if one["type"] == "extra_forbidden"]
    places = [place for place in places if _may_be_ignored(place, refused)]
    if not places:
        return None
    body = copy.deepcopy(body)
    found = [_left_out(body, place) for place in places]
    return body if any(found) else None


def _may_be_ignored(place: Sequence[Any], refused: Collection[str]) -> bool:
    return place[0] not in refused if len(place) == 1 else len(place) == 2 and place[0] in HINTS


def _left_out(body: Any, place: Sequence[Any]) -> bool:
    """Take the field at a place out of a body. Returns False for a place that also names pydantic's types."""
    *outer, name = place
    for part in outer:
        try:
            body = body[part]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(body, dict) and body.pop(name, place) is not place
