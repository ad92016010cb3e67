"""The interface of every teacher, and the keyword that gives one."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from ...errors import HfAccelWarning, UnsupportedError
from ..losses.logit_rows import Rows
from ..losses.objective import Objective

# Arguments of a student's forward that a teacher's does not get.
LABELS = (
    "labels", "num_items_in_batch", "shift_labels", "return_dict", "logits_to_keep", "output_hidden_states",
    "output_attentions", "output_router_logits", "use_cache", "past_key_values", "cache", "fused_lm_head",
)  # fmt: skip
# Arguments that a forward passes down in its **kwargs.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class Teacher(ABC):
    """A teacher, which a hook asks once for each micro-batch.

    It is no module, so that it is not part of a student's state.
    """

    @abstractmethod
    def check(self, student: Any, objective: Objective, tokenizer: Any = None) -> None:
        """Raise UnsupportedError, before training, if this teacher cannot teach this student.

        tokenizer: the student's, None where it is not known.
        """

    @abstractmethod
    def rows(self, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
        """Return the teacher's output at N positions, on the device of `select`.

        inputs: the keywords of the student's forward (with decoder_input_ids if it is an encoder and a decoder).
        select: bool, the shape of the logits less the vocabulary: the N positions that are learnt from. They are
            shifted already: position i predicts token i + 1.
        compact: never hold logits [B, T, V], where the teacher can do without.
        """


Target = TypeVar("Target", bound=Callable[..., Any])


def takes_teacher_model(target: Target) -> Target:
    """Decorate a function with teacher_model=: teacher= means the same, and warns. UnsupportedError for both."""

    @functools.wraps(target)
    def call(*args: Any, **keywords: Any) -> Any:
        if "teacher" in keywords:
            if "teacher_model" in keywords:
                raise UnsupportedError("teacher= and teacher_model= say the same; give teacher_model= alone")
            warnings.warn("teacher= is called teacher_model= now", HfAccelWarning, stacklevel=2)
            keywords["teacher_model"] = keywords.pop("teacher")
        return target(*args, **keywords)

    return call  # type: ignore[return-value]
