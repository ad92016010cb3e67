"""The mixin before TRL's trainer, and a LoRA student: where these packages are installed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hf_accel.distill.hf.config import DistillationSettings
from hf_accel.distill.hf.mixin import DistillationMixin

from .classroom import ALPHA, VOCABULARY, arguments, distance, llama, reference, texts, update
from .test_trainer import SETTINGS, trainer


def test_a_lora_student(tmp_path: Path) -> None:
    """Adapters learn as the reference says, from samples too, and a checkpoint holds them alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing PEFT warns of is not ours
        peft = pytest.importorskip("peft")
    student = peft.get_peft_model(llama(1), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    before, teacher = copy.deepcopy(student), llama(2, layers=2)
    found = update(trainer(tmp_path / "words", student, teacher))
    learnt = {name for name, parameter in before.named_parameters() if parameter.requires_grad}
    assert distance(
        {name: found[name] for name in learnt},
        {n: v for n, v in _lora_reference(before, teacher).items() if n in learnt},
    ) < 1e-5
    assert all(not found[name].any() for name in found.keys() - learnt)
    more: dict[str, Any] = {
        "lmbda": 1.0, "max_new_tokens": 4, "hidden_weight": 0.1, "attention_weight": 1.0, "save_strategy": "steps",
        "save_steps": 1,
    }  # fmt: skip
    made = trainer(tmp_path / "all", student, llama(2, layers=2, hidden_size=32), **more)
    made.train()
    assert made.state.log_history[0]["on_policy_tokens"] == 16
    with safe_open(tmp_path / "all" / "checkpoint-1" / "adapter_model.safetensors", "pt") as file:
        assert all("lora" in name for name in file.keys())  # noqa: SIM118


def _lora_reference(student: Any, teacher: Any) -> Any:
    for parameter in student.parameters():
        parameter.requires_grad_()
    return reference(student, teacher, texts(), shift=True)


def test_before_sft_trainer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl")
        datasets = pytest.importorskip("datasets")

        class KD(DistillationMixin, trl.SFTTrainer):
            pass

        tokenizer = _tokenizer()
        rows = [{"input_ids": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in texts()]
        plain = {k: v for k, v in arguments(tmp_path).to_dict().items() if k != "output_dir"}
        given = {**plain, "max_length": None, "packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        teacher = llama(2, layers=2)
        made = KD(
            llama(1),
            teacher_model=teacher,
            args=trl.SFTConfig(str(tmp_path), **given),
            distillation=DistillationSettings(**SETTINGS),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        found = update(made)
    assert distance(found, reference(llama(1), teacher, texts(), shift=True)) < 1e-5
    line = made.state.log_history[0]
    assert line["loss"] == pytest.approx(ALPHA * line["ce_loss"] + (1 - ALPHA) * line["kd_loss"], rel=1e-5)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w2"
    )
