"""Vectors of folders of sentence-transformers, by their files, and what of them is not known."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import hf_accel
from hf_accel.checkpoints.text_encoder import encodes, load_text_encoder
from hf_accel.errors import UnsupportedError
from tests.serving.encoders import NAMES, add_modules, save_decoder, save_encoder, save_ranker, write
from tests.serving.test_embeddings import TEXTS, lowest_cosine


def of_mode(states: Tensor, mode: str) -> Tensor:
    """The vector of one text of states [T, width], by the definition of its pooling."""
    places = torch.arange(1, len(states) + 1)[:, None]
    return {
        "cls": states[0], "lasttoken": states[-1], "max": states.amax(0), "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * places).sum(0) / places.sum(),
    }[mode]  # fmt: skip


@torch.no_grad()
def states_of(path: Path, text: str) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(path)
    states: Tensor = AutoModel.from_pretrained(path)(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return states


def found(path: Path, **keywords: Any) -> Tensor:
    encoder = load_text_encoder(str(path), **{"weights": None, **keywords})
    vectors = encoder.compute([encoder.row(text) for text in TEXTS])
    hf_accel.unpatch(encoder.model)
    return vectors


@pytest.mark.covering(1)
@pytest.mark.parametrize("save", [save_encoder, save_decoder])
@pytest.mark.parametrize("mode", NAMES)
def test_poolings(tmp_path: Path, save: Any, mode: str) -> None:
    save(tmp_path)
    add_modules(tmp_path, {"pooling_mode": mode}, normalize=False)
    wanted = torch.stack([of_mode(states_of(tmp_path, text), mode) for text in TEXTS])
    torch.testing.assert_close(found(tmp_path), wanted, rtol=1e-4, atol=1e-5)


def test_several_poolings_follow_each_other(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, normalize=False)
    states = [states_of(tmp_path, text) for text in TEXTS]
    wanted = torch.stack([torch.cat([of_mode(one, "cls"), of_mode(one, "mean")]) for one in states])
    torch.testing.assert_close(found(tmp_path), wanted, rtol=1e-4, atol=1e-5)


def test_an_encoder_alone_gets_the_mean(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    wanted = torch.stack([states_of(tmp_path, text).mean(0) for text in TEXTS])
    assert lowest_cosine(found(tmp_path), wanted) > 0.99999
    assert lowest_cosine(found(tmp_path, weights="int8"), wanted) > 0.9995


def test_a_quantized_folder(tmp_path: Path) -> None:
    """What `hf-accel quantize` writes keeps its bits; the files around the model are the user's to copy."""
    save_encoder(tmp_path / "float")
    model = hf_accel.load(str(tmp_path / "float"), weights="int8")
    for folder in (tmp_path / "int8", tmp_path / "float"):
        if folder.name == "int8":
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(tmp_path / "float").save_pretrained(folder)
        add_modules(folder, {"pooling_mode": "mean"}, dense=16)
    encoder = load_text_encoder(str(tmp_path / "int8"))
    assert "int8" in str(hf_accel.stats(encoder.model)) or hf_accel.is_patched(encoder.model)
    vectors = encoder.compute([encoder.row(text) for text in TEXTS])
    assert lowest_cosine(vectors, found(tmp_path / "float")) > 0.9995


@pytest.mark.parametrize("dense", [None, 16])
@pytest.mark.parametrize("include", [True, False])
def test_the_package_gives_the_same(tmp_path: Path, dense: int | None, include: bool) -> None:
    package = pytest.importorskip("sentence_transformers")
    save_encoder(tmp_path)
    prompts = {"prompts": {"query": "w1 w2 "}, "default_prompt_name": "query"}
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True, "include_prompt": include}, dense=dense, **prompts)
    wanted = torch.tensor(package.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS))
    assert lowest_cosine(found(tmp_path), wanted) > 0.99999


@pytest.mark.parametrize(
    "more", [{}, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}]
)
def test_the_package_scores_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    package = pytest.importorskip("sentence_transformers")
    save_ranker(tmp_path, num_labels=1, **more)
    pairs = list(pairwise(TEXTS))
    wanted = package.CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    encoder = load_text_encoder(str(tmp_path), weights=None)
    scores = encoder.compute([encoder.row(*pair) for pair in pairs])[:, 0].tolist()
    assert scores == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: write(path / "modules.json", [{"path": "", "type": "x.WordEmbeddings"}]), "WordEmbeddings"),
        (lambda path: write(path / "1_Pooling" / "config.json", {"pooling_mode": "sum"}), "'sum'"),
        (lambda path: write(path / "2_Dense" / "config.json", {"in_features": 64, "out_features": 16,
         "activation_function": "os.system"}), "os.system"),
        (lambda path: write(path / "2_Dense" / "config.json", {"in_features": 64, "out_features": 16,
         "use_residual": True}), "settings that are not known"),
    ],
    ids=["modules", "pooling", "activation", "residual"],
)  # fmt: skip
def test_what_is_not_known(tmp_path: Path, change: Any, message: str) -> None:
    save_encoder(tmp_path)
    add_modules(tmp_path, {"pooling_mode": "mean"}, dense=16)
    change(tmp_path)
    with pytest.raises(UnsupportedError, match=f"{message}.*|.*SentenceTransformer"):
        load_text_encoder(str(tmp_path))


def test_a_head_of_several_classes_gives_no_score(tmp_path: Path) -> None:
    save_ranker(tmp_path, num_labels=3)
    with pytest.raises(UnsupportedError, match="among 3 classes"):
        load_text_encoder(str(tmp_path))


def test_what_a_folder_is_for(tmp_path: Path) -> None:
    for name, save in {"encoder": save_encoder, "decoder": save_decoder, "ranker": save_ranker}.items():
        save(tmp_path / name)
    assert [encodes(str(tmp_path / name)) for name in ("encoder", "decoder", "ranker")] == [True, False, True]
    add_modules(tmp_path / "decoder", {"pooling_mode": "lasttoken"})
    assert encodes(str(tmp_path / "decoder"))
