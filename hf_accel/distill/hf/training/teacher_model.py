"""A teacher from what a trainer is given: a model, the name of one, or a Teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ....errors import UnsupportedError
from ..teaching.labels import unwrapped
from ..teaching.teachers import ModelTeacher, Teacher, as_teacher
from .config import DistillationSettings

KINDS = {  # names of the tasks' classes, and who loads them
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}


def load_teacher(
    given: PreTrainedModel | Teacher | str | Path, student: Any, settings: DistillationSettings, device: torch.device
) -> Teacher:
    """A name or path is loaded for the student's task, with teacher_init_kwargs; "base" is a LoRA student without its
    adapters; a model is moved to `device`, unless
    it was placed or quantized by others."""
    keywords = settings.teacher_init_kwargs
    if given == "base" or not isinstance(given, str | Path):
        if keywords:
            raise UnsupportedError("teacher_init_kwargs are for a teacher_model given by its name, and it is loaded")
        if not isinstance(given, PreTrainedModel):
            return as_teacher(given)
    if isinstance(keywords, str):
        raise UnsupportedError(f"teacher_init_kwargs={keywords!r}: give a dict, or one in JSON")
    model: Any = _load(str(given), student, keywords or {}) if isinstance(given, str | Path) else given
    placed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
    return ModelTeacher(model if placed else model.to(device))


def _load(name: str, student: Any, keywords: dict[str, Any]) -> PreTrainedModel:
    inner = unwrapped(student)
    for auto, mapping in KINDS.items():
        if type(inner).__name__ in getattr(modeling_auto, mapping).values():
            return getattr(transformers, auto).from_pretrained(name, **keywords)
    raise UnsupportedError(f"teacher_model={name!r}: load it yourself; no class is known for {type(inner).__name__}")
