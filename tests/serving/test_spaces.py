"""A model whose tokenizer drops the space before the first word (SentencePiece, as Llama 2's), over HTTP and alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.generation.sampling.test_constraint import sentence_piece

from .running import WAIT, Running, serving

pytest.importorskip("llguidance")
PROMPT = "abc"
CHOICES = [" a", " abc", "\u00e9 x"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, tokenizer = tmp_path_factory.mktemp("model"), sentence_piece()
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, eos_token_id=2, bos_token_id=1, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # words with a space before them are likely, and begin most answers
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(["\u2581a", "\u2581b", "\u2581abc"])] *= 20
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with serving(folder) as running:
        yield running


def behind(running: Running, prompt: list[int], tokens: list[int]) -> str:
    """What tokens add to the text of a prompt."""
    texts = [running.service.tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens)]
    assert texts[1].startswith(texts[0])
    return str(texts[1][len(texts[0]) :])


@pytest.fixture(scope="module")
def answer(running: Running) -> str:
    prompt = running.service.tokenizer(PROMPT)["input_ids"]
    found = behind(running, prompt, running.generated(prompt, 12))
    assert found.startswith(" ")
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_completion_goes_on_behind_its_prompt(client: openai.OpenAI, answer: str, stream: bool) -> None:
    given: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**given, stream=True)]
        tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens or ()]
        text = "".join(chunk.text for chunk in chunks)
    else:
        (choice,) = client.completions.create(**given).choices
        assert choice.logprobs is not None
        text, tokens = choice.text, list(choice.logprobs.tokens or ())
        assert all(token in top for token, top in zip(tokens, choice.logprobs.top_logprobs or (), strict=True))
    assert text == answer == "".join(tokens)


def test_a_chat_begins_without_the_space(running: Running, client: openai.OpenAI) -> None:
    """As in `transformers serve`: the text of the new tokens alone."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    prompt = running.service.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    expected = running.text(prompt["input_ids"], 12)
    (choice,) = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0).choices
    assert choice.message.content == expected != ""


def test_a_stop_string_that_begins_with_the_space_is_cut(running: Running, client: openai.OpenAI, answer: str) -> None:
    given: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop": answer[:2]}
    (choice,) = client.completions.create(**given).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    asked = {"max_new_tokens": 12, "temperature": 0}
    submit = running.service.engine.submit
    assert submit(PROMPT, stop=answer[:2], **asked).result(WAIT).text == ""
    assert submit(PROMPT, **asked).result(WAIT).text == answer.removeprefix(" ")


@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_an_answer_is_one_of_the_choices(running: Running, client: openai.OpenAI, prompt: str) -> None:
    form: Any = {"structured_outputs": {"choice": CHOICES}}
    given: Any = {"model": "tiny", "temperature": 1, "n": 8, "max_tokens": 30, "seed": 0, "extra_body": form}
    found = {one.text for one in client.completions.create(**given, prompt=prompt or [1]).choices}
    messages: Any = [{"role": "user", "content": prompt}]
    found |= {one.message.content for one in client.chat.completions.create(**given, messages=messages).choices}
    ids = running.service.tokenizer(prompt)["input_ids"] or [1]
    request = running.service.engine.submit(ids, choice=CHOICES, max_new_tokens=30, temperature=1, n=8, seed=0)
    found |= {one.text for one in request.results(WAIT)}
    assert found and found <= set(CHOICES)
