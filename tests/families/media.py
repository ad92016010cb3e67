"""Prompts with an image or a sound: which tensors a model takes and how many tokens one is, found by trying.

Each recipe makes the tensors of some of them; the first that stock runs on, and answers by, is the model's.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .configs import BEGIN, FIRST_SPECIAL, PADDING
from .inputs import FIRST_WORD

COUNT = 3  # two behind the same words, and one behind fewer
WORDS = 6
MASKED = -1e30
INDICES = ("image_token_pooling",)  # of patches, counted over all images
MARKS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
ROW_BY_ROW = (*MARKS, "input_ids", "attention_mask")

Recipe = Callable[[Any, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Medium:
    """What prompts hold besides words.

    features: the name of the method that makes embeddings of it. tokens: the names that a config may have for the
    token that stands for it. around: those of the tokens before and behind it. more: makes further inputs that say
    where it stands, of a config, ids [3, T], where they stand for a medium, and the tensors.
    """

    name: str
    recipes: list[Recipe]
    features: str
    tokens: tuple[str, ...]
    around: tuple[str, str]
    more: Callable[[Any, Tensor, Tensor, dict[str, Tensor]], dict[str, Tensor]]


def media_prompts(model: PreTrainedModel, medium: Medium) -> dict[str, Tensor]:
    """What generate takes: rows 0 and 1 say the same about two media, row 2 is shorter and padded on the left.

    Raises ValueError where no recipe fits.
    """
    parameters = inspect.signature(type(model).forward).parameters
    reasons = []
    for recipe in medium.recipes:
        try:
            made = recipe(model.config, torch.Generator().manual_seed(7))
            tensors = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in made.items()}
        except Exception as error:
            reasons.append(str(error))
            continue
        if not tensors.keys() <= parameters.keys():
            continue
        counts, tried = deque(_counts(model, tensors, medium)), set[int]()
        while counts:
            count = counts.popleft()
            tried.add(count)
            try:
                given = _prompts(model, tensors, count, medium)
                if _matters(model, given):
                    return given
                reasons.append(f"the {medium.name} does not change the logits")
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                told = re.search(r"features:? (\d+)", str(error))
                if told and int(told[1]) // COUNT not in tried:
                    counts.appendleft(int(told[1]) // COUNT)
    raise ValueError(f"no recipe for its {medium.name}s: {'; '.join(dict.fromkeys(reasons))[:300]}")


def alone_with_medium(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row and its medium; what is not per row is per patch, equally many for each image."""
    alone = {n: value.chunk(COUNT, dim=axis)[row] for n, value in given.items() if (axis := _axis(value)) is not None}
    alone = given | alone
    return alone | {name: value - value.min() for name, value in alone.items() if name in INDICES}


def one_without(given: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The same rows, of which row 1 says other words where its medium is; None if that is not known to be none."""
    ids = given.get("input_ids")
    special = None if ids is None else ids[1] >= FIRST_SPECIAL
    if ids is None or special is None or not bool(special.any()):
        return None
    ids = ids.clone()
    ids[1, special] = torch.arange(int(special.sum())) % (FIRST_SPECIAL - FIRST_WORD) + FIRST_WORD
    mixed = {"input_ids": ids}
    for name, value in given.items():
        if name in ROW_BY_ROW and name != "input_ids":
            mixed[name] = value.clone()
            mixed[name][1] *= int(name not in MARKS)
        elif name != "input_ids":
            axis = _axis(value)
            parts = (value,) if axis is None else value.chunk(COUNT, dim=axis)
            mixed[name] = torch.cat([parts[0], parts[2]], dim=axis) if len(parts) == COUNT else value
    return mixed


def _axis(value: Tensor) -> int | None:
    """The axis along which media stand; those of one sample may be packed end to end, by columns or by patches."""
    return 0 if len(value) != 1 else {4: 3, 5: 1}.get(value.ndim)


def largest(logits: Tensor) -> Tensor:
    """The largest magnitude, without those that stand for minus infinity, as of tokens that a model never says."""
    return torch.where(logits < MASKED, 0, logits).abs().max()


@torch.no_grad()
def _counts(model: PreTrainedModel, tensors: dict[str, Tensor], medium: Medium) -> Iterator[int]:
    """How many tokens stand for one medium: what the model makes of it, or a few guesses."""
    try:
        features = getattr(model, medium.features)(**tensors)
        pooled = features if isinstance(features, Tensor | list | tuple) else features.pooler_output
        if isinstance(pooled, Tensor):
            yield pooled.numel() // pooled.shape[-1] // COUNT
        else:
            yield sum(part.numel() // part.shape[-1] for part in pooled) // COUNT
    except Exception:
        yield from (16, 4, 8, 17, 20, 1, 0)


def _prompts(model: PreTrainedModel, tensors: dict[str, Tensor], count: int, medium: Medium) -> dict[str, Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(3)
    parameters = inspect.signature(type(model).forward).parameters
    reads_words = not config.is_encoder_decoder or model.get_encoder().main_input_name == "input_ids"
    if "input_ids" not in parameters or not reads_words:
        return tensors
    token = next((t for name in medium.tokens if (t := getattr(config, name, None)) is not None), FIRST_SPECIAL)
    start, end = (getattr(config, name, None) for name in medium.around)
    placed = [t for t in (start, *[token] * count, end) if t is not None]
    words = torch.randint(FIRST_WORD, FIRST_SPECIAL, (2, WORDS), generator=generator).tolist()
    full = [BEGIN, *placed, *words[0]]
    short = [PADDING] * 2 + [BEGIN, *placed, *words[1][2:]]
    ids = torch.tensor([full, full, short])
    mask = torch.ones_like(ids)
    mask[2, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, **tensors} | {
        name: value for name, value in medium.more(config, ids, ids == token, tensors).items() if name in parameters
    }


@torch.no_grad()
def _matters(model: PreTrainedModel, given: dict[str, Tensor]) -> bool:
    torch.manual_seed(0)
    more = {}
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = torch.full((COUNT, 2), BEGIN)
    logits = model(**given, **more).logits[:, -1]
    return bool((logits[0] - logits[1]).abs().max() > 1e-4 * largest(logits))
