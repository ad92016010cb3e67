"""Time and peak memory of each way to a quantized model: from memory, from a checkpoint, while loading."""

from __future__ import annotations

import tempfile

from .bench import Bench
from .models import weight_bytes
from .processes import call
from .tables import Row, Table

WIDTHS = ("int8", "int4")
TITLE = "ways to a quantized model"
NOTE = (
    "Each in a process of its own. The peak is resident memory above what was there before: for patch(), above the "
    "loaded model. Pages of a checkpoint that the system has mapped count, though it can drop them. In all: together "
    "with the model, if it was there before, and against its bytes."
)


def measure(bench: Bench) -> Table:
    """ "checkpoint": the model as from_pretrained left it, with the originals to be read back from disk."""
    settings, model_bytes = bench.settings, weight_bytes(bench.model)
    with tempfile.TemporaryDirectory(prefix="hf_accel-checkpoint-") as folder:
        bench.model.save_pretrained(folder)
        ways = [(("stock", "bf16", folder), "from_pretrained")]
        for weights in WIDTHS:
            ways.append((("memory", weights, settings.model), "patch, in memory, keep_original=False"))
            ways.append((("checkpoint", weights, folder), 'patch, from a checkpoint, keep_original="auto"'))
            ways.append((("load", weights, folder), "from_pretrained(quantization_config=AccelConfig)"))
        rows = [row(*way, settings.layers, model_bytes=model_bytes) for way in ways]
    return Table(TITLE, rows, NOTE)


def row(asked: tuple[str, str, str], text: str, layers: int | None, *, model_bytes: int) -> Row:
    """asked: the way, the weights, and the model or its folder, as patch_peak takes them."""
    way, weights, _ = asked
    print(f"    {way} {weights} in a new process", flush=True)
    found = call("patch_peak", *asked, layers or 0)
    peak, before = found["peak_bytes"], model_bytes if way in ("memory", "checkpoint") else 0
    return {
        "way": text,
        "weights": weights,
        "make_seconds": found["seconds"],
        "peak_bytes": peak,
        "in_all_ratio": None if peak is None else (before + peak) / model_bytes,
        "result_bytes": found["result_bytes"],
    }
