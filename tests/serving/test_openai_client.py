"""The openai package as a client: what it asks for is what it gets, streamed or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from hf_accel.serving.limits import Limits

from .running import CHAT_TEMPLATE, Running, serving, until

PROMPT = "import re\n\ndef "
MESSAGES: list[Any] = [{"role": "system", "content": "Python"}, {"role": "user", "content": "class Reader:\n    def "}]
# Greedy, this model repeats itself and does not end.
LONG: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True}
InTurns = Callable[[Callable[[], Iterable[Any]]], list[Any]]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as running:
        yield running


def chat_prompt(running: Running) -> list[int]:
    ids: list[int] = running.service.tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    return ids


def test_completion(running: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    (choice,) = answer.choices
    assert choice.text == running.text(PROMPT, 24)
    assert choice.finish_reason == "length" and answer.usage is not None
    prompt = len(running.service.tokenizer(PROMPT)["input_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 24)


def test_completion_streams(running: Running, client: openai.OpenAI, in_turns: InTurns) -> None:
    given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True}
    given["stream_options"] = {"include_usage": True}
    chunks = in_turns(lambda: client.completions.create(**given))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == running.text(PROMPT, 24)
    assert len(chunks) > 5, "it comes in pieces"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_counts_of_tokens_in_each_chunk(client: openai.OpenAI, in_turns: InTurns, chat: bool) -> None:
    """An option of vLLM that load generators send, guidellm for one."""
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": True}
    given["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if chat:
        chunks = in_turns(lambda: client.chat.completions.create(**given, messages=MESSAGES))
    else:
        chunks = in_turns(lambda: client.completions.create(**given, prompt=PROMPT))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and len(set(counts)) > 3 and counts[-1] == 12
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat(running: Running, client: openai.OpenAI, stream: bool) -> None:
    expected = running.text(chat_prompt(running), 24)
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    if stream:
        chunks = list(client.chat.completions.create(**given, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "length"
    else:
        answer = client.chat.completions.create(**given)
        assert answer.choices[0].message.content == expected and answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_response(running: Running, client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {
        "model": "tiny", "instructions": "Python", "input": MESSAGES[1]["content"], "max_output_tokens": 24,
        "temperature": 0,
    }  # fmt: skip
    response: Any
    if stream:
        with client.responses.stream(**given) as events:
            *before, last = list(events)
        assert last.type == "response.incomplete"
        assert [event.item.status for event in before if event.type == "response.output_item.done"] == ["incomplete"]
        assert not any(event.type in ("response.completed", "response.incomplete") for event in before)
        response = last.response
    else:
        response = client.responses.create(**given)
    assert response.output_text == running.text(chat_prompt(running), 24)
    assert response.usage is not None and response.usage.output_tokens == 24
    assert response.usage.input_tokens == len(chat_prompt(running))
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["incomplete"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop_strings_are_cut(running: Running, client: openai.OpenAI, stream: bool) -> None:
    whole = running.text(PROMPT, 24)
    stop = whole[9:14]  # it begins and ends within tokens
    expected = whole[: whole.index(stop)]
    given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    given["stop"] = ["no such text", stop]
    if stream:
        chunks = list(client.completions.create(**given, stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**given).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert text == expected and reason == "stop"


def test_seeds(client: openai.OpenAI) -> None:
    def ask(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=16, temperature=1.0, top_p=0.95, seed=seed, n=n
        )
        return [choice.text for choice in answer.choices]

    alone = ask(1)
    assert ask(2) != alone
    with ThreadPoolExecutor(6) as pool:  # what runs beside it, and torch's own generator, change nothing
        torch.manual_seed(5)
        found = list(pool.map(lambda seed: (seed, ask(seed)), [1, 2, 1, 3, 1, 4]))
    assert [texts for seed, texts in found if seed == 1] == [alone] * 3
    three = ask(1, n=3)
    assert three[0] == alone[0] and len(set(three)) == 3


def test_each_request_has_its_own_settings(running: Running, client: openai.OpenAI) -> None:
    """Stock's continuous batching takes those of the first request for all."""

    def ask(temperature: float) -> str:
        return (
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=temperature, seed=3)
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, [1.5, 0.0, 1.5, 0.0, 1.0, 0.0]))
    assert found[1] == found[3] == found[5] == running.text(PROMPT, 24)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_three_choices_of_a_chat(client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 1,
        "seed": 7,
        "n": 3,
    }
    whole = [choice.message.content for choice in client.chat.completions.create(**given).choices]
    assert len(set(whole)) == 3
    if stream:
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**given, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == whole


def test_several_prompts(running: Running, client: openai.OpenAI) -> None:
    prompts = [PROMPT, "class Reader:"]
    ids = [running.service.tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = [running.text(prompt, 8) for prompt in prompts for _ in range(2)]
    for given in (prompts, ids):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=8, temperature=0, n=2)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="tiny", prompt=ids[0], max_tokens=8, temperature=0)
    assert alone.choices[0].text == expected[0]


