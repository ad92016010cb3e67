"""The fastest tiles of the Triton kernels on this GPU: measured when a model is patched, and kept in a file.

With them torch's own product is measured where it has the same meaning (`TorchBlocks`). Each candidate is timed for a
few numbers of rows, with the cache of the GPU emptied before each call. What was timed is written to a file in the
user's cache folder, so that the next process goes on where this one stopped.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...hardware.measured import Numbers, cache_file, is_on, keep, read
from ...kernels import triton as kernels
from .backend import Backend, LinearSpec
from .registry import BackendChoice, example
from .triton import Triton

SECONDS = 6.0  # that the candidates of one model may take; the one that was begun last is finished
ROWS = (1, 8, 16, 32, 64, 256, 512, 2048)  # what is measured for so many serves fewer ones, and the last any number
LARGEST = 2**27  # integers of a weight that is made up; of a larger one some outputs are taken
MULTIPLE = 64  # outputs that every candidate takes


@dataclass(eq=False)
class Measuring:
    """The measurements of one plan.

    known: all that was timed, now or before; read on first use. said: the text about each spec.
    """

    clock: Callable[[], float] = time.perf_counter
    spent: float = 0.0  # seconds
    is_new: bool = False  # whether something was timed that the file lacks
    known: Numbers | None = None
    said: dict[tuple[Backend, LinearSpec, bool], str] = field(default_factory=dict)

    def measure(self, choice: BackendChoice, *, of_experts: bool = False) -> str | None:
        """Time the tiles of the backend that have not been timed, and let it take the best ones from now on.

        of_experts: whether one launch multiplies by the weights of all experts, which only our own programs can.
        Returns what a user should know; None if nothing is measured for this backend, on this device, or by a switch.
        """
        backend, spec = choice.backend, choice.spec
        if not isinstance(backend, Triton) or not is_measured(spec.device_type):
            return None
        asked = backend, spec, of_experts
        if asked not in self.said:
            self.said[asked] = self._measure(*asked)
        return self.said[asked]

    def _measure(self, backend: Triton, spec: LinearSpec, of_experts: bool) -> str:
        from ...kernels.triton.few_rows import takes_few_rows
        from ...kernels.triton.quantized_linear import stacked
        from .tiles import MEASURED, candidates, key_of

        shape = backend.pack(example(replace(spec, device_type="meta"), spec.out_features))
        shape = stacked([shape]) if of_experts else shape
        key = key_of(shape, spec.dtype, backend.rounding)
        if self.known is None:
            self.known = read(file())
        known = self.known.setdefault(f"{place()}; {_described(key)}", {})
        timing = _Timing(self, backend, spec)
        found: list[tuple[int, Any]] = []
        for rows in ROWS[takes_few_rows(shape, spec.dtype) :]:  # one row has the tile of eight, and so the same bits
            tiles = {str(tile): tile for tile in candidates(rows, shape, spec.dtype, backend.rounding)}
            timed = known.setdefault(str(rows), {})
            timing.time(rows, tiles, timed)
            done = [name for name in tiles if name in timed]
            is_whole = bool(done) and all(name in timed or name in timing.failed for name in tiles)
            found.append((rows, tiles[min(done, key=timed.__getitem__)] if is_whole else None))
        MEASURED[key] = tuple(found)
        return in_words(found, timing.left, timing.failed)

    def finish(self) -> None:
        """Add new measurements to the file, and keep those that others have written there meanwhile."""
        if not self.is_new or self.known is None:
            return
        keep(file(), self.known, "the measured tiles")
        self.is_new = False
        torch.cuda.empty_cache()  # what pages and graphs are sized by is the memory that nobody holds


@dataclass(eq=False)
class _Timing:
    """The measurement of one weight.

    left: tiles for which there was no time. failed: why a tile could not be run, by name.
    """

    measuring: Measuring
    backend: Triton
    spec: LinearSpec
    left: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def packed(self) -> Any:
        """A weight of zeros on the device."""
        most = max(MULTIPLE, LARGEST // self.spec.in_features // MULTIPLE * MULTIPLE)
        outputs = min(self.spec.out_features, most)
        return self.backend.pack(example(self.spec, outputs))

    def time(self, rows: int, tiles: dict[str, Any], timed: dict[str, float]) -> None:
        """Add the seconds of each of `tiles`, by name, that is not among `timed` and has not failed."""
        for name, tile in tiles.items():
            if name in timed or name in self.failed:
                continue
            if self.measuring.spent >= SECONDS:
                self.left += 1
                continue
            start = self.measuring.clock()
            try:
                timed[name] = seconds_of(rows, self.packed, tile, self.spec.dtype)
                self.measuring.is_new = True
            except Exception as error:  # what this GPU or this Triton cannot run is left out
                self.failed[name] = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
            self.measuring.spent += self.measuring.clock() - start


def is_measured(device_type: str) -> bool:
    """Return whether tiles are measured on this kind of device now."""
    on = is_on() and device_type == "cuda" and torch.cuda.is_available()
    return on and not torch.cuda.is_current_stream_capturing()


def file() -> Path:
    """Return the file of the measurements."""
    return cache_file("linear_tiles.json")


def place() -> str:
    """Return what seconds depend on besides the weight and the rows: the GPU, torch, Triton and the kernels."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {kernels.version()}, {_kernels()}"


@functools.cache
def _kernels() -> str:
    """Another word if a kernel of a linear changes."""
    from ...kernels.triton import few_rows
    from ...kernels.triton.programs import (
        integers,
        multiply,
        multiply_few,
        multiply_integers,
        rounded,
        stored_weight,
    )  # fmt: skip
    from . import tiles

    modules = (
        few_rows, integers, multiply, multiply_few, multiply_integers, rounded, stored_weight, tiles,
    )  # fmt: skip
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return f"kernels {hashlib.sha256(code).hexdigest()[:8]}"


def seconds_of(rows: int, weight: Any, tile: Any, dtype: torch.dtype) -> float:
    """The least time of one call, after some that compile and warm up."""
    from ...kernels.triton.launch import uncached_seconds
    from .tiles import multiply

    x = torch.ones(rows, weight.in_features, dtype=dtype, device=weight.integers.device)
    return uncached_seconds(lambda: multiply(x, weight, None, tile))


def _described(key: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in key._asdict().items())


def in_words(found: Sequence[tuple[int, Any]], left: int, failed: dict[str, str]) -> str:
    """Describe the measurement in words. found: the tile for up to so many rows, None for the rule's tile."""
    clauses: list[tuple[str, str]] = []
    for rows, tile in found:
        name = "as the rule says" if tile is None else str(tile).partition(",")[0]
        until = "beyond" if rows == ROWS[-1] else f"up to {rows} row{'s' if rows > 1 else ''}"
        if clauses and clauses[-1][0] == name:
            clauses.pop()
        clauses.append((name, until))
    words = "measured: " + ", ".join(f"{name} {until}" for name, until in clauses)
    if left:
        words += f"; {left} tiles are left for the next process, because {SECONDS:g} seconds were over"
    return words + "".join(f"; left out: {name} ({why})" for name, why in failed.items())
