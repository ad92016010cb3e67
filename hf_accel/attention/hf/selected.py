"""Attention to the tokens that an indexer has selected (DeepSeek-AI 2025, "DeepSeek-V3.2", sparse attention).

Each query attends to the few keys to which a small layer, the indexer, gives the highest scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...cache.hf import PagedKV
from ...errors import NotRaggedError
from ...kernels.layouts import KV, AttentionOptions
from .latents import expanded
from .mask import numbers_of, window_of


@dataclass(frozen=True)
class RaggedSelection:
    """The tokens that each token of a ragged pass attends to.

    seen: of each sequence which of its T tokens its n tokens of the pass see, bool [n, T]; None for all before them.
    """

    seen: list[Tensor | None]

    @property
    def is_all(self) -> bool:
        return all(each is None for each in self.seen)


def masked(mask: Tensor | None, indices: Tensor, columns: int) -> Tensor | None:
    """Return a mask that also hides what is not among `indices` [B, Q, k], as transformers' code for eager does it.

    Where all columns are, it is returned as it is. columns: T, of the keys.
    """
    if mask is None or indices.shape[-1] >= columns:
        return mask
    numbers: Any = numbers_of(mask)
    chosen = torch.zeros(*indices.shape[:2], columns, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(-1, indices.long(), True).unsqueeze(1)
    if numbers.dtype is torch.bool:
        return numbers & chosen
    return numbers.masked_fill(~chosen, torch.finfo(numbers.dtype).min)


def attend_selected(
    backend: Any, query: Tensor, kv: KV, *, paged: PagedKV, options: AttentionOptions, selection: RaggedSelection
) -> Tensor:  # fmt: skip
    """Compute attention of a ragged pass [1, H, N, D] over the tokens of a selection -> [1, N, H, Dv].

    kv: of all tokens of the sequences, see `selectable`. backend: computes it.
    """
    ragged = paged.group_step.ragged
    starts, ends = ragged.cu_q.tolist(), [0, *accumulate(ragged.kv_len.tolist())]
    q, parts = paged.step.tokens(query), []
    for queries, keys, seen in zip(pairwise(starts), pairwise(ends), selection.seen, strict=True):
        rows = q[slice(*queries)].transpose(0, 1)[None]
        own = KV(*(x[slice(*keys)].transpose(0, 1)[None] for x in (kv.k, kv.v)))
        given = options if seen is None else options._replace(causal=False)
        parts.append(backend.dense(rows, own, given, mask=None if seen is None else seen[None, None])[0])
    return paged.step.columns(torch.cat(parts), query.shape[0])


def selectable(module: Any, paged: PagedKV, options: AttentionOptions, mask: Tensor | None) -> KV:
    """Return K and V [M, H, D] of all tokens of the sequences of a pass, end to end.

    Raises NotRaggedError if the mask says more than causal attention.
    """
    if window_of(mask) != (True, None) or paged.window is not None or options.dropout:
        raise NotRaggedError("it selects tokens, and has a mask of its own, or drops weights")
    held = paged.held()
    if paged.rank is not None:
        return expanded(module, held)
    return KV(*(x[0].transpose(0, 1) for x in held))
