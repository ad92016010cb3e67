"""Values and gradients of the distances: printed numbers, autograd in float64, and the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_accel.distill.losses.objective import FLOOR, LOSSES, Objective, value_and_gradient

from .oracle import distance, relative_error, softened

TEACHER, STUDENT = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
SHARE = math.exp(-3 * 0.8)
NUMBERS = [  # loss, beta, D(TEACHER, STUDENT), worked out by hand
    ("fkl", 0.5, 0.085123),
    ("rkl", 0.5, 0.092033),
    ("jsd", 0.5, 0.021901),
    ("jsd", 0.1, 0.007695),
    ("jsd", 0.9, 0.008185),
    ("tv", 0.5, 0.2),
    ("nla", 0.5, 0.223144),
    ("lk", 0.5, 0.189579),
]


def objective_of(loss: str, temperature: float = 1.0, beta: float = 0.3) -> Objective:
    return Objective(0.0, temperature, loss, beta)


def pair(spread: float = 3.0, rows: int = 5, classes: int = 11) -> tuple[Tensor, Tensor]:
    student, teacher = torch.randn(2, rows, classes, dtype=torch.float64) * spread
    return student, teacher


def rows_of(*probabilities: tuple[float, ...]) -> list[Tensor]:
    return [torch.tensor([row], dtype=torch.float64).log() for row in probabilities]


@pytest.mark.parametrize(("loss", "beta", "expected"), NUMBERS)
def test_worked_numbers(loss: str, beta: float, expected: float) -> None:
    log_s, log_t = rows_of(STUDENT, TEACHER)
    objective = objective_of(loss, beta=beta)
    assert distance(log_s, log_t, objective).item() == pytest.approx(expected, abs=6e-7)
    assert value_and_gradient(log_s, log_t, objective)[0].item() == pytest.approx(expected, abs=6e-7)


def test_the_weight_of_lk() -> None:
    assert pytest.approx(0.090718, abs=1e-6) == SHARE
    assert pytest.approx(0.189579, abs=1e-6) == SHARE * 0.085123 + (1 - SHARE) * 0.2


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_autograd(loss: str, temperature: float) -> None:
    student, teacher = pair()
    objective = objective_of(loss, temperature)
    y = (student / temperature).requires_grad_()
    log_t = softened(teacher, objective)
    expected = distance(torch.log_softmax(y, -1), log_t, objective)
    (slope,) = torch.autograd.grad(expected.sum(), y)
    value, gradient = value_and_gradient(softened(student, objective), log_t, objective)
    assert relative_error(value, expected.detach()) <= 1e-12
    assert relative_error(gradient, slope) <= 1e-12


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "lk"])  # whose weight is a constant
def test_gradients_are_those_of_differences(loss: str) -> None:
    student, teacher = pair(rows=1)
    objective = objective_of(loss)

    def value(y: Tensor) -> Tensor:
        return value_and_gradient(softened(y, objective), softened(teacher, objective), objective)[0]

    _, gradient = value_and_gradient(softened(student, objective), softened(teacher, objective), objective)
    steps = 1e-6 * torch.eye(student.shape[-1], dtype=torch.float64)
    numeric = torch.stack([(value(student + step) - value(student - step))[0] for step in steps]) / 2e-6
    assert relative_error(gradient[0], numeric) <= 1e-7


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_pushes_nothing_but_differences(loss: str) -> None:
    student, teacher = pair()
    log_s, log_t = (softened(logits, objective_of(loss)) for logits in (student, teacher))
    _, gradient = value_and_gradient(log_s, log_t, objective_of(loss))
    assert gradient.sum(-1).abs().max() <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_have_no_distance(loss: str, dtype: torch.dtype) -> None:
    log_s = torch.log_softmax(3 * torch.randn(4, 1000, dtype=dtype), -1)
    value, gradient = value_and_gradient(log_s, log_s.clone(), objective_of(loss))
    precision = 4 * torch.finfo(dtype).eps
    assert value.abs().max() <= precision
    assert gradient.abs().max() <= precision


@pytest.mark.parametrize("loss", LOSSES)
def test_symmetry_of_the_symmetric(loss: str) -> None:
    log_s, log_t = (softened(logits, objective_of(loss)) for logits in pair())
    there, back = (
        value_and_gradient(a, b, objective_of(loss, beta=0.5))[0] for a, b in ((log_s, log_t), (log_t, log_s))
    )
    assert torch.allclose(there, back, rtol=1e-12) == (loss in ("jsd", "tv", "nla"))


# -- edges ---------------------------------------------------------------------------------------------


def normal(logits: list[float], dtype: torch.dtype) -> Tensor:
    return torch.log_softmax(torch.tensor([logits], dtype=dtype), -1).clamp_min(FLOOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_ten_thousand(loss: str, dtype: torch.dtype) -> None:
    """Opposite certainties: s = (1, 0, 0), t = (0, 1, 0), with log-probabilities of -20000 that exp cannot hold."""
    log_s, log_t = normal([1e4, -1e4, 0.0], dtype), normal([-1e4, 1e4, 0.0], dtype)
    value, gradient = value_and_gradient(log_s, log_t, objective_of(loss, beta=0.3))
    jsd = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    tv = 1.0
    expected = {"fkl": 2e4, "rkl": 2e4, "jsd": jsd, "tv": tv, "nla": 1e4, "lk": 2e4}[loss]
    assert value.item() == pytest.approx(expected, rel=1e-6)
    slopes = {"fkl": [1, -1, 0], "lk": [1, -1, 0], "nla": [0.5, 0, -0.5]}  # of nla: a tie, half way
    assert gradient[0].tolist() == pytest.approx(slopes.get(loss, [0, 0, 0]), abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_impossible_for_both_is_not_there(loss: str) -> None:
    student, teacher = pair()
    expected = value_and_gradient(*(softened(x, objective_of(loss)) for x in (student, teacher)), objective_of(loss))
    masked = [torch.nn.functional.pad(x, (0, 2), value=-torch.inf) for x in (student, teacher)]
    log_s, log_t = (softened(x, objective_of(loss)).clamp_min(FLOOR) for x in masked)
    value, gradient = value_and_gradient(log_s, log_t, objective_of(loss))
    assert relative_error(value, expected[0]) <= 1e-14
    assert relative_error(gradient[:, :-2], expected[1]) <= 1e-14
    assert not gradient[:, -2:].any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_what_is_impossible_for_one_is_dear_but_finite(loss: str, who: str) -> None:
    student, teacher = pair()
    (student if who == "student" else teacher)[:, 0] = -torch.inf
    log_s, log_t = (softened(x, objective_of(loss)).clamp_min(FLOOR) for x in (student, teacher))
    value, gradient = value_and_gradient(log_s, log_t, objective_of(loss))
    assert value.isfinite().all() and gradient.isfinite().all()
    assert torch.allclose(value, distance(log_s, log_t, objective_of(loss)), rtol=1e-12)
    dear = (loss in ("fkl", "lk") and who == "student") or (loss == "rkl" and who == "teacher")
    assert (value.max() > 100) == dear
    if loss == "fkl":
        assert relative_error(gradient, log_s.exp() - log_t.exp()) <= 1e-15


@pytest.mark.parametrize("loss", LOSSES)
def test_a_teacher_that_is_certain(loss: str) -> None:
    """t is one-hot: forward KL is the cross entropy, and the chance to be accepted is the student's probability."""
    student, _ = pair()
    log_s = torch.log_softmax(student, -1)
    log_t = torch.full_like(student, FLOOR)
    log_t[:, 2] = 0
    value, gradient = value_and_gradient(log_s, log_t, objective_of(loss))
    cross_entropy, s = -log_s[:, 2], log_s.exp()
    slope = s - torch.nn.functional.one_hot(torch.tensor(2), student.shape[-1])
    share = torch.exp(-3 * s[:, 2])
    expected = {"fkl": cross_entropy, "nla": cross_entropy, "tv": 1 - s[:, 2]}
    expected["lk"] = share * cross_entropy + (1 - share) * (1 - s[:, 2])
    if loss in expected:
        assert relative_error(value, expected[loss]) <= 1e-12
    if loss in ("fkl", "nla"):
        assert relative_error(gradient, slope) <= 1e-12
    assert value.isfinite().all() and gradient.isfinite().all()
