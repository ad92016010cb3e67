"""Prompts with an image: which tensors a model takes and how many tokens an image is, found by trying.

Each recipe makes the tensors of some images; the first that stock runs on, and answers by, is the model's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .configs import BEGIN, FIRST_SPECIAL, PADDING
from .inputs import FIRST_WORD

SIDE = 32
IMAGES = 3  # two behind the same words, and one behind fewer
WORDS = 6
MASKED = -1e30
INDICES = ("image_token_pooling",)  # of patches, counted over all images
UNKNOWN = "no recipe for its images"

ALL_SEE = ("paligemma",)  # whose token types say which tokens stand behind the prompt

TOKENS = ("image_token_id", "image_token_index", "video_token_index")

MARKS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
ROW_BY_ROW = (*MARKS, "input_ids", "attention_mask")

Recipe = Callable[[Any, torch.Generator], dict[str, Tensor]]


def image_prompts(model: PreTrainedModel) -> dict[str, Tensor]:
    """What generate takes: rows 0 and 1 say the same about different images, row 2 is shorter and padded on the left.

    Raises ValueError where no recipe fits.
    """
    parameters = inspect.signature(type(model).forward).parameters
    reasons = []
    for recipe in RECIPES:
        try:
            pixels = recipe(model.config, torch.Generator().manual_seed(7))
        except Exception as error:
            reasons.append(str(error))
            continue
        if not pixels.keys() <= parameters.keys():
            continue
        counts = list(_counts(model, pixels))
        for count in counts:
            given = _prompts(model, pixels, count, parameters.keys())
            try:
                if _sees(model, given):
                    return given
                reasons.append("the image does not change the logits")
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                told = re.search(r"features:? (\d+)", str(error))
                if told and int(told[1]) // IMAGES not in counts:
                    counts.append(int(told[1]) // IMAGES)
    raise ValueError(f"{UNKNOWN}: {'; '.join(dict.fromkeys(reasons))[:300]}")


def alone_with_image(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row and its image; what is not per row is per patch, equally many for each image."""
    alone = {name: value.chunk(IMAGES, dim=_axis_of_images(value))[row] for name, value in given.items()}
    return alone | {name: value - value.min() for name, value in alone.items() if name in INDICES}


