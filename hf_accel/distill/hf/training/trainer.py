"""The Trainer that distils."""

from __future__ import annotations

from transformers import Trainer

from .mixin import DistillationMixin


class DistillationTrainer(DistillationMixin, Trainer):
    """transformers' Trainer, whose model learns from a teacher too: DistillationMixin says what it does.

    DistillationTrainer(student, teacher_model=teacher, args=DistillationConfig("out", alpha=0.5), train_dataset=...)
    """
