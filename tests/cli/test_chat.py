"""hf-accel chat: a conversation over stdin, and the options that it shares with generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel
from hf_accel.cli.chat import Conversation
from tests.serving.adapters import save_adapter

from .conftest import TINY, Run, one_line
from .test_commands import PROMPT, answer

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}# a:{% endif %}"
)
WORDS = ["--max-new-tokens", "6", "--weights", "none", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = TEMPLATE
    AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected(folder: Path, messages: list[dict[str, str]]) -> str:
    """By transformers' generate()."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_a_conversation_keeps_what_was_said(run: Run, folder: Path) -> None:
    said = ["import re", "def f(", "/clear", "class A"]
    result = run(
        "chat", folder, *WORDS, "--system", "Python", input="\n".join([*said[:2], "", *said[2:], "/exit", "x"])
    )
    assert (result.exit_code, result.stderr) == (0, "")
    system = [{"role": "system", "content": "Python"}]
    first = expected(folder, [*system, {"role": "user", "content": said[0]}])
    messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": first}]
    second = expected(folder, [*system, *messages, {"role": "user", "content": said[1]}])
    third = expected(folder, [*system, {"role": "user", "content": said[3]}])
    assert result.stdout == f"{first}\n{second}\n{third}\n"
    document = answer(run("chat", folder, *WORDS, "--json", input="import re\n"))
    assert [message["role"] for message in document["messages"]] == ["user", "assistant"]


def test_answers_of_an_adapter(run: Run, folder: Path, tmp_path: Path) -> None:
    path, messages = tmp_path / "lora", [{"role": "user", "content": "import re"}]
    save_adapter(path, folder, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with hf_accel.Engine(hf_accel.patch(model, weights=None), tokenizer=tokenizer) as engine:
        engine.load_adapter("lora", path)
        new = [*engine.submit(inputs["input_ids"][0].tolist(), adapter="lora", max_new_tokens=6, temperature=0.0)]
    result = run("chat", folder, *WORDS, "--adapter", path, input="import re\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tokenizer.decode(new, skip_special_tokens=True)}\n"
    assert result.stdout != f"{expected(folder, messages)}\n"
    assert "lora" in one_line(run("chat", folder, *WORDS, "--adapter", tmp_path / "no lora", input="x\n"))


def test_a_chat_that_is_full(run: Run, folder: Path) -> None:
    result = run("chat", folder, *WORDS, input="import re\n" + "x = 1 " * 2000 + "\ndef f(\n")
    assert result.exit_code == 0 and result.stdout.count("\n") >= 2
    assert "/clear begins a new one" in result.stderr


def test_an_answer_that_is_interrupted(folder: Path) -> None:
    """What was written stays, and the next message is answered."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with hf_accel.Engine(hf_accel.patch(model, weights=None), tokenizer=tokenizer) as engine:
        conversation = Conversation(engine, {"max_new_tokens": 40, "stop": [], "temperature": 0}, None)
        seen: list[str] = []

        def write(piece: str) -> None:
            seen.append(piece)
            if len(seen) == 3:
                raise KeyboardInterrupt

        conversation.answer("import re", write)
        assert conversation.messages[-1] == {"role": "assistant", "content": "".join(seen)} and len(seen) == 3
        conversation.answer("def f(", lambda piece: None)
        assert len(conversation.messages) == 4 and not engine.stats["running"]


def test_a_model_without_a_template(run: Run) -> None:
    assert "no chat template" in one_line(run("chat", TINY, input="x\n"))


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (
            ["--presence-penalty", "1.5", "--frequency-penalty", "0.5"],
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        ),
        (["--min-tokens", "12"], {"min_new_tokens": 12}),
        (["--temperature", "0", "--repetition-penalty", "1.3"], {"repetition_penalty": 1.3}),
    ],
    ids=["penalties", "least", "repetition"],
)
def test_generate_has_the_options_of_the_server(run: Run, words: list[str], settings: dict[str, Any]) -> None:
    document = answer(
        run("generate", TINY, "--prompt", PROMPT, "--max-new-tokens", "12", *WORDS[2:], *words, "--json")
    )
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(TINY, dtype="float32"), weights=None)
    with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
        wanted = engine.submit(tokenizer(PROMPT)["input_ids"], max_new_tokens=12, **settings).result().tokens
    assert document["tokens"] == wanted


def test_generate_stops_as_the_model_says(run: Run, folder: Path, tmp_path: Path) -> None:
    """generation_config.json may name texts, for which generate() needs the tokenizer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    plain = answer(run("generate", folder, "--prompt", PROMPT, *WORDS, "--json"))["text"]
    model.generation_config.stop_strings = [plain[3:5]]
    model.save_pretrained(tmp_path / "stops")
    tokenizer.save_pretrained(tmp_path / "stops")
    stopped = answer(run("generate", tmp_path / "stops", "--prompt", PROMPT, *WORDS, "--json"))["text"]
    assert plain.startswith(stopped) and stopped != plain and plain[3:5] in stopped
