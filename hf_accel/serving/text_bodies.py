"""The bodies of requests about texts that write none: their tokens, their vectors and their scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .api_errors import ApiError
from .bodies import TokenId
from .formats import Closed, Effort, Ignored, Named, Tool
from .messages import Message

MOST_TEXTS = 2048  # of a request, as in OpenAI's API
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1)]


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


Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
Cut = Annotated[int, Field(ge=-1, description="Tokens of a text that are kept; -1: as many as the model takes.")]


class RowBody(Named):
    """The fields of all endpoints that compute vectors or scores."""

    user: Ignored = None
    truncate_prompt_tokens: Cut | None = None


class EmbeddingBody(RowBody):
    """POST /v1/embeddings, in the form of OpenAI, with vLLM's truncate_prompt_tokens.

    prompt_name: one of the prompts in the folder of the model, which stands in front of each text.
    """

    input: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One text or one list of token ids for each vector."""
        is_one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if is_one else self.input  # type: ignore[return-value]


class Document(Closed):
    text: Text


class RerankBody(RowBody):
    """POST /v1/rerank, in the form of Jina and vLLM."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreBody(RowBody):
    """POST /v1/score, in the form of vLLM: a text and one or several others, or as many as these."""

    text_1: Text | Texts
    text_2: Text | Texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The texts of each score. Raises ApiError (400) for lists of other lengths."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise ApiError(400, f"text_1 has {len(first)} texts and text_2 {len(second)}; send one, or as many")
        return list(zip(first, second, strict=True))
