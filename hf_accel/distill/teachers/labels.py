"""How a model reads its labels: which position learns which label, and by what its loss is divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from ...errors import UnsupportedError
from ...models import unwrapped

IGNORED = -100
CLASSIFYING = (ForSequenceClassificationLoss, ForTokenClassification)


def loss_of(model: Any) -> Any:
    """The loss function that transformers gives a model of this class, or None."""
    return LOSS_MAPPING.get(str(getattr(unwrapped(model), "loss_type", None)))


def shifts(model: Any) -> bool:
    """Whether position i of the logits learns label i + 1. Raises UnsupportedError for a loss that is not a cross
    entropy of one label at each position."""
    inner, loss = unwrapped(model), loss_of(model)
    if loss not in (None, ForCausalLMLoss, ForMaskedLMLoss, *CLASSIFYING):
        raise UnsupportedError(
            f"{type(inner).__name__} is trained by {getattr(loss, '__name__', loss)}, which is no cross entropy of "
            "one label at each position, so there is nothing a teacher's logits could soften; distil a language model "
            "or a classifier of sequences, tokens or images"
        )
    return loss in (None, ForCausalLMLoss) and not getattr(inner.config, "is_encoder_decoder", False)


def learnt(labels: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """Which positions of the logits learn, bool of the shape of `labels`, and the label of each, int64 [N]."""
    if labels.is_floating_point():
        raise UnsupportedError(
            f"labels of {labels.dtype}: regression and several labels at once have no softmax to distil; "
            "give class indices (int64)"
        )
    if not shift or labels.dim() < 2:
        valid = labels != IGNORED
        return valid, labels[valid]
    valid = labels[..., 1:] != IGNORED
    return torch.nn.functional.pad(valid, (0, 1)), labels[..., 1:][valid]


class Divisor:
    """What a model's own loss is divided by: `num_items_in_batch`, which a Trainer counts over all micro-batches of a
    step, or the labels of the micro-batch alone. Many a model takes the number and ignores it (it calls
    CrossEntropyLoss), so the first loss is asked: the number goes in with a gradient, and only a loss that was
    divided by it has a derivative with respect to it.
    """

    def __init__(self) -> None:
        # None while it is not known.
        self.is_given: bool | None = None
        self._probe: Tensor | None = None

    def watch(self, kwargs: dict[str, Any]) -> None:
        """Before a forward pass: puts the probe into its keywords if the answer is not known."""
        items = kwargs.get("num_items_in_batch")
        self._probe = None
        if self.is_given is None and items is not None:
            self._probe = torch.as_tensor(items).detach().float().clone().requires_grad_()
            kwargs["num_items_in_batch"] = self._probe

    def settle(self, loss: Tensor) -> Tensor | None:
        """After it. Returns the sum of the labels' cross entropies, float32, if the loss's derivative tells it:
        d(sum / items) / d(items) = -sum / items^2."""
        probe, self._probe = self._probe, None
        if probe is None or not loss.requires_grad:
            return None
        (slope,) = torch.autograd.grad(loss, probe, retain_graph=True, allow_unused=True)
        self.is_given = slope is not None
        return None if slope is None else -slope * probe.detach() ** 2

    def of(self, items: Any, labels: int) -> Any:
        """items: the number given to the forward pass or None; labels: how many the micro-batch has."""
        return items if self.is_given and items is not None else max(labels, 1)


def check_reading(own: Tensor, logits: Tensor, labels: Tensor, shift: bool) -> None:
    """Compares the sum of cross entropies in the model's own loss with ours under both readings. Raises
    UnsupportedError if the other reading explains it and this one does not. A loss of another kind passes."""
    if labels.dim() < 2:
        return
    sums = []
    for reading in (shift, not shift):
        valid, chosen = learnt(labels, reading)
        sums.append(cross_entropy(logits.detach()[valid].float(), chosen, reduction="sum"))
    ours, other = ((value - own).abs() / own.abs().clamp_min(1e-6) for value in sums)
    close = 1e-4 if logits.dtype == torch.float32 else 1e-2
    if ours > 10 * close and other < close:
        raise UnsupportedError(
            f"the model's own loss reads its labels {'in place' if shift else 'shifted by one'} and distillation "
            f"would read them {'shifted by one' if shift else 'in place'}: give "
            f"DistillationCallback(shift={not shift})"
        )
