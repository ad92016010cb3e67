"""What each dtype of keys and values loses, by the length of the context: perplexity and divergence, as in `quality`.

python -m benchmarks.run kv --model PATH_OR_NAME --text FILE; without them, the shipped model and its own text

Weights stay as they are. Contexts are those that the model was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from transformers import PreTrainedModel

import hf_accel
from hf_accel.cli.measurement import BASELINE
from hf_accel.config import KVDtype
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.models import load_model
from ..harness.tables import Row, Table
from .quality import Variant, checkpoint, held_out, lost, read_windows, score

NOTE = (
    "Change: of the perplexity, with the standard error of the mean over tokens. KL: of stock's predictions from the "
    "variant's, nats per token. Bytes: of K and V of a token, scales included. Passes of 64 tokens read what earlier "
    "ones wrote."
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    name, text = checkpoint(settings), held_out(settings)
    model = load_model(name)
    variants = make_variants(model)
    tables = []
    for length in lengths(settings.kv_contexts, model.config.max_position_embeddings):
        windows = read_windows(name, text, max(settings.quality_tokens, length), length=length)
        scores = score(variants, windows)
        rows: list[Row] = [
            {"keys_and_values": which} | lost(scores[which], scores[BASELINE]) | {"token_bytes": token_bytes(variant)}
            for which, variant in variants.items()
        ]
        many = f"{windows.numel()} tokens of {text.name}, in contexts of {windows.shape[1]}"
        tables.append(Table(f"keys and values of {Path(name).name} on {many}", rows, NOTE))
    return tables


def lengths(wanted: tuple[int, ...], most: int) -> Iterator[int]:
    """The contexts that a model of so many positions allows; its longest one if that is shorter than all of them."""
    yield from [length for length in wanted if length <= most] or [most]


def make_variants(model: PreTrainedModel) -> dict[str, Variant]:
    """Stock, and one patched model with a cache of each dtype."""
    patched = hf_accel.patch(twin(model), weights=None, keep_original=True)
    return {BASELINE: Variant(model, None)} | {kv: Variant(patched, kv) for kv in get_args(KVDtype)}


def token_bytes(variant: Variant) -> int:
    kv_dtype = variant.kv_dtype or "auto"
    return hf_accel.estimate(variant.model, context=1, kv_dtype=kv_dtype, bandwidth=1.0).kv_bytes
