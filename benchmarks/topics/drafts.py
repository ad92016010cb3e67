"""Drafts that this package trains: how much of what they draft is accepted, and how fast generate() is with them."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

import hf_accel
from hf_accel import DraftHead, SpeculativeConfig
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
from .train_draft import TRAINING_FACTS

DISTILLED, HEAD = "distilled", "head"
EQUAL = "head, equal steps"  # beside a head that was trained before, with more
KINDS: dict[str, Fields] = {
    "text alone": {"alpha": 1.0, "regenerate": 0},
    DISTILLED: {"alpha": 0.0, "regenerate": 1},
    HEAD: {"alpha": 0.0, "regenerate": 1, "kind": "eagle", "learning_rate": None},  # its own default
}
DRAFTS = Path("build") / "drafts"  # what the same code has trained with the same settings is not trained again
TRAINING = Path(hf_accel.distill.__file__).parent
PLAIN = "no draft"
Draft = PreTrainedModel | DraftHead
BESIDE: dict[str, Fields] = {DISTILLED: KINDS[DISTILLED], EQUAL: KINDS[HEAD], HEAD: {}}  # where a head is given
NOTE = (
    "Drafts of one layer with the target's embeddings and head, which begin as its first layer, and a head, which "
    "reads the target's hidden states and begins with random weights; on rows which the target has rewritten for the "
    "distilled one and for the head. Equal steps on equal rows, unless the title says how a head was trained. "
    "text: sum(min(p, q)), at temperature 0 same likeliest tokens, on held-out text; first, second, third: accepted "
    "by position, if all before were, on the target's own; tokens a pass, predicted ratio: of a chain of the length "
    "that is predicted to be best."
)
SPEED_NOTE = (
    "Whole calls of generate() on held-out text, prompt included, weights as loaded; ratio: to the same patched model "
    "without a draft; how many tokens are drafted, and whether as a tree, is left to the controller, unless a length "
    'is named; chains: no trees; seeded: verify="seeded". Drafts of the first seed.'
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    target = hf_accel.patch(endless(load_model(target_of(settings))), weights=None)
    tokens = AutoTokenizer.from_pretrained(target_of(settings))(held_out_text(settings.text), verbose=False).input_ids
    drafts = train(settings, target)
    temperatures = settings.drafters.temperatures
    tables = [acceptance(settings, target, drafts, tokens, temperature=t) for t in temperatures[::-1]]
    tables += [
        speed(settings, target, drafts, tokens, temperature=t, batch=batch)
        for t in temperatures
        for batch in settings.drafts.together
    ]
    return [*tables, *replayed_drafts.measure(bench)]


def train(settings: Settings, target: PreTrainedModel) -> dict[tuple[str, int], Draft]:
    """Drafts by kind and seed; of a head that was trained before, the one there is, as that of the first seed."""
    given, seeds = settings.drafts.head, settings.drafts.seeds
    kinds: dict[str, Fields] = BESIDE if given else KINDS
    if given:
        seeds = seeds[:1]
    shared: Fields = {
        "target": target_of(settings),
        "text": settings.text,
        "steps": settings.drafts.steps,
        "batch": settings.drafts.rows,
        "length": settings.drafts.length,
        "learning_rate": settings.drafts.rate,
    }
    wanted = {(kind, seed): {**shared, **own, "seed": seed} for kind, own in kinds.items() for seed in seeds}
    paths = {key: DRAFTS / digest(fields) for key, fields in wanted.items()}
    if given:
        paths[HEAD, seeds[0]] = Path(given)
    missing = {key: path.with_suffix(f".{os.getpid()}") for key, path in paths.items() if not path.exists()}
    call_all("train_draft", [{**wanted[key], "out": str(path)} for key, path in missing.items()])
    for key, path in missing.items():
        path.rename(paths[key])
    return {key: loaded(key[0], path, target) for key, path in paths.items()}


def digest(fields: Fields) -> str:
    """Of the settings of a training and of the package's code for it."""
    found = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for path in sorted(TRAINING.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def loaded(kind: str, path: Path, target: PreTrainedModel) -> Draft:
    return DraftHead.from_pretrained(path, target) if kind in (HEAD, EQUAL) else endless(load_model(str(path)))


def acceptance(
    settings: Settings,
    target: PreTrainedModel,
    drafts: Mapping[tuple[str, int], Draft],
    tokens: Sequence[int],
    *,
    temperature: float,
) -> Table:
    length = min(settings.drafts.length, len(tokens) // 2)
    texts = [tokens[start : start + length] for start in range(0, len(tokens) - length, length)]
    found: dict[str, list[AcceptanceReport]] = {kind: [] for kind, _ in drafts}
    for (kind, _), draft in drafts.items():
        report = hf_accel.measure_acceptance(
            target, draft, texts, temperature=temperature, max_draft=4, max_tokens=settings.drafts.measured,
            progress_bar=False,
        )  # fmt: skip
        found[kind].append(report)
    rows = [acceptance_row(kind, reports) for kind, reports in found.items()]
    first = {row["draft"]: row["first_share"] for row in rows}
    times = first[EQUAL if EQUAL in first else HEAD] / first[DISTILLED]
    title = (
        f"temperature {temperature:g}, {training_of(settings)}: after equal steps {times:.2f}x as many of a head's "
        "first tokens are accepted as of a distilled model's"
    )
    return Table(title, rows, NOTE)


def training_of(settings: Settings) -> str:
    """Say how the drafts were trained; of a head that was trained before, what `train_draft` has written beside it."""
    given, steps = settings.drafts.head, settings.drafts.steps
    if not given:
        return f"{steps} steps, mean of {len(settings.drafts.seeds)} seeds"
    facts = Path(given) / TRAINING_FACTS
    known = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else None
    head = "a head" if known is None else (
        f"a head of {known['steps']} steps with {known['batch']} rows of {known['length']} tokens "
        f"({known.get('epochs', 1)} epochs), "
        f"{known['training_cpu_seconds']:.0f} s of CPU time"
    )  # fmt: skip
    return f"{head}, a distilled model and a head of {steps} steps"


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
    drafts: Mapping[tuple[str, int], Draft],
    tokens: list[int],
    *,
    temperature: float,
    batch: int,
) -> Table:
    count = max(batch, settings.drafts.prompts)
    ids = prompts(tokens, "open text", count=count, length=settings.drafts.length)
    start = partial(generate_all, settings, ids, temperature, target, batch=batch)
    seed = settings.drafts.seeds[0]
    head = drafts[HEAD, seed]
    configs = {
        "ngram": SpeculativeConfig(drafter="ngram"),
        DISTILLED: SpeculativeConfig(drafter=drafts[DISTILLED, seed]),
        HEAD: SpeculativeConfig(drafter=head),
        f"{HEAD}, chains": SpeculativeConfig(drafter=head, max_nodes=1),
    }
    if temperature:
        configs[f"{HEAD}, seeded"] = SpeculativeConfig(drafter=head, verify="seeded")
    if batch == 1:
        configs[f"{HEAD}, chains of 3"] = SpeculativeConfig(drafter=head, num_draft=3, max_nodes=1)
        verify: Any = "seeded" if temperature else "token"  # trees of sampled tokens are drawn by seeds
        configs[f"{HEAD}, trees 4 deep"] = SpeculativeConfig(drafter=head, num_draft=4, verify=verify)
    runs: dict[str, Any] = {PLAIN: partial(start, speculative=None)}
    runs |= {name: partial(start, speculative=config) for name, config in configs.items()}
    found = take_turns(runs, rounds=settings.rounds)
    rows = [speed_row(name, found[PLAIN], found[name]) for name in found]
    amount = f"{settings.drafters.new_tokens} tokens after each of {len(ids)} prompts of {len(ids[0])}"
    return Table(f"generate(), temperature {temperature:g}, batch {batch}, {amount}", rows, SPEED_NOTE)


def speed_row(name: str, plain: Sequence[Run], own: Sequence[Run]) -> Row:
    counts = own[-1].statistics
    return {
        "drafter": name,
        "ratio": statistics.median(p.seconds / o.seconds for p, o in zip(plain, own, strict=True)),
        "tokens_per_pass": f"{counts['tokens'] / counts['steps']:.2f}" if counts else "1.00",
        "accepted_share": counts["accepted"] / counts["drafted"] if counts and counts["drafted"] else None,
        "generate_seconds": statistics.median(run.seconds for run in own),
    }
