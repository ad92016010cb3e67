"""Decoders that make the mask of causal attention by code of their own, as transformers' models did before its
masking_utils: they get a CausalMask, which tells our attention its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.hf import ATTENTION_NAME
from ...attention.hf.mask import CausalMask, Meaning, mask_forward
from ...models import modules_by_name
from ...recognition.call_form import parameter_names
from ...undo.journal import Mixin, original_class
from ..site import FusedSite, SiteKind

MAKES = "_prepare_decoder_attention_mask"
PARAMETERS = ("attention_mask", "input_shape", "inputs_embeds")
BEFORE_NAMES = ("cache_length", "past_key_values_length")  # the last parameter, from transformers 5.24 on and before
OWN_MASKS = SiteKind("own mask", "decoders that make causal masks by themselves", "with their meaning")
LOWEST = torch.finfo(torch.float16).min
TRIED = ((3, 0), (3, 5), (4096, 0))  # tokens, and those before them: a window shows in many


class OwnMasks(Mixin):
    """A mixin for a decoder that makes causal masks by itself."""

    def _prepare_decoder_attention_mask(
        self, attention_mask: Tensor | None, input_shape: Any, inputs_embeds: Tensor, cache_length: Any
    ) -> Tensor | None:
        own: Any = self
        ours = own.config._attn_implementation == ATTENTION_NAME and isinstance(cache_length, int)
        if attention_mask is not None or input_shape[-1] == 1 or not ours:
            made: Tensor | None = super()._prepare_decoder_attention_mask(  # type: ignore[misc]
                attention_mask, input_shape, inputs_embeds, cache_length
            )
            return made
        rows, count = input_shape
        return mask_forward(
            rows, count, cache_length + count, cache_length, allow_is_causal_skip=False,
            device=inputs_embeds.device,
        )  # fmt: skip


def own_masks(model: nn.Module) -> Iterator[FusedSite]:
    """Find the decoders in a model that make the mask of causal attention by a method of their own."""
    for name, module in modules_by_name(model):
        method = getattr(original_class(module), MAKES, None)
        if method is not None and _is_known(parameter_names(method)) and makes_triangles(module):
            yield FusedSite(name, module, OWN_MASKS, OwnMasks, None)


def _is_known(names: Sequence[str]) -> bool:
    return tuple(names[:-1]) == PARAMETERS and names[-1] in BEFORE_NAMES


@torch.no_grad()
def makes_triangles(module: Any) -> bool:
    """Return whether the masks of a module say that a token sees itself and all before it, and nothing else."""
    try:
        return all(_is_triangle(module, count, before) for count, before in TRIED)
    except Exception:  # code that is not known may do anything
        return False


def _is_triangle(module: Any, count: int, before: int) -> bool:
    make: Any = getattr(original_class(module), MAKES)
    mask = make(module, None, (1, count), torch.zeros(1, count, 1), before)
    columns = torch.ones(1, before + count, dtype=torch.bool)
    meaning = Meaning(None, padded=False, left_out=False)
    seen = CausalMask(columns, (count, before + count), meaning).whole()
    return mask.shape == seen.shape and torch.equal(mask == 0, seen) and bool((seen | (mask <= LOWEST)).all())
