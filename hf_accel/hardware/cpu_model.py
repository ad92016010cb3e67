"""The kind of this CPU, by which measurements that are kept tell it from others."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .device import ROOT, content_of, cpu_name


def cpu_numbers(root: Path = ROOT) -> tuple[str, int, int] | None:
    """Return the CPU's maker, family and model, which tell CPUs apart to which a virtual machine gives one name; None
    where Linux does not say them.
    """
    lines = (line.partition(":") for line in (content_of(root / "proc/cpuinfo") or "").splitlines())
    listed = {name.strip(): value.strip() for name, _, value in lines}
    try:
        return listed["vendor_id"], int(listed["cpu family"]), int(listed["model"])
    except (KeyError, ValueError):
        return None


@lru_cache
def cpu_model() -> str:
    """Return the name of the CPU, with the numbers that tell it from others of this name."""
    return ", ".join(map(str, (cpu_name(), *(cpu_numbers() or ()))))
