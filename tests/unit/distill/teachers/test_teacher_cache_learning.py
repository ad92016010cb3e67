"""A student of the cache against a student of the model, on real text: top 32 and 32 drawn of 2,048 ids."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_accel.distill.losses.distillation_loss import divergence_sum
from hf_accel.distill.losses.logit_rows import DenseRows, Rows
from hf_accel.distill.losses.objective import Objective
from hf_accel.distill.teachers.teacher_cache import TeacherCache

MODEL = Path(__file__).parents[4] / "examples" / "stdlib-tiny"
LENGTH, TEXTS, UNSEEN = 64, 160, 16


@pytest.fixture(scope="module")
def teacher() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows() -> Tensor:
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(MODEL)(text[:60_000], verbose=False).input_ids
    return torch.tensor(ids[: TEXTS * LENGTH]).view(TEXTS, LENGTH)


@pytest.fixture(scope="module")
def cache(teacher: Any, rows: Tensor, tmp_path_factory: pytest.TempPathFactory) -> TeacherCache:
    return TeacherCache.build(teacher, rows.tolist(), tmp_path_factory.mktemp("cache"), progress=False)


def student(teacher: Any, layers: int) -> Any:
    made = copy.deepcopy(teacher)
    made.model.layers, made.config.num_hidden_layers = made.model.layers[:layers], layers
    return made


def every(ids: Tensor) -> Tensor:
    select = torch.ones_like(ids, dtype=torch.bool)
    select[:, -1] = False
    return select


def online(teacher: Any, ids: Tensor) -> Rows:
    with torch.no_grad():
        return DenseRows(teacher(input_ids=ids).logits[every(ids)])


def cached(cache: TeacherCache, ids: Tensor) -> Rows:
    return cache.rows({"input_ids": ids}, every(ids))


def distance(model: Any, ids: Tensor, said: Rows, objective: Objective) -> Tensor:
    return divergence_sum(model(input_ids=ids).logits[every(ids)], said, objective) / len(said)


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_divergence_is_that_of_the_model(
    teacher: Any, cache: TeacherCache, rows: Tensor, temperature: float, layers: int
) -> None:
    objective = Objective(temperature=temperature)
    cache.check(teacher, objective)
    model, rows = student(teacher, layers), rows[:24]
    with torch.no_grad():
        exact, found = (distance(model, rows, say, objective) for say in (online(teacher, rows), cached(cache, rows)))
    assert found.item() == pytest.approx(exact.item(), rel=0.02)


def trained(teacher: Any, rows: Tensor, say: Any, objective: Objective, *, steps: int) -> float:
    """The divergence from the model itself, on texts it was not trained on."""
    model, order = student(teacher, 2), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        ids = rows[:-UNSEEN][torch.randint(TEXTS - UNSEEN, (4,), generator=order)]
        optimizer.zero_grad()
        distance(model, ids, say(ids), objective).backward()
        optimizer.step()
    with torch.no_grad():
        return distance(model, rows[-UNSEEN:], online(teacher, rows[-UNSEEN:]), objective).item()


@pytest.mark.parametrize("steps", [15, pytest.param(150, marks=pytest.mark.long)])
def test_a_student_learns_as_much(teacher: Any, cache: TeacherCache, rows: Tensor, steps: int) -> None:
    objective = Objective(temperature=1.0)
    cache.check(teacher, objective)
    exact = trained(teacher, rows, lambda ids: online(teacher, ids), objective, steps=steps)
    found = trained(teacher, rows, lambda ids: cached(cache, ids), objective, steps=steps)
    assert found == pytest.approx(exact, rel=0.02)
    assert cache.bytes_per_token < 280


@pytest.mark.long
def test_draws_teach_what_one_bucket_cannot(teacher: Any, cache: TeacherCache, rows: Tensor, tmp_path: Path) -> None:
    """At T=2, where the best 64 ids have half of the mass, in four passes over the same draws."""
    objective = Objective(temperature=2.0)
    bucket = TeacherCache.build(teacher, rows.tolist(), tmp_path, samples=0, progress=False)
    cache.check(teacher, objective)
    bucket.check(teacher, objective)
    exact = trained(teacher, rows, lambda ids: online(teacher, ids), objective, steps=150)
    drawn, merged = (
        trained(teacher, rows, lambda ids, by=by: cached(by, ids), objective, steps=150) for by in (cache, bucket)
    )
    assert drawn - exact < (merged - exact) / 2
    assert drawn == pytest.approx(exact, rel=0.1)
