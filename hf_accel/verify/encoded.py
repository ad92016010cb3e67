"""Compare what two encoders return, and make inputs for it: texts, images or sound, with padding or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..models import evaluating, vocabulary_size

VALUES_A_PLACE = 320  # values of sound for each place of a sequence: 20 ms at 16 kHz, as Wav2Vec2 and its like count


@dataclass(frozen=True)
class Agreement:
    """The outputs of two encoders, compared.

    output: the name of the one compared. rows: its vectors that were compared, without those at padding. cosine: the
    lowest between two vectors. difference: the largest, relative to the largest number of the reference.
    """

    output: str
    rows: int
    cosine: float
    difference: float


def encoder_inputs(model: Any, lengths: list[int]) -> dict[str, Tensor]:
    """Draw a batch for an encoder. lengths: the tokens of each text; images have one size, and sound one length.

    Raises UnsupportedError for a model that starts from anything else.
    """
    generator = torch.Generator().manual_seed(0)
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(vocabulary_size(model), mask.shape, generator=generator)
        padding = getattr(config, "pad_token_id", None) or 0
        # A few models count their positions by ids that are no padding.
        other = (padding + 1) % vocabulary_size(model)
        ids = torch.where(ids == padding, other, ids)
        return _placed(model, {"input_ids": torch.where(mask > 0, ids, padding), "attention_mask": mask})
    if name == "pixel_values":
        own = getattr(config, "vision_config", config)
        size = getattr(own, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(own, "num_channels", 3)
        return _placed(model, {name: torch.randn(len(lengths), channels, height, width, generator=generator)})
    if name == "input_values":
        return _placed(
            model, {name: torch.randn(len(lengths), VALUES_A_PLACE * (max(lengths) + 1), generator=generator)}
        )
    raise UnsupportedError(
        f"{type(model).__name__} starts from {name}, and random inputs are made for input_ids, pixel_values and "
        "input_values; call the model yourself, patched and not"
    )


def _placed(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.to(model.device, model.dtype if t.is_floating_point() else None) for n, t in inputs.items()}


def longest(model: Any, wanted: int) -> int:
    """Return `wanted` tokens, or as many as the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None) or wanted
    padding = getattr(model.config, "pad_token_id", None) or 0
    return int(min(wanted, max(1, positions - padding - 1)))  # RoBERTa counts on from its padding


@torch.no_grad()
def compare_encoders(model: PreTrainedModel, reference: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Agreement:
    """Compare the hidden states, or else the logits, that two models return where the mask shows tokens."""
    with evaluating(model, reference):
        ours, theirs = (one(**inputs) for one in (model, reference))
    name = next((n for n in ("last_hidden_state", "logits", "image_embeds") if theirs.get(n) is not None), None)
    if name is None:
        raise UnsupportedError(f"{type(model).__name__} returns neither hidden states nor logits to compare")
    actual, expected = (output[name].double().cpu() for output in (ours, theirs))
    mask = inputs.get("attention_mask")
    if mask is not None and expected.shape[:2] == mask.shape:
        actual, expected = (values[mask.cpu() > 0] for values in (actual, expected))
    actual, expected = (values.reshape(-1, values.shape[-1]) for values in (actual, expected))
    cosine = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    difference = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return Agreement(name, len(expected), float(cosine.min()), float(difference))
