"""What each method of quantizing loses at 8 to 2 bits, and how long it takes; perplexity as in `quality`.

python -m benchmarks.run methods --model PATH_OR_NAME --text FILE; without them, the shipped model and its own text

Calibrated on windows of Python's standard library, less the modules that the text is from. Layers whose inputs do not
divide into groups stay as they are. Each --beside FILE is a GGUF file that another program quantized, scored by the
same code: what hf_accel.load() makes of it. NF4 is there where bitsandbytes is installed.
"""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import hf_accel
from hf_accel.cli.measurement import BASELINE
from hf_accel.patching.survey import linear_sites
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.corpus import held_out_text, training_windows
from ..harness.models import load_model
from ..harness.settings import Methods
from ..harness.tables import Row, Table
from .quality import Variant, checkpoint, held_out, read_windows, row, score

METHODS = ("rtn", "gptq", "awq")
NOTE = (
    "Change: of the perplexity, with the standard error of the mean over tokens. KL: of stock's predictions from the "
    "variant's, nats per token. Bits: of the weight of a layer, scales and all, without embedding and head. stock is "
    "bfloat16. The head is INT8 in all of ours, bfloat16 in NF4, and as stored in files. Seconds: of patch()."
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    name, text = checkpoint(settings), held_out(settings)
    windows, model = read_windows(name, text, settings.quality_tokens), load_model(name)
    data = calibration(name, settings.text, count=settings.methods.windows, length=settings.methods.length)
    seconds: dict[str, float | None] = {BASELINE: None}
    variants = {BASELINE: Variant(model, None)}
    bits = {BASELINE: 16.0}
    for label, weights in configs(model, data, settings.methods):
        print(f"  {label}", flush=True)
        start = time.perf_counter()
        variants[label] = Variant(hf_accel.patch(twin(model), weights=weights, keep_original=True), "auto")
        seconds[label], bits[label] = time.perf_counter() - start, bits_of(model, weights)
    for file in settings.methods.beside:
        label = Path(file).stem
        variants[label] = Variant(hf_accel.load(file, dtype=model.dtype), "auto")
        seconds[label], bits[label] = None, bits_in(file)
    scores = score(variants, windows)
    rows: list[Row] = [
        {"bits": bits[which]} | row(which, variants, scores) | {"patch_seconds": seconds[which]} for which in variants
    ]
    title = f"methods on {Path(name).name}, {windows.numel()} tokens of {text.name}, calibrated on {data.numel()}"
    return [Table(title, rows, NOTE)]


def calibration(name: str, text: str | None, *, count: int, length: int) -> Tensor:
    """int64 [count, length] of token ids."""
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    return training_windows(tokenizer, held_out_text(text), count=count, length=length, seed=0)


def configs(model: PreTrainedModel, data: Tensor, settings: Methods) -> list[tuple[str, hf_accel.WeightConfig]]:
    """INT8; INT4 and fewer bits by each method for each size of groups; NF4 where it can be."""
    found = [("int8", hf_accel.WeightConfig())]
    kinds = [(4, size, True) for size in settings.groups] + [(4, size, False) for size in settings.lopsided]
    for bits, size, symmetric in kinds + [(bits, 32, False) for bits in settings.fewer]:
        for method in METHODS:
            weights = hf_accel.WeightConfig(
                bits=bits,
                group_size=size,
                symmetric=symmetric,
                method=method,
                calibration=None if method == "rtn" else data,
                skip=undivided(model, size),
            )
            kind = "" if symmetric else ", zero points"
            found.append((f"int{bits} {method}, groups of {size}{kind}", weights))
    for budget in settings.budgets:
        weights = hf_accel.WeightConfig(
            group_size=32, symmetric=False, method="gptq", calibration=data, average_bits=budget,
            skip=undivided(model, 32),
        )  # fmt: skip
        found.append((f"int4 gptq, groups of 32, zero points, {budget} bits on average", weights))
    if find_spec("bitsandbytes") is not None:
        found.append(("nf4", hf_accel.WeightConfig(bits=4, format="nf4")))
    return found


def bits_of(model: PreTrainedModel, weights: hf_accel.WeightConfig) -> float:
    """Of a quantized weight on average, scales included, without the head. A budget is taken to be used up."""
    if weights.average_bits is not None:
        return weights.average_bits
    planned = [p for p in hf_accel.plan(model, weights=weights).quantized if not p.site.is_head]
    size = sum(p.choice.spec.weight_bytes for p in planned if p.choice is not None)
    return 8 * size / sum(p.site.weight.numel() for p in planned)


def bits_in(file: str) -> float:
    """Of a weight of a layer in a GGUF file on average, scales included."""
    reader: Any = import_module("gguf").GGUFReader(file)
    found = [t for t in reader.tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    return float(8 * sum(t.n_bytes for t in found) / sum(t.n_elements for t in found))


def undivided(model: PreTrainedModel, size: int) -> tuple[str, ...]:
    """The ends of the names of the Linears whose inputs do not divide into groups of this size."""
    sites = [site for site in linear_sites(model, ()) if not site.is_head and site.skip is None]
    return tuple(sorted({site.name.rpartition(".")[2] for site in sites if site.weight.shape[1] % size}))
