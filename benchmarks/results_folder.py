"""The results: a folder for each kind of CPU, in it a JSON file per topic, and a README made from all of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hf_accel.hardware import ISA_LEVELS

from .tables import Table

FOLDER = Path(__file__).parent / "results"
BY_CPU = "Each kind of CPU has a folder, named after it and after the instruction set that the kernels used:"

INTRODUCTION = """\
# Results

Made by `python -m benchmarks.run` from the JSON files in this folder; do not edit. Both sides of a ratio ran in
turns in one run, verified before they were timed. A ratio above 1 is better than stock, or than what the table's
note names, whatever the unit; absolute times move from machine to machine.
"""


def cpu_folder(machine: dict[str, Any]) -> Path:
    """The folder of this kind of CPU, by its name and by the instruction set that our kernels use."""
    level = machine.get("kernels", machine["isa"])
    level = level if level in ISA_LEVELS else "without kernels"
    return FOLDER / re.sub("[^a-z0-9_]+", "-", f"{machine['cpu']} {level}".lower()).strip("-")


def write(folder: Path, result: dict[str, Any]) -> Path:
    """Store one topic's result, and make the READMEs anew."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['topic']}.json"
    replace(path, json.dumps(result, indent=1) + "\n")
    for each in (folder, FOLDER) if folder.parent == FOLDER else (folder,):
        replace(each / "README.md", readme(each))
    return path


def replace(path: Path, text: str) -> None:
    """Write beside it and rename, so that nobody ever reads half a file."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def readme(folder: Path) -> str:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n".join([INTRODUCTION, *kinds(folder), *(section(folder, result) for result in results)])


def kinds(folder: Path) -> list[str]:
    """A line for each kind of CPU, and the latest date of its results."""
    lines = []
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        results = [json.loads(path.read_text(encoding="utf-8")) for path in each.glob("*.json")]
        cpu, latest = results[0]["machine"]["cpu"], max(result["date"] for result in results)
        lines.append(f"* [{each.name}]({each.name}/README.md): {cpu}, topics: {len(results)}, the latest of {latest}")
    return [f"{BY_CPU}\n", *lines, ""] if lines else []


def section(folder: Path, result: dict[str, Any]) -> str:
    tables = "\n".join(Table(**table).markdown() for table in result["tables"])
    plot = f"{result['topic']}.png"
    image = f"![{result['topic']}]({plot})\n\n" if (folder / plot).exists() else ""
    return f"## {result['topic']}\n\n{provenance(result)}\n\n{image}{tables}"


def beside(machine: dict[str, Any]) -> str:
    """What ran besides, and which kernels were loaded, of files that say so."""
    kernels = f"kernels {machine['kernels']}, " if "kernels" in machine else ""
    if machine.get("busy_cores") is not None:
        return f"{kernels}others took {machine['busy_cores']:.2f} cores before"
    load = machine["load_average"]
    return f"{kernels}load {'unknown' if load is None else format(load, '.1f')}"


def provenance(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    bandwidth = machine["read_bytes_per_second"] / 1e9
    lines = [
        f"`{result['command']}`, {result['date']}: {result['model']}.",
        f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['threads']} threads, {machine['isa']}, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, reads {bandwidth:.0f} GB/s; {beside(machine)}.",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    lines += [f"{name} did not take part: {reason}." for name, reason in result["refused"].items()]
    return "\n".join(lines)
