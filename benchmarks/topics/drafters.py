"""Speculation as it is used: real drafters, on real text, against stock's assisted generation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.cli.measurement import take_turns
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.models import load_model
from ..harness.settings import Settings
from ..harness.tables import Row, Table
from ..harness.texts import KINDS, SHIPPED, prompts, read_tokens

PLAIN, STOCK_PLAIN = "none", "stock: none"
LOOKED_UP = 8  # tokens that stock's prompt lookup proposes, the most that ours does
NOTE = (
    "Speedup: to the same patched model without speculation; stock ratio: to stock's generate() without; assisted "
    "ratio: to stock's own assisted generation with the nearest drafter (prompt lookup, or the draft model). All of "
    "whole calls of generate() at batch 1, prompt included; weights as loaded. Drafting share: of the "
    "time of decoding, what is done for drafts before each pass, the choice of their lengths included."
)


@dataclass(frozen=True)
class Run:
    """All prompts of a workload, one after the other."""

    seconds: float
    statistics: Mapping[str, Any] = field(default_factory=dict)


def target_of(settings: Settings) -> str:
    return settings.drafters.target or str(SHIPPED)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    target = endless(load_model(target_of(settings)))
    draft = endless(load_model(settings.drafters.draft)) if settings.drafters.draft else None
    if draft is None:
        bench.refused["draft model"] = "name a checkpoint with --draft, of the tokenizer of --target"
    tokens = read_tokens(AutoTokenizer.from_pretrained(target_of(settings)), settings)
    models = Models(target, hf_accel.patch(twin(target), weights=None, keep_original=True), draft)
    few = replace(settings, drafters=replace(settings.drafters, new_tokens=4))
    for run in candidates(few, models, [tokens[:32]], 0.0).values():
        run()  # the first calls make draft models and set libraries up
    return [table(settings, models, tokens, temperature) for temperature in settings.drafters.temperatures]


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """Without a token that ends the text, so that all generate as many."""
    model.generation_config.eos_token_id = None
    return model


@dataclass(frozen=True)
class Models:
    """stock and patched share their weights."""

    stock: PreTrainedModel
    patched: PreTrainedModel
    draft: PreTrainedModel | None

    def drafters(self) -> dict[str, Any]:
        """What SpeculativeConfig takes, by name."""
        known: dict[str, Any] = {"ngram": "ngram", "suffix": "suffix", "self-int4": "self-int4"}
        if self.draft is not None:
            known |= {"draft model": self.draft, "suffix, draft model": ["suffix", self.draft]}
        return known

    def assistants(self) -> dict[str, dict[str, Any]]:
        """Keywords of stock's generate(), by the name of what they draft with."""
        known: dict[str, dict[str, Any]] = {"prompt lookup": {"prompt_lookup_num_tokens": LOOKED_UP}}
        if self.draft is not None:
            known["draft model"] = {"assistant_model": self.draft}
        return known


# -- runs ----------------------------------------------------------------------------------------------


def table(settings: Settings, models: Models, tokens: list[int], temperature: float) -> Table:
    rows: list[Row] = []
    for kind in KINDS:
        print(f"  {kind}, temperature {temperature:g}", flush=True)
        ids = prompts(tokens, kind, count=settings.drafters.prompts, length=settings.drafters.prompt)
        runs = take_turns(
            candidates(settings, models, ids, temperature), rounds=settings.drafters.rounds, warm_up=False
        )
        rows += [row(kind, name, runs) for name in (PLAIN, *models.drafters())]
    name = Path(target_of(settings)).name
    draft = f", draft model {Path(settings.drafters.draft).name}" if settings.drafters.draft else ""
    amount = f"{settings.drafters.new_tokens} tokens after each of {len(ids)} prompts"
    return Table(f"{name}{draft}: temperature {temperature:g}, {amount}", rows, NOTE)


def candidates(
    settings: Settings, models: Models, ids: list[list[int]], temperature: float
) -> dict[str, Callable[[], Run]]:
    start = partial(generate_all, settings, ids, temperature)
    wanted: dict[str, Callable[[], Run]] = {STOCK_PLAIN: partial(start, models.stock)}
    wanted |= {f"stock: {name}": partial(start, models.stock, **more) for name, more in models.assistants().items()}
    wanted[PLAIN] = partial(start, models.patched, speculative=None)
    for name, drafter in models.drafters().items():
        wanted[name] = partial(start, models.patched, speculative=SpeculativeConfig(drafter=drafter))
    return wanted


def generate_all(
    settings: Settings,
    ids: list[list[int]],
    temperature: float,
    model: PreTrainedModel,
    *,
    batch: int = 1,
    **keywords: Any,
) -> Run:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.manual_seed(settings.seed)
    counts: list[Mapping[str, Any]] = []
    start = time.perf_counter()
    for first in range(0, len(ids), batch):
        rows = torch.tensor(ids[first : first + batch])
        output = model.generate(
            rows, attention_mask=torch.ones_like(rows), max_new_tokens=settings.drafters.new_tokens,
            pad_token_id=0, **sampling, **keywords,
        )  # fmt: skip
        assert output.shape[1] == rows.shape[1] + settings.drafters.new_tokens
        if hf_accel.is_patched(model):
            counts.append(hf_accel.stats(model))
    seconds = time.perf_counter() - start
    return Run(seconds, joined(counts))


def joined(counts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the calls; empty without speculation."""
    names = ("steps", "tokens", "drafted", "accepted", "drafting_seconds", "verifying_seconds")
    return {name: sum(one[name] for one in counts) for name in names if counts and name in counts[0]}


# -- rows ----------------------------------------------------------------------------------------------


def row(kind: str, name: str, runs: Mapping[str, list[Run]]) -> Row:
    counts = runs[name][-1].statistics
    near = nearest(name)
    return {
        "drafter": f"{kind}: {name}",
        "speedup_ratio": ratio(runs, PLAIN, name),
        "stock_ratio": ratio(runs, STOCK_PLAIN, name),
        "assisted_ratio": None if near is None else ratio(runs, near, name),
        "tokens_per_pass": counts["tokens"] / counts["steps"] if counts else 1.0,
        "accepted_share": counts["accepted"] / counts["drafted"] if counts and counts["drafted"] else None,
        "drafting_share": drafting_share(counts) if counts else None,
        "generate_seconds": statistics.median(run.seconds for run in runs[name]),
    }


def drafting_share(counts: Mapping[str, Any]) -> float:
    drafting: float = counts["drafting_seconds"]
    return drafting / (drafting + counts["verifying_seconds"])


def nearest(name: str) -> str | None:
    """The stock run that drafts most alike; None for those that stock has no like of."""
    if name in ("ngram", "suffix"):
        return "stock: prompt lookup"
    return "stock: draft model" if "draft model" in name else None


def ratio(runs: Mapping[str, list[Run]], baseline: str, name: str) -> float:
    pairs = zip(runs[baseline], runs[name], strict=True)
    return statistics.median(before.seconds / after.seconds for before, after in pairs)
