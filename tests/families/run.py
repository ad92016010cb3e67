"""Compare stock and patched models: `python -m tests.families.run llama gpt2`, or --all, --shard 1/2, --resume.

Each model runs in a process of its own with a time limit, so that one that hangs or crashes does not stop the rest.
Results go to JSON lines; --resume leaves out the models that stand there for this code and these versions. Exits with
1 if anything is wrong or raises.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a few models compile what is given a static cache: minutes for each

import torch
import transformers

from .features import FAULTS, FEATURES, KINDS, outcomes
from .models import Family, drawn, families, select
from .passes import ENCODING
from .results import FOLDER, Line, append, read, versions

SECONDS = 240


def run_family(family: Family, names: list[str] | None, pipe: Any) -> None:
    """In the child: a message for each feature, as it came out."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    start = time.perf_counter()
    for name, result in outcomes(family, names):
        pipe.send((name, result.word, result.reason, time.perf_counter() - start))
        start = time.perf_counter()
    pipe.close()


def results_of(family: Family, names: list[str] | None, seconds: float) -> Iterator[Line]:
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
        yield _line(family, name, (word, reason), took)
    process.kill()
    process.join()
    missing = [name for name in asked(family, names) if name not in done]
    if missing and "build" not in done:
        yield _line(family, missing[0], ("raises", lost), seconds)


def asked(family: Family, names: list[str] | None) -> list[str]:
    return [name for name in FEATURES if family.kind in KINDS[name] and (names is None or name in names)]


def _line(family: Family, name: str, found: tuple[str, str], seconds: float) -> Line:
    """found: the word for what came out, and its reason."""
    return {
        "model": family.label, "type": family.model_type, "kind": family.kind, "feature": name, "result": found[0],
        "reason": found[1], "seconds": round(seconds, 2),
    }  # fmt: skip


def run(chosen: list[Family], arguments: argparse.Namespace) -> list[Line]:
    now = versions()
    known = read(arguments.results, now) if arguments.resume else []
    path = arguments.results / f"{arguments.shard.replace('/', '-of-')}.jsonl"
    lines = []
    for number, family in enumerate(chosen, 1):
        found = [line for line in known if line["model"] == family.label]
        names = {line["feature"] for line in found}
        if "build" in names or names >= set(asked(family, arguments.features)):
            lines += found
            continue
        results = [line | {"versions": now} for line in results_of(family, arguments.features, arguments.seconds)]
        append(path, results)
        lines += results
        report(family, results, f"{number}/{len(chosen)}", verbose=arguments.verbose)
    return lines


def report(family: Family, results: list[Line], place: str, *, verbose: bool) -> None:
    counts = Counter(result["result"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"[{place}] {family.label} ({family.kind}, {family.model_type}): {summary}; {seconds:.1f} s", flush=True)
    for result in results:
        if verbose or result["result"] in FAULTS or result["feature"] == "build":
            print(f"    {result['feature']}: {result['result']}. {result['reason']}", flush=True)
    if family.variant and any(result["result"] in FAULTS for result in results):
        print(f"    drawn: {drawn(family)}", flush=True)


def summary(lines: list[Line]) -> int:
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
    parser.add_argument("--encoders", action="store_true", help=f"only {', '.join(ENCODING)}")
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), help="only these")
    parser.add_argument("--variants", type=int, default=0, help="so many random configurations of each model instead")
    parser.add_argument("--first", type=int, default=1, help="the number of the first of them")
    parser.add_argument("--shard", default="1/1", help="1/4: the first of four parts")
    parser.add_argument("--resume", action="store_true", help="leave out what stands in the results")
    parser.add_argument("--results", type=Path, default=FOLDER, help="the folder of the JSON lines")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one model")
    parser.add_argument("--verbose", "-v", action="store_true", help="print every result")
    parsed = parser.parse_args(arguments)
    if not parsed.names and not parsed.all and not parsed.kind and not parsed.encoders:
        parser.error("name models, or give --all, --kind or --encoders")
    return parsed


def main(arguments: list[str]) -> int:
    parsed = parse(arguments)
    chosen = select(parsed.names) if parsed.names else list(families().values())
    if parsed.kind:
        chosen = [family for family in chosen if family.kind == parsed.kind]
    if parsed.encoders:
        chosen = [family for family in chosen if family.kind in ENCODING]
    if parsed.variants:
        numbers = range(parsed.first, parsed.first + parsed.variants)
        chosen = [replace(family, variant=number) for family in chosen for number in numbers]
    part, parts = map(int, parsed.shard.split("/"))
    return summary(run(chosen[part - 1 :: parts], parsed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
