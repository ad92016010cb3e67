"""The task of a model, and the way in which it reads its labels: the label of each position, and the divisor of the
loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
from transformers.models.auto import modeling_auto

from ...errors import UnsupportedError
from ...models import unwrapped
from ..losses.positions import learnt

CLASSIFYING = (ForSequenceClassificationLoss, ForTokenClassification)
AUTO_CLASSES = {  # how modeling_auto's mappings are called, and who loads their classes
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "TOKEN_CLASSIFICATION": "AutoModelForTokenClassification",
    "SEQUENCE_CLASSIFICATION": "AutoModelForSequenceClassification",
}
TASKS = {
    "AutoModelForCausalLM": "causal",
    "AutoModelForMaskedLM": "token",
    "AutoModelForTokenClassification": "token",
    "AutoModelForSequenceClassification": "sequence",
}


def auto_class_of(model: Any) -> str | None:
    """The class that loads models of this one's class, or of one that it inherits from."""
    loaders = _loaders()
    return next((loaders[one.__name__] for one in type(unwrapped(model)).__mro__ if one.__name__ in loaders), None)


@functools.cache
def _loaders() -> dict[str, str]:
    """The name of the auto class for the name of each of transformers' classes."""
    found = {}
    for mapping, loader in AUTO_CLASSES.items():
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            found.update(dict.fromkeys([names] if isinstance(names, str) else names, loader))
    return found


def task_of(model: Any) -> str | None:
    """Return what a model's logits predict: "causal" is the next token, "token" each token itself, "sequence" a class
    of the whole text. None if it is not known.
    """
    return TASKS.get(auto_class_of(model) or "")


def loss_of(model: Any) -> Any:
    """The loss function that transformers gives a model of this class, or None."""
    return LOSS_MAPPING.get(str(getattr(unwrapped(model), "loss_type", None)))


def shifts(model: Any) -> bool:
    """Return whether position i of the logits learns label i + 1.

    Raises UnsupportedError for a loss that is not a cross entropy of one label at each position.
    """
    inner, loss = unwrapped(model), loss_of(model)
    if loss not in (None, ForCausalLMLoss, ForMaskedLMLoss, *CLASSIFYING):
        raise UnsupportedError(
            f"{type(inner).__name__} is trained by {getattr(loss, '__name__', loss)}, which is no cross entropy of "
            "one label at each position, so there is nothing a teacher's logits could soften; distil a language model "
            "or a classifier of sequences, tokens or images"
        )
    return loss in (None, ForCausalLMLoss) and not getattr(inner.config, "is_encoder_decoder", False)


def labels_of(inputs: Mapping[str, Any]) -> Tensor:
    """The labels among the keywords of a forward pass: shift_labels, which are shifted already, or labels. Raises
    UnsupportedError if there are none."""
    shifted: Tensor | None = inputs.get("shift_labels")
    labels = inputs.get("labels") if shifted is None else shifted
    if labels is None:
        raise UnsupportedError(
            f"the model was called in training without labels (it got {', '.join(inputs)}), so its loss is computed "
            "elsewhere: a compute_loss_func or label smoothing takes them away. Leave these out, or use "
            "hf_accel.distillation_loss in the compute_loss_func"
        )
    return labels


def is_shifted(model: Any, inputs: Mapping[str, Any], shift: bool | None) -> bool:
    """Return whether position i learns label i + 1 of `labels_of`.

    shift: the user's answer, or None to read it from the model.
    """
    return inputs.get("shift_labels") is None and (shifts(model) if shift is None else shift)


class Divisor:
    """Find the divisor of a model's own loss: `num_items_in_batch`, which a Trainer counts over all micro-batches of a
    step, or the labels of the micro-batch alone. Some models take the number and ignore it (they call
    CrossEntropyLoss), so the first loss is tested: the number is given with a gradient, and only a loss that was
    divided by it has a derivative with respect to it.
    """

    def __init__(self) -> None:
        # None while it is not known.
        self.is_given: bool | None = None
        self._probe: Tensor | None = None

    def watch(self, kwargs: dict[str, Any]) -> None:
        """Put the probe into the keywords of a forward pass if the answer is not known."""
        items = kwargs.get("num_items_in_batch")
        self._probe = None
        if self.is_given is None and items is not None:
            self._probe = torch.as_tensor(items).detach().float().clone().requires_grad_()
            kwargs["num_items_in_batch"] = self._probe

    def settle(self, loss: Tensor) -> Tensor | None:
        """Return the sum of the labels' cross entropies, float32, if the derivative of the pass's loss tells it:
        d(sum / items) / d(items) = -sum / items^2."""
        probe, self._probe = self._probe, None
        if probe is None or not loss.requires_grad:
            return None
        (slope,) = torch.autograd.grad(loss, probe, retain_graph=True, allow_unused=True)
        self.is_given = slope is not None
        return None if slope is None else -slope * probe.detach() ** 2

    def of(self, items: Any, labels: int) -> Any:
        """Return the divisor. items: the number given to the forward pass or None; labels: how many the micro-batch
        has."""
        return items if self.is_given and items is not None else max(labels, 1)


def check_reading(own: Tensor, logits: Tensor, labels: Tensor, shift: bool) -> None:
    """Compare the sum of cross entropies in the model's own loss with ours under both readings, and raise
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