def one_without_image(given: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The same rows, of which row 1 says other words where its image is; None if that is not known to be no image."""
    ids = given.get("input_ids")
    if ids is None:
        return None
    special = ids[1] >= FIRST_SPECIAL
    if not bool(special.any()):
        return None
    ids = ids.clone()
    ids[1, special] = torch.arange(FIRST_WORD, FIRST_WORD + int(special.sum())) % (FIRST_SPECIAL - FIRST_WORD) + 3
    mixed = {"input_ids": ids}
    for name, value in given.items():
        if name in ROW_BY_ROW:
            mixed[name] = value.clone()
            if name in MARKS:
                mixed[name][1] = 0
        elif name != "input_ids":
            parts = value.chunk(IMAGES, dim=_axis_of_images(value))
            mixed[name] = torch.cat([parts[0], parts[2]], dim=_axis_of_images(value))
    return mixed


def _axis_of_images(value: Tensor) -> int:
    """The axis along which images stand; those of one sample may be packed end to end, by columns or by patches."""
    return 0 if len(value) != 1 else {4: 3, 5: 1}[value.ndim]


@torch.no_grad()
def _counts(model: PreTrainedModel, pixels: dict[str, Tensor]) -> Iterator[int]:
    """How many tokens stand for one image: what the model makes of it, or a few guesses."""
    try:
        features = model.get_image_features(**pixels)
        pooled = features if isinstance(features, Tensor | list | tuple) else features.pooler_output
        if isinstance(pooled, Tensor):
            yield pooled.numel() // pooled.shape[-1] // IMAGES
        else:
            yield sum(part.numel() // part.shape[-1] for part in pooled) // IMAGES
    except Exception:
        yield from (16, 4, 8, 17, 20, 1, 0)


def _prompts(model: PreTrainedModel, pixels: dict[str, Tensor], count: int, parameters: Any) -> dict[str, Tensor]:
    if "input_ids" not in parameters:  # an encoder of images alone
        return pixels
    config, generator = model.config, torch.Generator().manual_seed(3)
    token = next((t for name in TOKENS if (t := getattr(config, name, None)) is not None), FIRST_SPECIAL)
    start, end = (getattr(config, f"vision_{side}_token_id", None) for side in ("start", "end"))
    image = [t for t in (start, *[token] * count, end) if t is not None]
    words = torch.randint(FIRST_WORD, FIRST_SPECIAL, (2, WORDS), generator=generator).tolist()
    full = [BEGIN, *image, *words[0]]
    short = [PADDING] * 2 + [BEGIN, *image, *words[1][2:]]
    ids = torch.tensor([full, full, short])
    mask = torch.ones_like(ids)
    mask[2, :2] = 0
    given = {"input_ids": ids, "attention_mask": mask, **pixels}
    marked = torch.zeros_like(ids) if config.model_type in ALL_SEE else (ids == token).long()
    given |= {name: marked for name in MARKS if name in parameters}
    if "cross_attention_mask" in parameters:
        tiles = pixels["pixel_values"].shape[2]
        given["cross_attention_mask"] = torch.ones(IMAGES, ids.shape[1], 1, tiles, dtype=torch.long)
    if "image_attention_mask" in parameters:
        given["image_attention_mask"] = torch.ones(IMAGES, ids.shape[1], 1, dtype=torch.long)
    if "bbox" in parameters:
        given["bbox"] = torch.rand(*ids.shape, 4, generator=generator).sort(dim=-1).values
    if "qformer_input_ids" in parameters:
        given["qformer_input_ids"] = torch.tensor([words[0]] * IMAGES)
    return given


@torch.no_grad()
def _sees(model: PreTrainedModel, given: dict[str, Tensor]) -> bool:
    torch.manual_seed(0)
    more = {}
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = torch.full((IMAGES, 2), BEGIN)
    logits = model(**given, **more).logits[:, -1]
    return bool((logits[0] - logits[1]).abs().max() > 1e-4 * largest(logits))


def largest(logits: Tensor) -> Tensor:
    """The largest magnitude, without those that stand for minus infinity, as of tokens that a model never says."""
    return torch.where(logits < MASKED, 0, logits).abs().max()


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
    return {"pixel_values": _noise(generator, IMAGES, 3, side, side)}


def _nested(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _side(config)
    return {"pixel_values": _noise(generator, IMAGES, 1, 3, side, side)}


def _nested_masked(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _side(config)
    mask = torch.ones(IMAGES, 1, side, side, dtype=torch.long)
    return _nested(config, generator) | {"pixel_attention_mask": mask}


def _sized(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return _plain(config, generator) | {"image_sizes": torch.full((IMAGES, 2), _side(config))}


def _tiled(tiles: int) -> Recipe:
    def recipe(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
        side = _side(config)
        pixels = _noise(generator, IMAGES, tiles, 3, side, side)
        return {"pixel_values": pixels, "image_sizes": torch.full((IMAGES, 2), side)}

    return recipe


def _grid(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    vision = _vision(config)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    width = channels * frames * _patch(config) ** 2
    return {
        "pixel_values": _noise(generator, IMAGES * 16, width),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * IMAGES),
    }


def _grid_of_images(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    return {
        "pixel_values": _noise(generator, IMAGES * 16, 3, patch, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * IMAGES),
    }


def _grid_of_one(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    given = _grid_of_images(config, generator)
    return given | {"pixel_values": given["pixel_values"].unsqueeze(0)}


def _merged_grid(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return _grid(config, generator) | {"image_merge_sizes": torch.full((IMAGES,), 2)}


def _aspect_ratios(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    tiles, side = getattr(_vision(config), "max_num_tiles", 4), _side(config)
    mask = torch.zeros(IMAGES, 1, tiles, dtype=torch.long)
    mask[:, :, 0] = 1
    return {
        "pixel_values": _noise(generator, IMAGES, 1, tiles, 3, side, side),
        "aspect_ratio_ids": torch.ones(IMAGES, 1, dtype=torch.long),
        "aspect_ratio_mask": mask,
    }


def _positions(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    places = torch.stack([columns.flatten(), rows.flatten()], dim=-1)
    return {
        "pixel_values": torch.rand(IMAGES, 36, 3 * patch * patch, generator=generator),
        "image_position_ids": places.expand(IMAGES, -1, -1).contiguous(),
    }


def _merged_positions(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _vision(config).model_patch_size
    rows, columns = torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
    places = torch.stack([columns.flatten(), rows.flatten()], dim=-1)
    return {
        "pixel_values": torch.rand(IMAGES, 4, 3 * side * side, generator=generator),
        "image_position_ids": places.expand(IMAGES, -1, -1).contiguous(),
    }


def _patches(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": _noise(generator, IMAGES, 16, 3 * _patch(config) ** 2)}


def _packed(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """The patches of all images side by side, as in one image of the height of a patch."""
    patch = _patch(config)
    return {
        "pixel_values": _noise(generator, 1, 3, patch, IMAGES * 16 * patch),
        "target_sizes": torch.tensor([[4, 4]] * IMAGES, dtype=torch.int32),
    }


def _tiles_that_are(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _side(config)
    return {
        "pixel_values": _noise(generator, IMAGES, 2, 3, side, side),
        "pixel_attention_mask": torch.tensor([[True, False]] * IMAGES),
    }


def _pooled_crops(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """A crop of 4 x 4 patches for each image, of which each token pools 2 x 2."""
    places = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    return {
        "pixel_values": _noise(generator, IMAGES, 16, 3 * _patch(config) ** 2),
        "image_token_pooling": torch.cat([places + 16 * index for index in range(IMAGES)]),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * IMAGES),
        "image_num_crops": torch.ones(IMAGES, dtype=torch.long),
    }


def _merged_patches(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _patch(config) * _vision(config).spatial_merge_size
    return {
        "pixel_values": _noise(generator, IMAGES * 4, side, side, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * IMAGES),
    }


def _shaped(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    return {
        "pixel_values": _noise(generator, IMAGES, 16, 3 * patch * patch),
        "spatial_shapes": torch.tensor([[4, 4]] * IMAGES),
        "pixel_attention_mask": torch.ones(IMAGES, 16, dtype=torch.long),
    }


def _flattened(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    patch = _patch(config)
    places = torch.arange(16).repeat(IMAGES, 1)
    noise = _noise(generator, IMAGES, 16, 3 * patch * patch)
    return {"flattened_patches": torch.cat([torch.stack([places // 4 + 1, places % 4 + 1], -1).float(), noise], -1)}


def _proteins(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(5, 30, (IMAGES, 8), generator=generator)
    return {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}


def _two_resolutions(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    plain = _plain(config, generator)
    side = _side(config.high_res_vision_config) if hasattr(config, "high_res_vision_config") else SIDE
    return plain | {"high_res_pixel_values": _noise(generator, IMAGES, 3, side, side)}


RECIPES: list[Recipe] = [
    _pooled_crops, _packed, _tiles_that_are, _merged_positions, _merged_patches,
    _aspect_ratios, _two_resolutions, _positions, _shaped, _merged_grid, _grid, _grid_of_images, _grid_of_one,
    _tiled(2), _tiled(3), _tiled(5), _sized, _nested_masked, _nested, _plain, _flattened, _patches, _proteins,
]  # fmt: skip
