"""Teachers in memory: a model, or the student of a LoRA training without its adapters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models import evaluating, unwrapped
from ..losses.logit_rows import DenseRows, HeadRows, Rows
from ..losses.objective import Objective
from .last_hidden import LastHidden, check_head, head_of
from .matching import check_pair
from .teacher import LABELS, PACKING, Teacher


class ModelTeacher(Teacher):
    """A transformers model, patched by hf_accel or not, in any float dtype, on any device: inputs are moved to it.
    It answers in eval mode without gradients; its own flags are as they were between two questions."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def check(self, student: Any, objective: Objective, tokenizer: Any = None) -> None:
        check_pair(student, self.model, tokenizer)

    def rows(self, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
        return output_at(self.model, inputs, select, compact=compact)


class BaseTeacher(Teacher):
    """The student of a LoRA training without its adapters: no second model in memory."""

    def __init__(self) -> None:
        self._student: Any = None

    def check(self, student: Any, objective: Objective, tokenizer: Any = None) -> None:
        if not hasattr(student, "disable_adapter"):
            raise UnsupportedError(
                f"teacher='base' is the student without its adapters, and {type(student).__name__} has none; wrap it "
                "by peft.get_peft_model, or give a model as the teacher"
            )
        self._student = weakref.ref(student)

    def rows(self, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
        with self._bare() as student:
            return output_at(student, inputs, select, compact=compact)

    @contextmanager
    def _bare(self) -> Iterator[Any]:
        student = self._student()
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in student.parameters() if not parameter.requires_grad]
        try:
            with student.disable_adapter():
                yield student
        finally:
            # PEFT lets every active adapter train again, whether it was frozen before or not.
            for flag, parameters in ((True, trained), (False, frozen)):
                for parameter in parameters:
                    parameter.requires_grad_(flag)


@torch.no_grad()
def output_at(model: Any, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
    """Return the output of `model` at `select`: logits, or, with `compact` and a head that can be left out, hidden
    states.
    """
    # A head computes on its own device, and the rows must be on that of `select`.
    head = head_of(model) if compact and model.device == select.device else None
    given = {key: x.to(model.device) if isinstance(x, Tensor) else x for key, x in taken_by(model, inputs).items()}
    if head is None:
        with evaluating(model):
            logits = model(**given).logits
        _check_positions(logits, select)
        return DenseRows(logits[select.to(logits.device)].to(select.device))
    hidden = LastHidden(model)
    try:
        with evaluating(model):
            last = model(**given, logits_to_keep=1).logits
    finally:
        hidden.remove()
    check_head(model, head, hidden.value, last)
    _check_positions(hidden.value, select)
    return HeadRows(hidden.value[select], head)


def _check_positions(answers: Tensor, select: Tensor) -> None:
    if answers.shape[:-1] != select.shape:
        raise UnsupportedError(
            f"the teacher answers for {tuple(answers.shape[:-1])} and the student's labels are {tuple(select.shape)}: "
            "these are not the same positions; a teacher with virtual tokens (prompt tuning) cannot be used"
        )


def taken_by(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for a teacher's forward: those of the student's inputs that it takes (BERT's takes token_type_ids,
    DistilBERT's does not)."""
    forward = inspect.signature(unwrapped(model).forward).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in forward.values())
    rest = PACKING if is_open else ()
    given = {key: value for key, value in inputs.items() if key not in LABELS and (key in forward or key in rest)}
    return {**given, "use_cache": False} if "use_cache" in forward or is_open else given
