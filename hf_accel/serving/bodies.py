"""The bodies of requests: the fields of each endpoint that are honoured, and those that are refused.

A field that would change the answer is honoured, or its request is refused: nothing is dropped without a word. Fields
that change no token (names of users, billing, storage) are accepted and not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from .api_errors import ApiError
from .called_tools import calls_grammar
from .fields import REFUSED, without_unknown
from .formats import (
    Closed,
    Effort,
    Format,
    Ignored,
    Named,
    NamedTool,
    Reasoning,
    ResponseText,
    ResponseTool,
    StreamOptions,
    StructuredOutputs,
    Tool,
    match_keywords,
)
from .messages import MESSAGES, Message

MOST_STOPS = 16  # stop strings of one request
STOP_CHARACTERS = 256  # of one stop string
MOST_TOP_LOGPROBS = 20  # as in OpenAI's API
SEEDS = 2**63

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]

Body = TypeVar("Body", bound="Closed")


class Common(Named):
    """The fields of all endpoints that write text.

    top_k, min_p, repetition_penalty, structured_outputs and chat_template_kwargs are vLLM's additions; so are those of
    choices, stop_token_ids, min_tokens and ignore_eos, which its benchmark of servers sends.
    """

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None

    def sampling(self) -> dict[str, Any]:
        """Return the keywords for Engine.submit that say how tokens are chosen. None leaves the model's own."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def format(self) -> Closed | None:
        """The response_format, or what takes its place."""
        return None

    @property
    def must_call(self) -> bool:
        """True if the answer consists of calls of tools."""
        return False

    def constraint(self) -> dict[str, Any]:
        """Return the keywords for Engine.submit that say what the text must match; empty for any text."""
        return match_keywords(self.structured_outputs, self.format)

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def asks_for_samples(self) -> bool:
        """True if the request sets something that greedy search would ignore."""
        named = (self.top_p, self.top_k, self.min_p, self.seed)
        return self.num_choices > 1 or any(value is not None for value in named)

    @property
    def stops_at_end(self) -> bool:
        """True if the model's own stop tokens end the text."""
        return True

    @property
    def stops(self) -> list[str]:
        return []

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of a choice; None leaves it to the server."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of most probable tokens that are reported for each token; None reports no
        log-probabilities.
        """
        return None


class Choices(Common):
    """The fields that chat completions and completions have in common."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    response_format: Format | None = None

    @property
    def format(self) -> Closed | None:
        return self.response_format

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.min_tokens:
            given["min_new_tokens"] = self.min_tokens
        for name in ("presence_penalty", "frequency_penalty", "stop_token_ids"):
            if (value := getattr(self, name)) is not None:
                given[name] = list(value) if isinstance(value, list) else value
        if self.logit_bias:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return given

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops_at_end(self) -> bool:
        return not self.ignore_eos

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the counts of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_in_chunks(self) -> bool:
        """True if each chunk of a stream has the counts so far."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)


class WithTools(Common):
    """The fields about tools that chats and responses have in common."""

    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    def constraint(self) -> dict[str, Any]:
        """See Common.constraint. Raises ApiError (400) where tools are in conflict with it."""
        given = super().constraint()
        if self.parallel_tool_calls is False and not self.must_call:
            message = "parallel_tool_calls: false is served with tool_choice 'required' or a name; else only true is"
            raise ApiError(400, message, field="parallel_tool_calls")
        if given and self.tools and self.tool_choice != "none":
            message = "an answer cannot match a format and call tools too; leave one out, or send tool_choice 'none'"
            raise ApiError(400, message, field="tools")
        if not self.must_call:
            return given
        name = self.tool_choice.of_tool if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool.model_dump() for tool in self.tools or ()]
        return {"grammar": calls_grammar(tools, name, several=self.parallel_tool_calls is not False)}


class ChatBody(Choices, WithTools):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Ignored = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", field="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Choices):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One text or one list of token ids for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_ids = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if is_ids else self.prompt  # type: ignore[return-value]

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ApiError(400, f"best_of={self.best_of} is not served unless it equals n", field="best_of")
        return self.logprobs


class ResponseBody(WithTools):
    """POST /v1/responses. Nothing is stored, so a conversation is sent as a whole each time."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[ResponseTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    stream_options: StreamOptions | None = None
    reasoning: Reasoning | None = None

    @property
    def format(self) -> Closed | None:
        return None if self.text is None else self.text.format

    @property
    def new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def reasoning_effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort


# What one endpoint serves, another one does not ignore; the effort is a hint at all of them.
NEVER_IGNORED = REFUSED.union(*(kind.model_fields for kind in (ChatBody, CompletionBody, ResponseBody))) - {
    "reasoning", "reasoning_effort",
}  # fmt: skip


def read_body(kind: type[Body], body: dict[str, Any], *, ignore_unknown: bool = False) -> Body:
    """Check a request's JSON. Raises ApiError (400) with the first thing that is wrong, as one sentence.

    A field that is null counts as left out, whatever its name. ignore_unknown: whether fields that are not known, and
    of which no answer depends, count as left out too.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        known = without_unknown(given, error, refused=NEVER_IGNORED) if ignore_unknown else None
        if known is not None:
            return read_body(kind, known)
        raise _refusal(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def check_messages(messages: list[dict[str, Any]], *, field: str) -> None:
    """Check messages that were converted from another form.

    field: the field that they came from. Raises ApiError (400).
    """
    try:
        MESSAGES.validate_python(messages)
    except ValidationError as error:
        raise ApiError(400, f"{field}: {_refusal(error).message}", field=field) from None


def _refusal(error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_input=False)
    # Of a field that may be of several types, what came nearest to one of them: only a value was wrong, or a part.
    of_field = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_field, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    field = str(first["loc"][0]) if first["loc"] else None
    # pydantic also names the types that it tried, such as list[TextPart]
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _is_name(part))[:200]
    if first["type"] == "extra_forbidden":
        is_never = len(first["loc"]) == 1 and first["loc"][0] in NEVER_IGNORED
        ways = "" if is_never else ", or start the server with --ignore-unknown-fields"
        message = f"{where} is not served; leave it out{ways} (it is refused because it might change the answer)"
    elif first["type"] == "missing":
        message = f"{where} is missing"
    elif first["type"] == "literal_error":
        served = first["ctx"]["expected"].replace("True", "true").replace("False", "false")
        message = f"{where}: only {served} is served"
    elif first["type"] == "union_tag_invalid":
        message = f"{where}: only {first['ctx']['expected_tags']} is served"
    else:
        message = f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return ApiError(400, message, field=field and field[:200])


def _is_name(part: str) -> bool:
    return part not in ("str", "int", "constrained-str") and "[" not in part


def _token_id(token: str) -> int:
    if not token.isascii() or not token.isdigit() or len(token) > 12:
        raise ApiError(400, f"logit_bias names the token {token[:20]!r}; its keys are token ids", field="logit_bias")
    return int(token)
