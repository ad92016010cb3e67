"""Can rounding explain a first difference? Measured on the reference, not assumed.

Two computations that differ by rounding alone, each off the exact logits by at most d, can choose two tokens only if
the exact logits of the two lie within 2 d. d is taken as the spread of the logits over ways to compute the same
history that are equally valid:

* one pass over the whole history: every product has many rows;
* the prompt in one pass and then token after token over the cache, as generate does: one row;
* one pass in the next wider dtype (float32 for bfloat16), of which the first two are roundings. It is the arbiter:
  the margin is that of its logits. It takes a float copy of the weights, and is left out where that is too large.

The spread is at least one unit in the last place of the largest logit. What a defect does to a model's own logits
cannot enlarge it, because the model is not among the ways.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.hf import PagedCache
from ..hardware import detect
from ..patch import is_patched
from .twin import WIDER, state_of, widened

LARGEST_ARBITER = 4 * 2**30  # bytes of its weights
SINGLE_STEPS = 8  # tokens at the end of a history that are computed one by one, at the least


class Reference:
    """A model to compare with."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name

    @functools.cached_property
    def arbiter(self) -> PreTrainedModel | None:
        """The reference in the next wider dtype, made when it is first needed; None where there is none."""
        return widened(self.model) if _affordable(self.model) else None

    @torch.no_grad()
    def judge(self, history: Tensor, num_prompt: int, settings: Mapping[str, Any]) -> tuple[Tensor, float, str]:
        """Logits [V] after history [1, n] as margins are judged by, the rounding of a margin, and the logits' dtype.

        num_prompt: tokens of the history that were the prompt. settings: keywords of generate().
        """
        whole = last_logits(self.model, history, **settings)
        ways = [whole]
        stepped = self._stepped(history, num_prompt, settings)
        if stepped is not None:
            ways.append(stepped)
        dtype = self.model.dtype
        if self.arbiter is not None:
            ways.append(last_logits(self.arbiter, history, **settings))
            dtype = self.arbiter.dtype
        floor = torch.finfo(self.model.dtype).eps * float(whole.nan_to_num(0, 0, 0).abs().max())
        return ways[-1], 2 * max(spread(ways), floor), str(dtype).removeprefix("torch.")

    def _stepped(self, history: Tensor, num_prompt: int, settings: Mapping[str, Any]) -> Tensor | None:
        """As generate computes them, with at least a few single steps; None for a model without a KV cache."""
        start = min(num_prompt, max(1, history.shape[1] - SINGLE_STEPS))
        if history.shape[1] == 1 or getattr(self.model, "_is_stateful", False):
            return None
        cache, history = new_cache(self.model), history.to(self.model.device)
        for ids in (history[:, :start], *history[:, start:-1].split(1, dim=1)):
            cache = self.model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
        return last_logits(self.model, history, past_key_values=cache, **settings)


def spread(ways: list[Tensor]) -> float:
    """The largest difference between any two ways, over all logits that are finite in every way."""
    stacked = torch.stack(ways)
    finite = stacked[:, stacked.isfinite().all(0)]
    return float((finite.amax(0) - finite.amin(0)).max()) if finite.numel() else 0.0


def new_cache(model: PreTrainedModel) -> Any:
    """The kind of cache that a model's generate() uses; None for stock's own."""
    settings = state_of(model).generation.cache if is_patched(model) else None
    return None if settings is None else PagedCache(model.config, settings)


def last_logits(model: PreTrainedModel, history: Tensor, *, num_new: int = 1, **settings: Any) -> Tensor:
    """Logits [V], float32, that greedy generate() draws the last of num_new tokens after history [1, n] from."""
    output = greedy(model, history, num_new, output_scores=True, return_dict_in_generate=True, **settings)
    scores: Tensor = output.scores[-1][0]
    return scores.float().cpu()


def greedy(model: PreTrainedModel, prompt: Tensor, num_new: int, **settings: Any) -> Any:
    prompt = prompt.to(model.device)
    generate: Any = model.generate  # torch's stubs give a Module's attributes the type Tensor | Module
    fixed = {"do_sample": False, "num_beams": 1, "max_new_tokens": num_new}
    return generate(prompt, attention_mask=torch.ones_like(prompt), **fixed, **settings)


def _affordable(model: PreTrainedModel) -> bool:
    dtype = WIDER.get(model.dtype)
    if dtype is None or model.device.type not in ("cpu", "cuda"):
        return False
    needed = sum(p.numel() for p in model.parameters() if p.is_floating_point()) * dtype.itemsize
    free = detect(model.device).free_memory
    return needed <= LARGEST_ARBITER and (free is None or needed <= free // 2)
