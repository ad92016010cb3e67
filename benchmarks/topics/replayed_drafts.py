"""What trees bring a large model: of an oracle, and of a head whose acceptance was measured on a small one."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from hf_accel import DraftHead, SpeculativeConfig
from hf_accel.cli.measurement import Requests, take_turns

from ..harness.bench import Bench, Entrant
from ..harness.replay import OracleTree, Replay, replayed
from ..harness.requests import median_ratio
from ..harness.tables import Row, Table
from ..setups import accel
from .batching import agreeing
from .speculation import PLAIN, Decoding, continuation, decode

ORACLE = "oracle tree"
HEADS = {"head, replayed": {}, "head, replayed, chains": {"max_nodes": 1}}
NOTE = (
    "A replay: the model is random, and what is accepted was not earned here. Ratio: seconds of the tokens after the "
    "first, to the same model without drafts, in turns. Oracle tree: drafting costs nothing, and the right token is "
    "the first of its siblings in {oracle:.0%} of all cases, of trees of {nodes} tokens, {depth} deep. Head: an "
    "untrained head of this model drafts at what that costs, {words} tokens known; its tokens are then put right in "
    "{acceptances} of all cases by position, as was measured of heads on stdlib-14m, and by siblings in "
    "{siblings:.0%} of the others; the controller chooses what is drafted. Weights in INT8. Median of {rounds} rounds."
)


def measure(bench: Bench) -> list[Table]:
    entrant = agreeing(bench, bench.entrant(accel.INT8))
    head = head_of(bench, entrant)
    return [table(bench, entrant, head, batch) for batch in bench.settings.drafts.batches]


def head_of(bench: Bench, entrant: Entrant) -> DraftHead:
    """An untrained head with a part of the words, evenly spread: what they are does not change what they cost."""
    step = bench.settings.drafts.each_word
    return DraftHead.of(bench.model, tokens=range(0, bench.model.config.vocab_size, step))


def table(bench: Bench, entrant: Entrant, head: DraftHead, batch: int) -> Table:
    print(f"  replayed drafts, batch {batch}", flush=True)
    settings = bench.settings.drafts
    workload, known = continuation(bench, entrant, batch)
    shared: Any = {"vocabulary": bench.model.config.vocab_size, "seed": bench.settings.seed}
    oracle = Replay(known, acceptances=[settings.oracle], siblings=0.0, **shared)
    measured = Replay(known, acceptances=settings.acceptances, siblings=settings.siblings, **shared)
    tree = SpeculativeConfig(drafter=OracleTree(oracle), num_draft=settings.depth, max_nodes=settings.nodes)
    runs: dict[str, Any] = {
        PLAIN: partial(decode, entrant.model, workload, None),
        ORACLE: partial(decode, entrant.model, workload, tree),
    }
    for name, more in HEADS.items():
        config = SpeculativeConfig(drafter=head, **more)
        runs[name] = partial(decode_replayed, measured, entrant.model, workload, config)
    found = take_turns(runs, rounds=bench.settings.oracle.rounds)
    rows = [row(name, found) for name in found]
    title = f"replayed drafts on {bench.description}, temperature 0, batch {batch}, {workload.lengths[0]} tokens"
    words = len(range(0, shared["vocabulary"], settings.each_word))
    note = NOTE.format(
        oracle=settings.oracle, nodes=settings.nodes, depth=settings.depth, words=words,
        acceptances=" / ".join(f"{share:.0%}" for share in settings.acceptances), siblings=settings.siblings,
        rounds=bench.settings.oracle.rounds,
    )  # fmt: skip
    return Table(title, rows, note)


def decode_replayed(replay: Replay, model: Any, workload: Requests, speculative: SpeculativeConfig) -> Decoding:
    with replayed(replay):
        return decode(model, workload, speculative)


def row(name: str, found: dict[str, list[Decoding]]) -> Row:
    counts = found[name][-1].statistics if name != PLAIN else {}
    tokens = counts.get("tokens_per_pass") or 1.0
    return {
        "drafter": name,
        "ratio": median_ratio([one.seconds for one in found[PLAIN]], [one.seconds for one in found[name]]),
        "tokens_per_pass": f"{tokens:.2f}",
        "accepted_share": counts["accepted"] / counts["drafted"] if counts.get("drafted") else None,
        "generate_seconds": statistics.median(one.seconds for one in found[name]),
    }
