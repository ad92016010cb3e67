"""However a training ends, nothing of distillation is left on the model or the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.errors import UnsupportedError

from ..classroom import ALPHA, arguments, llama, texts


class Fault(Exception):
    pass


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Fault


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class Failing(TrainerCallback):
    """A callback whose event fails."""

    def __init__(self, event: str) -> None:
        setattr(self, event, fail)


def the_teacher(trainer: Trainer, teacher: Any) -> None:
    teacher.model.norm.forward = fail


def the_data(trainer: Trainer, teacher: Any) -> None:
    trainer.data_collator = fail


def the_student(trainer: Trainer, teacher: Any) -> None:
    trainer.model.lm_head.forward = fail


def an_interrupt_in_forward(trainer: Trainer, teacher: Any) -> None:
    trainer.model.lm_head.forward = interrupt


def the_backward_pass(trainer: Trainer, teacher: Any) -> None:
    trainer.model.lm_head.weight.register_hook(interrupt)


def the_optimizer(trainer: Trainer, teacher: Any) -> None:
    trainer.create_optimizer()
    trainer.optimizer.step = fail  # type: ignore[union-attr]


def event(name: str) -> Any:
    def fault(trainer: Trainer, teacher: Any) -> None:
        trainer.add_callback(Failing(name))

    fault.__name__ = name
    return fault


FAULTS = [the_teacher, the_data, the_student, an_interrupt_in_forward, the_backward_pass, the_optimizer]
# An event that fails after ours and before the forward pass is not among them: then nothing says that training ended.
EVENTS = ("train_begin", "epoch_begin", "pre_optimizer_step", "optimizer_step", "step_end", "log", "train_end")
CASES = [(fault, False) for fault in (*FAULTS, *(event(f"on_{name}") for name in EVENTS))]
CASES += [(the_teacher, True), (the_student, True)]


@pytest.mark.parametrize("fault, fused", CASES, ids=[f"{fault.__name__}{', fused' * fused}" for fault, fused in CASES])
def test_a_training_that_fails_teaches_nothing_later(tmp_path: Path, fault: Any, fused: bool) -> None:
    """The model's next pass is its own, and after it the model has no hook."""
    student, teacher = llama(1), llama(2)
    args = arguments(tmp_path, 2, 2, max_steps=2)
    callback = DistillationCallback(teacher, alpha=ALPHA, fused=fused)
    trainer = Trainer(student, args, train_dataset=texts(), callbacks=[callback])
    fault(trainer, teacher)
    with pytest.raises((Fault, KeyboardInterrupt)):
        trainer.train()
    for module in (student.lm_head, teacher.model.norm):
        vars(module).pop("forward", None)
    student.lm_head.weight._backward_hooks = None
    batch = {key: value[None] for key, value in texts()[0].items()}
    own = student.eval()(**batch).loss
    assert student.train()(**batch).loss == own
    assert not hooks(student) and not hooks(teacher)
    trainer.remove_callback(callback)
    trainer.data_collator, trainer.optimizer, trainer.lr_scheduler = torch.utils.data.default_collate, None, None
    trainer.remove_callback(Failing)
    trainer.train()  # without a teacher: it is not asked any more
    assert "ce_loss" not in trainer.state.log_history[0]


@pytest.mark.parametrize("fault", [the_student, an_interrupt_in_forward, the_backward_pass])
def test_another_callback_teaches_after_a_training_that_failed(tmp_path: Path, fault: Any) -> None:
    student, teacher = llama(1), llama(2)
    trainers = [
        Trainer(student, arguments(tmp_path), train_dataset=texts(), callbacks=[DistillationCallback(teacher)])
        for _ in range(2)
    ]
    fault(trainers[0], teacher)
    with pytest.raises((Fault, KeyboardInterrupt)):
        trainers[0].train()
    vars(student.lm_head).pop("forward", None)
    student.lm_head.weight._backward_hooks = None
    trainers[1].train()
    assert trainers[1].state.log_history[0]["kd_loss"] > 0 and not hooks(student)


def test_nothing_is_left_after_training_and_it_can_go_on(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2)
    callback = DistillationCallback(teacher, alpha=ALPHA)
    trainer = Trainer(student, arguments(tmp_path), train_dataset=texts(), callbacks=[callback])
    for _ in range(2):
        trainer.train()
        assert not hooks(student)
        assert "kd_loss" in trainer.state.log_history[0]


def test_a_callback_that_is_added_later_is_the_same(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2)
    trainer = Trainer(student, arguments(tmp_path), train_dataset=texts())
    trainer.add_callback(DistillationCallback(teacher, alpha=ALPHA))
    trainer.train()
    assert "kd_loss" in trainer.state.log_history[0] and not hooks(student)


def test_during_evaluation_there_is_no_hook(tmp_path: Path) -> None:
    student, seen = llama(1), []

    class Look(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            seen.append(hooks(student))

    callbacks = [DistillationCallback(llama(2), alpha=ALPHA), Look()]
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1)
    Trainer(student, args, train_dataset=texts(), eval_dataset=texts(), callbacks=callbacks).train()
    assert seen == [0]


def test_a_training_step_of_the_users_own_is_called(tmp_path: Path) -> None:
    trainer = Trainer(
        llama(1), arguments(tmp_path), train_dataset=texts(), callbacks=[DistillationCallback(llama(2), alpha=ALPHA)]
    )
    asked = []
    inner = trainer.training_step

    def step(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return inner(*args, **kwargs)

    trainer.training_step = step  # type: ignore[method-assign]
    trainer.train()
    assert asked and trainer.state.log_history[0]["kd_loss"] > 0


def test_another_loop_that_sends_the_events_is_followed() -> None:
    """Like SetFit's: no Trainer, the same events."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    student, teacher = llama(1), llama(2)
    callback = DistillationCallback(teacher, alpha=0.0)
    args, state, control = TrainingArguments(report_to=[], use_cpu=True), TrainerState(), TrainerControl()
    batch = {key: torch.stack([row[key] for row in texts()]) for key in texts()[0]}
    own = student.train()(**batch).loss.detach()
    callback.on_train_begin(args, state, control, model=student)
    assert student(**batch).loss == own
    callback.on_step_begin(args, state, control, model=student)
    assert student(**batch).loss != own
    student.eval()
    assert student(**batch).loss == own
    callback.on_step_end(args, state, control, model=student)
    logs = {"loss": 1.0}
    callback.on_log(args, state, control, logs=logs)
    assert logs["ce_loss"] == pytest.approx(float(own)) and logs["kd_loss"] > 0
    assert not hooks(student)


def test_two_teachers_are_refused(tmp_path: Path) -> None:
    callbacks = [DistillationCallback(llama(2)), DistillationCallback(llama(3))]
    trainer = Trainer(llama(1), arguments(tmp_path), train_dataset=texts(), callbacks=callbacks)
    with pytest.raises(UnsupportedError, match="two"):
        trainer.train()