def expected_logprobs(running: Running, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = running.service.engine.model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_logprobs_of_a_chat(running: Running, client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(**given, stream=True))
        found = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    else:
        choice = client.chat.completions.create(**given).choices[0]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        found = choice.logprobs.content
    prompt, tokenizer = chat_prompt(running), running.service.tokenizer
    tokens = running.generated(prompt, 6)
    logs = expected_logprobs(running, prompt, tokens)
    assert [entry.token for entry in found] == [tokenizer.decode([token]) for token in tokens]
    assert [bytes(entry.bytes or []).decode() for entry in found] == [entry.token for entry in found]
    chosen = [float(logs[place, token]) for place, token in enumerate(tokens)]
    assert [entry.logprob for entry in found] == pytest.approx(chosen, abs=1e-4)
    values, ids = logs.topk(3)
    for entry, best, names in zip(found, values.tolist(), ids.tolist(), strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-4)
        assert [top.token for top in entry.top_logprobs] == [tokenizer.decode([token]) for token in names]


def test_logprobs_of_a_completion(running: Running, client: openai.OpenAI) -> None:
    whole = running.text(PROMPT, 12)
    stop = whole[9:14]
    choice = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2, stop=stop
    ).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens and found.text_offset and found.token_logprobs and found.top_logprobs
    assert choice.text.startswith("".join(found.tokens[:-1])), "there is an entry for each token of the text"
    assert "".join(found.tokens).startswith(choice.text) and found.text_offset[-1] < len(choice.text)
    assert [choice.text[start:].startswith(found.tokens[0]) for start in found.text_offset[:1]] == [True]
    ids = running.service.tokenizer(PROMPT)["input_ids"]
    tokens = running.generated(ids, 12)
    logs = expected_logprobs(running, ids, tokens)
    chosen = [float(logs[place, tokens[place]]) for place in range(len(found.tokens))]
    assert found.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert all(len(top) == 2 for top in found.top_logprobs)


def test_penalties_and_biases(running: Running, client: openai.OpenAI) -> None:
    """They are OpenAI's own, subtracted from logits: stock's server makes a repetition_penalty of them."""
    engine, ids = running.service.engine, running.service.tokenizer(PROMPT)["input_ids"]
    settings = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, **settings)
    expected = engine.submit(ids, max_new_tokens=24, temperature=0, **settings).result(30).text
    assert answer.choices[0].text == expected != running.text(PROMPT, 24)
    token = running.service.tokenizer("lambda")["input_ids"][0]
    forced = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert forced.choices[0].text == running.service.tokenizer.decode([token] * 3)


@pytest.mark.parametrize("given", [{"top_p": 0.9}, {"seed": 3}, {"n": 3}, {"extra_body": {"top_k": 50}}], ids=str)
def test_what_only_samples_heed_samples(running: Running, client: openai.OpenAI, given: dict[str, Any]) -> None:
    """The model's own config is greedy; the API's default is a temperature of 1."""
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, **given)
    assert {choice.text for choice in answer.choices} != {running.text(PROMPT, 24)}
    greedy = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, **given)
    assert {choice.text for choice in greedy.choices} == {running.text(PROMPT, 24)}


def test_stop_tokens_are_added_to_the_model_s(running: Running, client: openai.OpenAI) -> None:
    tokens = running.generated(PROMPT, 24)
    place = next(place for place in range(4, 24) if tokens.index(tokens[place]) == place)
    given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    found = client.completions.create(**given, extra_body={"stop_token_ids": [tokens[place]]})
    assert found.usage is not None and found.usage.completion_tokens == place + 1
    assert found.choices[0].finish_reason == "stop"
    end = running.service.tokenizer.eos_token_id
    bias = {"logit_bias": {str(end): 100}}
    for more, expected in (
        ({"stop_token_ids": [tokens[place]]}, 1),
        ({"ignore_eos": True}, 24),
        ({"min_tokens": 5}, 6),
    ):
        ended = client.completions.create(**given, extra_body=more | bias)
        assert ended.usage is not None and ended.usage.completion_tokens == expected
    assert client.completions.create(**given, extra_body=bias | {"reasoning": None}).choices[0].text == ""


def test_a_stream_that_is_closed_is_cancelled(running: Running, client: openai.OpenAI) -> None:
    before = running.stats["cancelled"]
    asks: list[Callable[[], Any]] = [
        lambda: client.completions.create(**LONG, prompt=PROMPT, max_tokens=1500),
        lambda: client.chat.completions.create(**LONG, messages=MESSAGES, max_tokens=1500),
        lambda: client.responses.create(**LONG, input="def ", max_output_tokens=1500),
    ]
    for number, ask in enumerate(asks, start=1):
        stream = ask()
        for _, chunk in zip(range(3), stream, strict=False):
            assert chunk is not None
        stream.close()
        until(running.is_idle)
        assert running.stats["cancelled"] == before + number


def test_a_whole_answer_whose_client_leaves_is_cancelled(running: Running) -> None:
    before = running.stats["cancelled"]
    with running.client().with_options(timeout=0.4) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1900, temperature=0, n=4)
    until(running.is_idle)
    assert running.stats["cancelled"] == before + 4


def test_what_is_served(running: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here, but 'tiny' is"):
        client.completions.create(model="other", prompt=PROMPT)


def test_too_many_get_429() -> None:
    with serving(limits=Limits(max_running=1, max_queue=1)) as running, running.client() as client:
        streams = [client.completions.create(**LONG, prompt=PROMPT, max_tokens=1500) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="try again later") as error:
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 60
        until(lambda: running.stats["running"] == running.stats["waiting"] == 1)
        for stream in streams:
            stream.close()
        until(running.is_idle)
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1).choices[0].text


def test_keys() -> None:
    with serving(api_key="sésame") as running:
        with running.client("wrong") as client, pytest.raises(openai.AuthenticationError, match="API key"):
            client.models.list()
        right = {b"authorization": "Bearer sésame".encode()}
        for path in ("/v1/models", "/metrics", "/v1/none", "/load_model", "/none"):
            assert httpx.get(running.root + path).status_code == 401
        for path in ("/v1/models", "/metrics", "/health", "/ready"):
            assert httpx.get(running.root + path, headers=right).status_code == 200
        for path in ("/health", "/ready", "/"):  # the page asks for the key itself
            assert httpx.get(running.root + path).status_code == 200


def test_without_a_chat_template() -> None:
    with serving(chat_template=None) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert CHAT_TEMPLATE not in str(running.service.tokenizer.chat_template)
