"""Log-probabilities of the chosen tokens, from the model's logits before any processing."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from torch import Tensor

from ...tensors import HostCopy, integers, sent
from .filters import topk


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability (natural logarithm) of a token. top: the most probable token ids with theirs, descending."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs(logits: Tensor, tokens: abc.Sequence[int], counts: abc.Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [n, V], the log-probabilities of tokens[row] and of the counts[row] most probable ids."""
    logs = logits.float().log_softmax(-1)
    own = logs.gather(1, sent(integers(tokens), logs)[:, None])[:, 0]
    most = min(max(counts, default=0), logs.shape[1])
    copies = [HostCopy(tensor) for tensor in (own, *topk(logs, most))]  # the host waits for all of them at once
    chosen, values, ids = (copy.tolist() for copy in copies)
    return [
        TokenLogprobs(token, logprob, list(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, logprob, count, row_ids, row_values in zip(tokens, chosen, counts, ids, values, strict=True)
    ]
