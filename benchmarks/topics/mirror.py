"""A draft beside its target: is it faster to draft the next round on another core, while this round is verified?"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.cache.hf import page_groups
from hf_accel.cache.pages import Pages
from hf_accel.cli.measuring.requests import Requests, draw
from hf_accel.cli.measuring.served import WrongResultError, accelerated
from hf_accel.cli.measuring.turns import median_ratio, ratios, take_turns
from hf_accel.config import CacheConfig
from hf_accel.generation.hf.model_runner import ModelRunner
from hf_accel.generation.hf.vocabulary import vocabulary_size
from hf_accel.generation.speculation.drafters.model import ModelDrafter, PartialDraft
from hf_accel.generation.speculation.verifiers import TokenVerifier
from hf_accel.generation.unread import Unread, known
from hf_accel.hardware import detect, read_bandwidth
from hf_accel.hardware.processor import usable_cores
from hf_accel.patching.twin import twin
from hf_accel.tensors import integers
from hf_accel.undo.state import state_of

from ..harness.bench import Bench
from ..harness.models import load_model
from ..harness.oracle import spoilt
from ..harness.tables import Row, Table
from ..harness.texts import prompts, read_tokens
from ..setups import accel
from .drafters import endless, target_of
from .mirror_drafter import MirrorDrafter, Split

Known = Mapping[tuple[int, ...], list[int]]
PLAIN, IN_TURN, FEWER = "no draft", "in turn", "in turn, a core less"
WIDTHS = (accel.EXACT, accel.INT8, accel.INT4)
NOTE = (
    "Ratio: seconds of the tokens after the first, to the same model without a draft, in turns; turn ratio: to drafts "
    "in turn, with the least and the most of all rounds. a+b: threads of the target and of the draft, on cores of "
    "their own unless shared. Hit: of the rounds that might have had their draft before the verdict, those that had. "
    "Verify, draft: seconds of a pass of the target over the rows of a round, and of the draft model over one token "
    "of each row."
)
BALANCE_NOTE = (
    "A round of k tokens takes v + k d in turn, and v' + (1 - hit) k d' ahead, or (k + 1) d' where that is more than "
    "v': v and d with all threads, v' and d' with a core less for the target and one for the draft. So the target may "
    "lose k (d - (1 - hit) d') / v by the core that it cedes, and loses v' / v - 1. Drafting: k d / v. Predicted: by "
    "these terms; measured: by turns, where both also want the one lock of Python's interpreter and the same memory."
)


@dataclass(frozen=True)
class Way:
    """How rounds are drafted. split: of the threads; None: all for both. is_ahead: beside the target, else in turn."""

    name: str
    split: Split | None = None
    is_ahead: bool = False


@dataclass(frozen=True)
class Case:
    """A patched target and a patched draft model, and prompts that they go on with.

    tokens: what the target generates. known: what the draft model proposes, by prompt; None: what it chooses itself.
    """

    name: str
    target: Any
    draft: Any
    workload: Requests
    tokens: list[list[int]]
    known: Known | None = None


@dataclass(frozen=True)
class Run:
    """seconds: from the first tokens of all rows to the last token of all. verify, draft: seconds of a pass each.

    hit_share: of the rounds that might have had their draft ahead.
    """

    seconds: float
    tokens_per_pass: float = 1.0
    verify: float | None = None
    draft: float | None = None
    hit_share: float | None = None


def ways() -> list[Way]:
    """The draft has a core of its own, or it takes what it needs of those of the target."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    count = usable_cores()
    less = max(1, count - 1)  # a single core is both the target's and the draft's
    apart, shared = Split(less, 1, cores[:less] + cores[count - 1 : count]), Split(count, 1)
    return [
        Way(PLAIN),
        Way(IN_TURN),
        Way(FEWER, apart),
        Way(f"ahead, {apart.name}", apart, is_ahead=True),
        Way(f"ahead, {shared.name}", shared, is_ahead=True),
    ]


def measure(bench: Bench) -> list[Table]:
    titled = [*known_cases(bench), *own_cases(bench)]
    return [*(table for title, cases in titled for table in tables(bench, title, cases)), reading()]


