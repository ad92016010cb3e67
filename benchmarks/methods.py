"""What each method of quantizing loses at 4 bits, and how long it takes: perplexity and divergence, as in `quality`.

python -m benchmarks.run methods --model PATH_OR_NAME --text FILE; without them, the shipped model and its own text

Calibrated on windows of Python's standard library, less the modules that the text is from. Layers whose inputs do not
divide into groups stay as they are.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import hf_accel
from hf_accel.survey import linear_sites
from hf_accel.twin import twin

from .bench import Bench
from .corpus import held_out_text, training_windows
from .models import load_model
from .quality import Variant, checkpoint, read_windows, row, score
from .small_model import SHIPPED
from .tables import Row, Table
from .timing import BASELINE

METHODS = ("rtn", "gptq", "awq")
NOTE = (
    "Change: of the perplexity, with the standard error of the mean over tokens. KL: of stock's predictions from the "
    "variant's, nats per token. stock is bfloat16. The head is INT8 in all of them; seconds are of patch()."
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    name, text = checkpoint(settings), Path(settings.text or SHIPPED / "heldout.txt")
    windows, model = read_windows(name, text, settings.quality_tokens), load_model(name)
    data = calibration(name, settings.text, count=settings.methods.windows, length=settings.methods.length)
    seconds: dict[str, float | None] = {BASELINE: None}
    variants = {BASELINE: Variant(model, None)}
    for label, weights in configs(model, data, groups=settings.methods.groups, lopsided=settings.methods.lopsided):
        print(f"  {label}", flush=True)
        start = time.perf_counter()
        variants[label] = Variant(hf_accel.patch(twin(model), weights=weights, keep_original=True), "auto")
        seconds[label] = time.perf_counter() - start
    scores = score(variants, windows)
    rows: list[Row] = [row(which, variants, scores) | {"patch_seconds": seconds[which]} for which in variants]
    title = f"methods on {Path(name).name}, {windows.numel()} tokens of {text.name}, calibrated on {data.numel()}"
    return [Table(title, rows, NOTE)]


def calibration(name: str, text: str | None, *, count: int, length: int) -> Tensor:
    """int64 [count, length] of token ids."""
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    return training_windows(tokenizer, held_out_text(text), count=count, length=length, seed=0)


def configs(
    model: PreTrainedModel, data: Tensor, *, groups: tuple[int, ...], lopsided: tuple[int, ...]
) -> list[tuple[str, hf_accel.WeightConfig]]:
    """INT8, and INT4 by each method for each size of groups. lopsided: the sizes that get zero points too."""
    found = [("int8", hf_accel.WeightConfig())]
    for size, symmetric in [(size, True) for size in groups] + [(size, False) for size in lopsided]:
        for method in METHODS:
            weights = hf_accel.WeightConfig(
                bits=4,
                group_size=size,
                symmetric=symmetric,
                method=method,
                calibration=None if method == "rtn" else data,
                skip=undivided(model, size),
            )
            kind = "" if symmetric else ", zero points"
            found.append((f"int4 {method}, groups of {size}{kind}", weights))
    return found


def undivided(model: PreTrainedModel, size: int) -> tuple[str, ...]:
    """The ends of the names of the Linears whose inputs do not divide into groups of this size."""
    sites = [site for site in linear_sites(model, ()) if not site.is_head and site.skip is None]
    return tuple(sorted({site.name.rpartition(".")[2] for site in sites if site.weight.shape[1] % size}))
