"""Vectors and scores over HTTP are the model's own, whatever else is asked at the same time."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

from hf_accel.serving.limits import Limits

from .encoders import WORDS, add_modules, save_encoder, save_ranker
from .running import Running, serving, until

TEXTS = [" ".join(f"w{(7 * n + k) % WORDS}" for k in range(length)) for n, length in enumerate((1, 9, 3, 25, 2, 14))]
PROMPTS = {"prompts": {"query": "w1 w2 ", "document": ""}, "default_prompt_name": "query"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    save_encoder(path)
    add_modules(path, {"pooling_mode_mean_tokens": True, "include_prompt": False}, dense=24, **PROMPTS)
    return path


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with serving(folder, limits=Limits(max_running=4)) as running:
        yield running


@torch.no_grad()
def expected(folder: Path, text: str, prompt: str = "w1 w2 ") -> Tensor:
    """By transformers' model, one text at a time, and the formulas of sentence-transformers."""
    from safetensors.torch import load_file

    tokenizer = AutoTokenizer.from_pretrained(folder)
    states = BertModel.from_pretrained(folder)(**tokenizer(prompt + text, return_tensors="pt")).last_hidden_state[0]
    skipped = len(tokenizer(prompt)["input_ids"]) - 1 if prompt else 0
    dense = load_file(folder / "2_Dense" / "model.safetensors")
    found = torch.tanh(dense["linear.weight"] @ states[skipped:].mean(0) + dense["linear.bias"])
    return found / found.norm()


def lowest_cosine(found: Tensor, wanted: Tensor) -> float:
    return float(torch.cosine_similarity(found, wanted, dim=-1).min())


# -- vectors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["float", "base64", None], ids=str)
def test_vectors(running: Running, client: openai.OpenAI, folder: Path, encoding: Any) -> None:
    given = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=TEXTS, **given)
    wanted = torch.stack([expected(folder, text) for text in TEXTS])
    found = vectors(answer)
    if encoding == "base64":
        unpacked = [struct.unpack(f"<{24}f", base64.b64decode(one.embedding)) for one in answer.data]  # type: ignore[arg-type]
        found = torch.tensor(unpacked)
    assert found.shape == (len(TEXTS), 24) and lowest_cosine(found, wanted) > 0.99999
    assert torch.allclose(found, wanted, atol=1e-5)
    tokens = sum(len(running.service.tokenizer(f"w1 w2 {text}")["input_ids"]) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))


def vectors(answer: Any) -> Tensor:
    first = answer.data[0].embedding
    return torch.zeros(0) if isinstance(first, str) else torch.tensor([one.embedding for one in answer.data])


def test_one_text_tokens_and_prompts(running: Running, client: openai.OpenAI, folder: Path) -> None:
    (one,) = vectors(client.embeddings.create(model="tiny", input=TEXTS[1]))
    assert lowest_cosine(one, expected(folder, TEXTS[1])) > 0.99999
    ids = running.service.tokenizer(TEXTS[1])["input_ids"]
    plain = expected(folder, TEXTS[1], prompt="")
    for given in (ids, [ids]):
        assert lowest_cosine(vectors(client.embeddings.create(model="tiny", input=given))[0], plain) > 0.99999
    named = client.embeddings.create(model="tiny", input=TEXTS[1], extra_body={"prompt_name": "document"})
    assert lowest_cosine(vectors(named)[0], plain) > 0.99999


def test_fewer_dimensions(client: openai.OpenAI, folder: Path) -> None:
    found = vectors(client.embeddings.create(model="tiny", input=TEXTS, dimensions=8))
    wanted = torch.stack([expected(folder, text)[:8] for text in TEXTS])
    assert found.shape == (len(TEXTS), 8) and lowest_cosine(found, wanted) > 0.99999
    assert torch.allclose(found.norm(dim=-1), torch.ones(len(TEXTS)), atol=1e-5)


def test_a_text_is_cut_only_if_that_is_asked_for(client: openai.OpenAI, folder: Path) -> None:
    text = " ".join(["w3"] * 50)
    with pytest.raises(openai.BadRequestError, match="the model takes 32; send truncate_prompt_tokens=-1"):
        client.embeddings.create(model="tiny", input=text)
    for cut, words in ((-1, 28), (10, 6)):  # beside the prompt and the two special tokens
        found = client.embeddings.create(model="tiny", input=text, extra_body={"truncate_prompt_tokens": cut})
        assert lowest_cosine(vectors(found)[0], expected(folder, " ".join(["w3"] * words))) > 0.99999
        assert found.usage.prompt_tokens == (32 if cut == -1 else cut)


def test_requests_at_once_share_passes(running: Running, client: openai.OpenAI, folder: Path) -> None:
    wanted = {text: expected(folder, text) for text in TEXTS}
    before = running.stats

    def ask(number: int) -> float:
        texts = TEXTS[number % 3 :: 3] * (1 + number % 4)
        found = vectors(client.embeddings.create(model="tiny", input=texts))
        return lowest_cosine(found, torch.stack([wanted[text] for text in texts]))

    with ThreadPoolExecutor(12) as pool:
        assert min(pool.map(ask, range(24))) > 0.99999
    after = running.stats
    assert after["finished"] - before["finished"] == 24 and after["failed"] == 0
    rows = 2 * 6 * sum(range(1, 5))
    assert after["passes"] - before["passes"] < rows / 2, "rows of several texts go together"


