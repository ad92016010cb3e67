"""Measure topics and write what came out to benchmarks/results.

python -m benchmarks.run                        everything, about three hours on two cores
python -m benchmarks.run decode --quick         one topic, fewer repetitions
python -m benchmarks.run decode --layers 2      a model cut to two layers, to try the benchmark itself
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from . import plots
from .harness.bench import Bench
from .harness.machine import machine, require_kernels, versions
from .harness.quiet import wait_until_quiet
from .harness.results_folder import machine_folder, write
from .harness.settings import Drafters, Methods, Settings, Students
from .harness.tables import Table
from .setups import SETUPS
from .topics import (
    adapters,
    batching,
    decode,
    distill_memory,
    drafters,
    drafts,
    encoders,
    estimates,
    experts,
    float_rows,
    generate,
    http_load,
    isa,
    kinds,
    kv,
    ladder,
    latency,
    memory,
    methods,
    never_slower,
    patch_memory,
    patch_time,
    prefill,
    profile_step,
    quality,
    rows,
    scale_out,
    shared_prompts,
    small_model,
    speculation,
    structured,
    students,
    tiles,
    waste,
    weight_formats,
)

TOPICS: dict[str, Callable[[Bench], Iterable[Table]]] = {
    "isa": isa.measure,  # first: its processes need several GB, which later the models have
    "quality": quality.measure,
    "methods": methods.measure,
    "kv": kv.measure,
    "small_model": small_model.measure,
    "decode": decode.measure,
    "long_decode": decode.measure_long,
    "generate": generate.measure,
    "prefill": prefill.measure,
    "rows": rows.measure,
    "float_rows": float_rows.measure,
    "weight_formats": weight_formats.measure,
    "encoders": encoders.measure,
    "experts": experts.measure,
    "kinds": kinds.measure,
    "never_slower": never_slower.measure,
    "tiles": tiles.measure,
    "profile": profile_step.measure,
    "estimates": estimates.measure,
    "memory": memory.measure,
    "waste": waste.measure,
    "ladder": ladder.measure,
    "patch": patch_time.measure,
    "patch_memory": patch_memory.measure,
    "batching": batching.measure,
    "latency": latency.measure,
    "http_load": http_load.measure,
    "scale_out": scale_out.measure,
    "shared_prompts": shared_prompts.measure,
    "adapters": adapters.measure,
    "speculation": speculation.measure,
    "structured": structured.measure,
    "drafters": drafters.measure,
    "distill_memory": distill_memory.measure,
    "students": students.measure,
    "student_speed": students.speed,
    "ablation": students.ablation,
    "drafts": drafts.measure,
}


REMINDER = 10.0  # seconds


class TooLongError(BaseException):
    """A topic has taken all of its time. No Exception, since what a topic runs may go on after those."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a topic was left out, after one of them has failed or taken too long."""
    arguments = parse(argv)
    if not arguments.even_without_kernels and arguments.settings.device == "cpu":
        require_kernels()
    disable_progress_bar()
    bench = Bench(arguments.settings, keep_going=arguments.keep_going)
    where, start = machine(arguments.settings.device), time.perf_counter()
    out, left_out = arguments.out or machine_folder(where), []
    for topic in TOPICS if "all" in arguments.topics else arguments.topics:
        busy = wait_until_quiet(even_busy=arguments.even_busy)
        print(f"{topic}, {time.perf_counter() - start:.0f} s from the start", flush=True)
        tables: list[Table] = []
        try:
            with time_limit(arguments.topic_seconds):
                tables.extend(TOPICS[topic](bench))
        except (Exception, TooLongError) as error:
            if not arguments.keep_going:
                raise
            traceback.print_exc()
            left_out.append(topic)
            if not tables:
                print(f"{topic} is left out", flush=True)
                continue
            note = f"The rest of the topic is missing: {str(error).partition(chr(10))[0] or type(error).__name__}."
            tables[-1] = dataclasses.replace(tables[-1], note=f"{tables[-1].note} {note}".strip())
        print("\n" + "\n".join(table.markdown() for table in tables))
        result = record(topic, tables, bench, machine={**where, "busy_cores": busy}, command=arguments.command)
        print(plots.draw(out, result, arguments.label), flush=True)
        print(f"written to {write(out, result, arguments.label)}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all" + "".join(f"; {topic} failed" for topic in left_out))
    return int(bool(left_out))


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TooLongError in the main thread after so many seconds, and again while it is not heard; None: never.

    A call into another language is interrupted where it returns.
    """
    if seconds is None:
        yield
        return

    def interrupt(*_: Any) -> None:
        raise TooLongError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, REMINDER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def record(topic: str, tables: list[Table], bench: Bench, *, machine: dict[str, Any], command: str) -> dict[str, Any]:
    """JSON-able."""
    return {
        "topic": topic,
        "date": datetime.date.today().isoformat(),
        "command": command,
        "model": model_of(topic, bench),
        "settings": without_paths(dataclasses.asdict(bench.settings)),
        "machine": machine,
        "versions": versions(),
        "verified": bench.verified,
        "refused": bench.refused,
        "tables": [dataclasses.asdict(table) for table in tables],
    }


def model_of(topic: str, bench: Bench) -> str:
    """What a topic measured: some have a model of their own."""
    own = {
        "small_model": str(small_model.SHIPPED),
        "structured": str(small_model.SHIPPED),
        "never_slower": "random models of several shapes",
        "encoders": "random encoders of several shapes",
        "experts": "random experts of several shapes",
        "kinds": "random models with several kinds of state",
        "quality": quality.checkpoint(bench.settings),
        "methods": quality.checkpoint(bench.settings),
        "kv": quality.checkpoint(bench.settings),
        "drafters": drafters.target_of(bench.settings),
        "students": drafters.target_of(bench.settings),
        "student_speed": drafters.target_of(bench.settings),
        "ablation": drafters.target_of(bench.settings),
        "drafts": drafters.target_of(bench.settings),
        "distill_memory": f"random heads of width {bench.settings.distill.width}",
    }
    return Path(own[topic]).name if topic in own else bench.description


def without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_paths(value) if isinstance(value, dict) else without_path(value)
        for name, value in settings.items()
    }


def without_path(value: Any) -> Any:
    """Where files lie on this machine is nobody's business: of a path only the name is kept."""
    if isinstance(value, tuple):
        return tuple(map(without_path, value))
    return Path(value).name if isinstance(value, str) and os.sep in value else value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topics", nargs="*", default=["all"], help=f"all, or some of {', '.join(TOPICS)}")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, batches and lengths")
    parser.add_argument("--model", default=defaults.model, help="bench-1b, tiny, or what from_pretrained takes")
    parser.add_argument("--layers", type=int, help="of a named model: cut it to so many")
    parser.add_argument("--context", type=int, default=defaults.context, help="tokens of the prompt")
    parser.add_argument("--text", help="file to measure perplexity on, of a model that is a checkpoint")
    parser.add_argument("--tokens", type=int, help="tokens of it")
    parser.add_argument("--beside", action="append", default=[], help="a GGUF file that the methods topic scores too")
    parser.add_argument("--target", help="checkpoint that the drafters topic generates with; else the shipped one")
    parser.add_argument("--draft", help="smaller checkpoint of the same tokenizer that drafts for it")
    parser.add_argument("--head", help="folder of a trained draft head of --target, which the drafts topic measures")
    parser.add_argument("--draft-steps", type=int, help="for which the drafts topic trains drafts")
    parser.add_argument("--layers-kept", default="", help="comma-separated, of --target, that a student begins with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device, help="where the models are")
    parser.add_argument("--label", default="", help="of the JSON files' names, so that one folder holds two models")
    parser.add_argument("--rounds", type=int, help="repetitions")
    parser.add_argument("--at-once", action="store_true", help="of http_load: no load but all requests at once")
    parser.add_argument("--prompt", type=int, help="tokens of a prefill, where they are not as many as --context")
    parser.add_argument("--setups", default="", help=f"comma-separated, of {', '.join(s.name for s in SETUPS)}")
    parser.add_argument(
        "--even-without-kernels", action="store_true", help="measure also where hf_accel's kernels are not built"
    )
    parser.add_argument("--even-busy", action="store_true", help="measure also while other processes run here")
    parser.add_argument(
        "--keep-going", action="store_true", help="leave out topics and setups that fail; exit status 1 says so"
    )
    parser.add_argument("--topic-seconds", type=float, help="the most that a topic may take")
    parser.add_argument("--out", type=Path, help="folder for the JSON files and the README; left out: this machine's")
    arguments = parser.parse_args(argv)
    check_names(parser, arguments)
    arguments.settings = settings_of(arguments)
    words = map(without_path, sys.argv[1:] if argv is None else argv)
    arguments.command = f"{parser.prog} {shlex.join(words)}".rstrip()
    return arguments


def check_names(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """nargs="*" and choices do not go together in argparse."""
    for topic in arguments.topics:
        if topic not in ("all", *TOPICS):
            parser.error(f"topic {topic!r} is not known; choose all or some of {', '.join(TOPICS)}")
    for name in filter(None, arguments.setups.split(",")):
        if name not in [setup.name for setup in SETUPS]:
            parser.error(f"setup {name!r} is not known; choose some of {', '.join(s.name for s in SETUPS)}")


def settings_of(arguments: argparse.Namespace) -> Settings:
    settings = Settings(
        model=arguments.model,
        layers=arguments.layers,
        context=arguments.context,
        text=arguments.text,
        drafters=Drafters(target=arguments.target, draft=arguments.draft),
        methods=Methods(beside=tuple(arguments.beside)),
        students=Students(layers=tuple(map(int, filter(None, arguments.layers_kept.split(","))))),
        setups=tuple(filter(None, arguments.setups.split(","))),
    )
    settings = settings.on_gpu() if arguments.device == "cuda" else settings
    settings = settings.quicker() if arguments.quick else settings
    rounds, tokens = arguments.rounds or settings.rounds, arguments.tokens or settings.quality_tokens
    prompt = arguments.prompt or settings.prompt
    steps = arguments.draft_steps or settings.drafts.steps
    drafts = dataclasses.replace(settings.drafts, head=arguments.head, steps=steps)
    latency = dataclasses.replace(settings.latency, loads=()) if arguments.at_once else settings.latency
    return dataclasses.replace(
        settings, rounds=rounds, quality_tokens=tokens, prompt=prompt, latency=latency, drafts=drafts
    )


if __name__ == "__main__":
    sys.exit(main())
