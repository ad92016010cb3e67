"""Calibration data by optimum's names, by the real optimum and datasets: a data set in memory is the download."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_accel
from hf_accel.patching.calibration.windows import windows_of

from ....parity.families import VOCABULARY, build

data = pytest.importorskip("optimum.gptq.data", reason="needs optimum")
datasets = pytest.importorskip("datasets")
Loads = Callable[[Any], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<unknown>": 1, "<end>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unknown>")


def rows(count: int, words: int) -> Any:
    drawn = random.Random(0)
    texts = [" ".join(f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(words)) for _ in range(count)]
    return datasets.Dataset.from_dict({"text": texts})


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """Let datasets.load_dataset, as optimum calls it, return rows or raise; what it was asked for is recorded."""

    def loads(answer: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load_dataset(*words: Any, **settings: Any) -> Any:
            asked.append(words)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(data, "load_dataset", load_dataset)
        return asked

    return loads


@pytest.mark.parametrize(
    ("name", "repository"), [("wikitext2", "Salesforce/wikitext"), ("c4", "allenai/c4"), ("c4-new", "allenai/c4")]
)
def test_the_windows_are_those_of_optimum(name: str, repository: str, loads: Loads, tokenizer: Any) -> None:
    asked = loads(rows(40, 700))
    model = build("llama")
    length = min(512, model.config.max_position_embeddings)
    found = windows_of((name, tokenizer), model)
    expected = [one["input_ids"][0].tolist() for one in data.get_dataset(name, tokenizer, nsamples=32, seqlen=length)]
    assert found.tolist() == expected and found.shape == (32, length) and found.dtype == torch.int64
    assert {words[0] for words in asked} == {repository}


def test_a_patch_by_name_is_the_patch_by_its_ids(loads: Loads, tokenizer: Any) -> None:
    loads(rows(40, 700))
    ids = windows_of(("wikitext2", tokenizer), build("llama"))
    packed = []
    for calibration in (("wikitext2", tokenizer), ids, ids.flip(0)[:1]):
        config = hf_accel.WeightConfig(4, group_size=32, method="gptq", calibration=calibration)
        model = hf_accel.patch(build("llama"), weights=config)
        packed.append(model.model.layers[0].mlp.down_proj.quantized.dequantize(torch.float32))
    assert torch.equal(packed[0], packed[1]) and not torch.equal(packed[0], packed[2])


def test_random_numbers_of_the_process_stay(loads: Loads, tokenizer: Any) -> None:
    """optimum seeds Python's, numpy's and torch's generators."""
    loads(rows(40, 700))
    model, drawn = build("llama"), []
    for calibrated in (False, True):
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        if calibrated:
            windows_of(("wikitext2", tokenizer), model)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_the_tokenizer_of_the_checkpoint_reads_it(loads: Loads, tokenizer: Any, tmp_path: Any) -> None:
    loads(rows(40, 700))
    build("llama").save_pretrained(tmp_path)
    model = type(build("llama")).from_pretrained(tmp_path)
    with pytest.raises(hf_accel.UnsupportedError, match="there is no tokenizer for them"):
        windows_of("wikitext2", model)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(windows_of("wikitext2", model), windows_of(("wikitext2", tokenizer), model))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            ConnectionError("Couldn't reach 'Salesforce/wikitext' on the Hub\nmore"),
            "on the Hub; it is downloaded once",
        ),
        (rows(1, 5), "ValueError: "),  # fewer tokens than a window has
    ],
)
def test_data_that_cannot_be_had(answer: Any, said: str, loads: Loads, tokenizer: Any) -> None:
    loads(answer)
    model = build("llama")
    before = {name: id(module) for name, module in model.named_modules()}
    config = hf_accel.WeightConfig(4, group_size=32, method="awq", calibration=("wikitext2", tokenizer))
    with pytest.raises(hf_accel.HfAccelError, match=r"try again with a network, or give .* calibration=texts") as got:
        hf_accel.patch(model, weights=config)
    assert said in str(got.value) and "\n" not in str(got.value)
    assert before == {name: id(module) for name, module in model.named_modules()}


def test_names_that_optimum_withdrew(tokenizer: Any) -> None:
    with pytest.raises(hf_accel.UnsupportedError, match="'ptb' was withdrawn by optimum; choose calibration='c4'"):
        windows_of(("ptb", tokenizer), build("llama"))


@pytest.mark.parametrize(("missing", "gone"), [("optimum", "optimum.gptq"), ("datasets", "datasets")])
def test_without_the_packages(missing: str, gone: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own file in optimum's folder of commands makes `import optimum` succeed: it does not count."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == gone else real(name, package)

    monkeypatch.setattr("hf_accel.patching.calibration.named_data.find_spec", find_spec)
    with pytest.raises(hf_accel.UnsupportedError, match=rf'needs {missing}, .* pip install "hf_accel\[optimum\]"'):
        windows_of(("c4", tokenizer), build("llama"))
