from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from hf_accel.distill.trainer.settings import DistillationConfig, DistillationSettings
from hf_accel.errors import UnsupportedError

GIVEN: dict[str, Any] = {
    "alpha": 0.3, "temperature": 1.5, "loss": "jsd", "beta": 0.1, "hidden_weight": 2.0, "hidden_loss": "cosine",
    "hidden_layer_map": ["1:2", "2:4"], "attention_weight": 0.1, "relation_heads": 4, "lmbda": 0.5, "eval_kd": True,
    "teacher_init_kwargs": {"dtype": "float32"}, "prompt_tokens": 8,
}  # fmt: skip


def test_a_dict_and_json_make_the_same_config(tmp_path: Path) -> None:
    config = DistillationConfig(str(tmp_path), **GIVEN)
    assert DistillationConfig(**config.to_dict()).to_dict() == config.to_dict()
    (read,) = HfArgumentParser(DistillationConfig).parse_dict(json.loads(config.to_json_string()))
    assert read.to_dict() == config.to_dict()
    assert {name: config.to_dict()[name] for name in GIVEN} == GIVEN


def test_the_command_line_makes_the_same_config(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path)]
    for name, value in GIVEN.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
        words += [f"--{name}", *values]
    (read,) = HfArgumentParser(DistillationConfig).parse_args_into_dataclasses(words)
    assert {name: getattr(read, name) for name in GIVEN} == GIVEN
    assert read.layer_map("hidden_layer_map") == {1: 2, 2: 4}


@pytest.mark.parametrize(
    "given",
    [
        {"alpha": 1.5}, {"temperature": 0.0}, {"loss": "l2"}, {"beta": 1.0}, {"hidden_weight": -1.0},
        {"hidden_loss": "l1"}, {"hidden_layer_map": ["1-2"]}, {"hidden_layer_map": ["1:2", "1:3"]},
        {"hidden_layer_map": []}, {"attention_layer_map": ["0:1"]}, {"relation_heads": 0}, {"lmbda": 1.1},
        {"max_new_tokens": 0}, {"sampling_temperature": 0.0}, {"sampling_top_k": -1}, {"sampling_top_p": 0.0},
        {"prompt_tokens": 0}, {"hidden_weight": float("nan")},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], tmp_path: Path) -> None:
    (name,) = given
    with pytest.raises(UnsupportedError, match=name):
        DistillationConfig(str(tmp_path), **given)


def test_settings_mix_into_another_config(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Both(DistillationSettings, Seq2SeqTrainingArguments):
        pass

    config = Both(str(tmp_path), alpha=0.2, predict_with_generate=True, teacher_init_kwargs='{"dtype": "float32"}')
    assert config.alpha == 0.2 and config.predict_with_generate
    assert config.teacher_init_kwargs == {"dtype": "float32"}
    assert "accelerator_config" in Both._VALID_DICT_FIELDS
