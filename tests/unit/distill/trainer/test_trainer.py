"""DistillationTrainer against plain torch, the callback, and Trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    BertForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.distill.trainer.distillation_trainer import DistillationMixin, DistillationTrainer
from hf_accel.distill.trainer.settings import DistillationConfig, DistillationSettings
from hf_accel.errors import UnsupportedError

from ..classroom import ALPHA, TEMPERATURE, arguments, bert, classified, distance, llama, reference, t5, texts, update

SETTINGS: dict[str, Any] = {"alpha": ALPHA, "temperature": TEMPERATURE}


def config(folder: Path, batch: int = 4, accumulation: int = 1, **more: Any) -> DistillationConfig:
    plain = arguments(folder, batch, accumulation).to_dict()
    given = {**plain, "logging_steps": 1, **SETTINGS, **more}
    return DistillationConfig(**given)


def trainer(folder: Path, student: Any = None, teacher: Any = None, **more: Any) -> DistillationTrainer:
    keywords = {name: more.pop(name) for name in ("eval_dataset", "callbacks", "optimizers") if name in more}
    data = more.pop("train_dataset", None) or texts()
    return DistillationTrainer(
        student or llama(1),
        teacher_model=teacher or llama(2, layers=2),
        args=config(folder, **more),
        train_dataset=data,
        **keywords,
    )


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_an_update_is_that_of_the_reference_and_of_the_callback(batch: int, accumulation: int, tmp_path: Path) -> None:
    teacher = llama(2, layers=2)
    found = update(trainer(tmp_path, teacher=teacher, batch=batch, accumulation=accumulation))
    assert distance(found, reference(llama(1), teacher, texts(), shift=True)) < 1e-5
    called = Trainer(
        llama(1),
        arguments(tmp_path, batch, accumulation),
        train_dataset=texts(),
        callbacks=[DistillationCallback(teacher, **SETTINGS)],
    )
    for name, value in update(called).items():
        assert torch.equal(found[name], value), name


def test_without_logits_the_update_is_the_same(tmp_path: Path) -> None:
    more: dict[str, Any] = {"batch": 2, "accumulation": 2, "hidden_weight": 1e-3, "attention_weight": 2.0}
    plain, fused = (
        update(trainer(tmp_path, llama(1, layers=2), llama(2, layers=2), fused=fused, **more))
        for fused in (False, True)
    )
    assert distance(fused, plain) < 1e-5


def test_a_classifier_learns_as_the_reference(tmp_path: Path) -> None:
    models = [bert(BertForSequenceClassification, seed, num_labels=3) for seed in (1, 2)]
    data = classified()
    found = update(trainer(tmp_path, models[0], models[1], train_dataset=data))
    student = bert(BertForSequenceClassification, 1, num_labels=3)
    assert distance(found, reference(student, models[1], data, shift=False)) < 1e-5


def test_alpha_one_is_plain_training_bit_for_bit(tmp_path: Path) -> None:
    class Deaf(type(llama(2))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the teacher was asked")

    deaf = Deaf(llama(2).config)
    ours = trainer(tmp_path, llama(1, attention_dropout=0.3), deaf, alpha=1.0, max_steps=3, optim="adamw_torch")
    ours.train()
    plain_arguments = arguments(tmp_path, max_steps=3, optim="adamw_torch")
    plain = Trainer(llama(1, attention_dropout=0.3), plain_arguments, train_dataset=texts())
    plain.train()
    for (name, value), (_, other) in zip(ours.model.named_parameters(), plain.model.named_parameters(), strict=True):
        assert torch.equal(value, other), name
    losses = [[line.get("loss") for line in x.state.log_history] for x in (ours, plain)]
    assert losses[0] == losses[1]


def test_the_parts_of_the_loss_are_logged(tmp_path: Path) -> None:
    ours = trainer(
        tmp_path, llama(1, layers=2), batch=1, accumulation=2, max_steps=4, logging_steps=2, hidden_weight=0.5,
        attention_weight=3.0, learning_rate=1e-3,
    )  # fmt: skip
    ours.train()
    lines = [line for line in ours.state.log_history if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        words = ALPHA * line["ce_loss"] + (1 - ALPHA) * line["kd_loss"]
        assert line["loss"] == pytest.approx(words + 0.5 * line["hidden_loss"] + 3 * line["attention_loss"], rel=1e-5)
        assert line["hidden_loss"] > 0 and line["attention_loss"] > 0


@torch.no_grad()
def expected_evaluation(student: Any, teacher: Any) -> tuple[float, float]:
    """Mean T^2 * KL and mean sum of min(p, q) over all labels of texts()."""
    kl, accepted, count = 0.0, 0.0, 0
    for row in texts():
        keep = row["labels"][1:] != -100
        p, q = (model.eval()(row["input_ids"][None]).logits[0, :-1][keep] for model in (student, teacher))
        s, t = ((x / TEMPERATURE).softmax(-1) for x in (p, q))
        kl += TEMPERATURE**2 * float((t * (t.log() - s.log())).sum())
        accepted += float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
        count += int(keep.sum())
    return kl / count, accepted / count


def test_evaluation_reports_the_teacher_beside_the_plain_loss(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2, layers=2)
    ours = trainer(tmp_path, student, teacher, eval_dataset=texts())
    plain = Trainer(student, arguments(tmp_path), eval_dataset=texts())
    metrics = ours.evaluate()
    assert metrics["eval_loss"] == plain.evaluate()["eval_loss"]
    kl, accepted = expected_evaluation(student, teacher)
    assert metrics["eval_kd_loss"] == pytest.approx(kl, rel=1e-4)
    assert metrics["eval_acceptance"] == pytest.approx(accepted, rel=1e-5)
    assert ours.state.log_history[-1]["eval_acceptance"] == metrics["eval_acceptance"]
    assert "eval_kd_loss" not in trainer(tmp_path, student, teacher, eval_dataset=texts(), eval_kd=False).evaluate()


class Failing(TrainerCallback):
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    on_optimizer_step = on_substep_end


def hooks(model: Any) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_post_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_behind(fails: bool, tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2, layers=2, hidden_size=32).train()
    names, flags = list(student.state_dict()), [p.requires_grad for p in teacher.parameters()]
    callbacks = [Failing()] if fails else []
    ours = trainer(tmp_path, student, teacher, callbacks=callbacks, hidden_weight=1.0, attention_weight=1.0)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            ours.train()
    else:
        ours.train()
    assert hooks(student) == hooks(teacher) == 0
    assert list(student.state_dict()) == names and [n for n, _ in student.named_parameters()] == names[: len(names)]
    assert teacher.training and [p.requires_grad for p in teacher.parameters()] == flags
    assert all(p.grad is None for p in teacher.parameters())


def keys(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


EVERYTHING: dict[str, Any] = {
    "max_steps": 6, "batch": 2, "accumulation": 2, "optim": "adamw_torch", "learning_rate": 0.01, "hidden_weight": 1.0,
    "attention_weight": 1.0, "lmbda": 0.5, "max_new_tokens": 6, "save_strategy": "steps", "save_steps": 3,
    "train_sampling_strategy": "random", "max_grad_norm": 0.5,
}  # fmt: skip


def test_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    """With dropout, learned projections and on-policy steps on both sides of the checkpoint."""

    def new(folder: str) -> DistillationTrainer:
        student, teacher = llama(1, layers=2, attention_dropout=0.2), llama(2, layers=2, hidden_size=32)
        return trainer(
            tmp_path / folder, student, teacher, train_dataset=texts([9, 3, 6, 1, 5, 7, 2, 4]), **EVERYTHING
        )

    whole = new("whole")
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert keys(checkpoint / "model.safetensors") == keys(tmp_path / "whole" / "checkpoint-6" / "model.safetensors")
    student_keys = {name for name in whole.model.state_dict() if name != "lm_head.weight"}
    assert keys(checkpoint / "model.safetensors") - {"lm_head.weight"} == student_keys
    assert keys(checkpoint / "distillation_projections.safetensors") == {"weights.1", "weights.2"}
    resumed = new("resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for (name, value), (_, other) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(value, other), name
    after = [
        [{k: v for k, v in line.items() if "runtime" not in k} for line in x.state.log_history if "loss" in line][3:]
        for x in (whole, resumed)
    ]
    assert after[0] == after[1]
    sampled = [line["step"] for line in whole.state.log_history if "on_policy_steps" in line]
    assert sampled and min(sampled) <= 3 < max(sampled) and len(sampled) < 6


def test_a_checkpoint_without_projections_is_refused(tmp_path: Path) -> None:
    keywords = {**EVERYTHING, "lmbda": 0.0, "max_steps": 3}
    trainer(tmp_path, llama(1), llama(2, hidden_size=32), **keywords).train()
    checkpoint = tmp_path / "checkpoint-3"
    other = trainer(
        tmp_path, llama(1), llama(2, hidden_size=64, num_attention_heads=2), **{**keywords, "max_steps": 4}
    )
    with pytest.raises(UnsupportedError, match="same teacher"):
        other.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "distillation_projections.safetensors").unlink()
    same = trainer(tmp_path, llama(1), llama(2, hidden_size=32), **{**keywords, "max_steps": 4})
    with pytest.raises(UnsupportedError, match="has no distillation_projections"):
        same.train(resume_from_checkpoint=str(checkpoint))


def test_a_teacher_is_loaded_by_its_path(tmp_path: Path) -> None:
    teacher = llama(2, layers=2)
    teacher.save_pretrained(tmp_path / "teacher")
    ours = DistillationTrainer(
        llama(1),
        teacher_model=str(tmp_path / "teacher"),
        args=config(tmp_path, teacher_init_kwargs={"dtype": "float32"}),
        train_dataset=texts(),
    )
    assert distance(update(ours), reference(llama(1), teacher, texts(), shift=True)) < 1e-5


def test_what_cannot_be_had_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="give a DistillationConfig"):
        DistillationTrainer(llama(1), teacher_model=llama(2), args=arguments(tmp_path))
    with pytest.raises(UnsupportedError, match="teacher_init_kwargs"):
        trainer(tmp_path, teacher_init_kwargs={"dtype": "float32"})
    with pytest.raises(UnsupportedError, match="take it out"):
        trainer(tmp_path, callbacks=[DistillationCallback(llama(2))]).train()
    with pytest.raises(UnsupportedError, match="label_smoothing_factor"):
        trainer(tmp_path, label_smoothing_factor=0.1).train()
    student = llama(1)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    given: dict[str, Any] = {"hidden_weight": 1.0, "optimizers": (optimizer, None)}
    with pytest.raises(UnsupportedError, match="not in this optimizer"):
        trainer(tmp_path, student, llama(2, hidden_size=32), **given).train()
    assert hooks(student) == 0
    with pytest.raises(UnsupportedError, match="not one stack"):
        trainer(tmp_path, t5(1), t5(2), hidden_weight=1.0).train()


def test_training_goes_on_after_training(tmp_path: Path) -> None:
    """A second train() of one trainer keeps the projections that its optimizer knows."""
    ours = trainer(tmp_path, llama(1), llama(2, hidden_size=32), hidden_weight=1.0)
    ours.train()
    first = {name: value.clone() for name, value in ours._transfer.projections.named_parameters()}
    ours.train()
    assert all(not torch.equal(first[n], value) for n, value in ours._transfer.projections.named_parameters())


def test_before_seq2seq_trainer(tmp_path: Path) -> None:
    class KD(DistillationMixin, Seq2SeqTrainer):
        pass

    given = {**arguments(tmp_path).to_dict(), "predict_with_generate": True}
    student, teacher = t5(1), t5(2)
    ours = KD(
        student,
        teacher_model=teacher,
        args=Seq2SeqTrainingArguments(**given),
        distillation=DistillationSettings(**SETTINGS),
        train_dataset=texts(),
        eval_dataset=texts(),
    )
    found = update(ours)
    assert distance(found, reference(t5(1), teacher, texts(), shift=False)) < 1e-5
    assert math.isfinite(ours.evaluate(max_new_tokens=4)["eval_kd_loss"])
