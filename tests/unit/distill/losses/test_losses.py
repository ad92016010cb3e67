"""Losses of logits: the textbook's numbers, masks and paddings, dtypes, refusals, and what it costs in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.distill.losses import row_losses
from hf_accel.distill.losses.distillation_loss import distillation_loss, divergence_sum, loss_sums
from hf_accel.distill.losses.logit_rows import DenseRows, TopRows
from hf_accel.distill.losses.objective import LOSSES, Objective
from hf_accel.errors import UnsupportedError

from .largest import LargestTensor
from .oracle import relative_error, softened, total

IGNORED = -100


def logits_and_labels(batch: int = 2, length: int = 6, classes: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    """float64; of the labels a third is ignored."""
    student, teacher = 3 * torch.randn(2, batch, length, classes, dtype=torch.float64)
    labels = torch.randint(0, classes, (batch, length))
    labels[:, ::3] = IGNORED
    return student, teacher, labels


def expected_mean(student: Tensor, teacher: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Of positions [..., V] and their labels, position by position."""
    chosen = labels != IGNORED
    return total(student[chosen], teacher[chosen], objective, labels[chosen]) / chosen.sum()


def gradient_of(loss: Any, logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    return gradient


@pytest.fixture(params=[1, 3000, 1 << 20])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, some, and all."""
    monkeypatch.setattr(row_losses, "TILE_BYTES", request.param)


# -- numbers -------------------------------------------------------------------------------------------


def test_the_textbook_case() -> None:
    """Softened by 4, [10, 2, 1] is [.806, .109, .085] and [5, 1.5, 1] is [.560, .234, .206]."""
    teacher, student = torch.tensor([[10.0, 2, 1]]), torch.tensor([[5.0, 1.5, 1]])
    t, s = (torch.softmax(x / 4, -1)[0] for x in (teacher, student))
    assert t.tolist() == pytest.approx([0.806, 0.109, 0.085], abs=5e-4)
    assert s.tolist() == pytest.approx([0.560, 0.234, 0.206], abs=5e-4)
    kl = sum(a * math.log(a / b) for a, b in zip(t.tolist(), s.tolist(), strict=True))
    ce = math.log(sum(math.exp(x - 5) for x in (5, 1.5, 1)))
    labels = torch.tensor([0])
    loss = distillation_loss(student, teacher, labels, alpha=0.3, temperature=4.0, shift=False)
    assert loss.item() == pytest.approx(0.3 * ce + 0.7 * 16 * kl, rel=1e-5)
    gradient = gradient_of(lambda z: distillation_loss(z, teacher, None, alpha=0, temperature=4, shift=False), student)
    assert gradient[0].tolist() == pytest.approx((4 * (s - t)).tolist(), abs=1e-6)


def test_cross_entropy_and_divergence_are_weighed() -> None:
    teacher, student = (torch.tensor([p]).log() for p in ((0.7, 0.2, 0.1), (0.5, 0.3, 0.2)))
    loss = distillation_loss(student, teacher, torch.tensor([0]), alpha=0.3, temperature=1.0, shift=False)
    assert loss.item() == pytest.approx(0.267530, abs=1e-6)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.119630), (2.0, 0.123962), (4.0, 0.119818)])
def test_the_square_of_the_temperature(temperature: float, expected: float) -> None:
    teacher, student = torch.tensor([[2.0, 1, 0]]), torch.tensor([[1.0, 1, 0]])
    loss = distillation_loss(student, teacher, None, alpha=0, temperature=temperature, shift=False)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_hot_distillation_matches_logits() -> None:
    """As T grows the gradient goes to the centred difference of the logits over the number of classes."""
    teacher, student = torch.tensor([[2.0, 1, 0]]).double(), torch.tensor([[1.0, 1, 0]]).double()
    for temperature, tolerance in ((100.0, 1e-3), (1e5, 1e-6)):
        slope = gradient_of(
            lambda z, t=temperature: distillation_loss(z, teacher, None, alpha=0, temperature=t, shift=False), student
        )
        assert slope[0].tolist() == pytest.approx([-2 / 9, 1 / 9, 1 / 9], abs=tolerance)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("tile")
def test_values_and_gradients_of_every_loss(loss: str) -> None:
    student, teacher, labels = logits_and_labels()
    objective = Objective(0.4, 2.0, loss, 0.3)

    def ours(z: Tensor) -> Tensor:
        return distillation_loss(z, teacher, labels, alpha=0.4, temperature=2.0, loss=loss, beta=0.3)

    def plain(z: Tensor) -> Tensor:
        return expected_mean(z[:, :-1], teacher[:, :-1], labels[:, 1:], objective)

    assert relative_error(ours(student), plain(student)) <= 1e-12
    assert relative_error(gradient_of(ours, student), gradient_of(plain, student)) <= 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss: str) -> None:
    student, teacher, labels = logits_and_labels(1, 4, 5)
    eta = 0.0 if loss == "lk" else 3.0  # else its weight, a constant to the gradient, moves with the value

    def ours(z: Tensor) -> Tensor:
        return distillation_loss(z, teacher, labels, alpha=0.4, temperature=2.0, loss=loss, eta=eta)

    assert torch.autograd.gradcheck(ours, student.requires_grad_())


# -- the teacher's best tokens -------------------------------------------------------------------------


def top_rows(teacher: Tensor, objective: Objective, k: int) -> TopRows:
    best = softened(teacher, objective).topk(k)
    return TopRows(best.indices, best.values, teacher.shape[-1])


def test_worked_numbers_of_the_best_tokens() -> None:
    t, s = (torch.tensor([p]).double().log() for p in ((0.7, 0.2, 0.1), (0.5, 0.3, 0.2)))
    objective = Objective(0.0, 1.0)
    for k, expected in ((1, 0.082283), (2, 0.085123), (3, 0.085123)):
        assert divergence_sum(s, top_rows(t, objective, k), objective).item() == pytest.approx(expected, abs=1e-6)
    renormalised = (divergence_sum(s[:, :2], DenseRows(t[:, :2]), objective)).item()
    assert renormalised == pytest.approx(0.053814, abs=1e-6)  # what leaving the rest out would give


@pytest.mark.parametrize("k", [1, 4, 12, 13])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_rest_is_one_class_whose_gradient_is_shared(loss: str, k: int) -> None:
    student, teacher = 3 * torch.randn(2, 7, 13, dtype=torch.float64)
    objective = Objective(0.0, 2.0, loss, 0.3)
    rows = top_rows(teacher, objective, k)
    ids = None if k == 13 else rows.ids
    expected = gradient_of(lambda z: total(z, teacher, objective, ids=ids), student)
    found = gradient_of(lambda z: divergence_sum(z, rows, objective), student)
    assert relative_error(found, expected) <= 1e-12
    assert (
        relative_error(divergence_sum(student, rows, objective), total(student, teacher, objective, ids=ids)) <= 1e-12
    )


def test_the_best_of_a_wider_teacher() -> None:
    """Its padding, ids 13 and more, is no class of the student's: the others are renormalised."""
    student, teacher = 3 * torch.randn(7, 13).double(), 3 * torch.randn(7, 16).double()
    objective = Objective(0.0, 2.0)
    rows = top_rows(teacher, objective, 16)
    assert (rows.ids >= 13).any()
    expected = total(student, teacher[:, :13], objective)
    assert relative_error(divergence_sum(student, rows, objective), expected) <= 1e-12
    slopes = [
        gradient_of(lambda z, given=given: divergence_sum(z, given, objective), student)
        for given in (rows, DenseRows(teacher[:, :13]))
    ]
    assert relative_error(*slopes) <= 1e-12


def test_rounded_probabilities_above_one() -> None:
    student = torch.randn(1, 5, requires_grad=True)
    rows = TopRows(torch.tensor([[0, 1]]), torch.tensor([[0.8, 0.21]]).log().half(), 5)
    for loss in LOSSES:
        value = divergence_sum(student, rows, Objective(0.0, 1.0, loss))
        (gradient,) = torch.autograd.grad(value, student)
        assert value.isfinite() and gradient.isfinite().all()
        assert gradient.sum().abs() < 1e-6


def test_a_student_that_is_sure_of_the_best() -> None:
    """exp cannot hold what it leaves to the rest, nor -inf; the gradient goes where it should all the same."""
    student = torch.tensor([[300.0, 0, 1, -math.inf]])
    rows = TopRows(torch.tensor([[0]]), torch.tensor([[0.5]]).log(), 4)
    gradient = gradient_of(lambda z: divergence_sum(z, rows, Objective(0.0, 1.0)), student)
    p = math.exp(1) / (1 + math.exp(1))
    assert gradient[0].tolist() == pytest.approx([0.5, -0.5 * (1 - p), -0.5 * p, 0], abs=1e-6)


def test_a_rest_far_below_the_best() -> None:
    """Its tokens share its gradient however small it is; of -2e4 the softmax over all is 0."""
    student = torch.tensor([[0.0, -2e4, -2e4 + 1]])
    rows = TopRows(torch.tensor([[0]]), torch.tensor([[0.5]]).log(), 3)
    gradient = gradient_of(lambda z: divergence_sum(z, rows, Objective(0.0, 1.0)), student)
    p = math.exp(1) / (1 + math.exp(1))
    assert gradient[0].tolist() == pytest.approx([0.5, -0.5 * (1 - p), -0.5 * p], abs=1e-3)


# -- positions -----------------------------------------------------------------------------------------


def test_masked_language_models_and_classifiers_are_not_shifted() -> None:
    student, teacher, labels = logits_and_labels()
    objective = Objective(0.4, 2.0)
    found = distillation_loss(student, teacher, labels, alpha=0.4, shift=False)
    assert relative_error(found, expected_mean(student, teacher, labels, objective)) <= 1e-12
    s, t, chosen = student[:, 0], teacher[:, 0], labels[:, 1]
    found = distillation_loss(s, t, chosen, alpha=0.4, shift=False)
    assert relative_error(found, expected_mean(s, t, chosen, objective)) <= 1e-12


def test_soft_labels_alone() -> None:
    student, teacher, _ = logits_and_labels()
    found = distillation_loss(student, teacher, None, alpha=0)
    flat = (student.flatten(0, 1), teacher.flatten(0, 1))
    assert relative_error(found, total(*flat, Objective(0.0, 2.0)) / 12) <= 1e-12


def test_ignored_positions_do_not_matter() -> None:
    student, teacher, labels = logits_and_labels()
    expected = distillation_loss(student, teacher, labels)
    spoilt = [x.clone() for x in (student, teacher)]
    for x in spoilt:
        x[:, :-1][labels[:, 1:] == IGNORED] = torch.nan
        x[:, -1] = torch.nan
    assert torch.equal(distillation_loss(*spoilt, labels), expected)
    gradient = gradient_of(lambda z: distillation_loss(z, spoilt[1], labels), spoilt[0])
    assert not gradient[:, :-1][labels[:, 1:] == IGNORED].any() and not gradient[:, -1].any()
    other = labels.masked_fill(labels == IGNORED, -7)
    assert torch.equal(distillation_loss(student, teacher, other, ignore_index=-7), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_no_label_at_all_is_a_loss_of_nothing(alpha: float) -> None:
    student, teacher, labels = logits_and_labels()
    student[0, 0, 0] = torch.inf
    labels[:] = IGNORED
    leaf = student.float().requires_grad_()
    loss = distillation_loss(leaf, teacher, labels, alpha=alpha)
    loss.backward()
    assert loss.item() == 0 and leaf.grad is not None and not leaf.grad.any()


def test_parts_of_an_accumulated_batch_add_up() -> None:
    student, teacher, labels = logits_and_labels(4)
    count = int((labels[:, 1:] != IGNORED).sum())
    labels[3, 2:] = IGNORED
    count = int((labels[:, 1:] != IGNORED).sum())
    whole = gradient_of(lambda z: distillation_loss(z, teacher, labels), student)

    def in_parts(z: Tensor) -> Tensor:
        parts = [slice(0, 1), slice(1, 4)]
        return sum(distillation_loss(z[p], teacher[p], labels[p], num_items=torch.tensor(count)) for p in parts)

    assert relative_error(gradient_of(in_parts, student), whole) <= 1e-12


# -- vocabularies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_padding_of_either_vocabulary_is_cut_off(loss: str, who: str) -> None:
    student, teacher, labels = logits_and_labels()
    expected = distillation_loss(student, teacher, labels, loss=loss)
    padding = 5 * torch.randn(2, 6, 3, dtype=torch.float64)
    logits = {"student": student, "teacher": teacher}
    logits[who] = torch.cat((logits[who], padding), -1)
    found = distillation_loss(logits["student"], logits["teacher"], labels, loss=loss)
    assert relative_error(found, expected) <= 1e-12
    gradient = gradient_of(lambda z: distillation_loss(z, logits["teacher"], labels, loss=loss), logits["student"])
    assert gradient.shape == logits["student"].shape and not gradient[..., 13:].any()


def test_padding_of_both_is_cut_off_by_name() -> None:
    student, teacher, labels = logits_and_labels()
    wide = [torch.cat((x, torch.randn(2, 6, 3, dtype=torch.float64)), -1) for x in (student, teacher)]
    expected = distillation_loss(student, teacher, labels)
    assert relative_error(distillation_loss(*wide, labels, vocab_size=13), expected) <= 1e-12
    assert distillation_loss(*wide, labels) != expected


def test_the_worked_padding() -> None:
    """Zeros in the student's place of the teacher's padding would make it .26393."""
    student, teacher = torch.tensor([[1.0, 1, 0]]), torch.tensor([[2.0, 1, 0, -9]])
    loss = distillation_loss(student, teacher, None, alpha=0, temperature=1.0, shift=False)
    assert loss.item() == pytest.approx(0.119630, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_minus_infinity(loss: str) -> None:
    """Classes that both leave out are not there; one that either leaves out makes nothing NaN."""
    student, teacher, labels = logits_and_labels()
    expected = distillation_loss(student, teacher, labels, loss=loss)
    out = torch.full((2, 6, 3), -math.inf, dtype=torch.float64)
    both = [torch.cat((x, out), -1) for x in (student, teacher)]
    assert relative_error(distillation_loss(*both, labels, loss=loss), expected) <= 1e-12
    assert gradient_of(lambda z: distillation_loss(z, both[1], labels, loss=loss), both[0]).isfinite().all()
    for left_out in (student, teacher):
        one = left_out.clone()
        one[..., 5] = -math.inf
        s, t = (one, teacher) if left_out is student else (student, one)
        assert distillation_loss(s, t, None, alpha=0, loss=loss).isfinite()
        assert gradient_of(lambda z, t=t: distillation_loss(z, t, None, alpha=0, loss=loss), s).isfinite().all()


def test_a_sum_without_weight_does_not_count() -> None:
    """Not even if it is infinite."""
    student = torch.tensor([[0.0, 1.0, -math.inf]])
    sums = loss_sums(
        DenseRows(student), DenseRows(torch.zeros(1, 3)[:, :2]), Objective(0.0), torch.tensor([1]), size=2
    )
    assert sums.total == sums.kd
    sums = loss_sums(DenseRows(student), DenseRows(torch.zeros(1, 3)), Objective(0.0), torch.tensor([2]))
    assert sums.ce == math.inf and sums.total == sums.kd


# -- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_narrow_logits_are_computed_with_in_float32(loss: str, dtype: torch.dtype) -> None:
    student, teacher, labels = (x.to(dtype) if x.is_floating_point() else x for x in logits_and_labels(classes=500))

    def ours(z: Tensor) -> Tensor:
        return distillation_loss(z, teacher, labels, loss=loss)

    def exact(z: Tensor) -> Tensor:
        return distillation_loss(z, teacher.double(), labels, loss=loss)

    loss_value = ours(student)
    assert loss_value.dtype == torch.float32
    assert relative_error(loss_value, exact(student.double())) <= 2e-6
    gradient = gradient_of(ours, student)
    assert gradient.dtype == dtype
    rounding = max(torch.finfo(dtype).eps, 2e-6)
    assert relative_error(gradient, gradient_of(exact, student.double())) <= rounding


def test_teacher_and_student_may_differ_in_dtype() -> None:
    student, teacher, labels = logits_and_labels()
    mixed = distillation_loss(student.float(), teacher.bfloat16(), labels)
    assert relative_error(mixed, distillation_loss(student, teacher.bfloat16().double(), labels)) <= 2e-6


@pytest.mark.parametrize("k", [None, 4])
def test_autocast_changes_nothing(k: int | None) -> None:
    student, teacher = torch.randn(2, 5, 40)
    objective = Objective(0.0, 2.0, "jsd")
    rows = DenseRows(teacher) if k is None else top_rows(teacher, objective, k)
    expected = divergence_sum(student, rows, objective)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(divergence_sum(student, rows, objective), expected)


# -- sums ----------------------------------------------------------------------------------------------


def test_both_sums_of_one_pass() -> None:
    student, teacher, _ = logits_and_labels()
    student, teacher, labels = student.flatten(0, 1), teacher.flatten(0, 1), torch.randint(0, 13, (12,))
    objective = Objective(0.25, 2.0, "jsd")
    sums = loss_sums(DenseRows(student.requires_grad_()), DenseRows(teacher), objective, labels)
    assert relative_error(sums.ce, torch.nn.functional.cross_entropy(student, labels, reduction="sum")) <= 1e-12
    assert relative_error(sums.kd, total(student, teacher, Objective(0.0, 2.0, "jsd"))) <= 1e-12
    assert relative_error(sums.total, 0.25 * sums.ce + 0.75 * sums.kd) <= 1e-12
    assert sums.total.requires_grad and not sums.ce.requires_grad and not sums.kd.requires_grad


def test_selecting_is_left_to_us() -> None:
    student, teacher, _ = logits_and_labels()
    select, objective = torch.rand(2, 6) > 0.5, Objective(0.5, 2.0)
    rows = DenseRows(teacher[select])
    found = gradient_of(lambda z: divergence_sum(z, rows, objective, select=select), student)
    assert torch.equal(found, gradient_of(lambda z: divergence_sum(z[select], rows, objective), student))


def test_alpha_is_no_matter_of_the_divergence() -> None:
    student, teacher, _ = logits_and_labels()
    values = [divergence_sum(student[0], DenseRows(teacher[0]), Objective(alpha, 2.0)) for alpha in (0.0, 0.3, 1.0)]
    assert values[0] == values[1] == values[2] > 0


def test_with_alpha_of_one_the_teacher_is_not_read() -> None:
    student, _, labels = logits_and_labels()
    plain = torch.nn.functional.cross_entropy(student[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    for teacher in (None, torch.zeros(1, 3, 2)):
        assert relative_error(distillation_loss(student, teacher, labels, alpha=1.0), plain) <= 1e-12


def test_weights_on_the_loss_reach_the_gradient_each_time() -> None:
    student, teacher, labels = logits_and_labels()
    leaf = student.requires_grad_()
    loss = distillation_loss(leaf, teacher, labels)
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, leaf, retain_graph=True)
    (half,) = torch.autograd.grad(loss / 2, leaf)
    assert relative_error(thrice, 3 * once) <= 1e-14 and relative_error(half, once / 2) <= 1e-14


def test_a_second_derivative_is_refused() -> None:
    student, teacher, labels = logits_and_labels()
    leaf = student.requires_grad_()
    with pytest.raises(UnsupportedError, match="once, not twice"):
        torch.autograd.grad(distillation_loss(leaf, teacher, labels) + leaf.square().sum(), leaf, create_graph=True)


# -- refusals ------------------------------------------------------------------------------------------


def refusal(match: str, **changes: Any) -> None:
    student, teacher, labels = logits_and_labels()
    given = {"student_logits": student, "teacher_logits": teacher, "labels": labels, **changes}
    with pytest.raises(UnsupportedError, match=match):
        distillation_loss(**given)


def test_what_does_not_fit_is_refused() -> None:
    student, _, labels = logits_and_labels()
    refusal("labels are .* positions", labels=labels[:, 1:])
    refusal("soft labels", labels=torch.rand(2, 6, 13), alpha=0.5)
    refusal("labels are torch.float64", labels=labels.double())
    refusal("labels=None, but alpha", labels=None)
    refusal("the teacher has logits for", teacher_logits=torch.randn(2, 5, 13))
    refusal("no teacher", teacher_logits=None)
    refusal("the teacher's logits are", teacher_logits=torch.ones(2, 6, 13, dtype=torch.int64))
    refusal("the student's logits are", student_logits=torch.randn(13))
    refusal("shift=False", student_logits=student[0], teacher_logits=student[0], labels=labels[0])
    refusal("vocab_size=14", vocab_size=14)
    refusal("num_items=0", num_items=0)
    refusal("one class", student_logits=student[..., :1], labels=None, alpha=0)
    refusal("alpha=2", alpha=2)


def test_labels_beyond_the_classes_are_refused() -> None:
    _, teacher, labels = logits_and_labels()
    refusal(
        "label 12 is not among the 12",
        labels=labels.masked_fill(labels != IGNORED, 12),
        teacher_logits=teacher[..., :12],
    )
    refusal("label -1 is not among", labels=labels.masked_fill(labels != IGNORED, -1))
    student = torch.randn(2, 6, 13)
    assert distillation_loss(student, student[..., :5], labels, alpha=0) >= 0  # labels only say where


def test_rows_of_another_number_are_refused() -> None:
    student = torch.randn(4, 13)
    with pytest.raises(UnsupportedError, match="the teacher: 3 rows, but 4"):
        divergence_sum(student, DenseRows(student[:3]), Objective())
    with pytest.raises(UnsupportedError, match="targets: 1 rows"):
        loss_sums(DenseRows(student), DenseRows(student), Objective(), torch.zeros(1, dtype=torch.int64))


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_gradient_is_all_that_grows_with_the_batch(loss: str, k: int | None) -> None:
    """In the logits' dtype; every intermediate is a few rows of float32."""
    rows, classes = 512, 4096
    student = torch.randn(rows, classes, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.randn(rows, classes, dtype=torch.bfloat16)
    objective, labels = Objective(0.5, 2.0, loss), torch.randint(0, classes, (rows,))
    given = DenseRows(teacher) if k is None else top_rows(teacher.float(), objective, k)
    with LargestTensor() as made:
        loss_sums(DenseRows(student), given, objective, labels).total.backward()
    whole = rows * classes * 2
    assert made.bytes[:1] == [whole]  # the gradient
    assert made.bytes[1] <= row_losses.TILE_BYTES + rows * 4
