"""Distillation losses of logits, or of hidden states and a head: the gradient is computed along with the value."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from ...errors import UnsupportedError
from ...keywords import checked_keywords
from .logit_rows import DenseRows, HeadRows, Rows
from .objective import Objective, Sums, mean
from .positions import check_targets, find_positions, shared_size
from .row_losses import LossTask, differentiated, hidden_sums, logit_sums


@checked_keywords()
def distillation_loss(
    student_logits: Tensor | HeadRows,
    teacher_logits: Tensor | Rows | None,
    labels: Tensor | None,
    *,
    alpha: float = 0.5,
    temperature: float = 2.0,
    loss: str = "fkl",
    beta: float = 0.5,
    eta: float = 3.0,
    shift: bool = True,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> Tensor:
    """alpha * CE + (1 - alpha) * T^2 * D(teacher, student), softened by T (Hinton et al. 1503.02531): the mean over
    the labels that are not ignore_index. What `loss`, beta and eta mean is in `Objective`.

    student_logits: [B, T, V], or [B, V] of a classifier; float64, float32, bfloat16 or float16: computed in float32
        at least, and the gradient comes in their dtype. Or HeadRows, hidden states [B, T, H] with a Head: the logits
        are then made a few rows at a time and never held, and hidden states, weight and bias get gradients.
    teacher_logits: of the same shape; its V may differ. Or Rows, which may also hold a teacher's hidden states or its
        best tokens, at all positions or at those that count. Not read at alpha=1, when it may be None.
    labels: integers [B, T] or [B]. None at alpha=0: every position counts.
    shift: a causal model's logits speak of the next position's label. False: masked language models, classifiers.
    num_items: what the sum is divided by instead of how many labels count: the number in the whole accumulated batch.
    vocab_size: the first so many classes count. None: as many as both have or, at alpha=1, all of the student's.

    Returns a scalar float32, float64 for float64; 0, with a gradient of 0, if no label counts. It can be
    differentiated once. Raises UnsupportedError for what does not fit together, and for labels beyond the classes.
    """
    objective = Objective(alpha, temperature, loss, beta, eta)
    student = rows_of_logits(student_logits, "the student's logits")
    positions = find_positions(student.shape, labels, objective, shift=shift, ignore_index=ignore_index)
    teacher = None
    if alpha < 1:
        if teacher_logits is None:
            raise UnsupportedError("no teacher: its logits are needed unless alpha=1")
        teacher = positions.rows(rows_of_logits(teacher_logits, "the teacher's logits"))
    targets = positions.targets if alpha else None
    sums = loss_sums(student.flat(), teacher, objective, targets, index=positions.index, size=vocab_size)
    return mean(sums.total, len(positions), num_items)


def divergence_sum(
    student_logits: Tensor, teacher: Rows, objective: Objective, *, select: Tensor | None = None
) -> Tensor:
    """T^2 times the sum of D over the teacher's N rows: a scalar as of `distillation_loss`, whatever alpha.

    student_logits: [N, V]; or [..., V] with select, bool [...], true at N positions: cheaper than selecting before."""
    index = None if select is None else select.flatten().nonzero()[:, 0]
    logits = student_logits if select is None else student_logits.flatten(0, -2)
    return loss_sums(DenseRows(logits), teacher, replace(objective, alpha=0.0), index=index).total


def loss_sums(
    student: Rows,
    teacher: Rows | None,
    objective: Objective,
    targets: Tensor | None = None,
    *,
    index: Tensor | None = None,
    size: int | None = None,
) -> Sums:
    """The sums of both losses over N rows, from one pass over the student's logits.

    student: M rows, DenseRows or HeadRows. The total is differentiable in their logits, or in their hidden states and
        their head's weight and bias; what needs no gradient costs none.
    index: int64 [N], different rows of the student's, or None for all.
    teacher: of the N rows; None: no D, and kd is 0. targets: int64 [N], classes; None: no cross entropy, and ce is 0.
    size: how many classes count.
    """
    size = shared_size(student.vocab_size, teacher, size)
    count = len(student) if index is None else len(index)
    for what, given in (("the teacher", teacher), ("targets", targets)):
        if given is not None and len(given) != count:
            raise UnsupportedError(f"{what}: {len(given)} rows, but {count} of the student; one of each is needed")
    if targets is not None:
        check_targets(targets, size)
    if isinstance(teacher, HeadRows):
        teacher = teacher.prepared(size)
    task = LossTask(objective, size, count, teacher, targets, index)
    if isinstance(student, DenseRows):
        return differentiated(partial(logit_sums, student.logits, task), student.logits)
    if not isinstance(student, HeadRows) or not isinstance(student.head.weight, Tensor):
        raise UnsupportedError("a student needs logits, or hidden states and a head with a dense weight")
    hidden, head, weight = student.hidden, student.head, student.head.weight
    if hidden.shape[1] != weight.shape[1]:
        raise UnsupportedError(f"hidden states are {list(hidden.shape)}, the head's weight {list(weight.shape)}")
    return differentiated(partial(hidden_sums, hidden, head, task), hidden, weight, head.bias)


def rows_of_logits(given: Tensor | Rows, what: str) -> Rows:
    if isinstance(given, HeadRows) and given.hidden.dim() < 2:
        raise UnsupportedError(f"hidden states are {list(given.hidden.shape)}: [B, T, H] or [B, H] is needed")
    if not isinstance(given, Tensor):
        return given
    if given.dim() < 2 or not given.is_floating_point():
        raise UnsupportedError(f"{what} are {given.dtype} {list(given.shape)}: float [B, T, V] or [B, V] is needed")
    return DenseRows(given)
