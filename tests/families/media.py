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
            tensors = recipe(model.config, torch.Generator().manual_seed(7))
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
    parts = {name: value.chunk(COUNT)[row] for name, value in given.items() if value.shape[0] != 1}
    return given | parts


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
        yield from (16, 4, 8, 17, 1, 0)


def _prompts(model: PreTrainedModel, tensors: dict[str, Tensor], count: int, medium: Medium) -> dict[str, Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(3)
    parameters = inspect.signature(type(model).forward).parameters
    if "input_ids" not in parameters:  # an encoder's, that reads no words
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
    return bool((logits[0] - logits[1]).abs().max() > 1e-4 * logits.abs().max())
