"""Scratch memory and time of one layer over a whole prompt, in a process of its own.

python -m benchmarks.topics.attention_peak HEADS KV_HEADS HEAD_DIM LENGTH...

The layer is a model's only one, its MLP and vocabulary are tiny: what grows is attention, and keys and values.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

import hf_accel

from ..harness.models import random_model
from ..harness.peak import peak_bytes

MOST_BYTES = 4e9  # a length that would take more than this, if memory grew with its square, is left out
NewCache = Callable[[Any], Any]


@dataclass
class Candidate:
    """peaks: bytes by length; seconds likewise; None where the length was left out."""

    model: PreTrainedModel
    new_cache: NewCache
    peaks: list[int | None] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)


def candidates(config: LlamaConfig) -> dict[str, Candidate]:
    def paged(config: Any, dtype: str = "auto") -> hf_accel.PagedCache:
        return hf_accel.PagedCache(config, dtype=dtype)

    eager = random_model(config)
    eager.set_attn_implementation("eager")
    return {
        "eager": Candidate(eager, lambda config: DynamicCache(config=config)),
        "stock": Candidate(random_model(config), lambda config: DynamicCache(config=config)),
        "hf_accel": Candidate(hf_accel.patch(random_model(config), weights=None), paged),
        "hf_accel with int8 KV": Candidate(
            hf_accel.patch(random_model(config), weights=None), partial(paged, dtype="int8")
        ),
    }


def measure(candidate: Candidate, length: int, shorter: int | None) -> None:
    if not fits(candidate.peaks, length, shorter):
        candidate.peaks.append(None)
        candidate.seconds.append(None)
        return
    ids = torch.arange(length)[None] % candidate.model.config.vocab_size
    run(candidate, ids[:, :16])  # loads what is loaded at the first call
    seconds: list[float] = []
    candidate.peaks.append(peak_bytes(lambda: seconds.append(run(candidate, ids))))
    candidate.seconds.append(seconds[0])


def fits(peaks: list[int | None], length: int, shorter: int | None) -> bool:
    if not peaks or shorter is None:
        return True
    return peaks[-1] is not None and peaks[-1] * (length / shorter) ** 2 < MOST_BYTES


def run(candidate: Candidate, ids: torch.Tensor) -> float:
    cache = candidate.new_cache(candidate.model.config)
    start = time.perf_counter()
    candidate.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


@torch.no_grad()
def main(heads: int, kv_heads: int, head_dim: int, *lengths: int) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max(lengths),
    )
    found = candidates(config)
    for shorter, length in zip([None, *lengths], lengths, strict=False):
        for candidate in found.values():
            measure(candidate, length, shorter)
    print(json.dumps({name: {"bytes": c.peaks, "seconds": c.seconds} for name, c in found.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
