"""Scores that depend on which tokens stand before: [n, V] float32 and a Prefix for each row."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from .prefix import Prefix


def repeat(scores: Tensor, prefixes: abc.Sequence[Prefix], penalty: float) -> Tensor:
    """Divide the scores of tokens of prompt and output by `penalty`, or multiply them if negative (Keskar et al. 2019,
    arXiv 1909.05858); transformers' RepetitionPenaltyLogitsProcessor."""
    seen = _counts([prefix.ids for prefix in prefixes], scores) > 0
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def recount(scores: Tensor, prefixes: abc.Sequence[Prefix], *, frequency: float, presence: float) -> Tensor:
    """Subtract `frequency` for each time that a token was generated, and `presence` once; as OpenAI's API and vLLM."""
    counts = _counts([prefix.ids[prefix.num_prompt :] for prefix in prefixes], scores)
    scores = scores - frequency * counts
    return scores - presence * (counts > 0)


def _counts(rows: list[Tensor], scores: Tensor) -> Tensor:
    """How often each token stands in each row of ids -> int64 [n, V]. Ids that no logit belongs to are left out."""
    width = scores.shape[1] + 1
    flat = torch.cat([ids.clamp(max=width - 1) + row * width for row, ids in enumerate(rows)])
    counts = torch.bincount(flat.to(scores.device), minlength=len(rows) * width)
    return counts.view(len(rows), width)[:, :-1]
