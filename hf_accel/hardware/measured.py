"""Keeps what was measured on this machine in files of the user's cache folder, for the next process."""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from pathlib import Path

from ..errors import HfAccelError, HfAccelWarning
from .atomic import replaced_file

SWITCH = "HF_ACCEL_MEASURE"  # "0" in the environment turns measuring off

Numbers = dict[str, dict[str, dict[str, float]]]  # for example seconds, by what is computed, the rows, and the tile


def is_on() -> bool:
    """Return whether anything is measured in order to choose by it."""
    return os.environ.get(SWITCH, "1") != "0"


def cache_file(name: str) -> Path:
    """Return a file of the cache folder: that of temporary files for a user without a home, as in some containers."""
    folder = os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder) / "hf_accel" / name
    try:
        return Path.home() / ".cache" / "hf_accel" / name
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "hf_accel" / name


def read(path: Path) -> Numbers:
    """Return the content of a file; nothing if it is missing or damaged, so that all is measured again."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: {
                name: {each: float(number) for each, number in numbers.items() if 0 < float(number) < math.inf}
                for name, numbers in by_name.items()
            }
            for key, by_name in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep(path: Path, found: Numbers, what: str) -> None:
    """Add numbers to a file, and leave those that others have written there meanwhile. what: for a warning."""
    merged = read(path)
    for key, by_name in found.items():
        for name, numbers in by_name.items():
            merged.setdefault(key, {}).setdefault(name, {}).update(numbers)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as unfinished:
            unfinished.write_text(json.dumps(merged, indent=1, sort_keys=True), encoding="utf-8")
    except (OSError, HfAccelError) as error:
        warnings.warn(
            f"{what} were not kept, so that the next process measures again: {error}; set XDG_CACHE_HOME to a folder "
            f"that can be written to, or {SWITCH}=0 to measure nothing",
            HfAccelWarning,
            stacklevel=3,
        )
