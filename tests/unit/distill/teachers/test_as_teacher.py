"""What a user gives as a teacher: under one name, as a model, by its path, or as a folder of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import hf_accel
from hf_accel import HfAccelError, HfAccelWarning, UnsupportedError
from hf_accel.distill.teachers.teacher_cache import TeacherCache
from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.distill.trainer.distillation_trainer import DistillationTrainer
from hf_accel.distill.trainer.settings import DistillationConfig

from ..classroom import ALPHA, TEMPERATURE, arguments, distance, llama, reference, texts, update


def by_callback(folder: Path, **teacher: Any) -> Trainer:
    callback = DistillationCallback(**teacher, alpha=ALPHA, temperature=TEMPERATURE)
    return Trainer(llama(1), arguments(folder), train_dataset=texts(), callbacks=[callback])


def by_trainer(folder: Path, **teacher: Any) -> Trainer:
    plain = arguments(folder).to_dict()
    names = ("max_steps", "learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "logging_steps",
             "save_strategy", "report_to", "disable_tqdm", "use_cpu", "train_sampling_strategy",
             "dataloader_pin_memory", "per_device_train_batch_size")  # fmt: skip
    settings = {"alpha": ALPHA, "temperature": TEMPERATURE, **{name: plain[name] for name in names}}
    return DistillationTrainer(
        llama(1), args=DistillationConfig(str(folder), **settings), train_dataset=texts(), **teacher
    )


WAYS = [by_callback, by_trainer]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    llama(2, layers=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("way", WAYS)
def test_the_path_of_a_model(way: Any, kind: type, saved: Path, tmp_path: Path) -> None:
    expected = reference(llama(1), llama(2, layers=2), texts(), shift=True)
    assert distance(update(way(tmp_path / "out", teacher_model=kind(saved))), expected) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_the_folder_of_a_cache(way: Any, tmp_path: Path) -> None:
    TeacherCache.build(llama(2, layers=2), texts(), tmp_path / "answers", top_k=64, progress=False)
    expected = reference(llama(1), llama(2, layers=2), texts(), shift=True)
    found = update(way(tmp_path / "out", teacher_model=str(tmp_path / "answers")))
    assert distance(found, expected) < 1e-2  # of float16 logits


@pytest.mark.parametrize("way", WAYS)
def test_what_is_neither(way: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given in (tmp_path / "empty", tmp_path / "absent" / "folder"):
        with pytest.raises(UnsupportedError, match=r"neither a model \(config.json\) nor a TeacherCache"):
            way(tmp_path / "out", teacher_model=str(given))
    with pytest.raises(UnsupportedError, match="no model of this name can be loaded"):
        way(tmp_path / "out", teacher_model="nobody/nothing").train()
    (tmp_path / "empty" / "partial.json").write_text("{}")
    with pytest.raises(HfAccelError, match="its build was interrupted"):
        way(tmp_path / "out", teacher_model=tmp_path / "empty")


def cached(folder: Path, **teacher: Any) -> None:
    TeacherCache.build(dataset=texts(), path=folder, progress=False, **teacher)


def shortened(folder: Path, **teacher: Any) -> None:
    hf_accel.init_student(num_layers=1, **teacher)


@pytest.mark.parametrize("way", [*WAYS, cached, shortened])
def test_the_old_name_warns_and_works(way: Any, tmp_path: Path) -> None:
    teacher = llama(2, layers=2)
    with pytest.warns(HfAccelWarning, match="teacher= is called teacher_model= now") as found:
        made = way(tmp_path / "out", teacher=teacher)
    assert len(found) == 1 and found[0].filename == __file__
    if made is not None:
        assert distance(update(made), reference(llama(1), teacher, texts(), shift=True)) < 1e-5
    with pytest.raises(UnsupportedError, match="say the same"):
        way(tmp_path / "other", teacher=teacher, teacher_model=teacher)


def test_a_teacher_by_name_is_asked_in_the_dtype_it_has(saved: Path, tmp_path: Path) -> None:
    callback = DistillationCallback(saved, alpha=0.0)
    trainer = Trainer(llama(1), arguments(tmp_path), train_dataset=texts(), callbacks=[callback])
    trainer.train()
    assert callback._hook.teacher.model.dtype is torch.float32  # type: ignore[attr-defined]
    assert not any(name.startswith("teacher") for name in trainer.model.state_dict())
