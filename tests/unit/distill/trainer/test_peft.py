"""Students with adapters, and the base below them as the teacher."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Trainer

from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.errors import UnsupportedError

from ..classroom import ALPHA, TEMPERATURE, arguments, distance, llama, reference, texts, update

pytestmark = pytest.mark.filterwarnings("ignore")  # of another package


def adapted(model: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    given = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM", **more}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **given))


def distilled(folder: Path, student: Any, teacher: Any, *cut: int, **more: Any) -> dict[str, torch.Tensor]:
    callback = DistillationCallback(teacher, alpha=ALPHA, temperature=TEMPERATURE, **more)
    return update(Trainer(student, arguments(folder, *cut), train_dataset=texts(), callbacks=[callback]))


def learnt(update: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in update.items() if "lora" in name}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("teacher", ["another", "base"])
def test_update_is_the_gradient_over_all_labels(tmp_path: Path, teacher: str, fused: bool) -> None:
    student = adapted(llama(1))
    asked = llama(1) if teacher == "base" else llama(2, layers=2)
    for parameter in student.parameters():
        parameter.requires_grad_(True)
    expected = learnt(reference(student, asked, texts(), shift=True))
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("lora" in name)
    found = distilled(tmp_path, student, "base" if teacher == "base" else asked, 2, 2, fused=fused)
    assert distance(learnt(found), expected) < 1e-5
    assert all(float(value.abs().max()) == 0 for name, value in found.items() if "lora" not in name)
    assert not student._forward_hooks and not student.get_base_model().model._forward_hooks


def test_what_was_frozen_stays_so(tmp_path: Path) -> None:
    """PEFT thaws an adapter when it is switched on again."""
    student = adapted(llama(1))
    frozen = [name for name, _ in student.named_parameters() if "lora_A" in name]
    for name, parameter in student.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    flags = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    found = distilled(tmp_path, student, "base")
    assert {name: parameter.requires_grad for name, parameter in student.named_parameters()} == flags
    assert all(float(found[name].abs().max()) == 0 for name in frozen)
    assert any(float(value.abs().max()) > 0 for value in found.values())


def test_the_base_that_is_being_trained_is_no_teacher(tmp_path: Path) -> None:
    base = llama(1)
    student = adapted(base)
    with pytest.raises(UnsupportedError, match="base"):
        distilled(tmp_path, student, base)


def test_an_adapted_head_is_not_fused(tmp_path: Path) -> None:
    student = adapted(llama(1), target_modules=["lm_head"])
    with pytest.raises(UnsupportedError, match="target_modules"):
        distilled(tmp_path, student, llama(2), fused=True)


def test_virtual_tokens_are_refused(tmp_path: Path) -> None:
    tuning = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    student = peft.get_peft_model(llama(1), tuning)
    with pytest.raises(UnsupportedError, match="prompt tuning"):
        distilled(tmp_path, student, llama(2))


def test_adapters_alone_are_saved(tmp_path: Path) -> None:
    student = adapted(llama(1))
    names = set(copy.copy(student.state_dict()))
    callback = DistillationCallback("base", alpha=ALPHA)
    args = arguments(tmp_path, save_strategy="steps", save_steps=1)
    Trainer(student, args, train_dataset=texts(), callbacks=[callback]).train()
    assert set(student.state_dict()) == names
    assert {path.suffix for path in (tmp_path / "checkpoint-1").glob("*.safetensors")} == {".safetensors"}
    assert not (tmp_path / "checkpoint-1" / "model.safetensors").exists()
