"""python -m tests.serving.soak [SECONDS]: many clients for minutes; fails if an answer is wrong or anything leaks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from .load import Load, census, left_behind
from .running import serving
from .test_load import MANY

WARM_SECONDS = 20.0  # after which memory may no longer grow
GROWTH = 32 * 2**20  # bytes; less than one leaked request in ten would take in ten minutes


def resident_bytes() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def main(seconds: float) -> int:
    failed = False
    with serving(limits=MANY, engine={"max_tokens": 1024}, speculative="ngram") as running:
        load, before = Load(running, seed=2), census()
        asyncio.run(load.run(min(WARM_SECONDS, seconds)))
        warm, spent = resident_bytes(), min(WARM_SECONDS, seconds)
        while spent < seconds:
            asyncio.run(load.run(min(60.0, seconds - spent)))
            spent += min(60.0, seconds - spent)
            stats, grown = running.stats, resident_bytes() - warm
            left = left_behind(running, before)
            failed |= bool(left or load.outcome.wrong or stats["failed"])
            counts = {**load.outcome.counts, "wrong": len(load.outcome.wrong), "failed": stats["failed"]}
            counts["preempted"] = stats["preemptions"]
            print(f"{spent:.0f} s: {counts}, {grown / 2**20:+.1f} MB, left: {left or 'nothing'}", flush=True)
        failed |= resident_bytes() - warm > GROWTH
    print("failed" if failed else "passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))
