"""DistillationCallback in an unmodified Trainer, against a reference gradient in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
)

from hf_accel.distill.trainer.callback import DistillationCallback

from ..classroom import (
    ALPHA,
    CHECKPOINTING,
    TEMPERATURE,
    arguments,
    bert,
    classified,
    distance,
    gpt2,
    llama,
    mixtral,
    reference,
    t5,
    texts,
    update,
)


def distil(teacher: Any, **more: Any) -> DistillationCallback:
    return DistillationCallback(teacher, **{"alpha": ALPHA, "temperature": TEMPERATURE, **more})


def trained(folder: Path, student: Any, teacher: Any, data: Any, *cut: int, **more: Any) -> dict[str, torch.Tensor]:
    callbacks = [distil(teacher)] if teacher is not None else []
    return update(Trainer(student, arguments(folder, *cut, **more), train_dataset=data, callbacks=callbacks))


CUTS = pytest.mark.parametrize("cut", [(4, 1), (2, 2), (1, 4)], ids=str)


@CUTS
def test_update_is_the_gradient_over_all_labels(tmp_path: Path, cut: tuple[int, int]) -> None:
    student, teacher = llama(1), llama(2, layers=2)
    expected = reference(student, teacher, texts(), shift=True)
    assert distance(trained(tmp_path, student, teacher, texts(), *cut), expected) < 1e-5


def test_a_last_window_that_is_not_full(tmp_path: Path) -> None:
    student, teacher, data = llama(1), llama(2, layers=2), texts((9, 3, 6, 1, 4))
    expected = reference(student, teacher, data[:4], shift=True)
    after = copy.deepcopy(student)
    for name, value in after.named_parameters():
        value.data += expected[name]
    second = reference(after, teacher, data[4:], shift=True)
    found = trained(tmp_path, student, teacher, data, 1, 4, max_steps=2)
    assert distance(found, {name: expected[name] + second[name] for name in expected}) < 1e-4


def test_a_loss_that_ignores_the_count_would_be_found(tmp_path: Path) -> None:
    """The negative control: the means of 4 micro-batches, summed, are 4 times a gradient of equal texts."""

    class Naive(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            return model(**inputs).loss

    equal = texts((6, 6, 6, 6))
    student = llama(1)
    expected = reference(student, llama(2), equal, shift=True, alpha=1.0)
    found = update(Naive(student, arguments(tmp_path, 1, 4), train_dataset=equal))
    assert distance(found, {name: 4 * value for name, value in expected.items()}) < 1e-5


@CUTS
def test_a_model_whose_loss_ignores_the_count_is_followed(tmp_path: Path, cut: tuple[int, int]) -> None:
    """BertForSequenceClassification is given num_items_in_batch and takes a plain mean: a step is its sum of means."""
    student, teacher = (bert(BertForSequenceClassification, seed, num_labels=3) for seed in (1, 2))
    data = classified()
    parts = [reference(student, teacher, data[i : i + cut[0]], shift=False) for i in range(0, 4, cut[0])]
    expected = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    assert distance(trained(tmp_path, student, teacher, data, *cut), expected) < 1e-5


@pytest.mark.parametrize(
    "make, shift",
    [
        (gpt2, True),
        (lambda seed: bert(BertForMaskedLM, seed), False),
        (lambda seed: bert(BertForTokenClassification, seed, num_labels=64), False),
        (t5, False),
    ],
    ids=["gpt2", "masked", "token classes", "t5"],
)
def test_labels_are_read_as_the_model_reads_them(tmp_path: Path, make: Callable[[int], Any], shift: bool) -> None:
    student, teacher = make(1), make(2)
    expected = reference(student, teacher, texts(), shift=shift)
    assert distance(trained(tmp_path, student, teacher, texts()), expected) < 1e-5


@CUTS
def test_alpha_1_is_plain_training_bit_for_bit(tmp_path: Path, cut: tuple[int, int]) -> None:
    asked: list[Any] = []
    teacher = llama(2)
    teacher.register_forward_pre_hook(lambda *_: asked.append(1))
    plain = trained(tmp_path, llama(1, attention_dropout=0.1), None, texts(), *cut, max_steps=3)
    student = llama(1, attention_dropout=0.1)
    callbacks = [distil(teacher, alpha=1.0)]
    found = update(
        Trainer(student, arguments(tmp_path, *cut, max_steps=3), train_dataset=texts(), callbacks=callbacks)
    )
    assert not asked
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_evaluation_stays_the_cross_entropy(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, learning_rate=0.0)
    trainer = Trainer(student, args, train_dataset=texts(), eval_dataset=texts(), callbacks=[distil(teacher)])
    trainer.train()
    logged = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    expected = Trainer(llama(1), args, eval_dataset=texts()).evaluate()["eval_loss"]
    assert logged == [expected]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_asks_once(tmp_path: Path, reentrant: bool) -> None:
    student, teacher = llama(1, layers=2), llama(2)
    asked: list[Any] = []
    teacher.register_forward_pre_hook(lambda *_: asked.append(1))
    expected = reference(student, teacher, texts(), shift=True)
    asked.clear()
    more = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
    assert distance(trained(tmp_path, student, teacher, texts(), 2, 2, **more), expected) < 1e-5
    assert len(asked) == 2


def test_bf16_autocast(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2)
    expected = reference(student, teacher, texts(), shift=True)
    assert distance(trained(tmp_path, student, teacher, texts(), 2, 2, bf16=True), expected) < 2e-2


def test_given_shifted_labels_are_not_shifted_again(tmp_path: Path) -> None:
    """As padding-free collators give them."""
    student, teacher = llama(1), llama(2)
    expected = reference(student, teacher, texts(), shift=True)
    data = texts()
    for row in data:
        row["shift_labels"] = torch.cat((row["labels"][1:], torch.tensor([-100])))
        row["labels"] = torch.full_like(row["labels"], 5)  # not to be read
    found = trained(tmp_path, student, teacher, data, 2, 2, remove_unused_columns=False)
    assert distance(found, expected) < 1e-5


def test_experts_stay_balanced_whole(tmp_path: Path) -> None:
    """The router's loss has no label in it: a teacher does not take its place."""
    student, teacher = mixtral(1), llama(2)
    data = texts()
    expected = reference(student, teacher, data, shift=True)
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    probe = copy.deepcopy(student)
    (probe.router_aux_loss_coef * probe(**batch).aux_loss).backward()
    whole = {
        name: expected[name] - (0 if value.grad is None else value.grad) for name, value in probe.named_parameters()
    }
    assert distance(trained(tmp_path, student, teacher, data), whole) < 1e-5
    assert distance(expected, whole) > 1e-4


