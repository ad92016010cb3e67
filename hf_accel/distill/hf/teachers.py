"""Who is asked what the student should have said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ..rows import DenseRows, Rows

LABELS = ("labels", "num_items_in_batch", "shift_labels", "return_dict", "logits_to_keep", "output_hidden_states")


class Teacher(ABC):
    """What a hook asks once for each micro-batch."""

    @abstractmethod
    def check(self, student: Any, objective: Any) -> None:
        """Before training. Raises UnsupportedError if this teacher cannot teach this student."""

    @abstractmethod
    def rows(self, inputs: Mapping[str, Any], select: Tensor) -> Rows:
        """inputs: the keywords of the student's forward. select: bool, the shape of the logits less the vocabulary:
        the N positions that are learnt from (already shifted: position i speaks of token i + 1)."""


class ModelTeacher(Teacher):
    """A transformers model, patched by hf_accel or not. Frozen while it teaches, never a part of the student."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def check(self, student: Any, objective: Any) -> None:
        if self.model is student:
            raise UnsupportedError("the teacher is the student itself; give another model")

    @torch.no_grad()
    def rows(self, inputs: Mapping[str, Any], select: Tensor) -> Rows:
        given = {key: value for key, value in inputs.items() if key not in LABELS}
        return DenseRows(self.model(**given, use_cache=False).logits[select])
