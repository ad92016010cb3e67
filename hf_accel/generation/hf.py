"""The mixin that a patched model's class gets: stock's generate loops over the paged cache.

A forward pass over a PagedCache has one contract, whoever drives it: `PagedCache.prepare` first, then the
model with `past_key_values=cache`. In a patched model a forward pre-hook does the first part.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.hf import PagedCache
from ..config import CacheConfig
from ..errors import UnsupportedError
from ..instance import Mixin

STATE = "_hf_accel"  # where patch() keeps its GenerationState on the model
MAX_FIRST_TOKENS = 65536  # a cache makes room for at most this many tokens before any is written

# With any other input (images, audio, ...) equal token ids do not mean equal keys and values.
TEXT_INPUTS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict", "logits_to_keep",
    "labels", "output_attentions", "output_hidden_states", "is_causal",
}  # fmt: skip


@dataclass
class GenerationState:
    """What generate() of one patched model needs to know, and what it last did.

    patch_id: tells this patch from an earlier one of the same Parameters, whose quantized weights were others.
    """

    cache: CacheConfig | None
    patch_id: bytes = field(default_factory=lambda: os.urandom(16))
    last_cache: PagedCache | None = None
    prompt_columns: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)

    def record(self, sequences: Tensor, seconds: float) -> None:
        """Statistics of a finished generate(); new tokens are counted to the longest row's end."""
        rows, columns = sequences.shape
        new_tokens = rows * (columns - self.prompt_columns)
        run = {
            "seconds": seconds,
            "sequences": rows,
            "new_tokens": new_tokens,
            "tokens_per_second": new_tokens / seconds,
        }
        self.statistics = run if self.last_cache is None else {**run, **self.last_cache.statistics()}


def prepare_step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a patched model: plan the pass on the PagedCache it was given, if any.

    Raises UnsupportedError for an empty input.
    """
    cache = kwargs.get("past_key_values")
    ids = args[0] if args else kwargs.get("input_ids")
    source = kwargs.get("inputs_embeds") if ids is None else ids
    if source is not None and 0 in source.shape[:2]:
        raise UnsupportedError(
            f"the input has {source.shape[0]} rows of {source.shape[1]} tokens; give at least one token in one row"
        )
    mask = kwargs.get("attention_mask")
    if not isinstance(cache, PagedCache) or source is None or not (mask is None or _is_columns(mask)):
        return
    mask = None if mask is None else mask.bool()
    fresh = cache.get_seq_length() == 0
    shareable = ids is not None and not any(
        isinstance(value, Tensor) and name not in TEXT_INPUTS for name, value in kwargs.items()
    )
    if fresh and shareable:
        shareable = not _positions_depend_on_length(model.config) and _positions_count_tokens(
            kwargs.get("position_ids"), mask
        )
    cache.prepare(
        source.shape[0],
        source.shape[1],
        device=source.device,
        mask=mask,
        token_ids=ids if shareable and cache.settings.prefix_sharing else None,
        salt=weights_salt(model) if fresh and shareable else None,
    )


def _is_columns(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 2


def _positions_count_tokens(position_ids: Tensor | None, mask: Tensor | None) -> bool:
    """Whether each token's position is its number in the row, so that rows with equal tokens have equal keys."""
    if position_ids is None:
        return mask is None or bool(mask.all())
    if position_ids.ndim != 2:
        return False
    if mask is None or bool(mask.all()):
        return bool((position_ids == torch.arange(position_ids.shape[1], device=position_ids.device)).all())
    expected = mask.long().cumsum(1) - 1
    return bool(((position_ids == expected) | ~mask).all())


def weights_salt(model: nn.Module) -> bytes:
    """A digest that changes with the patch, and when a Parameter is written to or replaced or an adapter switched."""
    state: GenerationState = vars(model)[STATE].generation
    digest = hashlib.blake2b(state.patch_id, digest_size=16)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                version = 0 if parameter.is_inference() else parameter._version
                digest.update(f"{parameter.data_ptr()}:{version};".encode())
        if "_active_adapter" in vars(module):
            switches = (vars(module).get(name) for name in ("_active_adapter", "_disable_adapters", "merged_adapters"))
            digest.update(repr(tuple(switches)).encode())
    return digest.digest()


def _positions_depend_on_length(config: Any) -> bool:
    """Rotary scaling that looks at the prompt's length gives equal prefixes of unequal prompts different keys."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [rope.get("rope_type"), *(v.get("rope_type") for v in rope.values() if isinstance(v, dict))]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


class AcceleratedGeneration(Mixin):
    """Mixed into a patched model's class, in front of the original class."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        state: GenerationState = vars(self)[STATE].generation
        start = time.perf_counter()
        try:
            output = super().generate(*args, **kwargs)  # type: ignore[misc]
            state.record(output if isinstance(output, Tensor) else output.sequences, time.perf_counter() - start)
        finally:
            state.last_cache = None
        return output

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, *rest: Any
    ) -> None:
        state: GenerationState = vars(self)[STATE].generation
        given = model_kwargs.get("past_key_values")
        wanted = state.cache is not None and generation_config.use_cache is not False
        if wanted and given is None and generation_config.cache_implementation is None:
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs["past_key_values"] = PagedCache(
                self.config,  # type: ignore[attr-defined]
                state.cache,
                capacity=min(rows * generation_config.max_length, MAX_FIRST_TOKENS),
            )
        else:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, *rest
            )
        cache = model_kwargs.get("past_key_values")
        state.last_cache = cache if isinstance(cache, PagedCache) else None

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Skip what the cache holds of the prompts, and compute a prompt that stock has repeated only once."""
        vars(self)[STATE].generation.prompt_columns = input_ids.shape[1]
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, PagedCache) and cache.get_seq_length():
            cache.sequences.use_salt(weights_salt(self))  # type: ignore[arg-type]
        if not isinstance(cache, PagedCache) or cache.get_seq_length() or not _is_text(model_kwargs):
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        repeats = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if generation_config.output_hidden_states or generation_config.output_attentions:
            repeats = 1
        once = {name: _every(value, repeats, len(input_ids)) for name, value in model_kwargs.items()}
        self._adopt_prefix(cache, input_ids[::repeats], once)
        outputs = super()._prefill(  # type: ignore[misc]
            input_ids[::repeats], generation_config, once, *args, **kwargs
        )
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
            outputs.logits = outputs.logits.repeat_interleave(repeats, dim=0)
        return outputs

    def _adopt_prefix(self, cache: PagedCache, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        mask = model_kwargs.get("attention_mask")
        mask = None if mask is None else mask.bool()
        shareable = cache.settings.prefix_sharing and not _positions_depend_on_length(self.config)  # type: ignore[attr-defined]
        if shareable and cache.has_prefixes and _positions_count_tokens(model_kwargs.get("position_ids"), mask):
            cache.adopt_prefix(input_ids, mask, weights_salt(self))  # type: ignore[arg-type]


def _is_text(model_kwargs: dict[str, Any]) -> bool:
    return not any(isinstance(value, Tensor) and name not in TEXT_INPUTS for name, value in model_kwargs.items())


def _every(value: Any, repeats: int, rows: int) -> Any:
    return value[::repeats] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
