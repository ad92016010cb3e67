"""Why a model, or one call of generate(), stays on transformers' own loop."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList

from ...cache.hf import PagedCache
from .processing import processors_refusal, stateful_refusal
from .step import is_text, positions_count_tokens, positions_depend_on_length

# Phi-3's own preparation is only for rotary scaling that depends on the length, which is refused before.
LONG_ROPE = "original_max_position_embeddings"


def model_refusal(model: nn.Module) -> str | None:
    """Why tokens of several sequences cannot be computed in one ragged row, as one clause; None if they can."""
    name = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"{name} takes no position_ids"
    if positions_depend_on_length(model.config):
        return "its rotary scaling depends on the length of the batch"
    if getattr(model, "_is_stateful", False):
        return f"{name} keeps a recurrent state that cannot go back"
    for method in ("prepare_inputs_for_generation", "_prepare_position_ids_for_generation"):
        own = getattr(type(model), method)
        if own is not getattr(GenerationMixin, method) and LONG_ROPE not in own.__code__.co_names:
            return f"{name} has a {method} of its own"
    return None


def call_refusal(
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: Any,
    inputs: dict[str, Any],
    *,
    synced: bool,
    own_cache: bool,
    speculates: bool,
) -> str | None:
    """Why this call cannot run ragged, as one clause; None if it can. inputs: what the model would be called with."""
    cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
    if not isinstance(cache, PagedCache) or inputs.get("use_cache") is False:
        return "it has no paged cache"
    if not own_cache and len(input_ids) > 1:
        return "a cache that is passed along holds columns, padding included"
    if synced:
        return "synced_gpus=True keeps all ranks in step"
    if not input_ids.numel() or not is_text(inputs) or inputs.get("encoder_outputs") is not None:
        return "its inputs are more than token ids"
    wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in wanted if getattr(generation_config, name) and generation_config.return_dict_in_generate]
    if asked:
        return f"{asked[0]}=True collects a row of each step"
    beside = [tensor for tensor in (mask, inputs.get("position_ids")) if tensor is not None]
    if input_ids.is_floating_point() or any(tensor.shape != input_ids.shape for tensor in beside):
        return "its mask and position_ids are not those of its token ids"
    if mask is not None and not _only_left_padded(mask):
        return "padding stands behind or between tokens"
    if not positions_count_tokens(inputs.get("position_ids"), None if mask is None else mask.bool()):
        return "position_ids do not count tokens"
    refusal = processors_refusal(processors, criteria, batch_size=len(input_ids))
    return stateful_refusal(processors, input_ids) if refusal is None and speculates else refusal


def _only_left_padded(mask: Tensor) -> bool:
    return mask.ndim == 2 and bool((mask[:, -1] != 0).all()) and bool((mask[:, 1:] >= mask[:, :-1]).all())
