"""ce_loss and kd_loss reach every reader of a Trainer's logs, with the right weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, Trainer, TrainerCallback

from hf_accel.distill.trainer.callback import DistillationCallback

from ..classroom import ALPHA, TEMPERATURE, arguments, bert, classified, llama, texts


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cut", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_the_parts_add_up_to_the_loss(tmp_path: Path, cut: tuple[int, int], fused: bool) -> None:
    args = arguments(tmp_path, *cut, max_steps=4, logging_steps=2, learning_rate=0.1)
    callbacks = [DistillationCallback(llama(2), alpha=ALPHA, temperature=TEMPERATURE, fused=fused)]
    trainer = Trainer(llama(1), args, train_dataset=texts((9, 3, 6, 1, 4, 4, 2, 8)), callbacks=callbacks)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["loss"] == pytest.approx(ALPHA * line["ce_loss"] + (1 - ALPHA) * line["kd_loss"], rel=1e-4)
    assert "ce_loss" not in trainer.state.log_history[-1]  # the summary


def test_ce_is_what_plain_training_logs(tmp_path: Path) -> None:
    """Between two evaluations too, which neither have it nor take it away."""
    more = {"max_steps": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    args = arguments(tmp_path, 1, 4, learning_rate=0.0, **more)
    data = texts((9, 3, 6, 1, 4, 4, 2, 8))
    callbacks = [DistillationCallback(llama(2), alpha=ALPHA)]
    trainer = Trainer(llama(1), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    plain = Trainer(llama(1), args, train_dataset=data, eval_dataset=data)
    for each in (trainer, plain):
        each.train()
    (mine,), (theirs,) = ([line for line in t.state.log_history if "loss" in line] for t in (trainer, plain))
    assert mine["ce_loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert sum("ce_loss" in line for line in trainer.state.log_history) == 1


def test_a_loss_that_ignores_the_count_is_logged_as_a_mean(tmp_path: Path) -> None:
    student, teacher = (bert(BertForSequenceClassification, seed, num_labels=3) for seed in (1, 2))
    args = arguments(tmp_path, 1, 4, learning_rate=0.0)
    trainer = Trainer(
        student, args, train_dataset=classified(), callbacks=[DistillationCallback(teacher, alpha=ALPHA)]
    )
    trainer.train()
    batch = {key: torch.stack([row[key] for row in classified()]) for key in classified()[0]}
    with torch.no_grad():
        assert trainer.state.log_history[0]["ce_loss"] == pytest.approx(float(student.eval()(**batch).loss), rel=1e-5)


def test_reporters_that_stand_after_it_and_printers_see_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    callbacks = [DistillationCallback(llama(2), alpha=ALPHA), Reporter()]
    trainer = Trainer(llama(1), arguments(tmp_path), train_dataset=texts(), callbacks=callbacks)
    trainer.train()
    assert seen[0]["kd_loss"] == trainer.state.log_history[0]["kd_loss"] > 0
    assert "kd_loss" in capsys.readouterr().out
