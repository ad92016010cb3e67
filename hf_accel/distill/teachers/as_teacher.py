"""A teacher from what a user gives: a model, the name of one, "base", a Teacher, or the folder of a TeacherCache."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...models import unwrapped
from .identity import AUTO_CLASSES, kind_of
from .live import BaseTeacher, ModelTeacher
from .teacher import Teacher
from .teacher_cache import TeacherCache


def as_teacher(teacher: Any) -> Teacher:
    """A model, "base" for the student without its adapters, a Teacher, or the folder of a TeacherCache."""
    if isinstance(teacher, Teacher):
        return teacher
    if teacher == "base":
        return BaseTeacher()
    if isinstance(teacher, str | PathLike):
        return TeacherCache(Path(teacher))
    if isinstance(teacher, torch.nn.Module):
        return ModelTeacher(teacher)
    raise UnsupportedError(
        f"teacher={teacher!r}: a transformers model, 'base', or a TeacherCache or its folder is needed"
    )


def load_teacher(
    given: PreTrainedModel | Teacher | str | Path,
    student: Any,
    device: torch.device,
    keywords: dict[str, Any] | str | None,
) -> Teacher:
    """A name or path is loaded for the student's task, with `keywords` for from_pretrained. "base" is a LoRA student
    without its adapters. A model is moved to `device`, unless it was placed or quantized by others."""
    is_name = isinstance(given, str | Path) and given != "base"
    if keywords and not is_name:
        raise UnsupportedError("teacher_init_kwargs are for a teacher_model given by its name, and it is loaded")
    if isinstance(keywords, str):
        raise UnsupportedError(f"teacher_init_kwargs={keywords!r}: give a dict, or one in JSON")
    loaded = _load(str(given), student, keywords or {}) if is_name else given
    if not isinstance(loaded, PreTrainedModel):
        return as_teacher(loaded)
    model: Any = loaded
    placed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
    return ModelTeacher(model if placed else model.to(device))


def _load(name: str, student: Any, keywords: dict[str, Any]) -> PreTrainedModel:
    kind = kind_of(student)
    if kind is None:
        known = type(unwrapped(student)).__name__
        raise UnsupportedError(f"teacher_model={name!r}: load it yourself; no class is known for {known}")
    model: PreTrainedModel = getattr(transformers, AUTO_CLASSES[kind]).from_pretrained(name, **keywords)
    return model
