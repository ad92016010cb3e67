"""DistillationCallback in an unmodified Trainer, against a reference gradient in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from hf_accel.distill.hf import DistillationCallback

from .classroom import (
    ALPHA,
    TEMPERATURE,
    arguments,
    distance,
    llama,
    reference,
    texts,
    update,
)  # fmt: skip


def distil(teacher: Any, **more: Any) -> DistillationCallback:
    return DistillationCallback(teacher, **{"alpha": ALPHA, "temperature": TEMPERATURE, **more})


@pytest.mark.parametrize("batch, accumulation", [(4, 1), (2, 2), (1, 4)])
def test_update_is_the_gradient_over_all_labels(tmp_path: Path, batch: int, accumulation: int) -> None:
    student, teacher = llama(1), llama(2, layers=2)
    expected = reference(student, teacher, texts(), shift=True)
    trainer = Trainer(
        student, arguments(tmp_path, batch, accumulation), train_dataset=texts(), callbacks=[distil(teacher)]
    )
    assert distance(update(trainer), expected) < 1e-5
