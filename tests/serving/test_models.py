"""Several models in one server: each answers as it does alone, and none needs another one to live."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import BertModel, LlamaConfig, LlamaForCausalLM, WhisperForConditionalGeneration, WhisperProcessor

from hf_accel.checkpoints.fitting import process_bytes
from hf_accel.errors import UnsupportedError
from hf_accel.estimate import estimate
from hf_accel.serving.hf.loaded_models import load_models
from hf_accel.serving.limits import Limits
from hf_accel.undo.state import state_of

from .adapters import save_adapter
from .encoders import save_encoder, tokenizer
from .running import SHIPPED, Running, serving, until
from .whisper import RATE, save_whisper, tone, wav

PROMPT = "import re\n"
LONG: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1500, "stream": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that write text, an encoder and a Whisper, by their names."""
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    config = LlamaConfig.from_pretrained(SHIPPED, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(place / "other")
    for file in SHIPPED.glob("tokenizer*"):
        shutil.copy(file, place / "other")
    save_encoder(place / "embed")
    save_whisper(place / "hear")
    for index, name in enumerate(("one", "two")):
        save_adapter(place / "adapters" / name, SHIPPED, seed=index)
    save_adapter(place / "adapters" / "small", place / "other", seed=3)
    return {"code": SHIPPED, "other": place / "other", "embed": place / "embed", "hear": place / "hear"}


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path]) -> Path:
    return folders["other"].parent / "adapters"


@pytest.fixture(scope="module")
def running(folders: dict[str, Path], adapters: Path) -> Iterator[Running]:
    with serving(
        folders, limits=Limits(adapter_folder=adapters, max_body_bytes=2**19), deterministic=False
    ) as running:
        yield running


def completion(client: openai.OpenAI, model: str, tokens: int = 12) -> str:
    found = client.completions.create(model=model, prompt=PROMPT, max_tokens=tokens, temperature=0)
    assert found.model == model
    return found.choices[0].text


# -- which one answers ---------------------------------------------------------------------------------


@torch.no_grad()
def test_each_answers_as_alone_while_all_are_asked(
    running: Running, client: openai.OpenAI, folders: dict[str, Path]
) -> None:
    wanted: dict[str, Any] = {}
    for name in ("code", "other"):
        service: Any = running.models.named(name)
        ids = torch.tensor([service.tokenizer(PROMPT)["input_ids"]])
        model = LlamaForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        wanted[name] = service.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    encoder = BertModel.from_pretrained(folders["embed"])
    wanted["embed"] = encoder(**tokenizer()("w1 w7 w9", return_tensors="pt")).last_hidden_state[0].mean(0)
    whisper, processor = (
        kind.from_pretrained(folders["hear"]) for kind in (WhisperForConditionalGeneration, WhisperProcessor)
    )
    sound = tone(2.0, 800.0)
    features = processor(sound.mul(32767).round().div(32768).numpy(), sampling_rate=RATE, return_tensors="pt")
    wanted["hear"] = processor.tokenizer.decode(
        whisper.generate(**features, language="en", task="transcribe")[0], skip_special_tokens=True
    ).strip()

    def ask(name: str) -> Any:
        if name == "embed":
            found = client.embeddings.create(model=name, input="w1 w7 w9", encoding_format="float")
            return torch.tensor(found.data[0].embedding)
        if name == "hear":
            file = ("a.wav", wav(sound))
            return client.audio.transcriptions.create(model=name, file=file, language="en").text
        return completion(client, name, 40)

    asked = list(wanted) * 6
    with ThreadPoolExecutor(8) as pool:
        for name, found in zip(asked, pool.map(ask, asked), strict=True):
            if name == "embed":
                torch.testing.assert_close(found, wanted[name], atol=1e-5, rtol=1e-5)
            else:
                assert found == wanted[name], name
    assert wanted["code"] != wanted["other"]


def test_all_are_listed(running: Running, client: openai.OpenAI) -> None:
    assert [(one.id, one.max_model_len) for one in client.models.list()] == [  # type: ignore[attr-defined]
        ("code", 2048), ("other", 2048), ("embed", 40), ("hear", 64)
    ]  # fmt: skip
    assert client.models.retrieve("embed").id == "embed"
    with pytest.raises(
        openai.NotFoundError, match="'nobody' is not served here, but 'code', 'other', 'embed', 'hear'"
    ):
        client.models.retrieve("nobody")
    with httpx.Client(base_url=running.root) as http:
        plans = {name: http.get("/plan", params={"model": name}).json() for name in ("code", "embed")}
        assert [plan["model"] for plan in plans.values()] == ["code", "embed"]
        assert (
            plans["embed"]["models"] == ["code", "other", "embed", "hear"] and "Bert" in plans["embed"]["description"]
        )
        assert http.get("/plan").json()["model"] == "code"
        assert "preemptions" in http.get("/stats").json()
        assert "preemptions" not in http.get("/stats", params={"model": "embed"}).json()
        assert http.get("/stats", params={"model": "nobody"}).status_code == 404
        paths = http.get("/openapi.json").json()["paths"]
        assert {"/v1/completions", "/v1/embeddings", "/v1/audio/transcriptions"} < paths.keys()


