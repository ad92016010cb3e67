"""Top-k, top-p and min-p: what is cut off before sampling, as transformers' warpers cut it, mostly without a sort.

All take scores [n, V] float32 and return new ones with -inf where a token is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import cpu
from ...kernels.cpu.logits import topk as native_topk

# The mass of a prefix of the sorted vocabulary, summed in another order, differs by less than this. Where the decision
# is closer than that, or falls between equal scores, the row is sorted whole, as transformers does.
TOLERANCE = 2.0**-16
CANDIDATES = (256, 2048)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Cut what is less than the k-th largest; its equals stay."""
    if k >= scores.shape[-1]:
        return scores
    return _without(scores, scores < topk(scores, k)[0][:, -1:])


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the fewest most probable tokens with a mass of at least p (Holtzman et al. 2020, arXiv 1904.09751)."""
    if p >= 1:
        return scores
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
    """`top_p` of `top_k`, from one look at the k + 1 largest."""
    if k >= scores.shape[1] or p >= 1:
        return top_p(top_k(scores, k), p)
    values = topk(scores, k + 1)[0]
    largest = values[:, :k]
    threshold, clear = _cut(largest, largest.logsumexp(-1, keepdim=True), p, complete=True)
    clear = clear & (values[:, k] < values[:, k - 1])  # the equals of the k-th have their share of the mass
    kept = _without(scores, scores < threshold)
    if not clear.all():
        unclear = (~clear).nonzero()[:, 0]
        kept[unclear] = sorted_top_p(top_k(scores[unclear], k), p)
    return kept


def _cut(values: Tensor, total: Tensor, p: float, *, complete: bool) -> tuple[Tensor, Tensor]:
    """The smallest score that stays, [n, 1], and whether that is certain, [n].

    values: the largest scores, descending; complete: there are no others. total: logarithm of the whole mass, [n, 1].
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
    """transformers' TopPLogitsWarper."""
    ordered, indices = scores.sort(dim=-1)
    cut = ordered.softmax(-1).cumsum(-1) <= 1 - p
    cut[:, -1] = False
    return _without(scores, cut.scatter(1, indices, cut))


def min_p(scores: Tensor, p: float) -> Tensor:
    """Cut what is less probable than p times the most probable (Nguyen et al. 2024, arXiv 2407.01082)."""
    if p <= 0:
        return scores
    probabilities = scores.softmax(-1)
    return _without(scores, probabilities < p * probabilities.amax(-1, keepdim=True))


def _without(scores: Tensor, cut: Tensor) -> Tensor:
    """masked_fill branches on each element: where() takes a tenth of its time."""
    return torch.where(cut, -torch.inf, scores)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, descending, and where they are."""
    if scores.device.type == "cpu" and cpu.refusal() is None and not scores.requires_grad:
        return native_topk(scores, k)
    values, indices = scores.topk(k, dim=-1)
    return values, indices
