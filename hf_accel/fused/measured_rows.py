"""The rows up to which our product of float weights is faster than torch's on this CPU: measured once, kept in a file.

Ours reads the weights where they are, torch's packs them first, and from some number of rows on that pays. An
instruction set does not say from which: on an EPYC with AVX-512, 64 rows of bfloat16 by rule were 128 to 192 in fact.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hardware import UNLIMITED
from ..hardware.atomic import locked
from ..hardware.busy import BUSY, busy_cores
from ..hardware.cpu_model import cpu_model
from ..hardware.measured import cache_file, is_on, keep, read
from ..kernels.cpu import library
from ..kernels.cpu.float_linear import FloatLinear
from .projections import native_rows

CANDIDATE_ROWS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
SHAPES = ((576, 1536), (2048, 2048))  # outputs and inputs: one that is small and torch is good at, one of usual size
COLD_BYTES = 2**26  # of the copies of a weight that are used in turn, so that most of each comes from memory
LEAST_SECONDS = 0.02  # the least for each number of rows and each shape
LEAST_CALLS = 4  # of each
LEAST_RATIO = 0.97  # of torch's seconds to ours: one call of a layer saves more than that around its products
ATTEMPTS = 3  # to reach it, before torch is taken to be faster
FEWEST_ROWS = 4  # that are native whatever is faster: drafts of three tokens are verified as tokens are decoded
GLANCE = 0.2  # seconds in which others are looked at
BY_INPUTS = " [in, out]"  # behind a dtype: of weights that are so
PATIENCE = 30.0  # seconds to wait for another process that measures

_found: dict[tuple[str, str], int] = {}  # the most rows, by `this_cpu` and product: also where no file can be written


def rows_here(dtype: torch.dtype, *, by_inputs: bool = False, measure: bool = False) -> int:
    """Return the most rows with which our product of float weights is faster than torch's on this CPU.

    by_inputs: whether the weights are [in, out]. measure: whether it is measured if it was not before, which takes
    about a second. Else, and for products that torch is known to be slow at, and with HF_ACCEL_MEASURE=0, it is what
    other CPUs of this kind have.
    """
    usual = native_rows(dtype, by_inputs=by_inputs)
    if usual in (0, UNLIMITED) or not is_on():
        return usual
    asked = this_cpu(), str(dtype).removeprefix("torch.") + (BY_INPUTS if by_inputs else "")
    if asked not in _found:
        ratios = kept(*asked)
        if not ratios and measure:
            ratios = measured(dtype, *asked, by_inputs=by_inputs)
            _found[asked] = most_rows(ratios) if ratios else usual
        elif ratios:
            _found[asked] = most_rows(ratios)
        else:
            return usual
    return _found[asked]


def kept(place: str, product: str) -> dict[str, float]:
    return read(rows_file()).get(place, {}).get(product, {})


def measured(dtype: torch.dtype, place: str, name: str, *, by_inputs: bool) -> dict[str, float]:
    """Measure, unless another process does, which would take the cores from both: then wait for what it finds. Return
    nothing where other programs take the cores: our calls wait for their last thread, and torch's need not.
    """
    with ExitStack() as lock:
        with suppress(OSError):  # Timeout is one; keep() warns of a folder that cannot be written to
            rows_file().parent.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(rows_file().with_suffix(".lock"), timeout=PATIENCE))
        ratios = kept(place, name)
        if not ratios and (busy_cores(GLANCE) or 0.0) < BUSY:
            ratios = {str(rows): ratio for rows, ratio in ratios_by_rows(dtype, by_inputs=by_inputs).items()}
            keep(rows_file(), {place: {name: ratios}}, "the measured rows of float linears")
        return ratios


def most_rows(ratios: dict[str, float]) -> int:
    """Return the most rows up to which no ratio is below LEAST_RATIO, at least FEWEST_ROWS. They are UNLIMITED where
    the most of CANDIDATE_ROWS is among them: with more, neither product changes its ways.
    """
    most = FEWEST_ROWS
    for rows in sorted(map(int, ratios)):
        if ratios[str(rows)] < LEAST_RATIO:
            break
        most = rows
    return UNLIMITED if most == CANDIDATE_ROWS[-1] else most


@torch.inference_mode()
def ratios_by_rows(dtype: torch.dtype, *, by_inputs: bool) -> dict[int, float]:
    """Return torch's seconds over ours, the geometric mean over SHAPES, up to the first number of rows where it stays
    below LEAST_RATIO: one that noise brought there would keep all larger ones from being native for good.
    """
    generator, floats = torch.Generator("cpu").manual_seed(0), {"dtype": torch.float32, "device": "cpu"}
    numbers = functools.partial(torch.randn, generator=generator, **floats)
    weights = [numbers(*(shape[::-1] if by_inputs else shape)).to(dtype) for shape in SHAPES]
    copies = [[one.clone() for _ in range(max(2, COLD_BYTES // one.nbytes))] for one in weights]
    ours = [[FloatLinear([each], [None], by_inputs=by_inputs) for each in some] for some in copies]
    found: dict[int, float] = {}
    for rows in CANDIDATE_ROWS:
        inputs = [numbers(rows, size).to(dtype) for _, size in SHAPES]
        for _ in range(ATTEMPTS):
            with torch.autocast("cpu", enabled=False):  # it may be on where a plan is made
                each = [speed_ratio(*three, LEAST_SECONDS) for three in zip(inputs, copies, ours, strict=True)]
            found[rows] = max(found.get(rows, 0.0), math.prod(each) ** (1 / len(each)))
            if found[rows] >= LEAST_RATIO:
                break
        else:
            break
    return found


def speed_ratio(x: Tensor, weights: Sequence[Tensor], ours: Sequence[FloatLinear], seconds: float) -> float:
    """Return torch's least seconds over ours, of calls in turns, each on the next weight."""
    torchs_product = torch.mm if ours[0].by_inputs else F.linear
    torchs: list[float] = []
    own: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(own) < LEAST_CALLS:
        turn = 2 * len(own)
        torchs.append(_timed(torchs_product, x, weights[turn % len(weights)]))
        own.append(_timed(ours[(turn + 1) % len(weights)], x))
    return min(torchs) / min(own)


def _timed(call: Callable[..., object], *arguments: Tensor) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def rows_file() -> Path:
    """Return the file of the measurements."""
    return cache_file("float_rows.json")


def this_cpu() -> str:
    """Return what ratios depend on besides the dtype and the rows."""
    return (
        f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {library.isa()}, {_kernels()}"
    )


@functools.cache
def _kernels() -> str:
    """Another word if a kernel changes."""
    return f"kernels {hashlib.sha256(library.library_file().read_bytes()).hexdigest()[:8]}"
