"""Top-k, top-p and min-p, with the results of transformers' warpers but mostly without sorting the vocabulary.

Each function takes scores [n, V] float32 and returns new scores, with -inf for the tokens that it removes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import cpu
from ...kernels.cpu.library import DTYPES
from ...kernels.cpu.row_kernels import topk as native_topk
from ...tensors import is_remote

# The sum of probabilities depends on the order of summation, but by less than this. A row is sorted as a whole, as in
# transformers, if a sum is closer than this to p, or if the limit is between equal scores.
TOLERANCE = 2.0**-16
CANDIDATES = (256, 2048)  # numbers of largest scores among which top_p looks for its limit


def top_k(scores: Tensor, k: int) -> Tensor:
    """Remove the scores that are less than the k-th largest. Scores equal to it stay."""
    if k >= scores.shape[-1]:
        return scores
    return _without(scores, scores < topk(scores, k)[0][:, -1:])


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the most probable tokens: the fewest whose probabilities sum to at least p (Holtzman et al. 2020, arXiv
    1904.09751)."""
    if p >= 1:
        return scores
    if is_remote(scores):  # what follows asks which rows are certain, and a GPU sorts fast
        return sorted_top_p(scores, p)
    threshold = torch.full((len(scores), 1), -torch.inf, device=scores.device)
    total = scores.logsumexp(-1, keepdim=True)
    unclear = torch.arange(len(scores), device=scores.device)
    for size in CANDIDATES:
        if size >= scores.shape[1] or not len(unclear):
            break
        everything = len(unclear) == len(scores)
        values = topk(scores if everything else scores[unclear], size)[0]
        cut, clear = _cut(values, total[unclear], p, complete=False)
        threshold[unclear] = cut
        unclear = unclear[~clear]
    kept = _without(scores, scores < threshold)
    if len(unclear):
        kept[unclear] = sorted_top_p(scores[unclear], p)
    return kept


def top_k_top_p(scores: Tensor, k: int, p: float) -> Tensor:
    """Return top_p(top_k(scores, k), p). Both limits are found among the k + 1 largest scores."""
    if k >= scores.shape[1] or p >= 1 or is_remote(scores):
        return top_p(top_k(scores, k), p)
    values = topk(scores, k + 1)[0]
    largest = values[:, :k]
    threshold, clear = _cut(largest, largest.logsumexp(-1, keepdim=True), p, complete=True)
    # If the next score equals the k-th, it stays too and changes the probabilities.
    clear = clear & (values[:, k] < values[:, k - 1])
    kept = _without(scores, scores < threshold)
    if not clear.all():
        unclear = (~clear).nonzero()[:, 0]
        kept[unclear] = sorted_top_p(top_k(scores[unclear], k), p)
    return kept


def _cut(values: Tensor, total: Tensor, p: float, *, complete: bool) -> tuple[Tensor, Tensor]:
    """Return the smallest score that top-p keeps, [n, 1], and whether it is certain, [n] bool.

    values: the largest scores of each row, [n, size], descending. complete: whether a row has no other scores.
    total: logsumexp of all scores of each row, [n, 1].
    """
    size = values.shape[1]
    mass = (values - total).double().exp()
    above = mass.cumsum(-1) - mass
    kept = (above < p).sum(-1, keepdim=True).clamp(1, size)
    smallest = values.gather(1, kept - 1)
    following = values.gather(1, kept.clamp(max=size - 1))
    distinct = (following < smallest) & (kept < size)
    close = ((above - p).abs() < TOLERANCE).any(-1, keepdim=True)
    return smallest, ((distinct | (complete & (kept == size))) & ~close)[:, 0]


def sorted_top_p(scores: Tensor, p: float) -> Tensor:
    """Top-p as transformers' TopPLogitsWarper computes it, with a sort of the vocabulary."""
    ordered, indices = scores.sort(dim=-1)
    cut = ordered.softmax(-1).cumsum(-1) <= 1 - p
    cut[:, -1] = False
    return _without(scores, cut.scatter(1, indices, cut))


def min_p(scores: Tensor, p: float) -> Tensor:
    """Remove tokens less probable than p times the most probable one (Nguyen et al. 2024, arXiv 2407.01082)."""
    if p <= 0:
        return scores
    probabilities = scores.softmax(-1)
    return _without(scores, probabilities < p * probabilities.amax(-1, keepdim=True))


def _without(scores: Tensor, cut: Tensor) -> Tensor:
    # torch.where takes a tenth of the time of masked_fill, which branches on each element.
    return torch.where(cut, -torch.inf, scores)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row, [n, k], descending, and their indices, [n, k] int64."""
    if scores.device.type == "cpu" and scores.dtype in DTYPES and cpu.refusal() is None and not scores.requires_grad:
        return native_topk(scores, k)
    values, indices = scores.topk(k, dim=-1)
    return values, indices
