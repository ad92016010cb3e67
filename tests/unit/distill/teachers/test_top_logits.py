"""What is kept of a row against the whole row: closed forms, and draws on average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.distill.losses.distillation_loss import divergence_sum
from hf_accel.distill.losses.logit_rows import DenseRows, TopRows
from hf_accel.distill.losses.objective import LOSSES, Objective
from hf_accel.distill.teachers.top_logits import STORED_DTYPES, KeptLogits, TopLogits, top_logits
from hf_accel.errors import HfAccelError

TEACHER = torch.tensor([[0.7, 0.2, 0.1]]).log()
STUDENT = torch.tensor([[0.5, 0.3, 0.2]]).log()


def choice(
    size: int, best: int, drawn: int = 0, *, temperatures: tuple[float, ...] = (1.0,), dtype: str = "float32"
) -> KeptLogits:
    return KeptLogits(vocab_size=size, top_k=best + drawn, samples=drawn, temperatures=temperatures, dtype=dtype)


def keep(logits: Tensor, kept: KeptLogits) -> TopLogits:
    return top_logits(logits, kept, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("best", "expected"), [(1, 0.082283), (2, 0.085123), (3, 0.085123)])
def test_the_rest_is_one_class(best: int, expected: float) -> None:
    kept, objective = choice(3, best), Objective(temperature=1.0)
    rows = keep(TEACHER + 3, kept).rows(kept, objective)
    assert divergence_sum(STUDENT, rows, objective).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_all_ids_are_the_whole(loss: str, temperature: float) -> None:
    teacher, student = torch.randn(5, 40) * 3, torch.randn(5, 40)
    objective, kept = Objective(temperature=temperature, loss=loss), choice(40, 40)
    found = divergence_sum(student, keep(teacher, kept).rows(kept, objective), objective)
    torch.testing.assert_close(found, divergence_sum(student, DenseRows(teacher), objective))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shift", [0.0, 5000.0])
def test_what_is_read_back_is_near_and_sums_to_one(dtype: str, shift: float) -> None:
    logits = torch.randn(50, 30) * 8
    kept = top_logits(logits + shift, choice(30, 30, temperatures=(2.0,), dtype=dtype))
    read = kept.logits.float() / 2 - kept.log_sums
    torch.testing.assert_close(read.exp().sum(-1), torch.ones(50))
    true = (logits / 2).log_softmax(-1).gather(-1, kept.ids.long())
    near = true > -6
    assert (read - true)[near].abs().max() < 12 * torch.finfo(STORED_DTYPES[dtype]).eps + shift * 1e-6


def draws(logits: Tensor, kept: KeptLogits, count: int, objective: Objective) -> TopRows:
    """The rows of one row [V], drawn many times."""
    generator = torch.Generator().manual_seed(1)
    rows = top_logits(logits.expand(count, -1), kept, generator).rows(kept, objective)
    assert isinstance(rows, TopRows) and rows.excess is not None
    return rows


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_are_right_on_average(temperature: float) -> None:
    teacher, student = torch.randn(200) * 2, torch.randn(200)
    kept = choice(200, 2, 30, temperatures=(1.0, 2.0))  # some of the rest are heavy enough to be drawn for sure
    objective = Objective(temperature=temperature)
    rows = draws(teacher, kept, 4000, objective)
    torch.testing.assert_close(rows.log_probs.exp().sum(-1), torch.ones(4000))
    mean = torch.zeros(200).index_add_(0, rows.ids.flatten(), rows.log_probs.exp().flatten()) / 4000
    assert (mean - (teacher / temperature).softmax(-1)).abs().max() < 1e-3
    found = divergence_sum(student.expand(4000, -1), rows, objective) / 4000
    exact = divergence_sum(student[None], DenseRows(teacher[None]), objective)
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)


def test_ids_differ_where_the_teacher_forbids_some() -> None:
    teacher = torch.randn(20, 32)
    teacher[:, 5:] = -torch.inf
    kept = choice(32, 8, 16)
    found = keep(teacher, kept)
    assert all(len(set(row)) == 24 for row in found.ids.tolist())
    rows = found.rows(kept, Objective(temperature=1.0))
    assert isinstance(rows, TopRows) and rows.excess is not None
    mass = torch.zeros(20, 32).scatter_(-1, rows.ids, rows.log_probs.exp())
    torch.testing.assert_close(mass, teacher.softmax(-1), atol=1e-6, rtol=0)
    assert torch.isfinite(rows.excess).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.randn(3, 9)
    logits[1, 4] = bad
    with pytest.raises(HfAccelError, match="best logit is"):
        keep(logits, choice(9, 2))
