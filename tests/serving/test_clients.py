"""Clients of other packages against our server, as their users write them. `make clients` installs them all.

Each is asked for what a random model can be held to: the text that generate() gives, an object that a schema allows,
a call of a tool, vectors. A package that is not installed is skipped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field
from transformers import BertModel

from .encoders import save_encoder, save_ranker, tokenizer
from .running import SHIPPED, Running, serving

pytest.importorskip("llguidance")
# What these packages warn of in code of their own is no fault of the server, and changes with each of their releases.
pytestmark = pytest.mark.filterwarnings("default")
ASKED = "class Reader:\n    def "
MESSAGES: Any = [{"role": "user", "content": ASKED}]
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w1 w2"]
TOKENS = 24


class Place(BaseModel):
    """A place with people in it."""

    city: str = Field(max_length=10)
    kind: Literal["town", "village"]
    people: int = Field(ge=0, le=999)


TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": Place.model_json_schema()},
}


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm asks the network for a list of prices when it is imported, and others send counts of their use."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "PYDANTIC_AI_DISABLE_TELEMETRY", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1" if name != "LITELLM_LOCAL_MODEL_COST_MAP" else "True")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("encoders")
    save_encoder(found / "embed")
    save_ranker(found / "rank", num_labels=1)
    return found


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with serving({"tiny": SHIPPED, "embed": folder / "embed", "rank": folder / "rank"}) as running:
        yield running


@pytest.fixture(scope="module")
def said(running: Running) -> str:
    """What the model says to MESSAGES: the tokens of transformers' generate()."""
    prompt = running.service.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    return running.text(prompt["input_ids"], TOKENS)


@pytest.fixture(scope="module")
def vectors(folder: Path) -> torch.Tensor:
    encoder = BertModel.from_pretrained(folder / "embed").eval()
    with torch.no_grad():
        return torch.stack(
            [encoder(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
        )


def are_near(found: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), expected, atol=1e-4)


# -- litellm -------------------------------------------------------------------------------------------


def test_litellm(running: Running, said: str, vectors: torch.Tensor) -> None:
    litellm = pytest.importorskip("litellm")
    given: dict[str, Any] = {
        "model": "openai/tiny", "api_base": running.url, "api_key": "none", "messages": MESSAGES, "max_tokens": TOKENS,
        "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(**given)
    assert whole.choices[0].message.content == said and whole.usage.completion_tokens == TOKENS
    pieces = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == said
    free = given | {"max_tokens": 200, "temperature": 1, "seed": 1}
    answer = litellm.completion(**free, response_format=Place)
    Place.model_validate_json(answer.choices[0].message.content)
    (call,) = (
        litellm.completion(**free, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
        .choices[0]
        .message.tool_calls
    )
    assert call.function.name == "weather" and Place.model_validate_json(call.function.arguments)
    text = litellm.text_completion(
        model="text-completion-openai/tiny", api_base=running.url, api_key="none", prompt=ASKED, max_tokens=TOKENS,
        temperature=0,
    )  # fmt: skip
    assert text.choices[0].text == running.text(ASKED, TOKENS)
    found = litellm.embedding(model="openai/embed", api_base=running.url, api_key="none", input=TEXTS)
    assert are_near([one["embedding"] for one in found.data], vectors)
    ranked = litellm.rerank(
        model="hosted_vllm/rank", api_base=running.root, api_key="none", query="w1", documents=TEXTS, top_n=2
    )
    assert len(ranked.results) == 2
    with pytest.raises(litellm.exceptions.BadRequestError, match="its keys are token ids"):
        litellm.completion(**given, logit_bias={"x": 1})


# -- instructor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(running: Running, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(running.client(), mode=getattr(instructor.Mode, mode))
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "seed": 3, "max_tokens": 300}
    place = client.chat.completions.create(**given, response_model=Place, max_retries=0)
    assert isinstance(place, Place)
    *_, last = client.chat.completions.create_partial(**given, response_model=Place, max_retries=0)
    assert Place.model_validate(last.model_dump())


# -- pydantic-ai ---------------------------------------------------------------------------------------


def test_pydantic_ai(running: Running, said: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=running.url, api_key="none")
    model = OpenAIChatModel("tiny", provider=provider)
    greedy: Any = {"temperature": 0.0, "max_tokens": TOKENS}
    assert Agent(model).run_sync(ASKED, model_settings=greedy).output == said

    async def streamed() -> str:
        async with Agent(model).run_stream(ASKED, model_settings=greedy) as answer:
            return str(await answer.get_output())

    assert asyncio.run(streamed()) == said
    free: Any = {"temperature": 1.0, "max_tokens": 300, "seed": 2}
    for kind in (Place, NativeOutput(Place)):  # a call of a tool that must come, and a response_format
        assert isinstance(Agent(model, output_type=kind, retries=0).run_sync(ASKED, model_settings=free).output, Place)
    asked = Agent(OpenAIResponsesModel("tiny", provider=provider), output_type=NativeOutput(Place), retries=0)
    assert isinstance(asked.run_sync(ASKED, model_settings={"max_tokens": 300}).output, Place)


# -- langchain -----------------------------------------------------------------------------------------


def test_langchain(running: Running, said: str, vectors: torch.Tensor) -> None:
    langchain = pytest.importorskip("langchain_openai")
    where: dict[str, Any] = {"base_url": running.url, "api_key": "none", "max_retries": 0}
    chat = langchain.ChatOpenAI(model="tiny", temperature=0, max_tokens=TOKENS, **where)
    assert chat.invoke(ASKED).content == said
    assert "".join(str(piece.content) for piece in chat.stream(ASKED)) == said
    assert [one.content for one in chat.batch([ASKED] * 3)] == [said] * 3
    free = langchain.ChatOpenAI(model="tiny", temperature=1, seed=4, max_tokens=300, **where)
    for method in ("json_schema", "function_calling"):
        assert isinstance(free.with_structured_output(Place, method=method).invoke(ASKED), Place)
    (call,) = free.bind_tools([Place], tool_choice="required").invoke(ASKED).tool_calls[:1]
    assert call["name"] == "Place" and Place.model_validate(call["args"])
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(ASKED).response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in logprobs) == said and len(logprobs[0]["top_logprobs"]) == 2
    embed = langchain.OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **where)
    assert are_near(embed.embed_documents(TEXTS), vectors)
    text = langchain.OpenAI(model="tiny", temperature=0, max_tokens=TOKENS, **where).invoke(ASKED)
    assert text == running.text(ASKED, TOKENS)


