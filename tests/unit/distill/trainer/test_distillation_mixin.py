"""The mixin before TRL's trainer, and a LoRA student: where these packages are installed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import trl
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_accel.distill.trainer.distillation_trainer import DistillationMixin
from hf_accel.distill.trainer.settings import DistillationSettings

from ..classroom import ALPHA, VOCABULARY, arguments, distance, llama, reference, texts, update
from .test_trainer import SETTINGS, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages


def test_a_lora_student(tmp_path: Path) -> None:
    """Adapters learn as the reference says, from samples too, and a checkpoint holds them alone."""
    student = peft.get_peft_model(llama(1), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    before, teacher = copy.deepcopy(student), llama(2, layers=2)
    found = update(trainer(tmp_path / "words", student, teacher))
    learnt = {name for name, parameter in before.named_parameters() if parameter.requires_grad}
    assert (
        distance(
            {name: found[name] for name in learnt},
            {n: v for n, v in _lora_reference(before, teacher).items() if n in learnt},
        )
        < 1e-5
    )
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


def sft(folder: Path, **settings: Any) -> Any:
    class KD(DistillationMixin, trl.SFTTrainer):
        pass

    names = ("max_steps", "learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "logging_steps",
             "report_to", "save_strategy", "disable_tqdm", "use_cpu",
             "train_sampling_strategy", "dataloader_pin_memory")  # fmt: skip
    plain = arguments(folder).to_dict()
    args = trl.SFTConfig(
        str(folder), **{name: plain[name] for name in names}, per_device_train_batch_size=2, bf16=False,
        gradient_accumulation_steps=2, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    columns = {name: [row[name].tolist() for row in texts()] for name in ("input_ids", "labels")}
    table = datasets.table.InMemoryTable.from_pydict(columns)
    return KD(
        llama(1),
        teacher_model=llama(2, layers=2),
        args=args,
        distillation=DistillationSettings(**SETTINGS, **settings),
        train_dataset=datasets.Dataset(table, fingerprint="texts"),  # hashing it would pickle pyarrow
        processing_class=tokenizer(),
    )


def tokenizer() -> PreTrainedTokenizerFast:
    model = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    named = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w0"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **named)


def test_before_sft_trainer(tmp_path: Path) -> None:
    made = sft(tmp_path)
    assert distance(update(made), reference(llama(1), llama(2, layers=2), texts(), shift=True)) < 1e-5
    line = made.state.log_history[0]
    assert line["loss"] == pytest.approx(ALPHA * line["ce_loss"] + (1 - ALPHA) * line["kd_loss"], rel=1e-4)


def test_sft_trainer_learns_what_the_plain_one_does_inside(tmp_path: Path) -> None:
    settings = {"hidden_weight": 1e-3, "attention_weight": 2.0}
    plain = trainer(tmp_path, teacher=llama(2, layers=2), batch=2, accumulation=2, **settings)
    assert distance(update(sft(tmp_path, **settings)), update(plain)) < 1e-5


def test_sft_trainer_learns_from_samples(tmp_path: Path) -> None:
    settings = {"lmbda": 1.0, "max_new_tokens": 4, "sampling_top_k": 1}
    plain = trainer(tmp_path, teacher=llama(2, layers=2), batch=2, accumulation=2, **settings)
    made = sft(tmp_path, **settings)
    assert distance(update(made), update(plain)) < 1e-5
    assert made.state.log_history[0]["on_policy_tokens"] == plain.state.log_history[0]["on_policy_tokens"] > 0
