"""What the models are asked: ragged prompts, padded on the side that their kind takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .configs import BEGIN, FIRST_SPECIAL, PADDING

FIRST_WORD = 3  # behind padding, begin and end
LENGTHS = (9, 13, 11)
# rows, columns, padded: prompts longer than the window of configs.py, as long, and shorter
SHAPES = ((1, 13, False), (3, 13, False), (1, 6, False), (3, 4, False))


def prompts(kind: str, *, rows: int = len(LENGTHS), seed: int = 1) -> dict[str, Tensor]:
    """input_ids and attention_mask [rows, 13]: padded on the left for what generates, else on the right."""
    columns = max(LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, FIRST_SPECIAL, (rows, columns), generator=generator)
    ids[:, -4:] = ids[:, -8:-4]  # something for a lookup to find
    missing = columns - torch.tensor(LENGTHS[:rows]).unsqueeze(1)
    places = torch.arange(columns)
    mask = places >= missing if kind in ("causal", "vision", "speech") else places < columns - missing
    return {"input_ids": ids.masked_fill(~mask, PADDING), "attention_mask": mask.long()}


def shaped(kind: str, *, rows: int, columns: int, padded: bool) -> dict[str, Tensor]:
    """The last `columns` columns of `rows` rows, with padding or without any."""
    batch = prompts(kind, rows=rows)
    if not padded:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(FIRST_WORD, FIRST_SPECIAL, (rows, max(LENGTHS)), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: value[:, -columns:] for name, value in batch.items()}


def single(kind: str) -> dict[str, Tensor]:
    """The longest prompt alone, without padding."""
    batch = prompts(kind)
    return {name: value[1:2] for name, value in batch.items()}


def decoder_prompts(rows: int) -> Tensor:
    """What a decoder has said so far, [rows, 13]."""
    ids = prompts("encoder", rows=rows, seed=2)["input_ids"].clamp(min=FIRST_WORD)
    ids[:, 0] = BEGIN
    return ids
