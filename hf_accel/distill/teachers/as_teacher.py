"""A teacher from what a user gives: a model, the name of one, "base", a Teacher, or the folder of a TeacherCache."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ...errors import UnsupportedError
from ...models import unwrapped
from .cache_files import INDEX, PARTIAL
from .labels import auto_class_of
from .live import BaseTeacher, ModelTeacher
from .teacher import Teacher
from .teacher_cache import TeacherCache

ADAPTER = "adapter_config.json"  # of a folder that PEFT has saved
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a model on a hub


def as_teacher(teacher: Any) -> Teacher:
    """The Teacher for a model, for "base" (the student without its adapters), or for the folder of a TeacherCache."""
    if isinstance(teacher, Teacher):
        return teacher
    if isinstance(teacher, str) and teacher == "base":
        return BaseTeacher()
    if isinstance(teacher, str | PathLike):
        return _cache(Path(teacher))
    if isinstance(teacher, torch.nn.Module):
        return ModelTeacher(teacher)
    raise UnsupportedError(
        f"teacher_model={teacher!r}: a transformers model, its name or path, 'base', or a TeacherCache or its folder "
        "is needed"
    )


def _cache(path: Path) -> TeacherCache:
    if not any((path / name).exists() for name in (INDEX, PARTIAL)):
        raise UnsupportedError(
            f"teacher_model={str(path)!r}: there is neither a model ({CONFIG_NAME}) nor a TeacherCache ({INDEX}); "
            "give the folder of one of them, the name of a model, or what TeacherCache.build returns"
        )
    return TeacherCache(path)


def names_model(given: Any) -> bool:
    """Return whether a teacher is given by the path of a model, or by a name, for from_pretrained to load."""
    if not isinstance(given, str | PathLike) or given == "base":
        return False
    path = Path(given)
    if path.exists():
        return any((path / name).exists() for name in (CONFIG_NAME, ADAPTER))
    return HUB_NAME.fullmatch(str(given)) is not None


def load_teacher(
    given: PreTrainedModel | Teacher | str | PathLike[str],
    student: Any,
    device: torch.device,
    keywords: dict[str, Any] | str | None = None,
) -> Teacher:
    """Load a name or path for the student's task, with `keywords` for from_pretrained. "base" is a LoRA student
    without its adapters. A model is moved to `device`, unless it was placed or quantized by others."""
    is_name = names_model(given)
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
    loader = auto_class_of(student)
    if loader is None:
        known = type(unwrapped(student)).__name__
        raise UnsupportedError(f"teacher_model={name!r}: load it yourself; no class is known for {known}")
    try:
        model: PreTrainedModel = getattr(transformers, loader).from_pretrained(name, **keywords)
    except OSError as error:
        raise UnsupportedError(
            f"teacher_model={name!r} is no folder of a model or of a TeacherCache, and no model of this name can be "
            f"loaded: {error}"
        ) from error
    return model
