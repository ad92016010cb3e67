"""Play many random programmes of requests: `python -m tests.parity.play windows --programmes 200`, or --all.

Of a class of transformers, as JambaForCausalLM, each programme has a configuration of its own, drawn by its number.
What no Session serves is told, and not counted. A programme that goes wrong is told with its seed, and the next one is
played. Exits with 1 if any was.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from hf_accel import UnsupportedError

from .test_programmes import IMAGES, MODELS, happened

KINDS = (*MODELS, *IMAGES)


def play(kind: str, seeds: range) -> int:
    """Return how many programmes of a kind, or of a class of transformers, went wrong."""
    counts: Counter[str] = Counter()
    wrong = served = 0
    for seed in seeds:
        played = kind if kind in KINDS else f"{kind} {seed}"
        try:
            counts += happened(played, range(seed, seed + 1))
            served += 1
        except UnsupportedError as error:
            print(f"{played}: not served, as {error}", flush=True)
        except Exception as error:
            served, wrong = served + 1, wrong + 1
            notes = " ".join(getattr(error, "__notes__", ()))
            print(f"{played}: {type(error).__name__}: {str(error)[:300]} {notes}", flush=True)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{kind}: {served} programmes, {wrong} wrong; {told}", flush=True)
    return wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.play", description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", help=f"classes of transformers, or kinds of state: {', '.join(KINDS)}")
    parser.add_argument("--all", action="store_true", help="every kind")
    parser.add_argument("--programmes", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parsed = parser.parse_args(arguments)
    unknown = {kind for kind in parsed.kinds if kind not in KINDS and not hasattr(transformers, kind)}
    if unknown or not (parsed.kinds or parsed.all):
        parser.error(f"name kinds, or give --all; {', '.join(sorted(unknown)) or 'none'} is no kind")
    torch.set_num_threads(1)
    seeds = range(parsed.first, parsed.first + parsed.programmes)
    return int(sum(play(kind, seeds) for kind in (KINDS if parsed.all else parsed.kinds)) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
