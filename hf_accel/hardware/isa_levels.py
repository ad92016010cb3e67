"""The levels of CPU instructions that kernels are compiled for, and what each has.

kernels/cpu/build.py has the compiler flags of each level; it runs where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..errors import UnsupportedError

AVX512 = frozenset({"avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni"})
# A feature of CPUs that add pairs of bfloat16 more slowly than single numbers: torch has no name for it.
SLOW_PAIRS = "slow_avx512_bf16"
UNLIMITED = 2**62
# Rows above which torch's matmul of float weights, which packs them first, is faster than reading them in place, where
# that has not been measured on this CPU (fused/measured_rows.py). As `python -m benchmarks.run float_rows` found.
FLOAT_ROWS = {torch.bfloat16: 16, torch.float16: 128, torch.float32: 128}
# The same of weights [in, out]. Where bfloat16 is converted, torch is faster with many rows of it (an EPYC with
# AVX-512: ours is 1.3 times as fast with 2 rows of each expert, 0.9 times with 8).
ROWS_BY_INPUTS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 128}


@dataclass(frozen=True)
class Level:
    """This says what a level needs, and what it has.

    needs: features of the CPU, by the names of torch.cpu.get_capabilities.
    slow_with: features with which another level is faster.
    pairs_of_bfloat16: whether kernels multiply two of these at once.
    slow_bfloat16_in_torch: whether torch may not multiply them on such CPUs: ours is faster then with any number of
    rows (512 in benchmarks/results/amd-epyc-zen-3-avx2/prefill.json).
    float_rows, rows_by_inputs: where other numbers than FLOAT_ROWS and ROWS_BY_INPUTS hold.
    """

    needs: frozenset[str]
    slow_with: frozenset[str] = frozenset()
    pairs_of_bfloat16: bool = False
    slow_bfloat16_in_torch: bool = False
    float_rows: Mapping[torch.dtype, int] = field(default_factory=dict)
    rows_by_inputs: Mapping[torch.dtype, int] = field(default_factory=dict)

    def most_rows(self, dtype: torch.dtype, *, by_inputs: bool) -> int:
        """Return the most rows with which our product of float weights is faster than torch's; none of other dtypes.

        by_inputs: whether the weights are [in, out].
        """
        rows = self.float_rows.get(dtype, FLOAT_ROWS.get(dtype, 0))
        return min(rows, self.rows_by_inputs.get(dtype, ROWS_BY_INPUTS.get(dtype, 0))) if by_inputs else rows


# Best first. The last two are for tests alone: they have the kernels of "amx", and plain loops in place of its tiles;
# without AVX-512 only those of linear layers.
ISA_LEVELS = {
    "amx": Level(
        AVX512 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
        pairs_of_bfloat16=True,
        float_rows={torch.bfloat16: UNLIMITED},
    ),
    "avx512_vnni_bf16": Level(
        AVX512 | {"avx512_bf16"},
        slow_with=frozenset({SLOW_PAIRS}),
        pairs_of_bfloat16=True,
        float_rows={torch.bfloat16: 64, torch.float32: 256},
        rows_by_inputs={torch.bfloat16: 64},
    ),
    # By pairs, or where it only imitates them, torch is slower with any number of rows: 0.7 of ours with 512, of both
    # layouts.
    "avx512_vnni": Level(AVX512, float_rows={torch.bfloat16: UNLIMITED}, rows_by_inputs={torch.bfloat16: UNLIMITED}),
    "avx_vnni": Level(frozenset({"avx2", "fma3", "avx_vnni"}), slow_bfloat16_in_torch=True),
    "avx2": Level(frozenset({"avx2", "fma3"}), slow_bfloat16_in_torch=True),
    "neon_i8mm": Level(frozenset({"neon", "dot", "i8mm"})),
    "neon_dotprod": Level(frozenset({"neon", "dot"})),
    "neon": Level(frozenset({"neon"})),
    "portable": Level(frozenset()),
    "avx2_tiles": Level(frozenset({"avx2", "fma3"})),
    "avx512_bf16_tiles": Level(AVX512 | {"avx512_bf16"}, pairs_of_bfloat16=True),
}


def possible_levels(features: frozenset[str]) -> list[str]:
    """Return the levels that a CPU with such features can run, best first."""
    return [name for name, level in ISA_LEVELS.items() if level.needs <= features]


def choose_isa(features: frozenset[str], *, requested: str | None = None) -> str:
    """Return the fastest level of ISA_LEVELS that `features` allow, or the `requested` one.

    Raises UnsupportedError for a level that is unknown, or that this CPU would stop at with an illegal instruction.
    """
    possible = possible_levels(features)
    if not requested:
        return next(name for name in possible if not ISA_LEVELS[name].slow_with & features)
    if requested not in ISA_LEVELS:
        raise UnsupportedError(f"HF_ACCEL_ISA={requested!r} is not known; choose one of {', '.join(ISA_LEVELS)}")
    if requested not in possible:
        raise UnsupportedError(f"HF_ACCEL_ISA={requested!r} is not in this CPU; choose one of {', '.join(possible)}")
    return requested
