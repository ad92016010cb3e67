"""Prompts with a sound: the tensors that models take for it; see media.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .media import COUNT, Medium, Recipe

BANDS = 16  # of a spectrogram, as configs.py has it
BANDS_NAMES = ("num_mel_bins", "input_dim", "feature_projection_input_dim", "input_feat_per_channel")
FRAMES = 128
SAMPLES = 64


def _part(config: Any) -> Any:
    names = ("audio_config", "encoder_config")
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def _frames(config: Any) -> int:
    """How long a spectrogram is: what an encoder with a table of positions wants, which halves it."""
    positions = getattr(_part(config), "max_source_positions", None)
    return 2 * positions if positions else FRAMES


def _spectrogram(frames: int, bands: int, generator: torch.Generator) -> Tensor:
    return torch.randn(COUNT, bands, frames, generator=generator)


def _bands(config: Any) -> int:
    part = _part(config)
    return int(next((n for name in BANDS_NAMES if (n := getattr(part, name, None))), BANDS))


def _ones(frames: int) -> Tensor:
    return torch.ones(COUNT, frames, dtype=torch.long)


def _masked(name: str, frames: int | None = None) -> Recipe:
    def recipe(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
        columns = frames or _frames(config)
        return {"input_features": _spectrogram(columns, _bands(config), generator), name: _ones(columns)}

    return recipe


def _plain(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    if config.is_encoder_decoder:
        raise ValueError("its encoder takes a mask")
    return {"input_features": _spectrogram(_frames(config), _bands(config), generator)}


def _by_frames(*, masked: bool) -> Recipe:
    """The frames stand before the bands. masked: whether there is a mask of the frames."""

    def recipe(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
        if config.is_encoder_decoder:
            raise ValueError("its encoder takes a mask")
        frames = _spectrogram(FRAMES, _bands(config), generator).mT.contiguous()
        return {"input_features": frames} | ({"input_features_mask": _ones(FRAMES)} if masked else {})

    return recipe


def _wave(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Samples, of which stock adds noise to what it hears unless it is told not to."""
    return {
        "input_values": torch.randn(COUNT, 1, SAMPLES, generator=generator),
        "padding_mask": torch.ones(COUNT, SAMPLES, dtype=torch.bool),
    }


def _encoded(name: str, columns: int, *, by_frames: bool = False) -> Recipe:
    """What an encoder takes, with a mask of frames or of samples, of which the last row has fewer."""

    def recipe(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
        if not config.is_encoder_decoder:
            raise ValueError("it has no encoder")
        mask = _ones(columns)
        mask[-1, columns * 3 // 4 :] = 0
        if name == "input_values":
            return {name: torch.randn(COUNT, columns, generator=generator), "attention_mask": mask}
        numbers = _spectrogram(columns, _bands(config), generator)
        return {name: numbers.mT.contiguous() if by_frames else numbers, "attention_mask": mask}

    return recipe


def _nothing(config: Any, ids: Tensor, is_sound: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


RECIPES: list[Recipe] = [
    _masked("input_features_mask"), _masked("input_features_mask", 100), _masked("feature_attention_mask"),
    _by_frames(masked=True), _by_frames(masked=False), _plain, _wave,
    _encoded("input_features", FRAMES, by_frames=True), _encoded("input_features", FRAMES),
    _encoded("input_values", 4000),
]  # fmt: skip

SOUND = Medium("sound", RECIPES, "get_audio_features", ("audio_token_id", "audio_token_index"), ("", ""), _nothing)
