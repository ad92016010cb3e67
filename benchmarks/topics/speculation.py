"""Speculation with an oracle: what given acceptance makes of each width of weights, and what none at all loses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_accel import SpeculativeConfig
from hf_accel.cli.measurement import Requests, accelerated, draw, take_turns
from hf_accel.undo.state import state_of

from ..harness.bench import Bench, Entrant
from ..harness.oracle import OracleDrafter
from ..harness.requests import median_ratio
from ..harness.tables import Row, Table
from ..setups import accel
from .batching import agreeing

PLAIN = "no speculation"
NOTE = (
    "Ratio: seconds of the tokens after the first, to the same model without speculation, in turns. The oracle "
    "replays the model's own tokens, each wrong with probability 1 - acceptance; drafting costs nothing. First "
    "accepted: of the drafts, those whose first token was kept, which should be the acceptance asked for. exact: no "
    "more rows in a pass than are rounded as one is, since else its own continuation is another."
)
NOTHING_NOTE = (
    "Every drafted token is wrong, and what is below 1 is lost by looking for a gain. Drafted: tokens for each "
    "generated one. Median of {rounds} rounds."
)


@dataclass(frozen=True)
class Decoding:
    """Seconds from the first tokens of all rows to the last token of all; statistics of the speculation."""

    seconds: float
    statistics: Mapping[str, Any]


def measure(bench: Bench) -> Iterator[Table]:
    entrants = [agreeing(bench, bench.entrant(setup)) for setup in (accel.INT8, accel.EXACT, accel.INT4)]
    for batch in bench.settings.oracle.batches:
        yield table(bench, entrants, batch)
    yield nothing_accepted(bench, entrants[0])


def table(bench: Bench, entrants: list[Entrant], batch: int) -> Table:
    rows = [one for entrant in entrants for one in rows_of(bench, entrant, batch)]
    title = f"oracle drafts, batch {batch}, {bench.settings.oracle.new_tokens} tokens"
    return Table(title, rows, NOTE)


def rows_of(bench: Bench, entrant: Entrant, batch: int) -> list[Row]:
    """INT8 also with drafts of fixed lengths, where they may pay; others with fewer kinds of them."""
    print(f"  {entrant.setup.name}, batch {batch}", flush=True)
    workload, known = continuation(bench, entrant, batch)
    main = entrant.setup is accel.INT8
    fixed = bench.settings.oracle.counts if main else ()
    acceptances = bench.settings.oracle.acceptances[:: 1 if main else 3]
    wanted = [(a, count) for a in acceptances for count in ("auto", *(fixed if a else ()))]
    invariant_rows = state_of(entrant.model).generation.invariant_rows
    most = None if invariant_rows is None else invariant_rows // batch - 1
    oracles = {(a, count): oracle(bench, known, acceptance=a, count=count, most=most) for a, count in wanted}
    runs = in_turns(entrant, workload, oracles, rounds=bench.settings.oracle.rounds)
    return [row(entrant, acceptance, count, runs) for acceptance, count in wanted]


def nothing_accepted(bench: Bench, entrant: Entrant) -> Table:
    rows = []
    for batch in bench.settings.oracle.nothing_batches:
        print(f"  nothing accepted, batch {batch}", flush=True)
        workload, known = continuation(bench, entrant, batch)
        oracles = {(0.0, "auto"): oracle(bench, known, acceptance=0.0, count="auto")}
        runs = in_turns(entrant, workload, oracles, rounds=bench.settings.oracle.nothing_rounds)
        drafted = runs[0.0, "auto"][-1].statistics["drafted"]
        rows.append(
            {
                "batch": batch,
                "ratio": speed(runs, (0.0, "auto")),
                "drafted_share": drafted / workload.useful,
                "pass_seconds": statistics.median(d.seconds for d in runs[0.0, "auto"]) / (workload.lengths[0] - 1),
            }
        )
    note = NOTHING_NOTE.format(rounds=bench.settings.oracle.nothing_rounds)
    return Table(f"{entrant.setup.name}, auto, nothing is accepted", rows, note)


# -- runs ----------------------------------------------------------------------------------------------


def continuation(bench: Bench, entrant: Entrant, batch: int) -> tuple[Requests, dict[tuple[int, ...], list[int]]]:
    """A batch of prompts, and what the model generates after each."""
    settings = bench.settings
    workload = draw(
        "fixed",
        requests=batch,
        mean=settings.oracle.new_tokens,
        prompt_lengths=(settings.oracle.prompt, settings.oracle.prompt),
        vocabulary=bench.model.config.vocab_size,
        seed=settings.seed,
    )
    tokens = accelerated(entrant.model, workload).checked(workload).tokens
    return workload, dict(zip(map(tuple, workload.prompts), tokens, strict=True))


def oracle(
    bench: Bench, known: dict[tuple[int, ...], list[int]], *, acceptance: float, count: Any, most: int | None = None
) -> SpeculativeConfig:
    """most: tokens that "auto" drafts; None for its own limit."""
    drafter = OracleDrafter(
        known, acceptance=acceptance, vocabulary=bench.model.config.vocab_size, seed=bench.settings.seed
    )
    limits = {} if most is None else {"max_draft": max(1, min(most, SpeculativeConfig.max_draft))}
    return SpeculativeConfig(drafter=drafter, num_draft=count, **limits)


def in_turns(
    entrant: Entrant, workload: Requests, oracles: Mapping[Any, Any], *, rounds: int
) -> dict[Any, list[Decoding]]:
    """Without speculation and with each of `oracles`."""
    candidates: dict[Any, Any] = {PLAIN: partial(decode, entrant.model, workload, None)}
    candidates |= {key: partial(decode, entrant.model, workload, config) for key, config in oracles.items()}
    return take_turns(candidates, rounds=rounds, warm_up=False)


def decode(model: Any, workload: Requests, speculative: Any) -> Decoding:
    served = accelerated(model, workload, speculative=speculative, record_timestamps=True).checked(workload)
    return Decoding(served.decode_seconds, served.statistics)


# -- rows ----------------------------------------------------------------------------------------------


def row(entrant: Entrant, acceptance: float, count: Any, runs: Mapping[Any, list[Decoding]]) -> Row:
    done = runs[acceptance, count]
    counts = done[-1].statistics
    return {
        "setup": entrant.setup.name,
        "acceptance": acceptance,
        "num_draft": count,
        "ratio": speed(runs, (acceptance, count)),
        "tokens_per_pass": counts["tokens_per_pass"],
        "first_accepted_share": counts["acceptance_at"][0] if counts["drafted"] else None,
        "decode_seconds": statistics.median(d.seconds for d in done),
    }


def speed(runs: Mapping[Any, list[Decoding]], key: Any) -> float:
    return median_ratio([d.seconds for d in runs[PLAIN]], [d.seconds for d in runs[key]])