# -- dspy ----------------------------------------------------------------------------------------------


def test_dspy(running: Running, said: str, vectors: torch.Tensor) -> None:
    dspy = pytest.importorskip("dspy")
    where: dict[str, Any] = {"api_base": running.url, "api_key": "none", "cache": False, "num_retries": 0}
    (found,) = dspy.LM("openai/tiny", temperature=0, max_tokens=TOKENS, **where)(messages=MESSAGES)
    assert (found["text"] if isinstance(found, dict) else found) == said
    schema = {"type": "object", "properties": {"place": Place.model_json_schema()}, "required": ["place"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "Asked", "schema": schema | {"additionalProperties": False}},
    }
    free = dspy.LM("openai/tiny", temperature=1, max_tokens=400, seed=5, response_format=form, **where)

    class Asked(dspy.Signature):
        """Says where a question is about."""

        question: str = dspy.InputField()
        place: Place = dspy.OutputField()

    with dspy.context(lm=free, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Asked)(question=ASKED).place, Place)
    embed = dspy.Embedder("openai/embed", api_base=running.url, api_key="none", caching=False)
    assert are_near(embed(TEXTS), vectors)


# -- the openai package, as the others use it ------------------------------------------------------------


def test_openai(running: Running, said: str) -> None:
    with running.client() as client:
        assert client.models.retrieve("tiny").id == "tiny"
        assert [one.id for one in client.models.list()] == ["tiny", "embed", "rank"]
        parsed = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Place, temperature=1, seed=1, max_tokens=200
        )
        assert isinstance(parsed.choices[0].message.parsed, Place)
        tool = openai.pydantic_function_tool(Place)
        called = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, tools=[tool], tool_choice="required", temperature=1, seed=1,
            parallel_tool_calls=False, max_tokens=200,
        )  # fmt: skip
        (call,) = called.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Place)
        with client.chat.completions.stream(
            model="tiny", messages=MESSAGES, response_format=Place, temperature=1, seed=1, max_tokens=200
        ) as stream:
            stream.until_done()
            assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}

    async def at_once() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(8)))  # type: ignore[call-overload]
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(at_once()) == [said] * 8


# -- guidellm ------------------------------------------------------------------------------------------


def test_guidellm(running: Running, tmp_path: Path) -> None:
    """A load of 24 requests, as docs/serving.md runs it."""
    command = shutil.which("guidellm", path=str(Path(sys.executable).parent)) or shutil.which("guidellm")
    if command is None:
        pytest.skip("guidellm is not installed")
    words = [
        command, "run", "--backend",
        f"kind=openai_http,target={running.root},model=tiny,request_format=/v1/completions",
        "--tokenizer", f"kind=huggingface_auto,model={SHIPPED}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--profile", "kind=throughput,max_concurrency=24", "--constraint", "kind=max_requests,count=24",
        "--output", f"kind=json,path={tmp_path / 'found.json'}",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert counts["successful"] == 24 and counts["errored"] == 0, counts
