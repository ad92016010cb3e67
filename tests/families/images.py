"""Prompts with an image: the tensors that models take for it; see media.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .media import COUNT, WORDS, Medium, Recipe

SIDE = 32

ALL_SEE = ("paligemma",)  # whose token types say which tokens stand behind the prompt


def _marks(config: Any, ids: Tensor, is_image: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make what some models take to tell which tokens are images, and which of them may be attended to."""
    marked = torch.zeros_like(ids) if config.model_type in ALL_SEE else is_image.long()
    names = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
    tiles = next((x.shape[2] for x in tensors.values() if x.ndim > 4), 1)
    return dict.fromkeys(names, marked) | {
        "cross_attention_mask": torch.ones(COUNT, ids.shape[1], 1, tiles, dtype=torch.long),
        "image_attention_mask": torch.ones(COUNT, ids.shape[1], 1, dtype=torch.long),
        "qformer_input_ids": ids[:1, -WORDS:].repeat(COUNT, 1),
    }


# -- recipes -------------------------------------------------------------------------------------------


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None) or config


def _side(config: Any) -> int:
    size = getattr(_vision(config), "image_size", SIDE)
    return int(size[0] if isinstance(size, list | tuple) else size or SIDE)


def _patch(config: Any) -> int:
    size = getattr(_vision(config), "patch_size", 8)
    return int(size[0] if isinstance(size, list | tuple) else size)


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _plain(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _side(config)
    return {"pixel_values": _noise(generator, COUNT, 3, side, side)}


def _nested(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _side(config)
    return {"pixel_values": _noise(generator, COUNT, 1, 3, side, side)}


def _nested_masked(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _side(config)
    mask = torch.ones(COUNT, 1, side, side, dtype=torch.long)
    return _nested(config, generator) | {"pixel_attention_mask": mask}


def _sized(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return _plain(config, generator) | {"image_sizes": torch.full((COUNT, 2), _side(config))}


def _tiled(tiles: int) -> Recipe:
    def recipe(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
        side = _side(config)
        pixels = _noise(generator, COUNT, tiles, 3, side, side)
        return {"pixel_values": pixels, "image_sizes": torch.full((COUNT, 2), side)}

    return recipe


def _grid(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    vision = _vision(config)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    width = channels * frames * _patch(config) ** 2
    return {
        "pixel_values": _noise(generator, COUNT * 16, width),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * COUNT),
    }


def _grid_of_images(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    return {
        "pixel_values": _noise(generator, COUNT * 16, 3, patch, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * COUNT),
    }


def _grid_of_one(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    given = _grid_of_images(config, generator)
    return given | {"pixel_values": given["pixel_values"].unsqueeze(0)}


def _merged_grid(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return _grid(config, generator) | {"image_merge_sizes": torch.full((COUNT,), 2)}


def _aspect_ratios(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    tiles, side = getattr(_vision(config), "max_num_tiles", 4), _side(config)
    mask = torch.zeros(COUNT, 1, tiles, dtype=torch.long)
    mask[:, :, 0] = 1
    return {
        "pixel_values": _noise(generator, COUNT, 1, tiles, 3, side, side),
        "aspect_ratio_ids": torch.ones(COUNT, 1, dtype=torch.long),
        "aspect_ratio_mask": mask,
    }


def _positions(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    places = torch.stack([columns.flatten(), rows.flatten()], dim=-1)
    return {
        "pixel_values": torch.rand(COUNT, 36, 3 * patch * patch, generator=generator),
        "image_position_ids": places.expand(COUNT, -1, -1).contiguous(),
    }


def _shaped(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    return {
        "pixel_values": _noise(generator, COUNT, 16, 3 * patch * patch),
        "spatial_shapes": torch.tensor([[4, 4]] * COUNT),
        "pixel_attention_mask": torch.ones(COUNT, 16, dtype=torch.long),
    }


def _flattened(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    places = torch.arange(16).repeat(COUNT, 1)
    noise = _noise(generator, COUNT, 16, 3 * patch * patch)
    return {"flattened_patches": torch.cat([torch.stack([places // 4 + 1, places % 4 + 1], -1).float(), noise], -1)}


def _proteins(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(5, 30, (COUNT, 8), generator=generator)
    return {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}


def _two_resolutions(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    plain = _plain(config, generator)
    side = _side(config.high_res_vision_config) if hasattr(config, "high_res_vision_config") else SIDE
    return plain | {"high_res_pixel_values": _noise(generator, COUNT, 3, side, side)}


RECIPES: list[Recipe] = [
    _aspect_ratios, _two_resolutions, _positions, _shaped, _merged_grid, _grid, _grid_of_images, _grid_of_one,
    _tiled(2), _tiled(3), _tiled(5), _sized, _nested_masked, _nested, _plain, _flattened, _proteins,
]  # fmt: skip

IMAGE = Medium(
    "image",
    RECIPES,
    "get_image_features",
    ("image_token_id", "image_token_index", "video_token_index"),
    ("vision_start_token_id", "vision_end_token_id"),
    _marks,
)
