"""Requests of several lengths: each alone, and all together, for models that keep states of other kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .speculating import requests

PROMPTS = requests(5, longest=40, seed=6, shared=9)
NEW_TOKENS = 20


def alone(model: Any, prompt: list[int], count: int = NEW_TOKENS, **settings: Any) -> list[int]:
    """The tokens that generate() writes behind one prompt."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False} | settings
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    return out[0, len(prompt) :].tolist()


def padded(side: str) -> tuple[Tensor, Tensor]:
    """PROMPTS as ids and a mask, padded on one side."""
    longest = max(map(len, PROMPTS))
    rows = [[0] * (longest - len(p)) + p if side == "left" else p + [0] * (longest - len(p)) for p in PROMPTS]
    ids = torch.tensor(rows)
    return ids, (ids != 0).long()


def together(model: Any) -> list[list[int]]:
    """The tokens that generate_batch() writes behind each of PROMPTS."""
    found = model.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [output.generated_tokens for output in found.values()]


def in_passes(model: Any, ids: Tensor, mask: Tensor, cuts: list[int], *, cache: Any) -> Tensor:
    """The logits of ids [B, T] in passes over so many columns each, over one cache."""
    start, logits = 0, []
    for count in cuts:
        part = slice(start, start + count)
        output = model(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, part.stop
        logits.append(output.logits)
    return torch.cat(logits, 1)
