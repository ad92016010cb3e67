"""Memory on each way to a patched model: from memory, a checkpoint, while loading, from a quantized checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hf_accel
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.models import weight_bytes
from ..harness.processes import call
from ..harness.tables import Row, Table

WEIGHTS = (None, "int8", "int4")
FIT = "0.6"  # of the bytes of the float model
WAYS = {
    "stock": "from_pretrained",
    "memory": "patch, in memory, keep_original=False",
    "checkpoint": "from_pretrained, then patch",
    "load": "from_pretrained(quantization_config=AccelConfig)",
    "saved": "from_pretrained of what save_pretrained wrote",
    "copied": "the same with HF_ACCEL_MAP_WEIGHTS=0",
    "fit": "load(fit=...), with room for 60 % of the float weights",
}
TITLE = "ways to a patched model"
NOTE = (
    "Each in a process of its own, above what the process held before it had the model. The peak is the kernel's own "
    "mark of resident memory; anonymous memory and mapped pages of files, which the system can drop, were sampled, "
    "and peak at their own times. In all: the peak against the bytes of the float model. Held: when all is done. The "
    "result's bytes count weights that are mapped from the checkpoint, and are not in memory before they are read. "
    "Seconds are those of the call, with the file in the system's cache; of the processor, those of all its cores."
)


def measure(bench: Bench) -> list[Table]:
    with tempfile.TemporaryDirectory(prefix="hf_accel-checkpoint-") as folder:
        bench.model.save_pretrained(folder)
        rows = [row(bench, "stock", None, folder)]
        for weights in WEIGHTS:
            rows += [row(bench, way, weights, folder) for way in ("memory", "checkpoint", "load")]
            if weights is not None:
                saved = Path(folder, weights)
                patched = hf_accel.patch(twin(bench.model), weights=weights)
                patched.save_pretrained(saved)
                del patched
                rows += [row(bench, way, weights, str(saved)) for way in ("saved", "copied")]
        rows.append(row(bench, "fit", FIT, folder))
    return [Table(TITLE, rows, NOTE)]


def row(bench: Bench, way: str, weights: str | None, folder: str) -> Row:
    """The model is random for the way "memory", the checkpoint in `folder` for the others."""
    print(f"    {way} {weights} in a new process", flush=True)
    settings = bench.settings
    name = settings.model if way == "memory" else folder
    environment = {"HF_ACCEL_MAP_WEIGHTS": "0"} if way == "copied" else None
    found = call("patch_peak", way, weights, name, settings.layers or 0, environment=environment)
    peak = found["peak_bytes"]
    return {
        "way": WAYS[way],
        "weights": found["chosen"] if way == "fit" else weights or "as they are",
        "in_all_ratio": None if peak is None else peak / weight_bytes(bench.model),
        "peak_bytes": peak,
        "anonymous_bytes": found["anonymous_bytes"],
        "mapped_bytes": found["mapped_bytes"],
        "held_bytes": found["held_bytes"],
        "result_bytes": found["result_bytes"],
        "make_seconds": found["seconds"],
        "cpu_seconds": found["cpu_seconds"],
    }
