from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_accel.errors import UnsupportedError
from hf_accel.patching.calibration import windows
from hf_accel.patching.calibration.windows import windows_of

from ....parity.families import VOCABULARY, build

WORDS = {"<unknown>": 1, "<end>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>")


FORMS: list[tuple[Any, list[list[int]]]] = [
    (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    (torch.tensor([[5, 6], [7, 8]], dtype=torch.int32), [[5, 6], [7, 8]]),
    (torch.tensor([5, 6, 7]), [[5, 6, 7]]),
    ([5, 6, 7], [[5, 6, 7]]),
    ([[5, 6], [7]], [[5, 6, 7]]),
    ([torch.tensor([5, 6]), torch.tensor([[7]])], [[5, 6, 7]]),
    ({"input_ids": torch.tensor([[5, 6], [7, 8]])}, [[5, 6, 7, 8]]),
    ({"input_ids": [[5, 6], [7]]}, [[5, 6, 7]]),
    ([{"input_ids": [5, 6]}, {"input_ids": [7], "text": "w9"}], [[5, 6, 7]]),
    (iter([[5, 6], [7]]), [[5, 6, 7]]),
]


@pytest.mark.parametrize(("data", "expected"), FORMS)
def test_token_ids(data: Any, expected: list[list[int]], model: PreTrainedModel) -> None:
    found = windows_of(data, model)
    assert found.tolist() == expected and found.dtype == torch.int64


@pytest.mark.parametrize("data", ["w5 w6", ["w5 w6"], [{"text": "w5 w6", "more": 1}]], ids=str)
def test_texts_end_with_the_end_of_text(data: Any, model: PreTrainedModel, tokenizer: Any) -> None:
    assert windows_of((data, tokenizer), model).tolist() == [[5, 6, 2]]


def test_texts_are_joined_and_cut(model: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "LENGTH", 4)
    monkeypatch.setattr(windows, "MOST", 2)
    texts = ["w5 w6", "w7 w8 w9 w10 w11", "w12 w13 w14"]
    assert windows_of((texts[:2], tokenizer), model).tolist() == [[5, 6, 2, 7], [8, 9, 10, 11]]
    assert windows_of((texts, tokenizer), model).tolist() == [[5, 6, 2, 7], [8, 9, 10, 11]]
    assert windows_of((texts[1:] * 3, tokenizer), model).tolist() == [[7, 8, 9, 10], [9, 10, 11, 2]]
    monkeypatch.setattr(windows, "READ", 1)
    assert windows_of((texts[1:] * 3, tokenizer), model).tolist() == [[7, 8, 9, 10], [11, 2, 12, 13]]
    assert windows_of((texts[1:2], tokenizer), model).tolist() == [[7, 8, 9, 10]]


def test_the_tokenizer_of_the_checkpoint(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"not loaded from a checkpoint; pass calibration=\(texts, tokenizer\)"):
        windows_of(["w5"], model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"none can be loaded from .*; pass calibration=\(texts, tokenizer\)"):
        windows_of(["w5"], loaded)
    tokenizer.save_pretrained(tmp_path)
    assert windows_of(["w5"], loaded).tolist() == [[5, 2]]


BAD: list[tuple[Any, str]] = [
    (5, "calibration= is int; give token ids as a tensor"),
    (b"w5", "calibration= is bytes"),
    (torch.zeros(2, 3), "a tensor of torch.float32, and token ids are integers"),
    (torch.zeros(2, 3, 4, dtype=torch.int64), r"calibration= is Tensor of shape \[2, 3, 4\]"),
    ([[5.0]], r"calibration= holds list"),
    ([None], "calibration= holds NoneType"),
    ([{"label": 1, "tokens": 2}], "a dataset with the columns 'label', 'tokens'; give"),
    ([], "holds no tokens"),
    (torch.zeros(0, 5, dtype=torch.int64), "holds no tokens"),
    ([5, VOCABULARY], f"the token id {VOCABULARY}, and the model knows 0 to {VOCABULARY - 1}"),
    ([5, -100], "the token id -100, .* leave out padding"),
]


@pytest.mark.parametrize(("data", "text"), BAD, ids=str)
def test_what_is_no_data(data: Any, text: str, model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedError, match=text):
        windows_of(data, model)
