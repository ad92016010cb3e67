"""Compare what two encoders return, and make inputs for it: texts, images or sound, with padding or without."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..estimate.lengths import longest_text
from ..models import evaluating, vocabulary_size
from .certificate import Agreement

VALUES_A_PLACE = 320  # values of sound for each place of a sequence: 20 ms at 16 kHz, as Wav2Vec2 and its like count
OUTPUTS = (
    "last_hidden_state", "logits", "prediction_logits", "start_logits", "end_logits", "text_embeds", "image_embeds",
    "pooler_output",
)  # fmt: skip
MEAN = "mean over tokens"


def encoder_inputs(model: Any, lengths: list[int]) -> dict[str, Tensor]:
    """Draw a batch for an encoder. lengths: the tokens of each text; images have one size, and sound one length.

    Raises UnsupportedError for a model that starts from anything else.
    """
    generator = torch.Generator().manual_seed(0)
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(vocabulary_size(model), mask.shape, generator=generator)
        padding = padding_id(model)
        # A few models count their positions by ids that are no padding.
        other = (padding + 1) % vocabulary_size(model)
        ids = torch.where(ids == padding, other, ids)
        texts = {"input_ids": torch.where(mask > 0, ids, padding), "attention_mask": mask}
        asked = inspect.signature(type(model).forward).parameters
        images = {"pixel_values": _images(config, len(lengths), generator)} if "pixel_values" in asked else {}
        return _placed(model, texts | images)
    if name == "pixel_values":
        return _placed(model, {name: _images(config, len(lengths), generator)})
    if name == "input_values" and not hasattr(config, "num_mel_bins"):
        return _placed(
            model, {name: torch.randn(len(lengths), VALUES_A_PLACE * (max(lengths) + 1), generator=generator)}
        )
    raise UnsupportedError(
        f"{type(model).__name__} starts from {name}, and random inputs are made for input_ids, pixel_values and the "
        "waves of input_values; call the model yourself, patched and not"
    )


def _images(config: Any, count: int, generator: torch.Generator) -> Tensor:
    own = getattr(config, "vision_config", config)
    size = getattr(own, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(count, getattr(own, "num_channels", 3), height, width, generator=generator)


def padding_id(model: Any) -> int:
    return int(getattr(model.config, "pad_token_id", None) or 0)


def _placed(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.to(model.device, model.dtype if t.is_floating_point() else None) for n, t in inputs.items()}


def encoder_batches(model: Any, tokens: int, rows: int = 4) -> dict[str, dict[str, Tensor]]:
    """Draw the batches that a certificate compares, by what they are: alone, together, and padded in every form.

    tokens: of the longest text, if the model has positions for so many.
    """
    if model.main_input_name != "input_ids":
        what = "image" if model.main_input_name == "pixel_values" else "sound"
        found = {f"one {what}": encoder_inputs(model, [tokens])}
        found[f"{rows} of one size"] = several = encoder_inputs(model, [tokens] * rows)
        if what == "sound" and "attention_mask" in inspect.signature(type(model).forward).parameters:
            values = several["input_values"]
            ends = torch.arange(rows, 0, -1)[:, None] * values.shape[1] // rows
            mask = (torch.arange(values.shape[1]) < ends).long().to(values.device)
            found[f"{rows} of several lengths, padded"] = {"input_values": values * mask, "attention_mask": mask}
        return found
    most = longest_text(model, tokens)
    lengths = [max(1, most * row // rows) for row in range(rows, 0, -1)]
    whole, padded = encoder_inputs(model, [most] * rows), encoder_inputs(model, lengths)
    name = f"{rows} of {min(lengths)} to {most} tokens"
    mask = padded["attention_mask"]
    on_the_left = {
        key: torch.stack([row.roll(most - length) for row, length in zip(value, lengths, strict=True)])
        for key, value in padded.items()
        if value.shape == mask.shape
    }
    return {
        f"one of {most} tokens": encoder_inputs(model, [most]),
        f"{rows} of {most} tokens, a mask of ones": whole,
        f"{rows} of {most} tokens, no mask": {k: v for k, v in whole.items() if k != "attention_mask"},
        f"{name}, padded on the right": padded,
        f"{name}, a mask of booleans": padded | {"attention_mask": mask.bool()},
        f"{name}, padded on the left": padded | on_the_left,
    }


def vectors(output: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the vectors [rows, n] of an encoder's output, float64 on the CPU, by name, and the mean of its tokens.

    Of states of tokens those that the mask shows. Raises UnsupportedError for an output of none that is known.
    """
    mask = inputs.get("attention_mask")
    shown = torch.zeros(0) if mask is None else mask.cpu() > 0
    found: dict[str, Tensor] = {}
    for name in OUTPUTS:
        given = output.get(name)
        if not isinstance(given, Tensor) or given.ndim < 2:
            continue
        values = given.double().cpu()
        of_tokens = values.shape[:2] == shown.shape
        if of_tokens and values.ndim == 2:  # a logit of each token, as of where an answer begins
            values = values.masked_fill(~shown, 0)
        found[name] = (values[shown] if of_tokens and values.ndim > 2 else values).reshape(-1, values.shape[-1])
        if name == "last_hidden_state" and values.ndim == 3:
            weights = shown[..., None].double() if of_tokens else torch.ones_like(values[..., :1])
            found[MEAN] = (values * weights).sum(1) / weights.sum(1)
    if not found:
        raise UnsupportedError(f"{type(output).__name__} has neither hidden states nor logits to compare")
    return found


@torch.no_grad()
def encoder_vectors(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the `vectors` of a pass of the model in evaluation mode."""
    with evaluating(model):
        return vectors(model(**inputs), inputs)


def compare_encoders(
    model: PreTrainedModel, reference: PreTrainedModel, inputs: Mapping[str, Tensor]
) -> tuple[Agreement, ...]:
    """Compare the outputs of two models: states of tokens or logits first, where the mask shows them, then pooled."""
    return compare_vectors(encoder_vectors(model, inputs), encoder_vectors(reference, inputs))


def compare_vectors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[Agreement, ...]:
    return tuple(_agreement(name, ours[name], expected) for name, expected in theirs.items())


def _agreement(name: str, actual: Tensor, expected: Tensor) -> Agreement:
    cosine = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    difference = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return Agreement(name, len(expected), float(cosine.min()), float(cosine.mean()), float(difference))