def test_a_micro_batch_without_labels_teaches_nothing(tmp_path: Path) -> None:
    """Its own plain mean, of no label, is not a number, and would be logged."""
    student, teacher = (bert(BertForTokenClassification, seed, num_labels=64) for seed in (1, 2))
    data = texts((0, 0, 3, 5))
    expected = reference(student, teacher, data[2:], shift=False)
    trainer = Trainer(student, arguments(tmp_path, 2, 2), train_dataset=data, callbacks=[distil(teacher)])
    assert distance(update(trainer), expected) < 1e-5
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(ALPHA * line["ce_loss"] + (1 - ALPHA) * line["kd_loss"], rel=1e-4)


def test_resuming_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    more = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}
    data, teacher = texts((9, 3, 6, 1, 4, 5, 2, 7)), llama(2)
    student = llama(1, attention_dropout=0.1)
    whole = Trainer(student, arguments(tmp_path, 2, 1, **more), train_dataset=data, callbacks=[distil(teacher)])
    whole.train()
    again = llama(3, attention_dropout=0.1)
    resumed = Trainer(again, arguments(tmp_path, 2, 1, **more), train_dataset=data, callbacks=[distil(teacher)])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(
        torch.equal(a, b) for a, b in zip(student.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_the_teacher_is_never_saved(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2, layers=3)
    names, modules = set(student.state_dict()), len(list(student.modules()))
    seen: list[set[str]] = []

    class Look(DistillationCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(set(kwargs["model"].state_dict()))
            super().on_step_end(args, state, control, **kwargs)

    callbacks = [Look(teacher, alpha=ALPHA)]
    args = arguments(tmp_path, save_strategy="steps", save_steps=1)
    Trainer(student, args, train_dataset=texts(), callbacks=callbacks).train()
    assert seen == [names] and len(list(student.modules())) == modules
    assert set(type(student).from_pretrained(tmp_path / "checkpoint-1").state_dict()) == names
    size = sum(value.numel() * 4 for value in student.parameters())
    assert (tmp_path / "checkpoint-1" / "model.safetensors").stat().st_size < 1.5 * size + 4096