def tables(bench: Bench, title: str, cases: list[Case]) -> list[Table]:
    runs = {case.name: in_turns(bench, case) for case in cases}
    timed = [row for name, results in runs.items() for row in rows(name, results)]
    weighed = [balance(name, results, bench.settings.mirror.num_draft) for name, results in runs.items()]
    return [Table(title, timed, NOTE), Table(f"{title}: what a core may cost", weighed, BALANCE_NOTE)]


# -- cases ---------------------------------------------------------------------------------------------


def known_cases(bench: Bench) -> Iterator[tuple[str, list[Case]]]:
    """A draft model of a few layers of the target's shape, whose tokens are right as often as is asked for."""
    settings, vocabulary = bench.settings.mirror, bench.model.config.vocab_size
    depth = bench.model.config.num_hidden_layers
    layers = max(1, min(settings.draft_layers, depth // 2))
    draft = hf_accel.patch(load_model(bench.settings.model, layers=layers, seed=1), weights="int8")
    for batch in settings.batches:
        workload = draw(
            "fixed", requests=batch, mean=settings.new_tokens, prompt_lengths=(settings.prompt, settings.prompt),
            vocabulary=vocabulary, seed=bench.settings.seed,
        )  # fmt: skip
        cases = []
        for setup in WIDTHS:
            target = bench.entrant(setup).model
            tokens = accelerated(target, workload).checked(workload).tokens
            known = {
                tuple(prompt): spoilt(own, settings.acceptance, vocabulary, random.Random(f"{prompt}"))
                for prompt, own in zip(workload.prompts, tokens, strict=True)
            }
            cases.append(Case(setup.name, target, draft, workload, tokens, known))
        yield f"batch {batch}, draft of {layers} of {depth} layers in INT8, {settings.acceptance:.0%} right", cases


def own_cases(bench: Bench) -> Iterator[tuple[str, list[Case]]]:
    """The checkpoints of --target and --draft, on text."""
    settings, checkpoints = bench.settings.mirror, bench.settings.drafters
    if checkpoints.draft is None:
        bench.refused["draft model"] = "name a checkpoint with --draft, of the tokenizer of --target"
        return
    name = target_of(bench.settings)
    text = read_tokens(AutoTokenizer.from_pretrained(name), bench.settings)
    stock, draft = endless(load_model(name)), hf_accel.patch(endless(load_model(checkpoints.draft)), weights=None)
    targets = {setup.name: setup.prepare(twin(stock)) for setup in WIDTHS}
    for batch in settings.batches:
        ids = prompts(text, "open text", count=batch, length=settings.prompt)
        workload = Requests("open text", ids, [settings.new_tokens] * batch)
        cases = [
            Case(name, target, draft, workload, accelerated(target, workload).checked(workload).tokens)
            for name, target in targets.items()
        ]
        yield f"{Path(name).name}, draft model {Path(checkpoints.draft).name}, batch {batch}", cases


class KnownTokens(ModelDrafter):
    """Computes what its parent computes, and then proposes what it was told."""

    known: Known

    def _next_tokens(self, drafts: list[PartialDraft], logits: Tensor) -> tuple[Tensor, Unread[list[int]]]:
        tokens = [self._known(draft) for draft in drafts]
        return integers(tokens), known(tokens)

    def _guess(self, drafts: list[PartialDraft], logits: Tensor) -> list[int]:
        return [self._known(draft) for draft in drafts]

    def _known(self, draft: PartialDraft) -> int:
        sequence = draft.sequence
        tokens = self.known[tuple(sequence.tokens[: sequence.num_prompt])]
        return [*tokens, 0, 0][min(sequence.num_new + len(draft.tokens), len(tokens))]


class KnownMirror(KnownTokens, MirrorDrafter):
    """KnownTokens ahead."""


# -- runs ----------------------------------------------------------------------------------------------


def in_turns(bench: Bench, case: Case) -> dict[str, list[Run]]:
    print(f"  {case.name}, batch {len(case.tokens)}", flush=True)
    settings = bench.settings.mirror
    candidates = {way.name: partial(run, case, way, settings.num_draft) for way in ways()}
    return take_turns(candidates, rounds=settings.rounds)


def run(case: Case, way: Way, num_draft: int) -> Run:
    """One generation. Raises WrongResultError if its tokens are not the target's own."""
    with way.split.applied() if way.split else nullcontext():
        drafter = None if way.name == PLAIN else drafter_of(case, way)
        speculative = None if drafter is None else SpeculativeConfig(drafter=drafter, num_draft=num_draft)
        try:
            served = accelerated(case.target, case.workload, speculative=speculative, record_timestamps=True)
        finally:
            if isinstance(drafter, MirrorDrafter):
                drafter.close()
    if served.tokens != case.tokens:
        raise WrongResultError(f"{case.name}, {way.name}: the tokens are not those without a draft")
    if drafter is None:
        return Run(served.decode_seconds)
    batch = len(case.tokens)
    costs = list(state_of(case.target).generation.controllers.values())[-1]  # of the run that has just ended
    return Run(
        served.decode_seconds,
        served.statistics["tokens_per_pass"],
        costs.verify_costs.seconds(batch * (num_draft + 1)),
        costs.draft_costs[drafter.name].seconds(batch),
        drafter.hits / max(1, drafter.rounds) if isinstance(drafter, MirrorDrafter) else None,
    )


def drafter_of(case: Case, way: Way) -> ModelDrafter:
    """A drafter with pages of its own; with a thread of its own, if it drafts ahead."""
    groups, group_of_layer = page_groups(case.draft.config, CacheConfig(prefix_sharing=False))
    pages = Pages(groups)
    parts = ModelRunner(case.draft, groups, group_of_layer), pages, TokenVerifier()
    sizes = {"num_tokens": vocabulary_size(case.draft), "target_tokens": vocabulary_size(case.target)}
    kinds = (KnownTokens, KnownMirror) if case.known is not None else (ModelDrafter, MirrorDrafter)
    more = {"split": way.split} if way.is_ahead else {}
    drafter: Any = kinds[way.is_ahead](*parts, target_pages=pages, **sizes, **more)
    drafter.known = case.known
    return drafter


# -- tables --------------------------------------------------------------------------------------------


def rows(name: str, runs: Mapping[str, list[Run]]) -> list[Row]:
    seconds = {way: [run.seconds for run in results] for way, results in runs.items()}
    found = []
    for way, results in runs.items():
        beside_turn = ratios(seconds[IN_TURN], seconds[way])
        found.append(
            {
                "setup": f"{name}: {way}",
                "ratio": median_ratio(seconds[PLAIN], seconds[way]),
                "turn_ratio": statistics.median(beside_turn),
                "least_turn_ratio": min(beside_turn),
                "most_turn_ratio": max(beside_turn),
                "tokens_per_pass": statistics.median(run.tokens_per_pass for run in results),
                "hit_share": median_of(results, "hit_share"),
                "verify_seconds": median_of(results, "verify"),
                "draft_seconds": median_of(results, "draft"),
                "decode_seconds": statistics.median(seconds[way]),
            }
        )
    return found


def median_of(runs: list[Run], name: str) -> float | None:
    values = [getattr(run, name) for run in runs]
    return None if None in values else statistics.median(values)


def balance(name: str, runs: Mapping[str, list[Run]], num_draft: int) -> Row:
    """What the model in BALANCE_NOTE says of the way with a core for each, and what was measured."""
    apart = next(way for way in runs if way.startswith("ahead"))
    v, d = (statistics.median(getattr(run, part) for run in runs[IN_TURN]) for part in ("verify", "draft"))
    less_v, less_d = (statistics.median(getattr(run, part) for run in runs[FEWER]) for part in ("verify", "draft"))
    hit = statistics.median(run.hit_share or 0.0 for run in runs[apart])
    ahead = hit * max(less_v, (num_draft + 1) * less_d) + (1 - hit) * (less_v + num_draft * less_d)
    return {
        "setup": name,
        "hit_share": hit,
        "drafting_share": num_draft * d / v,
        "may_lose_share": num_draft * (d - (1 - hit) * less_d) / v,
        "loses_share": less_v / v - 1,
        "predicted_ratio": (v + num_draft * d) / ahead,
        "measured_ratio": median_ratio([run.seconds for run in runs[IN_TURN]], [run.seconds for run in runs[apart]]),
    }


def reading() -> Table:
    """The bytes per second that memory gives to one thread and to all."""
    before, found = torch.get_num_threads(), []
    for threads in (1, usable_cores()):
        torch.set_num_threads(threads)
        try:
            found.append({"threads": threads, "gigabytes_per_second": read_bandwidth(detect()) / 1e9})
        finally:
            torch.set_num_threads(before)
    return Table("memory read", found, "What one thread cannot read alone is lost where the target cedes a core.")