BAD: list[dict[str, Any]] = [
    {}, {"input": ""}, {"input": []}, {"input": [""]}, {"input": [[]]}, {"input": 5}, {"input": [10**6]},
    {"input": [-1]}, {"input": ["a", 1]}, {"input": "\ud800"}, {"input": "w1", "dimensions": 0},
    {"input": "w1", "dimensions": 25}, {"input": "w1", "encoding_format": "hex"}, {"input": "w1", "model": "other"},
    {"input": "w1", "no_such_field": 1}, {"input": "w1", "prompt_name": "other"}, {"input": ["w1"] * 2049},
    {"input": "w1", "truncate_prompt_tokens": -2}, {"input": "w1", "truncate_prompt_tokens": 33},
    {"input": "w1", "temperature": 1},
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_what_is_refused(running: Running, body: dict[str, Any]) -> None:
    before = running.stats["requests"]
    content = json.dumps(body).encode()
    answer = httpx.post(f"{running.url}/embeddings", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"], answer.text
    assert running.stats["requests"] == before or body.get("dimensions") == 25


@pytest.mark.parametrize(
    ("given", "words"),
    [([], "at least 1 item"), (["w1"] * 2049, "at most 2048 items"), (["w1", ""], "input.1: string should have at")],
    ids=["none", "too many", "an empty one"],
)
def test_what_is_said_of_several_texts(running: Running, given: list[str], words: str) -> None:
    answer = httpx.post(f"{running.url}/embeddings", json={"input": given})
    assert words in answer.json()["error"]["message"]


def test_the_other_routes_of_an_encoder(running: Running) -> None:
    with httpx.Client(base_url=running.root) as client:
        assert client.get("/ready").status_code == client.get("/plan").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 32
        assert "hf_accel_passes_total" in client.get("/metrics").text and "passes" in client.get("/stats").json()
        assert client.post("/tokenize", json={"prompt": "w1 w2"}).json()["tokens"] == [2, 6, 7, 3]
        assert client.post("/v1/chat/completions", json={}).status_code == 404
        paths = client.get("/openapi.json").json()["paths"]
        asked = {"query": "w1", "documents": ["w2", "w1"]}
        answers = [client.post(path, json=asked).json()["results"] for path in ("/v1/rerank", "/rerank", "/v2/rerank")]
        assert answers[0][0]["index"] == 1 and answers == [answers[0]] * 3
        assert client.post("/score", json={"text_1": "w1", "text_2": "w1"}).json()["data"][0]["score"] > 0.99
        assert {"/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize"} < paths.keys()
        assert "/v1/completions" not in paths


def test_a_client_that_leaves(running: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.url}/embeddings", json={"input": TEXTS * 300}, timeout=0.05)
    until(running.is_idle)
    assert running.stats["cancelled"] + running.stats["finished"] == running.stats["requests"]


# -- scores --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Running]]:
    path = tmp_path_factory.mktemp("ranker")
    save_ranker(path, num_labels=1)
    with serving(path) as running:
        yield path, running


@torch.no_grad()
def score(path: Path, first: str, second: str) -> float:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    return float(model(**tokenizer(first, second, return_tensors="pt")).logits.sigmoid())


def test_scores(ranker: tuple[Path, Running]) -> None:
    path, running = ranker
    for first, second in ((TEXTS[0], TEXTS[1:4]), (TEXTS[:2], TEXTS[2:4]), (TEXTS[0], TEXTS[1])):
        answer = httpx.post(f"{running.url}/score", json={"text_1": first, "text_2": second}).json()
        seconds = [second] if isinstance(second, str) else second
        firsts = [first] * len(seconds) if isinstance(first, str) else first
        wanted = [score(path, a, b) for a, b in zip(firsts, seconds, strict=True)]
        assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_documents_are_sorted(ranker: tuple[Path, Running]) -> None:
    path, running = ranker
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[4]]}
    answer = httpx.post(f"{running.url}/rerank", json=body).json()
    wanted = [score(path, TEXTS[0], text) for text in (TEXTS[1], TEXTS[2], TEXTS[4])]
    assert [one["index"] for one in answer["results"]] == sorted(range(3), key=lambda place: -wanted[place])
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(sorted(wanted)[::-1], abs=1e-5)
    first = answer["results"][0]
    assert first["document"] == {"text": (TEXTS[1], TEXTS[2], TEXTS[4])[first["index"]]}
    best = httpx.post(f"{running.url}/rerank", json={**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": first["index"], "relevance_score": first["relevance_score"]}]


def test_an_embedder_scores_by_cosine(running: Running, folder: Path) -> None:
    answer = httpx.post(f"{running.url}/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:3]}).json()
    first = expected(folder, TEXTS[0])
    wanted = [float(first @ expected(folder, text)) for text in TEXTS[1:3]]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("score", {"text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]}),
        ("score", {"text_1": "w1"}),
        ("score", {"text_1": "w1", "text_2": []}),
        ("rerank", {"query": "w1", "documents": []}),
        ("rerank", {"query": "w1", "documents": [{"title": "x"}]}),
        ("rerank", {"query": "w1 " * 50, "documents": ["w1"]}),
        ("embeddings", {"input": "w1"}),
    ],
)
def test_what_a_ranker_refuses(ranker: tuple[Path, Running], path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{ranker[1].url}/{path}", json=body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
