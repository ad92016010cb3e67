"""Adapters that clients ask for by the name of a model, loaded with the server and while it serves."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

import hf_accel
from hf_accel.cli.output import BadInputError
from hf_accel.cli.serve import named_path, of_model
from hf_accel.serving.limits import Limits

from .adapters import save_adapter
from .running import SHIPPED, serving

PROMPT = "import re\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the shipped model."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        save_adapter(folder / name, SHIPPED, seed=seed)
    return folder


def completion(client: openai.OpenAI, model: str) -> tuple[str, str]:
    found = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    return found.model, found.choices[0].text


def test_adapters_are_models(folder: Path) -> None:
    with serving(limits=Limits(adapter_folder=folder)) as running, running.client() as client:
        running.models.load_adapter("first", folder / "one", model="tiny")
        with pytest.raises(hf_accel.UnsupportedError, match="cannot have the name 'tiny', which a model"):
            running.models.load_adapter("tiny", folder / "one", model="tiny")
        assert [model.id for model in client.models.list()] == ["tiny", "first"]
        assert client.models.retrieve("first").id == "first"
        base, first = completion(client, "tiny"), completion(client, "first")
        assert (base[0], first[0]) == ("tiny", "first") and base[1] != first[1]
        chunks = list(
            client.completions.create(model="first", prompt=PROMPT, max_tokens=12, temperature=0, stream=True)
        )
        assert "".join(each.choices[0].text for each in chunks) == first[1] and chunks[0].model == "first"
        said = client.chat.completions.create(model="first", messages=[{"role": "user", "content": "x"}], max_tokens=2)
        assert said.model == "first"
        load, unload = (f"{running.root}/v1/{verb}_lora_adapter" for verb in ("load", "unload"))
        assert httpx.post(load, json={"lora_name": "second", "lora_path": "two"}).status_code == 200
        second = completion(client, "second")
        assert second[1] not in (base[1], first[1])
        assert completion(client, "tiny") == base and completion(client, "first") == first
        for body, status in [
            ({"lora_name": "second", "lora_path": "two"}, 400),
            ({"lora_name": "third", "lora_path": "none"}, 400),
            ({"lora_name": "third", "lora_path": "../../etc"}, 403),
            ({"lora_name": "third", "lora_path": "/etc"}, 403),
            ({"lora_name": "third"}, 400),
        ]:
            answer = httpx.post(load, json=body)
            assert answer.status_code == status, body
            assert str(folder) not in answer.text  # where the server keeps its adapters is not for clients
        assert httpx.post(unload, json={"lora_name": "second"}).status_code == 200
        assert httpx.post(unload, json={"lora_name": "second"}).status_code == 404
        with pytest.raises(openai.NotFoundError, match="'second' is not served here, but 'tiny', 'first' are"):
            completion(client, "second")


def test_clients_load_none_unasked(folder: Path) -> None:
    with serving() as running:
        for verb in ("load", "unload"):
            body = {"lora_name": "one", **({"lora_path": str(folder / "one")} if verb == "load" else {})}
            found = httpx.post(f"{running.root}/v1/{verb}_lora_adapter", json=body)
            assert found.status_code == 403 and "--adapter-folder" in found.json()["error"]["message"]


def test_names_on_the_command_line() -> None:
    assert named_path("support=loras/a=b", "--adapter") == ("support", "loras/a=b")
    for wrong in ("support", "=loras", "support="):
        with pytest.raises(BadInputError, match=r"--adapter '.*' is not NAME=PATH"):
            named_path(wrong, "--adapter")


def test_the_model_of_an_adapter() -> None:
    assert of_model(("support", "loras"), ["chat"]) == ("chat", "support", "loras")
    assert of_model(("a:support", "loras"), ["a", "a:b"]) == ("a", "support", "loras")
    assert of_model(("a:b:support", "loras"), ["a", "a:b"]) == ("a:b", "support", "loras")
    assert of_model(("x:support", "loras"), ["chat"]) == ("chat", "x:support", "loras")
    with pytest.raises(BadInputError, match=r"give --adapter MODEL:x:y=loras, where MODEL is one of a, b"):
        of_model(("x:y", "loras"), ["a", "b"])
    with pytest.raises(BadInputError, match="for models that write text"):
        of_model(("x", "loras"), [])
