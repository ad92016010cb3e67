"""Log-probabilities of chosen tokens under the model's own logits, before any processing."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from .filters import topk


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms. top: the most probable token ids with theirs, descending."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs(logits: Tensor, tokens: abc.Sequence[int], counts: abc.Sequence[int]) -> list[TokenLogprobs]:
    """For each row of [n, V] that of its token, and of the counts[row] most probable ones."""
    logs = logits.float().log_softmax(-1)
    own = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    most = min(max(counts, default=0), logs.shape[1])
    values, ids = topk(logs, most)
    return [
        TokenLogprobs(token, logprob, list(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, logprob, count, row_ids, row_values in zip(
            tokens, own, counts, ids.tolist(), values.tolist(), strict=True
        )
    ]
