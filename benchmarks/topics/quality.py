"""What smaller weights and a smaller cache cost: perplexity of a text, and divergence from stock's predictions.

python -m benchmarks.run quality --model PATH_OR_NAME --text FILE; without them, the shipped model and its own text

Windows of 512 tokens, teacher-forced, in passes of 64, so that attention reads what went through the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

import hf_accel
from hf_accel.cli.measurement import BASELINE
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.models import MODELS, load_model, weight_bytes
from ..harness.settings import Settings
from ..harness.tables import Row, Table
from .small_model import SHIPPED

WINDOW, CHUNK = 512, 64
INT4_WHOLE = hf_accel.WeightConfig(bits=4, head="int4", embedding="int4")
INT4_G32 = hf_accel.WeightConfig(bits=4, group_size=32)
NOTE = (
    "Change: of the perplexity, with the standard error of the mean over tokens. KL: of stock's predictions from the "
    "variant's, nats per token. Same top: tokens where both find the same one likeliest. stock is bfloat16. "
    "One table: the embedding looks its rows up in the quantized head; elsewhere it stays in floating point."
)


@dataclass(frozen=True)
class Variant:
    """A model with the type of cache that its keys and values go through; None: stock's."""

    model: PreTrainedModel
    kv_dtype: str | None

    def new_cache(self) -> Any:
        if self.kv_dtype is None:
            return DynamicCache(config=self.model.config)
        return hf_accel.PagedCache(self.model.config, dtype=self.kv_dtype)


@dataclass(frozen=True)
class Scores:
    """Per predicted token: loss and divergence from stock in nats; whether the likeliest token is stock's."""

    losses: Tensor
    divergences: Tensor
    same_top: Tensor


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    name, text = checkpoint(settings), held_out(settings)
    windows = read_windows(name, text, settings.quality_tokens)
    variants = make_variants(load_model(name))
    scores = score(variants, windows)
    rows = [row(which, variants, scores) for which in variants]
    title = f"perplexity of {Path(name).name} on {windows.numel()} tokens of {text.name}"
    return [Table(title, rows, NOTE)]


def checkpoint(settings: Settings) -> str:
    """The model that was asked for, if it has learned something."""
    return str(SHIPPED) if settings.model in MODELS else settings.model


def held_out(settings: Settings) -> Path:
    """The text that perplexity is measured on."""
    return Path(settings.text or SHIPPED / "heldout.txt")


def make_variants(model: PreTrainedModel) -> dict[str, Variant]:
    def patched(weights: Any) -> PreTrainedModel:
        return hf_accel.patch(twin(model), weights=weights, keep_original=True)

    int8 = patched("int8")
    return {
        BASELINE: Variant(model, None),
        "hf_accel exact": Variant(patched(None), "auto"),
        "int8": Variant(int8, "auto"),
        "int8, one table": Variant(patched(hf_accel.WeightConfig(embedding="int8")), "auto"),
        "int8 with int8 KV": Variant(int8, "int8"),
        "int4, groups of 128": Variant(patched("int4"), "auto"),
        "int4, groups of 128, one table": Variant(patched(hf_accel.WeightConfig(4, embedding="int8")), "auto"),
        "int4, groups of 128, head too": Variant(patched(hf_accel.WeightConfig(4, head="int4")), "auto"),
        "int4, groups of 128, one table of 4 bits": Variant(patched(INT4_WHOLE), "auto"),
        "int4, groups of 32": Variant(patched(INT4_G32), "auto"),
    }


def read_windows(name: str, text: Path, num_tokens: int, *, length: int = WINDOW) -> Tensor:
    """Token ids [n, length] of the beginning of the text."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0, :num_tokens]
    length = min(length, len(ids))
    return ids[: len(ids) // length * length].view(-1, length)


def score(variants: dict[str, Variant], windows: Tensor) -> dict[str, Scores]:
    """All variants window by window: stock's predictions of one window at a time are kept."""
    parts: dict[str, list[Scores]] = {name: [] for name in variants}
    for number, ids in enumerate(windows.split(1), 1):
        print(f"    window {number} of {len(windows)}", flush=True)
        expected = list(predictions(variants[BASELINE], ids))
        for name, variant in variants.items():
            actual = expected if name == BASELINE else predictions(variant, ids)
            pairs = zip(actual, expected, ids[:, 1:].split(CHUNK, dim=1), strict=True)
            parts[name] += [compare(a, e, targets) for a, e, targets in pairs]
    return {name: joined(pieces) for name, pieces in parts.items()}


@torch.no_grad()
def predictions(variant: Variant, ids: Tensor) -> Iterator[Tensor]:
    """Log-probabilities [chunk, vocabulary] of the token after each, chunk by chunk."""
    cache = variant.new_cache()
    for chunk in ids[:, :-1].split(CHUNK, dim=1):
        logits = variant.model(input_ids=chunk, past_key_values=cache, use_cache=True).logits
        yield logits[0].float().log_softmax(-1)


def compare(actual: Tensor, expected: Tensor, targets: Tensor) -> Scores:
    return Scores(
        losses=-actual.gather(-1, targets.view(-1, 1)).flatten(),
        divergences=(expected.exp() * (expected - actual)).sum(-1),
        same_top=(actual.argmax(-1) == expected.argmax(-1)).float(),
    )


def joined(pieces: list[Scores]) -> Scores:
    return Scores(*(torch.cat([getattr(p, name) for p in pieces]) for name in Scores.__dataclass_fields__))


def row(name: str, variants: dict[str, Variant], scores: dict[str, Scores]) -> Row:
    size = weight_bytes(variants[name].model)
    return {"weights": name} | lost(scores[name], scores[BASELINE]) | {"weight_bytes": size}


def lost(own: Scores, stock: Scores) -> Row:
    differences = (own.losses - stock.losses).double()
    return {
        "perplexity": math.exp(own.losses.double().mean()),
        "change_percent": 100 * math.expm1(differences.mean()),
        "error_percent": 100 * float(differences.std()) / math.sqrt(len(differences)),
        "kl_nats": float(own.divergences.double().mean()),
        "same_top_share": float(own.same_top.mean()),
    }
