"""Draft heads: made of a target's last layer, and loaded for the target that they were trained for."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from ...errors import UnsupportedError
from ...generation.hf.draft_head import SETTINGS, WEIGHTS, DraftHead, tapped
from ...models import layers_config
from ..losses.distillation_loss import distillation_loss
from ..losses.objective import Objective
from .student import init_student

STEPS_AHEAD = 3  # tokens that a head is trained to draft in a row
DECAY = 0.8  # what a step counts of the one before, as in EAGLE-3


def target_layers_of(target: PreTrainedModel) -> tuple[int, int, int]:
    """Return the numbers of a low, a middle and the last hidden state of a target."""
    count = layers_config(target.config).num_hidden_layers
    return min(2, count), max(1, count // 2), count


def new_head(target: PreTrainedModel, target_layers: Sequence[int] | None = None) -> DraftHead:
    """Make a head that begins as the target's last layer, behind embeddings as they are.

    Raises UnsupportedError for a target without float weights, or with layers that its last one cannot stand for.
    """
    count = layers_config(target.config).num_hidden_layers
    tapped(target, target_layers or target_layers_of(target))
    decoder = init_student(target, layers=[count - 1], share_embeddings=True)
    head = DraftHead(decoder, target_layers or target_layers_of(target))
    with torch.no_grad():
        for layer in (head.narrow, head.fuse):  # the last state and the embedding pass as they are
            size = layer.weight.shape[0]
            layer.weight.zero_()
            layer.weight[:, -size:] = torch.eye(size)
    return head.eval()


def load_draft_head(folder: str | os.PathLike[str], target: PreTrainedModel) -> DraftHead:
    """Load a head that `save_pretrained` has written, for the target that it was trained for.

    Raises UnsupportedError for a folder that holds none, and for another target.
    """
    path = Path(folder)
    if not (path / SETTINGS).is_file():
        raise UnsupportedError(f"{path} holds no {SETTINGS}; give a folder to which a head was saved")
    settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    head = new_head(target, settings["target_layers"])
    kept, own = load_file(path / WEIGHTS), head.own_parameters()
    odd = sorted(kept.keys() ^ own.keys()) or [name for name in own if own[name].shape != kept[name].shape]
    if odd:
        raise UnsupportedError(
            f"{path} was made for another model: {odd[0]!r} and {len(odd) - 1} more weights do not fit "
            f"{type(target).__name__}; train a head for this one with distill_draft(..., kind='eagle')"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(kept[name])
    return head


# -- training ------------------------------------------------------------------------------------------


class HeadTrainer(Trainer):
    """Trains a head over its own predictions (the training-time test of EAGLE-3, 2503.01840).

    In the first step the head reads the target's states, in each later one its own of the step before, as it does when
    it drafts. The later steps count DECAY of the one before.
    """

    def __init__(self, head: DraftHead, target: Any, objective: Objective, **keywords: Any) -> None:
        super().__init__(model=head, **keywords)
        self.target, self.goal = target, objective
        self._signature_columns: Any = ["input_ids", "attention_mask", "labels"]  # which Trainer reads from forward()

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, labels = inputs["input_ids"], inputs["labels"]
        states, logits = target_states(self.target, model.target_layers, ids, inputs.get("attention_mask"))
        goal = self.goal
        read = own = model.narrow(states[:, :-1].to(model.fuse.weight.dtype))
        total: Any = 0.0
        for step in range(STEPS_AHEAD):
            made, last = model(read, ids[:, 1:])
            read = torch.cat([own[:, :1], last[:, :-1]], dim=1)
            loss = distillation_loss(
                made, logits[:, 1:], labels[:, 1:], alpha=goal.alpha, temperature=goal.temperature, loss=goal.loss
            )
            total = total + DECAY**step * loss
        return (total, {}) if return_outputs else total


@torch.no_grad()
def target_states(
    target: Any, target_layers: Sequence[int], ids: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the hidden states [B, T, C] of a target that a head reads, side by side, and its logits [B, T, V]."""
    read = target(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return torch.cat([read.hidden_states[number] for number in target_layers], dim=-1), read.logits


@torch.no_grad()
def head_logits(head: DraftHead, target: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of a head and of its target about the same tokens of a text [1, T]: both [T - 1, V].

    They are those of the tokens from the third on, since a head reads a token before it drafts the next.
    """
    states, logits = target_states(target, head.target_layers, ids)
    made, _ = head(head.narrow(states[:, :-1]), ids[:, 1:])
    return made[0], logits[0, 1:]
