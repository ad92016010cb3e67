"""What a student learns from inside its teacher: hidden states, and which token relates to which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UnsupportedError

HIDDEN_LOSSES = ("mse", "cosine")
RELATION_BYTES = 64 * 2**20  # of float32 relations of one model, held at a time
NOWHERE = -1  # the document of a token that is padding


def uniform_layer_map(student_layers: int, teacher_layers: int) -> dict[int, int]:
    """Student layer m learns from teacher layer round(m * L_t / L_s); both count from 1, so last learns from last."""
    share = teacher_layers / student_layers
    return {layer: max(1, round(layer * share)) for layer in range(1, student_layers + 1)}


def hidden_loss(student: Tensor, teacher: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Sum over tokens of weights * distance. student, teacher: [..., H], any float dtype; weights: float [...].

    kind "mse": the squared error over the teacher's squared length, so that layers of any scale count alike
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
    max_bytes: int = RELATION_BYTES,
) -> Tensor:
    """Sum over query tokens of weights * the mean over `heads` of KL(teacher's relations | student's): MiniLM-v2
    (2012.15828), where the relations of a token are softmax(x x^T / sqrt(d)) of its vector with those it may see.

    student: [B, T, W_s] and teacher: [B, T, W_t], the queries, keys or values of all heads side by side, before any
    rotation, cut anew into `heads` of equal width. weights: float [B, T]. documents: int [B, T]: a token sees those of
    its own document, and if `causal` none after itself; NOWHERE is padding, which nobody sees. No more than max_bytes
    of relations are held for a model at a time: they are computed again in the backward pass.
    """
    s, t = _split(student, heads), _split(teacher, heads)
    batch, length = weights.shape
    rows = max(1, max_bytes // (4 * batch * heads * length))
    total = student.new_zeros((), dtype=torch.float32)
    for start in range(0, length, rows):
        piece = slice(start, min(start + rows, length))
        seen = slice(0, piece.stop if causal else length)
        mask = _visible(documents, piece, seen, causal)
        part = (s[:, :, piece], s[:, :, seen], t[:, :, piece], t[:, :, seen], mask, weights[:, piece].float())
        total = total + checkpoint(_relation_rows, *part, use_reentrant=False, preserve_rng_state=False)
    return total


def _split(vectors: Tensor, heads: int) -> Tensor:
    """[B, T, W] to float32 [B, heads, T, W / heads]."""
    return vectors.float().reshape(*vectors.shape[:2], heads, -1).transpose(1, 2)


def _visible(documents: Tensor, queries: slice, keys: slice, causal: bool) -> Tensor:
    """bool [B, 1, queries, keys]."""
    own, others = documents[:, queries, None], documents[:, None, keys]
    mask = (own == others) & (others != NOWHERE)
    if causal:
        place = torch.arange(documents.shape[1], device=documents.device)
        mask = mask & (place[queries, None] >= place[keys])
    return mask[:, None]


def _relation_rows(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    log_s = _log_relations(sq, sk, mask)
    with torch.no_grad():
        log_t = _log_relations(tq, tk, mask)
    kl = torch.where(mask, log_t.exp() * (log_t - log_s), 0.0).sum(-1)
    return (kl.mean(1) * weights).sum()


def _log_relations(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    return torch.log_softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), -1)


def relation_heads(widths: Iterable[int], wanted: int | None) -> int:
    """How many heads the vectors of these widths are cut into: `wanted`, or the most up to 12 that divide them all.

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


class Projections(nn.Module):
    """Learned linear maps from a student's width to its teacher's, one for each student layer of `layers`.

    Orthogonal to begin with, drawn from `seed` alone: torch's own generators stay where they are. float32.
    """

    def __init__(self, layers: Iterable[int], student_width: int, teacher_width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for layer in layers:
            weight = torch.empty(teacher_width, student_width, dtype=torch.float32)
            self.weights[str(layer)] = nn.Parameter(nn.init.orthogonal_(weight, generator=generator))

    def project(self, layer: int, hidden: Tensor) -> Tensor:
        """[..., H_s] to float32 [..., H_t]."""
        return nn.functional.linear(hidden.float(), self.weights[str(layer)])


@dataclass(frozen=True)
class Site:
    """A module whose output is wanted: of its last dimension, from `start` to `stop`."""

    module: nn.Module
    start: int = 0
    stop: int | None = None


class Capture:
    """The outputs of some modules during one forward pass, by (part, layer). learns: they need gradients.

    Open only while that pass lasts: the second time that a checkpointed layer runs, in the backward pass, is not
    taken for another. The tensors keep their graph.
    """

    def __init__(self, sites: Mapping[tuple[str, int], Site], *, learns: bool) -> None:
        self._sites, self._learns = dict(sites), learns
        self._handles: list[Any] = []
        self._open = False
        self.found: dict[tuple[str, int], Tensor] = {}

    def install(self) -> None:
        for name, site in self._sites.items():
            self._handles.append(site.module.register_forward_hook(self._keeper(name, site)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.close()

    def open(self) -> None:
        self.found.clear()
        self._open = True

    def close(self) -> None:
        self._open = False
        self.found.clear()

    def stop(self) -> None:
        """Take no more, and keep what is there."""
        self._open = False

    def take(self) -> dict[tuple[str, int], Tensor]:
        """What was found, which is then forgotten here. Raises UnsupportedError for modules that were not run, or
        that lost their graph."""
        whose = "student" if self._learns else "teacher"
        found, self.found = self.found, {}
        missing = sorted(f"{part} {layer}" for part, layer in self._sites.keys() - found.keys())
        if missing:
            raise UnsupportedError(
                f"of the {whose} {', '.join(missing)} did not run as modules of their own, so nothing can be learnt "
                f"from them: unpatch the model, or take transfer from fewer layers"
            )
        for name, value in found.items():
            trained = any(parameter.requires_grad for parameter in self._sites[name].module.parameters())
            if self._learns and trained and not value.requires_grad:
                raise UnsupportedError(
                    f"the student's {' '.join(map(str, name))} has no gradient: reentrant checkpointing cuts it "
                    f"off; give gradient_checkpointing_kwargs={{'use_reentrant': False}}"
                )
        return found

    def _keeper(self, name: tuple[str, int], site: Site) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self._open:
                value = output[0] if isinstance(output, tuple) else output
                self.found[name] = value[..., site.start : site.stop]

        return keep
