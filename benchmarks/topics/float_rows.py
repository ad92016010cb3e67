"""Float linears by number of rows: our product, which reads weights in place, against torch's, which packs them.

Only a quiet machine gives a figure. Torch multiplies one float32 row by one thread, and ours has one for each core:
where another program keeps the cores busy, a call waits for its last thread until the system lets it run. That is 4 to
8 ms on Linux, and so 0.02 to 0.1 of torch's speed for a product of 0.1 to 0.5 ms, of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_accel.fused.measured_rows import rows_here, speed_ratio
from hf_accel.kernels.cpu.float_linear import FloatLinear

from ..harness.bench import Bench
from ..harness.tables import Row, Table

SHAPES = (
    (576, 576), (1536, 576), (576, 1536), (768, 768), (3072, 768), (768, 3072), (896, 896), (4864, 896), (896, 4864),
    (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), (14336, 4096),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
# Torch takes seconds for many rows of half precision on some CPUs.
DTYPES = {"float32": ROWS, "bfloat16": ROWS[:9], "float16": ROWS[:9]}
# Of Conv1Ds, as GPT-2 and GPT-2 XL have them; their weights are [in, out].
BY_INPUTS = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (4800, 1600), (1600, 6400))
COLD_BYTES = 2**27  # of the copies of a weight that are used in turn, so that none is found in a cache
SECONDS = 0.25  # of each number of rows
NOTE = (
    "Torch's least seconds over ours, in turns, over weights that no cache holds. A patched "
    "model uses ours up to `native_rows` rows, and torch's above; with deterministic=True always ours."
)


def measure(bench: Bench) -> list[Table]:
    forms = {"": (SHAPES, False), ", [in, out]": (BY_INPUTS, True)}
    return [
        Table(name + form, [row(*shape, getattr(torch, name), numbers, by_inputs=by_inputs) for shape in shapes], NOTE)
        for form, (shapes, by_inputs) in forms.items()
        for name, numbers in DTYPES.items()
    ]


@torch.inference_mode()
def row(out_features: int, in_features: int, dtype: torch.dtype, numbers: Sequence[int], *, by_inputs: bool) -> Row:
    shape = (in_features, out_features) if by_inputs else (out_features, in_features)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = [weight.clone() for _ in range(max(2, COLD_BYTES // weight.nbytes))]
    ours = [FloatLinear([each], [None], by_inputs=by_inputs) for each in weights]
    most = rows_here(dtype, by_inputs=by_inputs, measure=True)
    found = {}
    for rows in numbers:
        x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
        found[f"{rows}_rows_ratio"] = speed_ratio(x, weights, ours, SECONDS)
    print(f"    {dtype} {out_features} x {in_features}, {by_inputs=}: {found}", flush=True)
    return {"weight": f"{out_features} x {in_features}", "native_rows": most if most < 2**31 else "any", **found}
