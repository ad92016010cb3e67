"""The bodies of requests about texts that write none: their tokens, their vectors and their scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .api_errors import ApiError
from .bodies import Effort, Named, TokenId, Tool
from .messages import Message


class TokenizeBody(Named):
    """POST /tokenize, in the form of vLLM: the tokens of a text or of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None

    def check(self) -> None:
        """Raise ApiError (400) unless there is a text or a chat, and nothing that is of the other."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", field="prompt")
        others = ("tools", "chat_template_kwargs") if self.messages is None else ("add_special_tokens",)
        for name in others:
            if getattr(self, name) is not None:
                what = (
                    "a chat template adds what special tokens it wants" if self.messages else "it is a part of a chat"
                )
                raise ApiError(400, f"{name}: {what}; leave it out", field=name)


class DetokenizeBody(Named):
    """POST /detokenize, in the form of vLLM."""

    tokens: list[TokenId]
