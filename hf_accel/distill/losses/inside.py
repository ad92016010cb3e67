"""Losses on what is inside a teacher: its hidden states, and which token relates to which."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...errors import UnsupportedError

HIDDEN_LOSSES = ("mse", "cosine")
# The most bytes of float32 relations of one model that are held at a time.
RELATION_BYTES = 64 * 2**20
# The document of a token that is padding.
NOWHERE = -1
# Vectors of the tokens that look, and of those that are seen.
Pair = tuple[Tensor, Tensor]


def uniform_layer_map(student_layers: int, teacher_layers: int) -> dict[int, int]:
    """Let student layer m learn from teacher layer round(m * L_t / L_s); both count from 1, so last learns from
    last."""
    share = teacher_layers / student_layers
    return {layer: max(1, round(layer * share)) for layer in range(1, student_layers + 1)}


def hidden_loss(student: Tensor, teacher: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Sum over tokens of weights * distance. student, teacher: [..., H], any float dtype; weights: float [...].

    kind "mse": the squared error over the teacher's squared length, so that layers of any scale count equally
    (SquareHead, 2310.06927, by token); "cosine": 1 - cos (DistilBERT, 1910.01108). Returns a float32 scalar,
    differentiable in student.
    """
    taken = weights != 0
    s, t, w = student[taken].float(), teacher[taken].float(), weights[taken].float()
    if kind == "cosine":
        return (w * (1 - nn.functional.cosine_similarity(s, t, dim=-1))).sum()
    length = t.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (w * (s - t).square().sum(-1) / length).sum()


def relation_loss(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    documents: Tensor,
    *,
    heads: int,
    causal: bool,
) -> Tensor:
    """Sum over query tokens of weights * the mean over `heads` of KL(teacher's relations | student's): MiniLM-v2
    (2012.15828), where the relations of a token are softmax(x x^T / sqrt(d)) of its vector with those it may see.

    student: [B, T, W_s] and teacher: [B, T, W_t], the queries, keys or values of all heads side by side, before any
    rotation, cut again into `heads` of equal width. weights: float [B, T]. documents: int [B, T]: a token sees those
    of its own document, and if `causal` none after itself; NOWHERE is padding, which nobody sees. No more than
    RELATION_BYTES of relations are held for a model at a time: they are computed again in the backward pass.
    """
    s, t = _split(student, heads), _split(teacher, heads)
    batch, length = weights.shape
    rows = max(1, RELATION_BYTES // (4 * batch * heads * length))
    total = student.new_zeros((), dtype=torch.float32)
    for start in range(0, length, rows):
        piece = slice(start, min(start + rows, length))
        seen = slice(0, piece.stop if causal else length)
        mask = _visible(documents, piece, seen, causal)
        part = ((s[:, :, piece], s[:, :, seen]), (t[:, :, piece], t[:, :, seen]), mask, weights[:, piece].float())
        total = total + checkpoint(_relation_rows, *part, use_reentrant=False, preserve_rng_state=False)
    return total


def _split(vectors: Tensor, heads: int) -> Tensor:
    """Reshape [B, T, W] to float32 [B, heads, T, W / heads]."""
    return vectors.float().reshape(*vectors.shape[:2], heads, -1).transpose(1, 2)


def _visible(documents: Tensor, queries: slice, keys: slice, causal: bool) -> Tensor:
    """The keys that each query sees, bool [B, 1, queries, keys]."""
    own, others = documents[:, queries, None], documents[:, None, keys]
    mask = (own == others) & (others != NOWHERE)
    if causal:
        place = torch.arange(documents.shape[1], device=documents.device)
        mask = mask & (place[queries, None] >= place[keys])
    return mask[:, None]


def _relation_rows(student: Pair, teacher: Pair, mask: Tensor, weights: Tensor) -> Tensor:
    log_s = _log_relations(*student, mask)
    with torch.no_grad():
        log_t = _log_relations(*teacher, mask)
    kl = torch.where(mask, log_t.exp() * (log_t - log_s), 0.0).sum(-1)
    return (kl.mean(1) * weights).sum()


def _log_relations(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    return torch.log_softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), -1)


def relation_heads(widths: Iterable[int], wanted: int | None) -> int:
    """Return the number of heads for vectors of these widths: `wanted`, or the most up to 12 that divide all widths.

    Raises UnsupportedError where `wanted` does not divide them.
    """
    found = sorted(set(widths))
    if wanted is None:
        return max(heads for heads in range(1, 13) if all(width % heads == 0 for width in found))
    if wanted < 1 or any(width % wanted for width in found):
        raise UnsupportedError(
            f"relation_heads={wanted} does not divide the widths {found} of the queries, keys and values; "
            f"give a common divisor, or None to have one chosen"
        )
    return wanted
