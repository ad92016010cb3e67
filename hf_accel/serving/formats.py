"""The parts of bodies that say how an answer is streamed, and what it must match: JSON, a regex, a call of a tool."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from .api_errors import ApiError

Ignored = Annotated[Any, Field(description="Is taken and not read: it changes no token.")]
Effort = Annotated[str, Field(max_length=64, description="Is given to the chat template, which must read it.")]


class Closed(BaseModel):
    """A body whose fields are all known: another one is an error. Types are not converted, so "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)
    media_type: ClassVar[str] = "application/json"


class Named(Closed):
    """A body that may name the model."""

    model: str | None = None


class Reasoning(Closed):
    """The field of the Responses API that holds the effort."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class StreamOptions(Closed):
    """The options of a stream.

    continuous_usage_stats is vLLM's: each chunk has the counts of tokens so far, for load generators.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class PlainText(Closed):
    type: Literal["text"]


class JsonObject(Closed):
    type: Literal["json_object"]


class NamedSchema(Closed):
    """A JSON schema. Answers match it whether it is strict or not; its name and description are not read."""

    name: Ignored = None
    description: Ignored = None
    strict: bool | None = None
    own: dict[str, Any] | bool = Field(alias="schema")


class JsonSchema(Closed):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class FlatJsonSchema(NamedSchema):
    type: Literal["json_schema"]


class ResponseText(Closed):
    format: Annotated[PlainText | JsonObject | FlatJsonSchema, Field(discriminator="type")] | None = None


class StructuredOutputs(Closed):
    """Says what the text must match, as in vLLM. Whitespace in JSON is always the same."""

    as_json: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    disable_any_whitespace: Literal[True] | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords for Engine.submit."""
        given: dict[str, Any] = {"regex": self.regex, "grammar": self.grammar, "choice": self.choice}
        if self.json_object:
            given["response_format"] = {"type": "json_object"}
        if self.as_json is not None:
            try:
                schema = json.loads(self.as_json) if isinstance(self.as_json, str) else self.as_json
            except (ValueError, RecursionError) as error:
                field = "structured_outputs"
                raise ApiError(
                    400, f"structured_outputs.json is a text that is no JSON: {error}", field=field
                ) from None
            given["response_format"] = {"type": "json_schema", "schema": schema}
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) + bool(self.json_object and self.as_json is not None) != 1:
            message = "structured_outputs takes one of json, json_object, regex, grammar and choice"
            raise ApiError(400, message, field="structured_outputs")
        return found


class FunctionNamed(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    name: Annotated[str, Field(min_length=1)]


class NamedTool(Closed):
    """The tool that must be called: {"type": "function", "function": {"name": ...}}, or flat in responses."""

    type: Literal["function"]
    name: str | None = None
    function: FunctionNamed | None = None

    @property
    def of_tool(self) -> str:
        name = self.name if self.function is None else self.function.name
        if name is None:
            raise ApiError(400, "tool_choice names no function", field="tool_choice")
        return name


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]
    function: FunctionNamed


class ResponseTool(BaseModel):
    """A tool in the flat form of the Responses API, or nested as in chats."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]


class AdapterName(Closed):
    """The body that unloads an adapter, by vLLM's names."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: Ignored = None


class AdapterBody(AdapterName):
    """The body that loads an adapter. model: the one that it is for, where several write text."""

    lora_path: Annotated[str, Field(min_length=1)]
    model: str | None = None


def match_keywords(outputs: StructuredOutputs | None, form: Closed | None) -> dict[str, Any]:
    """Return the keywords for Engine.submit of the one that is sent. Raises ApiError (400) for both."""
    given = {} if outputs is None else outputs.keywords()
    if form is not None and not isinstance(form, PlainText):
        if given:
            message = "response_format and structured_outputs are both sent; an answer can match one"
            raise ApiError(400, message, field="structured_outputs")
        given["response_format"] = form.model_dump(by_alias=True)
    return given