TEXT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {**TEXT, "model": "nobody"}, 404, "'nobody' is not served here, but 'code', 'other'"),
        ("/v1/completions", {**TEXT, "model": "embed"}, 404, "'embed' does not answer here, but 'code', 'other' are"),
        ("/v1/completions", TEXT, 400, "names no model, and 'code', 'other' are served here"),
        ("/v1/completions", {**TEXT, "model": 5}, 400, "model"),
        ("/v1/embeddings", {"input": "w1", "model": "code"}, 404, "does not answer here, but 'embed' is"),
        ("/v1/embeddings", {"input": "w1"}, 200, ""),
        ("/tokenize", {"prompt": "w1"}, 400, "'code', 'other', 'embed', 'hear' are served here"),
        ("/tokenize", {"prompt": "w1 w2", "model": "embed"}, 200, ""),
        ("/v1/embeddings", {"input": "w1" * 2**19}, 413, "larger than 524288 bytes"),
    ],
)
def test_the_model_of_a_request(running: Running, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = httpx.post(running.root + path, json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.text
    if status == 404:
        assert answer.json()["error"] | {"message": ""} == {
            "message": "", "type": "not_found_error", "param": "model", "code": 404
        }  # fmt: skip


def test_a_sound_may_be_larger_than_other_bodies(folders: dict[str, Path]) -> None:
    with serving({name: folders[name] for name in ("embed", "hear")}, deterministic=False) as running:
        sound = {"file": ("a.wav", wav(tone(1.0, rate=48_000), 48_000, channels=12))}  # 1.15 MB
        answer = httpx.post(f"{running.url}/audio/transcriptions", files=sound, data={"language": "en"}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert httpx.post(f"{running.url}/embeddings", content=b" " * 1_150_000).status_code == 413


def test_adapters_belong_to_a_model(running: Running, client: openai.OpenAI) -> None:
    load, unload = (f"{running.root}/v1/{verb}_lora_adapter" for verb in ("load", "unload"))
    texts = {name: completion(client, name) for name in ("code", "other")}
    for body, status, words in [
        ({"lora_name": "a", "lora_path": "one", "model": "code"}, 200, "a"),
        ({"lora_name": "b", "lora_path": "small", "model": "other"}, 200, "b"),
        ({"lora_name": "c", "lora_path": "two"}, 400, "'code', 'other' are served here"),
        ({"lora_name": "c", "lora_path": "two", "model": "embed"}, 404, "does not answer here"),
        ({"lora_name": "c", "lora_path": "small", "model": "code"}, 400, ""),  # of other shapes
        ({"lora_name": "a", "lora_path": "small", "model": "other"}, 400, "which a model or an adapter has here"),
        ({"lora_name": "embed", "lora_path": "one", "model": "code"}, 400, "which a model or an adapter has here"),
    ]:
        answer = httpx.post(load, json=body)
        assert answer.status_code == status and words in answer.text, answer.text
    parents = {one.id: getattr(one, "parent", None) for one in client.models.list()}
    expected = {"code": None, "a": "code", "other": None, "b": "other", "embed": None, "hear": None}
    assert list(parents.items()) == list(expected.items())
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip("ab", pool.map(lambda name: completion(client, name), "ab"), strict=True))
    assert found["a"] != texts["code"] and found["b"] != texts["other"]
    assert {name: completion(client, name) for name in texts} == texts
    for name in "ab":
        assert httpx.post(unload, json={"lora_name": name}).status_code == 200
    for name in ("a", "code"):
        assert httpx.post(unload, json={"lora_name": name}).status_code == 404


def samples(running: Running) -> dict[tuple[str, str], float]:
    """The samples with a model alone as their label, by the metric and the model."""
    page = httpx.get(f"{running.root}/metrics").text
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "each kind of numbers is said once"
    found = [one for family in text_string_to_metric_families(page) for one in family.samples]
    return {(one.name, one.labels["model"]): one.value for one in found if one.labels.keys() == {"model"}}


def test_numbers_of_each(running: Running, client: openai.OpenAI) -> None:
    before = samples(running)
    completion(client, "other", 7)
    client.embeddings.create(model="embed", input="w1 w2")
    until(running.is_idle)
    after = samples(running)
    changed = {
        key: value - before[key] for key, value in after.items() if value != before[key] and "_sum" not in key[0]
    }
    assert {model for _, model in changed} == {"other", "embed"}
    assert changed["hf_accel_generated_tokens_total", "other"] == 7
    assert changed["hf_accel_prompt_tokens_total", "embed"] == 4
    assert (
        changed["hf_accel_request_seconds_count", "other"] == changed["hf_accel_request_seconds_count", "embed"] == 1
    )
    assert {after["hf_accel_model_live", name] for name in ("code", "other", "embed", "hear")} == {1}


# -- their end -----------------------------------------------------------------------------------------


def test_one_that_breaks_takes_no_other_with_it(folders: dict[str, Path]) -> None:
    given = {name: folders[name] for name in ("code", "other", "embed")}
    with serving(given) as running, running.client() as client:
        wanted = completion(client, "other")
        streams = {name: client.completions.create(model=name, **LONG) for name in ("code", "other")}
        for stream in streams.values():
            next(iter(stream))

        def broken() -> None:
            raise SystemError("the engine's thread is broken")

        running.service.engine.loop._commands.put(broken)
        with pytest.raises(openai.APIError, match="the engine has ended"):
            list(streams["code"])
        with pytest.raises(openai.InternalServerError, match="must be restarted"):
            completion(client, "code")
        assert completion(client, "other") == wanted
        assert len(client.embeddings.create(model="embed", input="w1").data) == 1
        with httpx.Client(base_url=running.root) as http:
            for path in ("/health", "/ready"):
                answer = http.get(path)
                assert answer.status_code == 200 and answer.json()["reasons"].keys() == {"code"}, path
            live = {model: value for (name, model), value in samples(running).items() if name == "hf_accel_model_live"}
            assert live == {"code": 0, "other": 1, "embed": 1}
            assert [one.id for one in client.models.list()] == ["code", "other", "embed"]
            streams["other"].close()
            for name in ("other", "embed"):
                running.models.named(name).engine.close(wait=True)  # type: ignore[union-attr]
            assert [http.get(path).status_code for path in ("/health", "/ready")] == [503, 503]


def test_all_are_drained(folders: dict[str, Path]) -> None:
    with serving({name: folders[name] for name in ("code", "embed")}) as running, running.client() as client:
        whole = completion(client, "code", 400)
        stream = client.completions.create(model="code", **{**LONG, "max_tokens": 400})
        text = next(iter(stream)).choices[0].text
        running.server.handle_exit(15, None)
        until(lambda: httpx.get(f"{running.root}/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.embeddings.create(model="embed", input="w1")
        assert text + "".join(chunk.choices[0].text for chunk in stream) == whole


# -- one memory ----------------------------------------------------------------------------------------


def caches(folders: dict[str, Path], **given: Any) -> dict[str, Any]:
    """The settings of the caches of models that are loaded together."""
    models = load_models({name: str(path) for name, path in folders.items()}, **{"dtype": torch.float32, **given})
    try:
        return {one.name: state_of(one.engine.model).generation.cache for one in models.services}
    finally:
        models.close()


def test_tokens_are_shared_out(folders: dict[str, Path]) -> None:
    found = caches(folders, cache={"max_tokens": 515, "block_size": 8})
    assert [found[name].max_tokens for name in ("code", "other", "hear")] == [257, 257, None]
    assert {found[name].block_size for name in ("code", "other", "hear")} == {8} and found["embed"] is None
    with pytest.raises(UnsupportedError, match="max_tokens=1 are too few for the caches of 2 models"):
        caches(folders, cache={"max_tokens": 1})


def test_a_memory_is_shared_out_by_what_each_needs(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too little for all as they are, each gets as much less as the others."""
    parts: dict[str, float] = {}

    def load_to_start(path: str, *, fit: int, name: str, **_: Any) -> Any:
        parts[name] = fit - process_bytes()
        return lambda share: SimpleNamespace(name=name, metrics=None)

    with monkeypatch.context() as patched:
        patched.setattr("hf_accel.serving.hf.loaded_models.load_to_start", load_to_start)
        load_models({name: str(path) for name, path in folders.items()}, fit=process_bytes() + 200 * 10**6)
    assert sum(parts.values()) == pytest.approx(200e6, rel=0.02)
    needs = {name: estimate(folders[name], bandwidth=1.0).total_bytes for name in folders}
    assert sorted(needs, key=needs.__getitem__) == sorted(parts, key=parts.__getitem__)
    given = {"first": SHIPPED, "second": SHIPPED}
    found = caches(given, fit=process_bytes() + 120 * 10**6)
    tokens = {name: cache.max_tokens for name, cache in found.items()}
    assert all(512 <= count < 2048 for count in tokens.values()), tokens
    with pytest.raises(UnsupportedError, match="less than this process holds"):
        caches(given, fit="1MB")
    with pytest.raises(UnsupportedError, match="is too small for LlamaForCausalLM"):
        caches(given, fit=process_bytes() + 2**19)


def test_two_models_of_one_name(folders: dict[str, Path]) -> None:
    with (
        serving(folders["embed"]) as running,
        pytest.raises(UnsupportedError, match="two models have the name 'tiny'"),
    ):
        type(running.models)([running.service, running.service])
