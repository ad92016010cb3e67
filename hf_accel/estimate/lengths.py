"""The longest input of a model, and the length of a source that has one alone, from its config and its shapes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

TEXT = 512  # tokens of an encoder without a table of positions
FRAMES = 1500  # 30 seconds of sound in steps of 20 ms, as Whisper, Wav2Vec2 and their like count
ADDED = ("cls_token", "class_embedding", "distillation_token")  # a token in front of the patches


def source_length(model: PreTrainedModel) -> int | None:
    """Return the tokens that an encoder makes of what it reads; None for a text, which is as long as it is."""
    encoder: Any = model.get_encoder()
    if model.main_input_name == "input_ids":
        return None
    return longest_input(encoder.config, encoder)


def decoder_positions(config: Any) -> int | None:
    """Return how many tokens a decoder has positions for; None if its config does not say."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)


def longest_input(config: Any, model: nn.Module) -> int:
    """Return the tokens of the longest input of an encoder, by its config and its table of positions."""
    started = getattr(model, "main_input_name", "input_ids")
    if started == "input_ids":
        return longest_text(model, getattr(config, "max_position_embeddings", None) or TEXT)
    table = _positions(model)
    if started != "pixel_values":
        return table or FRAMES
    patches = _patches(config)
    if table is not None and table >= patches:
        return table
    return patches + sum(name.rpartition(".")[2] in ADDED for name, _ in model.named_parameters())


def longest_text(model: Any, wanted: int) -> int:
    """Return `wanted` tokens, or as many as the model has positions for."""
    most = getattr(model.config, "max_position_embeddings", None) or wanted
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "position_embedding")):
            # RoBERTa and its like count on from their padding, which has a row of the table too.
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            most = min(most, module.num_embeddings) - offset
            break
    return int(min(wanted, max(1, most)))


def _positions(model: nn.Module) -> int | None:
    """Return the rows of a table of positions of patches or frames; None without one."""
    for name, parameter in model.named_parameters():
        if "position" in name and parameter.ndim in (2, 3) and parameter.shape[-2] > 1:
            return int(parameter.shape[-2])
    return None


def _patches(config: Any) -> int:
    size, patch = (_sides(getattr(config, name, None)) for name in ("image_size", "patch_size"))
    return max(1, size[0] // patch[0]) * max(1, size[1] // patch[1])


def _sides(value: Any) -> tuple[int, int]:
    if isinstance(value, list | tuple):
        return int(value[0]), int(value[-1])
    return int(value or 224), int(value or 224)
