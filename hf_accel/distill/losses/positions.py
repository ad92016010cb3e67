"""The positions that a student learns from, and their labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Size, Tensor

from ...errors import UnsupportedError
from .logit_rows import DenseRows, PickedRows, Rows
from .objective import Objective

IGNORED = -100


@dataclass(frozen=True)
class Positions:
    """The positions that count, of all positions flattened to [M].

    index: int64 [N], their numbers. targets: int64 [N], their labels. Both are None where there are no labels: then
    all positions count.
    """

    shape: Size
    index: Tensor | None
    targets: Tensor | None

    def __len__(self) -> int:
        return self.shape.numel() if self.index is None else len(self.index)

    def rows(self, teacher: Rows) -> Rows:
        """The teacher's rows for these N positions."""
        if teacher.shape == self.shape:
            flat = teacher.flat()
            if self.index is None:
                return flat
            return PickedRows(flat.logits, self.index) if isinstance(flat, DenseRows) else flat[self.index]
        if teacher.shape == (len(self),):
            return teacher
        raise UnsupportedError(
            f"the teacher has logits for {list(teacher.shape)} positions, the student for {list(self.shape)}, "
            f"of which {len(self)} have labels: give both the same batch, or one row of the teacher for each label"
        )


def learnt(labels: Tensor, shift: bool, ignore_index: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Return which positions of the logits learn, bool of the shape of `labels`, and the label of each, int64 [N].

    shift: whether a position learns the label of the next one, where there is a sequence. Raises UnsupportedError for
    labels that are no class numbers.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UnsupportedError(
            f"labels are {labels.dtype}: regression and several labels at once have no softmax to distil; give class "
            "indices (int64), or, to learn from the teacher alone, distillation_loss(..., labels=None, alpha=0)"
        )
    if not shift or labels.dim() < 2:
        chosen = labels != ignore_index
        return chosen, labels[chosen].long()
    chosen = labels[..., 1:] != ignore_index
    return torch.nn.functional.pad(chosen, (0, 1)), labels[..., 1:][chosen].long()


def find_positions(
    shape: Size, labels: Tensor | None, objective: Objective, *, shift: bool, ignore_index: int
) -> Positions:
    """Find the positions that count among those of `shape`, [B, T] or [B]. shift: a position's label is the next
    one's."""
    if labels is None:
        if objective.alpha:
            raise UnsupportedError(f"labels=None, but alpha={objective.alpha} gives them a share: pass alpha=0")
        return Positions(shape, None, None)
    if labels.shape != shape:
        raise UnsupportedError(
            f"labels are {list(labels.shape)}, but there are logits for {list(shape)} positions; one class number is "
            "needed for each (soft labels: pass them as the teacher's logits, with labels=None and alpha=0)"
        )
    if shift and len(shape) < 2:
        raise UnsupportedError(f"shift=True, but labels {list(shape)} have no sequence: classification is shift=False")
    select, targets = learnt(labels, shift, ignore_index)
    return Positions(shape, select.flatten().nonzero()[:, 0], targets)


def check_targets(targets: Tensor, size: int) -> None:
    """Raise if a label is none of the first `size` classes."""
    wrong = targets[(targets < 0) | (targets >= size)]
    if len(wrong):
        raise UnsupportedError(
            f"label {int(wrong[0])} is not among the {size} classes that student and teacher share: correct it, mark "
            "it with ignore_index, or give a teacher that knows it"
        )


def shared_size(student: int, teacher: Rows | None, vocab_size: int | None) -> int:
    """Return how many classes count. Those beyond, which are padding, are cut off student and teacher."""
    widths = [student] if teacher is None else [student, teacher.vocab_size]
    if vocab_size is not None and not 0 < vocab_size <= min(widths):
        known = " and the teacher ".join(map(str, widths))
        raise UnsupportedError(f"vocab_size={vocab_size}, but the student has {known} classes")
    size = vocab_size or min(widths)
    if size < 2 and teacher is not None:
        raise UnsupportedError("one class has probability 1 everywhere: distil a regression with an error of its own")
    return size
