"""Scores that depend on which tokens stand before: [n, V] float32 and a Prefix for each row."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from .prefix import Prefix


def repeat(scores: Tensor, prefixes: abc.Sequence[Prefix], penalty: float) -> Tensor:
    """Divide the scores of tokens of prompt and output by `penalty`, or multiply them if negative (Keskar et al. 2019,
    arXiv 1909.05858); transformers' RepetitionPenaltyLogitsProcessor."""
    scores = scores.clone(memory_format=torch.contiguous_format)
    places = _places([prefix.ids for prefix in prefixes], scores)
    found = scores.view(-1)[places]
    scores.view(-1)[places] = torch.where(found < 0, found * penalty, found / penalty)
    return scores


def recount(scores: Tensor, prefixes: abc.Sequence[Prefix], *, frequency: float, presence: float) -> Tensor:
    """Subtract `frequency` for each time that a token was generated, and `presence` once; as OpenAI's API and vLLM."""
    scores = scores.clone(memory_format=torch.contiguous_format)
    places = _places([prefix.ids[prefix.num_prompt :] for prefix in prefixes], scores)
    places, counts = torch.unique(places, return_counts=True)
    scores.view(-1)[places] = scores.view(-1)[places] - frequency * counts - presence
    return scores


def _places(rows: list[Tensor], scores: Tensor) -> Tensor:
    """Where in the flat scores the ids of each row stand; ids that no logit belongs to are left out."""
    size = scores.shape[1]
    return torch.cat([ids[ids < size] + row * size for row, ids in enumerate(rows)]).to(scores.device)
