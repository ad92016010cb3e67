"""Compare stock and patched models: `python -m tests.families.run llama gpt2`, or --all, --shard 1/2, --resume.

Each model runs in a process of its own with a time limit, so that one that hangs or crashes does not stop the rest.
Results go to a JSON-lines file, a line for each model and feature; --resume leaves out the models that stand in it for
this code and these versions. Exits with 1 if anything is wrong or raises.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from .features import FAULTS, FEATURES, KINDS, outcomes
from .models import Family, families, select

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "families.jsonl"
SECONDS = 240


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "code": _code()}


def _code() -> str:
    """The commit, and a digest of what the working tree changed in the package."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout

    commit = git("rev-parse", "--short=10", "HEAD").strip() or "unknown"
    changes = git("diff", "HEAD", "--", "hf_accel", "tests/families")
    return commit + (f"+{hashlib.sha1(changes.encode()).hexdigest()[:8]}" if changes else "")


def run_family(family: Family, names: list[str] | None, queue: Any) -> None:
    """In the child: one message for each feature that begins and one for how it came out."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    start = time.perf_counter()
    for name, result in outcomes(family, names):
        queue.send((name, result.word, result.reason, time.perf_counter() - start))
        start = time.perf_counter()
    queue.close()


def results_of(family: Family, names: list[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    """The lines of one family, whatever becomes of its process."""
    context = multiprocessing.get_context("fork")  # transformers is imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_family, args=(family, names, theirs), daemon=True)
    process.start()
    theirs.close()
    end, done = time.monotonic() + seconds, set()
    lost = "took too long"
    while (left := end - time.monotonic()) > 0 and ours.poll(left):
        try:
            name, word, reason, took = ours.recv()
        except EOFError:
            process.join()
            lost = f"its process ended with {process.exitcode}"
            break
        done.add(name)
        yield _line(family, name, word, reason, took)
    process.kill()
    process.join()
    missing = [n for n in FEATURES if family.kind in KINDS[n] and n not in done and (names is None or n in names)]
    if missing and "build" not in done:
        yield _line(family, missing[0], "raises", lost, seconds)


def _line(family: Family, name: str, word: str, reason: str, seconds: float) -> dict[str, Any]:
    return {
        "model": family.label, "type": family.model_type, "kind": family.kind, "feature": name, "result": word,
        "reason": reason, "seconds": round(seconds, 2),
    }  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def run(chosen: list[Family], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    now = versions()
    path: Path = arguments.results
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for line in read(path) if line["versions"] == now] if arguments.resume else []
    finished = {line["model"] for line in lines if line.get("last")}
    lines = [line for line in lines if line["model"] in finished]
    for number, family in enumerate(chosen, 1):
        if family.label in finished:
            continue
        results = list(results_of(family, arguments.features, arguments.seconds))
        with path.open("a", encoding="utf-8") as file:  # all of a model at once: a killed run leaves no half
            for result in results:
                result |= {"versions": now, "last": result is results[-1]}
                file.write(json.dumps(result) + "\n")
        lines += results
        report(family, results, f"{number}/{len(chosen)}", verbose=arguments.verbose)
    return [line for line in lines if line["model"] in {family.label for family in chosen}]


def report(family: Family, results: list[dict[str, Any]], place: str, *, verbose: bool) -> None:
    counts = Counter(result["result"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"[{place}] {family.label} ({family.kind}, {family.model_type}): {summary}; {seconds:.1f} s", flush=True)
    for result in results:
        if verbose or result["result"] in FAULTS or result["feature"] == "build":
            print(f"    {result['feature']}: {result['result']}. {result['reason']}", flush=True)


def summary(lines: list[dict[str, Any]]) -> int:
    counts = Counter(line["result"] for line in lines)
    print(f"\n{len({line['model'] for line in lines})} models: " + ", ".join(f"{n} {w}" for w, n in counts.items()))
    faults = Counter((line["feature"], line["result"]) for line in lines if line["result"] in FAULTS)
    for (name, word), count in faults.most_common():
        print(f"  {name}: {count} {word}")
    return int(bool(faults))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.families.run", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="model types or classes")
    parser.add_argument("--all", action="store_true", help="every class of the mappings")
    parser.add_argument("--kind", choices=sorted({f.kind for f in families().values()}), help="only of this mapping")
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), help="only these")
    parser.add_argument("--shard", default="1/1", help="1/4: the first of four parts")
    parser.add_argument("--resume", action="store_true", help="leave out what stands in the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON-lines file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one model")
    parser.add_argument("--verbose", "-v", action="store_true", help="print every result")
    parsed = parser.parse_args(arguments)
    if not parsed.names and not parsed.all and not parsed.kind:
        parser.error("name models, or give --all or --kind")
    return parsed


def main(arguments: list[str]) -> int:
    parsed = parse(arguments)
    chosen = select(parsed.names) if parsed.names else list(families().values())
    if parsed.kind:
        chosen = [family for family in chosen if family.kind == parsed.kind]
    part, parts = map(int, parsed.shard.split("/"))
    return summary(run(chosen[part - 1 :: parts], parsed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
