"""Distillation on real text: students of half the depth, each trained on text alone and from the teacher."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_accel
from hf_accel.cli.measurement import take_turns, time_generate
from hf_accel.distill.drafts.student import choose_layers

from ..harness.bench import Bench
from ..harness.models import load_model
from ..harness.processes import call_all
from ..harness.requests import median_ratio
from ..harness.settings import Settings
from ..harness.tables import Row, Table
from .drafters import target_of

Fields = dict[str, Any]

KINDS: dict[str, Fields] = {
    "text alone": {"alpha": 1.0},
    "distilled": {"alpha": 0.1, "hidden_weight": 1.0, "fused": True},
}
NOTE = (
    "Each row is one training; both begin with the same layers of the teacher and read the same text in the same "
    "order, drawn by the seed. accuracy: next tokens of the held-out text that are the likeliest; kept: over the "
    "teacher's; same choice: likeliest tokens that are the teacher's too; acceptance: sum(min(p, q)) with the teacher."
)
SPEED_NOTE = "Whole calls of generate() at batch 1, the prompt included; stock and patched are the same weights."
ABLATION_NOTE = (
    "Each row is one training of the same steps; loss, T and alpha are those of L = alpha * CE + (1 - alpha) * T^2 * "
    "D; +- is half the range over the seeds."
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    trainings = [(kind, seed) for seed in settings.students.seeds for kind in KINDS]
    shared = common(settings)
    found = call_all("train_student", [{**shared, **KINDS[kind], "seed": seed} for kind, seed in trainings])
    rows = [row_of(kind, seed, result) for (kind, seed), result in zip(trainings, found, strict=True)]
    return [summary(settings, rows), Table("each training", rows, NOTE)]


def common(settings: Settings) -> Fields:
    return {
        "teacher": target_of(settings),
        "text": settings.text,
        "layers": kept_layers(settings),
        "steps": settings.students.steps,
        "batch": settings.students.batch,
        "length": settings.students.length,
        "learning_rate": settings.students.rate,
        "measured": settings.quality_tokens,
    }


def kept_layers(settings: Settings) -> list[int]:
    """Those that were named, or half of the teacher's, its first and last among them."""
    if settings.students.layers:
        return list(settings.students.layers)
    total: int = load_model(target_of(settings)).config.num_hidden_layers
    return choose_layers(total, total // 2, None, strategy="first_last", influence=list)


# -- tables --------------------------------------------------------------------------------------------


def row_of(kind: str, seed: int, result: Any) -> Row:
    return {
        "student": kind,
        "seed": seed,
        "kept_share": result["accuracy"] / result["teacher_accuracy"],
        "accuracy_share": result["accuracy"],
        "teacher_accuracy_share": result["teacher_accuracy"],
        "perplexity": math.exp(result["nats"]),
        "teacher_perplexity": math.exp(result["teacher_nats"]),
        "same_choice_share": result["same_choice"],
        "acceptance_share": result["acceptance"],
        "training_seconds": result["training_seconds"],
    }


def summary(settings: Settings, rows: Sequence[Row]) -> Table:
    columns = ("kept_share", "accuracy_share", "perplexity", "same_choice_share", "acceptance_share")
    table = []
    for kind in dict.fromkeys(row["student"] for row in rows):
        own = [row for row in rows if row["student"] == kind]
        table.append({"student": kind} | {name: statistics.mean(row[name] for row in own) for name in columns})
    tokens = settings.students.steps * settings.students.batch * settings.students.length
    title = (
        f"layers {', '.join(map(str, kept_layers(settings)))} of the teacher, {settings.students.steps} steps, "
        f"{tokens} tokens, mean of {len(settings.students.seeds)} seeds"
    )
    return Table(title, table, NOTE)


def speed(bench: Bench) -> list[Table]:
    """Of the teacher and of a student of these layers, which its weights do not change."""
    settings = bench.settings
    teacher = load_model(target_of(settings))
    student = hf_accel.init_student(teacher, layers=kept_layers(settings)).eval()
    prompt = torch.randint(1, teacher.config.vocab_size, (1, settings.drafters.prompt))
    rows: list[Row] = []
    for name, weights in (("stock", "stock"), ("hf_accel exact", None), ("hf_accel int8", "int8")):
        seconds = timed(settings, {"teacher": teacher, "student": student}, prompt, weights)
        rows.append(
            {
                "setup": name,
                "ratio": median_ratio(seconds["teacher"], seconds["student"]),
                "teacher_seconds": statistics.median(seconds["teacher"]),
                "student_seconds": statistics.median(seconds["student"]),
            }
        )
    amount = f"{settings.drafters.new_tokens} tokens after {settings.drafters.prompt}"
    return [
        Table(f"speed of a student of layers {', '.join(map(str, kept_layers(settings)))}, {amount}", rows, SPEED_NOTE)
    ]


def timed(settings: Settings, models: dict[str, PreTrainedModel], prompt: Any, weights: Any) -> dict[str, list[float]]:
    for model in models.values():
        model.generation_config.eos_token_id = None
        if weights != "stock":
            hf_accel.patch(model, weights=weights, keep_original=True)
    runs = {
        name: lambda model=model: time_generate(model, prompt, num_new=settings.drafters.new_tokens).total
        for name, model in models.items()
    }
    seconds = take_turns(runs, rounds=settings.rounds)
    for model in models.values():
        if weights != "stock":
            hf_accel.unpatch(model)
    return seconds


# -- ablation ------------------------------------------------------------------------------------------

ABLATION: list[Fields] = [
    *({"alpha": alpha, "temperature": 2.0, "loss": "fkl"} for alpha in (1.0, 0.5, 0.0)),
    *({"alpha": 0.0, "temperature": temperature, "loss": "fkl"} for temperature in (1.0, 4.0)),
    *({"alpha": 0.0, "temperature": 1.0, "loss": loss} for loss in ("rkl", "jsd", "tv", "nla", "lk")),
]


def ablation(bench: Bench) -> list[Table]:
    settings = bench.settings
    students = dataclasses.replace(settings.students, steps=settings.students.ablation_steps)
    settings = dataclasses.replace(settings, students=students)
    shared = common(settings)
    trainings = [{**shared, **fields, "seed": seed} for fields in ABLATION for seed in settings.students.seeds]
    found = call_all("train_student", trainings)
    rows = []
    for fields in ABLATION:
        own = [r for t, r in zip(trainings, found, strict=True) if fields.items() <= t.items()]
        rows.append(
            {
                "alpha": fields["alpha"],
                "T": "-" if fields["alpha"] == 1 else fields["temperature"],
                "loss": "-" if fields["alpha"] == 1 else fields["loss"],
                "accuracy_share": statistics.mean(r["accuracy"] for r in own),
                "accuracy +-": spread([100 * r["accuracy"] for r in own]),
                "perplexity": math.exp(statistics.mean(r["nats"] for r in own)),
                "same_choice_share": statistics.mean(r["same_choice"] for r in own),
                "acceptance_share": statistics.mean(r["acceptance"] for r in own),
                "acceptance +-": spread([100 * r["acceptance"] for r in own]),
            }
        )
    tokens = settings.students.steps * settings.students.batch * settings.students.length
    title = f"{settings.students.steps} steps, {tokens} tokens, mean of {len(settings.students.seeds)} seeds"
    return [Table(title, rows, ABLATION_NOTE)]


def spread(percents: Sequence[float]) -> str:
    return f"{(max(percents) - min(percents)) / 2:.1f}"
