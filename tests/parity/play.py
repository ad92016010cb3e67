"""Play many random programmes of requests: `python -m tests.parity.play windows --programmes 200`, or --all.

One that goes wrong is told with its seed, and the next one is played. Exits with 1 if any was.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from .test_programmes import IMAGES, MODELS, happened


def play(kind: str, seeds: range) -> int:
    """Return how many programmes of a kind went wrong."""
    counts: Counter[str] = Counter()
    wrong = 0
    for seed in seeds:
        try:
            counts += happened(kind, range(seed, seed + 1))
        except Exception as error:
            wrong += 1
            notes = " ".join(getattr(error, "__notes__", ()))
            print(f"{kind}: {type(error).__name__}: {str(error)[:300]} {notes}", flush=True)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{kind}: {len(seeds)} programmes, {wrong} wrong; {told}", flush=True)
    return wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.play", description=__doc__.split("\n")[0])
    kinds = [*MODELS, *IMAGES]
    parser.add_argument("kinds", nargs="*", help=f"kinds of state: {', '.join(kinds)}")
    parser.add_argument("--all", action="store_true", help="every kind")
    parser.add_argument("--programmes", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.kinds) - set(kinds)
    if unknown or not (parsed.kinds or parsed.all):
        parser.error(f"name kinds, or give --all; {', '.join(sorted(unknown)) or 'none'} is no kind")
    torch.set_num_threads(1)
    seeds = range(parsed.first, parsed.first + parsed.programmes)
    return int(sum(play(kind, seeds) for kind in (kinds if parsed.all else parsed.kinds)) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
