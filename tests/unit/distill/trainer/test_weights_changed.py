"""Our trainers say of a patched student that its weights have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_accel
from hf_accel import DistillationCallback, DistillationSettings, DistillationTrainer
from hf_accel.undo.state import state_of

from ..classroom import arguments, llama, texts


def by_callback(student: Any, args: Any) -> Trainer:
    return Trainer(student, args, train_dataset=texts(), callbacks=[DistillationCallback(llama(2))])


def by_trainer(student: Any, args: Any) -> Trainer:
    settings = DistillationSettings(alpha=0.5)
    return DistillationTrainer(
        student, teacher_model=llama(2), args=args, train_dataset=texts(), distillation=settings
    )


@pytest.mark.parametrize("make", [by_callback, by_trainer], ids=lambda make: make.__name__)
def test_after_each_step(tmp_path: Path, make: Any) -> None:
    student = hf_accel.patch(llama(1), weights=None)
    make(student, arguments(tmp_path, max_steps=3)).train()
    assert state_of(student).generation.watch.declared >= 3
