"""The model card of a checkpoint of ours: it says how to load it, and a user's own is not written to."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import transformers
import yaml
from transformers import PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import model_card

from ...parity.families import build

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def encoder() -> PreTrainedModel:
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


MODELS = {"decoder": lambda: build("qwen2"), "encoder": encoder}
each_model = pytest.mark.parametrize("kind", MODELS)


@each_model
def test_it_begins_with_the_import(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    original = type(model)
    hf_accel.patch(model, weights="int8")
    assert type(model).__name__ == original.__name__
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        folder = tmp_path / str(id(same))
        same.save_pretrained(folder)
        _, settings, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n")
        assert yaml.safe_load(settings) == {"library_name": "transformers", "tags": ["hf_accel"]}
        assert text.strip().startswith("Run `import hf_accel`") and len(text.strip().splitlines()) == 1
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    loaded = original.from_pretrained(folder)  # as the card says: hf_accel is imported
    assert hf_accel.is_patched(loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").exists()
    hf_accel.unpatch(model)
    assert type(model) is original


def test_the_package_says_in_one_place_what_it_is_called() -> None:
    from hf_accel.checkpoints.registration import OUR_NAME

    assert OUR_NAME == model_card.METHOD


@each_model
def test_a_users_card_stays(kind: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    hf_accel.patch(MODELS[kind](), weights="int8").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_what_loads_without_us_gets_none(tmp_path: Path) -> None:
    model = hf_accel.patch(build("qwen2"), weights="int8")
    hf_accel.save_compressed(model, tmp_path / "compressed")
    model.save_pretrained(tmp_path / "rank", is_main_process=False)
    hf_accel.patch(build("qwen2"), weights=None).save_pretrained(tmp_path / "float")
    hf_accel.unpatch(model).save_pretrained(tmp_path / "stock")
    assert (tmp_path / "compressed" / "config.json").exists() and (tmp_path / "float" / "config.json").exists()
    assert list(tmp_path.rglob("README.md")) == []
