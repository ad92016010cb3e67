"""The results: a folder for each kind of CPU and GPU, in it a JSON file per topic, and a README made from them all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hf_accel.hardware import ISA_LEVELS

from .tables import Table

FOLDER = Path(__file__).parents[1] / "results"
BY_CPU = (
    "Each kind of CPU has a folder, named after it and after the instruction set that the kernels used; each kind of "
    "GPU has one that is named after it:"
)

INTRODUCTION = """\
# Results

Made by `python -m benchmarks.run` from the JSON files in this folder; do not edit. Both sides of a ratio ran in
turns in one run, verified before they were timed. A ratio above 1 is better than stock, or than what the table's
note names, whatever the unit; absolute times move from machine to machine.
"""


def machine_folder(machine: dict[str, Any]) -> Path:
    """The folder of this kind of CPU, by its name and by the instruction set that our kernels use; or of a GPU."""
    if "gpu" in machine:
        return FOLDER / slug(machine["gpu"])
    level = machine.get("kernels", machine["isa"])
    level = level if level in ISA_LEVELS else "without kernels"
    return FOLDER / slug(f"{machine['cpu']} {level}")


def slug(name: str) -> str:
    return re.sub("[^a-z0-9_]+", "-", name.lower()).strip("-")


def write(folder: Path, result: dict[str, Any], label: str = "") -> Path:
    """Store one topic's result, and make the READMEs anew. label: of the file's name, behind the topic."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(result['topic'], label)}.json"
    replace(path, json.dumps(result, indent=1) + "\n")
    for each in (folder, FOLDER) if folder.parent == FOLDER else (folder,):
        replace(each / "README.md", readme(each))
    return path


def file_stem(topic: str, label: str = "") -> str:
    """Of the names of a result's files."""
    return f"{topic}{label and '_'}{label}"


def replace(path: Path, text: str) -> None:
    """Write beside it and rename, so that nobody ever reads half a file."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def readme(folder: Path) -> str:
    results = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return "\n".join([INTRODUCTION, *kinds(folder), *(section(path, result) for path, result in results.items())])


def kinds(folder: Path) -> list[str]:
    """A line for each kind of CPU, and the latest date of its results."""
    lines = []
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        results = [json.loads(path.read_text(encoding="utf-8")) for path in each.glob("*.json")]
        machine = results[0]["machine"]
        name, latest = machine.get("gpu", machine["cpu"]), max(result["date"] for result in results)
        lines.append(f"* [{each.name}]({each.name}/README.md): {name}, topics: {len(results)}, the latest of {latest}")
    return [f"{BY_CPU}\n", *lines, ""] if lines else []


def section(path: Path, result: dict[str, Any]) -> str:
    tables = "\n".join(Table(**table).markdown() for table in result["tables"])
    plot = path.with_suffix(".png")
    image = f"![{result['topic']}]({plot.name})\n\n" if plot.exists() else ""
    return f"## {result['topic']}\n\n{provenance(result)}\n\n{image}{tables}"


def beside(machine: dict[str, Any]) -> str:
    """What ran besides, and which kernels were loaded, of files that say so."""
    kernels = f"kernels {machine['kernels']}, " if "kernels" in machine else ""
    if machine.get("busy_cores") is not None:
        return f"{kernels}others took {machine['busy_cores']:.2f} cores before"
    load = machine["load_average"]
    return f"{kernels}load {'unknown' if load is None else format(load, '.1f')}"


def described(machine: dict[str, Any]) -> str:
    """What was measured, with its memory and bandwidth: the CPU, or a GPU with the CPU beside it."""
    cpu = f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['threads']} threads, {machine['isa']}"
    reads = f"{machine['memory_bytes'] / 1e9:.0f} GB, reads {machine['read_bytes_per_second'] / 1e9:.0f} GB/s"
    if "gpu" not in machine:
        return f"{cpu}, {reads}; {beside(machine)}."
    capability = ".".join(map(str, machine["compute_capability"]))
    return (
        f"{machine['gpu']}, compute capability {capability}, {reads}; driver {machine['driver'] or 'unknown'}, CUDA "
        f"{machine['cuda']}, {machine['gpu_kernels']}; host: {cpu}; {beside(machine)}."
    )


def provenance(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"`{result['command']}`, {result['date']}: {result['model']}.",
        described(machine),
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    lines += [f"{name} did not take part: {reason}." for name, reason in result["refused"].items()]
    return "\n".join(lines)
