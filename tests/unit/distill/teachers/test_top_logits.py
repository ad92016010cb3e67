"""What is kept of a row against the whole row: closed forms, and draws on average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.distill.losses.distillation_loss import divergence_sum
from hf_accel.distill.losses.logit_rows import DenseRows, TopRows
from hf_accel.distill.losses.objective import LOSSES, Objective
from hf_accel.distill.teachers.top_logits import KeptLogits, TopLogits, top_logits
from hf_accel.errors import HfAccelError

TEACHER = torch.tensor([[0.7, 0.2, 0.1]]).log()
STUDENT = torch.tensor([[0.5, 0.3, 0.2]]).log()


def keep(logits: Tensor, best: int, drawn: int = 0, temperatures: tuple[float, ...] = (1.0,)) -> TopLogits:
    generator = torch.Generator().manual_seed(0)
    return top_logits(logits, KeptLogits(best, drawn, temperatures, torch.float32), generator)


@pytest.mark.parametrize(("best", "expected"), [(1, 0.082283), (2, 0.085123), (3, 0.085123)])
def test_the_rest_is_one_class(best: int, expected: float) -> None:
    rows = keep(TEACHER + 3, best).top(1.0, 0, 3)
    assert divergence_sum(STUDENT, rows, Objective(temperature=1.0)).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_all_ids_are_the_whole(loss: str, temperature: float) -> None:
    teacher, student = torch.randn(5, 40) * 3, torch.randn(5, 40)
    objective = Objective(temperature=temperature, loss=loss)
    found = divergence_sum(student, keep(teacher, 40).dense(), objective)
    torch.testing.assert_close(found, divergence_sum(student, DenseRows(teacher), objective))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 5000.0])
def test_what_is_read_back_is_near_and_sums_to_one(dtype: torch.dtype, shift: float) -> None:
    logits = torch.randn(50, 30) * 8
    kept = top_logits(logits + shift, KeptLogits(30, 0, (2.0,), dtype))
    read = kept.logits.float() / 2 - kept.log_sums
    torch.testing.assert_close(read.exp().sum(-1), torch.ones(50))
    true = (logits / 2).log_softmax(-1).gather(-1, kept.ids)
    near = true > -6
    assert (read - true)[near].abs().max() < 12 * torch.finfo(dtype).eps + shift * 1e-6


def draws(logits: Tensor, choice: KeptLogits, count: int, temperature: float) -> TopRows:
    """Of one row [V], many times."""
    generator = torch.Generator().manual_seed(1)
    kept = top_logits(logits.expand(count, -1), choice, generator)
    column, drawn_at = choice.temperatures.index(temperature), max(choice.temperatures)
    rows = kept.sampled(choice.best, temperature, column, drawn_at=drawn_at, vocab_size=len(logits))
    assert isinstance(rows, TopRows) and rows.excess is not None
    return rows


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_are_right_on_average(temperature: float) -> None:
    teacher, student = torch.randn(200) * 2, torch.randn(200)
    choice = KeptLogits(2, 30, (1.0, 2.0), torch.float32)  # some of the rest are heavy enough to be drawn for sure
    rows = draws(teacher, choice, 4000, temperature)
    torch.testing.assert_close(rows.log_probs.exp().sum(-1), torch.ones(4000))
    mean = torch.zeros(200).index_add_(0, rows.ids.flatten(), rows.log_probs.exp().flatten()) / 4000
    assert (mean - (teacher / temperature).softmax(-1)).abs().max() < 1e-3
    objective = Objective(temperature=temperature)
    found = divergence_sum(student.expand(4000, -1), rows, objective) / 4000
    exact = divergence_sum(student[None], DenseRows(teacher[None]), objective)
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)


def test_ids_differ_where_the_teacher_forbids_some() -> None:
    teacher = torch.randn(20, 32)
    teacher[:, 5:] = -torch.inf
    kept = keep(teacher, 8, 16)
    assert all(len(set(row)) == 24 for row in kept.ids.tolist())
    rows = kept.sampled(8, 1.0, 0, drawn_at=1.0, vocab_size=32)
    assert isinstance(rows, TopRows) and rows.excess is not None
    mass = torch.zeros(20, 32).scatter_(-1, rows.ids, rows.log_probs.exp())
    torch.testing.assert_close(mass, teacher.softmax(-1), atol=1e-6, rtol=0)
    assert torch.isfinite(rows.excess).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.randn(3, 9)
    logits[1, 4] = bad
    with pytest.raises(HfAccelError, match="best logit is"):
        keep(logits, 2)
