"""hf-accel embed: vectors of texts, and what has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.serving.encoders import add_modules, save_decoder, save_encoder, save_ranker

from .conftest import Run, one_line
from .test_commands import answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_encoder(path / "embedder")
    add_modules(path / "embedder", {"pooling_mode": "cls"}, prompts={"query": "w9 "})
    save_ranker(path / "ranker", num_labels=1)
    save_decoder(path / "decoder")
    return path


def test_vectors(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("w1 w2\n\nw3\n")
    words = ["embed", folder / "embedder", "w4 w5 w6", "--file", tmp_path / "texts.txt", "--weights", "none"]
    document = answer(run(*words, "--json"))
    vectors = torch.tensor(document["vectors"])
    assert vectors.shape == (3, document["dimensions"]) == (3, 64) and document["tokens"] == [5, 4, 3]
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    lines = run(*words).stdout.splitlines()
    torch.testing.assert_close(torch.tensor([json.loads(line) for line in lines]), vectors)
    int8 = torch.tensor(answer(run(*words[:-2], "--json"))["vectors"])
    assert float(torch.cosine_similarity(int8, vectors).min()) > 0.9995
    named = answer(run("embed", folder / "embedder", "w1", "--prompt-name", "query", "--json"))
    assert named["tokens"] == [4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["embedder"], "no text is given"),
        (["ranker", "w1"], "scores two texts"),
        (["decoder", "w1"], "writes text"),
        (["embedder", "w1", "--prompt-name", "no"], "it has query"),
        (["embedder", "w1 " * 40], "add --truncate"),
        (["embedder", "w1", "--file", "no.txt"], "cannot be read"),
    ],
)
def test_what_has_no_vectors(run: Run, folder: Path, words: list[str], said: str) -> None:
    assert said in one_line(run("embed", folder / words[0], *words[1:]))


def test_a_text_is_cut_if_that_is_asked_for(run: Run, folder: Path) -> None:
    assert answer(run("embed", folder / "embedder", "w1 " * 40, "--truncate", "--json"))["tokens"] == [32]
