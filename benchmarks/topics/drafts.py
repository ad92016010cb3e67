"""What a draft gains by being distilled: acceptance, and the speed of generate(), over one trained on text alone."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.cli.measurement import take_turns
from hf_accel.distill.drafts.report import AcceptanceReport

from ..harness.bench import Bench
from ..harness.corpus import held_out_text
from ..harness.models import load_model
from ..harness.processes import call_all
from ..harness.settings import Settings
from ..harness.tables import Row, Table
from ..harness.texts import prompts
from . import replayed_drafts
from .drafters import Run, endless, generate_all, target_of
from .students import Fields

KINDS: dict[str, Fields] = {
    "text alone": {"alpha": 1.0, "regenerate": 0},
    "distilled": {"alpha": 0.0, "regenerate": 1},
}
PLAIN = "no draft"
NOTE = (
    "Drafts of one layer that begin as the target's first, with its embeddings and head; equal steps on equal rows, "
    "which the target has rewritten for the distilled one. text: sum(min(p, q)), at temperature 0 same likeliest "
    "tokens, on held-out text; first, second, third: accepted by position, if all before were, on the target's own; "
    "tokens a pass, predicted ratio: with the number of drafted tokens that is predicted to be best."
)
SPEED_NOTE = (
    "Whole calls of generate() at batch 1 on held-out text, prompt included, weights as loaded; ratio: to the same "
    "patched model without a draft; how many tokens are drafted is left to the controller."
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    target = hf_accel.patch(endless(load_model(target_of(settings))), weights=None)
    tokens = AutoTokenizer.from_pretrained(target_of(settings))(held_out_text(settings.text), verbose=False).input_ids
    with tempfile.TemporaryDirectory() as folder:
        drafts = train(settings, Path(folder))
        tables = [
            acceptance(settings, target, drafts, tokens, temperature=t) for t in settings.drafters.temperatures[::-1]
        ]
        tables += [speed(settings, target, drafts, tokens, temperature=t) for t in settings.drafters.temperatures]
    return [*tables, *replayed_drafts.measure(bench)]


def train(settings: Settings, folder: Path) -> dict[tuple[str, int], PreTrainedModel]:
    """By kind and seed."""
    wanted = [(kind, seed) for seed in settings.students.seeds for kind in KINDS]
    shared: Fields = {
        "target": target_of(settings),
        "text": settings.text,
        "steps": settings.drafts.steps,
        "batch": settings.drafts.rows,
        "length": settings.drafts.length,
        "learning_rate": settings.drafts.rate,
    }
    paths = {(kind, seed): str(folder / f"{kind}-{seed}") for kind, seed in wanted}
    call_all(
        "train_draft", [{**shared, **KINDS[kind], "seed": seed, "out": path} for (kind, seed), path in paths.items()]
    )
    return {key: endless(load_model(path)) for key, path in paths.items()}


def acceptance(
    settings: Settings,
    target: PreTrainedModel,
    drafts: Mapping[tuple[str, int], PreTrainedModel],
    tokens: Sequence[int],
    *,
    temperature: float,
) -> Table:
    length = min(settings.drafts.length, len(tokens) // 2)
    texts = [tokens[start : start + length] for start in range(0, len(tokens) - length, length)]
    found: dict[str, list[AcceptanceReport]] = {kind: [] for kind in KINDS}
    for (kind, _), draft in drafts.items():
        report = hf_accel.measure_acceptance(
            target, draft, texts, temperature=temperature, max_draft=4, max_tokens=settings.drafts.measured,
            progress_bar=False,
        )  # fmt: skip
        found[kind].append(report)
    rows = [acceptance_row(kind, reports) for kind, reports in found.items()]
    gain = mean(found["distilled"], "text_acceptance") / mean(found["text alone"], "text_acceptance")
    own = rows[1]["first_share"] / rows[0]["first_share"]
    title = (
        f"temperature {temperature:g}, {settings.drafts.steps} steps, mean of {len(settings.students.seeds)} seeds: "
        f"acceptance on text {gain:.2f}x, on the target's own {own:.2f}x by distilling"
    )
    return Table(title, rows, NOTE)


def acceptance_row(kind: str, reports: Sequence[AcceptanceReport]) -> Row:
    first, second, third = (
        statistics.mean(report.acceptances[position] for report in reports) for position in range(3)
    )
    texts = [report.text_acceptance for report in reports]
    return {
        "draft": kind,
        "text_share": statistics.mean(texts),
        "text least_share": min(texts),
        "text most_share": max(texts),
        "first_share": first,
        "second_share": second,
        "third_share": third,
        "draft_cost_share": mean(reports, "draft_cost"),
        "num_draft": "/".join(str(report.num_draft) for report in reports),
        "tokens_a_pass": f"{statistics.mean(report.expected_tokens(report.num_draft) for report in reports):.2f}",
        "predicted_ratio": statistics.mean(report.speed_up(report.num_draft) for report in reports),
    }


def mean(reports: Sequence[AcceptanceReport], name: str) -> float:
    return statistics.mean(getattr(report, name) for report in reports)


def speed(
    settings: Settings,
    target: PreTrainedModel,
    drafts: Mapping[tuple[str, int], PreTrainedModel],
    tokens: list[int],
    *,
    temperature: float,
) -> Table:
    ids = prompts(tokens, "open text", count=settings.drafts.prompts, length=settings.drafts.length)
    start = partial(generate_all, settings, ids, temperature, target)
    runs: dict[str, Any] = {PLAIN: partial(start, speculative=None)}
    runs["ngram"] = partial(start, speculative=SpeculativeConfig(drafter="ngram"))
    for (kind, seed), draft in drafts.items():
        runs[f"{kind}, seed {seed}"] = partial(start, speculative=SpeculativeConfig(drafter=draft))
    found = take_turns(runs, rounds=settings.rounds)
    rows = [speed_row(name, found[PLAIN], found[name]) for name in found]
    amount = f"{settings.drafters.new_tokens} tokens after each of {len(ids)} prompts of {len(ids[0])}"
    return Table(f"generate(), temperature {temperature:g}, {amount}", rows, SPEED_NOTE)


def speed_row(name: str, plain: Sequence[Run], own: Sequence[Run]) -> Row:
    counts = own[-1].statistics
    return {
        "drafter": name,
        "ratio": statistics.median(p.seconds / o.seconds for p, o in zip(plain, own, strict=True)),
        "tokens_per_pass": f"{counts['tokens'] / counts['steps']:.2f}" if counts else "1.00",
        "accepted_share": counts["accepted"] / counts["drafted"] if counts and counts["drafted"] else None,
        "generate_seconds": statistics.median(run.seconds for run in own),
    }
