"""The messages of a chat, as clients send them: their parts, texts and images, and the calls of tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError


class TextPart(BaseModel):
    """A part of a message that is text."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageAddress(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    url: str


class ImagePart(BaseModel):
    """A part of a message that is an image. `detail`, which names no size that models have, is not read."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["image_url", "input_image"]
    image_url: str | ImageAddress


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    arguments: str | dict[str, Any]


class ToolCalled(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a chat. Unknown fields go to the chat template, which knows the model."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    tool_calls: list[ToolCalled] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("no_content", "a message needs content or tool_calls")
        return self


MESSAGES = TypeAdapter(list[Message])
