"""Attention over compressed keys, which stay in pages as they are (attention/hf/latents.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.expansion import Expansion, KnownExpansion
from ...attention.hf.latents import is_known_expansion
from ...cache.hf import PAGED_HANDLE, PagedKV
from ...errors import UnsupportedError
from ...hardware import UNLIMITED
from ...kernels.layouts import Ragged
from ...linear import QuantLinear
from ...linear.formats import Int8Weight
from ...recognition.expanded_keys import EXPANSION
from ...recognition.unchanged import is_unobserved
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..projections import ProjectionCall
from ..site import FusedSite, SiteKind

COMPRESSED = SiteKind("compressed", "attention modules", "compressed keys in pages")


class PagedLatents(Mixin):
    """A mixin for attention over compressed keys, which hands them on as they are where pages hold them."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, D] of latents [B, 1, T, rank] and rotated parts [B, 1, T, Dr].

        Where pages hold them, both are returned as they are. Raises UnsupportedError if the pages are for others.
        """
        paged: PagedKV | None = getattr(kv_nope, PAGED_HANDLE, None)
        own: Any = self
        if paged is None:
            expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
            return expanded
        if paged.rank != own.kv_lora_rank:
            raise UnsupportedError(
                f"the pages are for compressed keys of {paged.rank} numbers, and layer {own.layer_idx} has "
                f"{own.kv_lora_rank}; make the cache with hf_accel.PagedCache(model.config)"
            )
        return kv_nope, k_rot

    def expansion(self, dtype: torch.dtype, ragged: Ragged) -> Expansion | None:
        """Return the weight that multiplies queries and results of `dtype`; None to make all keys and values.

        That is so if the layer has an adapter or hooks, or computes in another dtype. It is so too where it takes
        fewer operations, as in prompts, and the layer rounds a row by their number anyway: otherwise a token's bits
        would depend on what is computed with it.
        """
        own: Any = self
        state: ExpansionState = vars(self)[FUSED]
        parts = state.expansion(own, dtype)
        rounds = ragged.max_q > state.most_rows(own)
        return None if parts is None or (rounds and parts.takes_more(ragged, own.qk_rope_head_dim)) else parts


class ExpansionState(KnownExpansion):
    """The weight of a layer as attention reads it: a quantized one in int8 as it is, else as floats.

    It is made with the first pass, and again after another weight was put into the layer. A copy or a pickle holds
    none.
    """

    def __init__(self) -> None:
        self._made_of: Any = None  # a packed weight, which a write to the layer replaces by another
        self._made: Expansion | None = None

    def __reduce__(self) -> Any:
        return ExpansionState, ()

    def expansion(self, module: Any, dtype: torch.dtype) -> Expansion | None:
        linear = module._modules[EXPANSION]
        if linear._parameters.get("bias") is not None or not is_unobserved(linear):
            return None
        if type(linear) is QuantLinear:
            return self._stored(module, linear) if linear.dtype is dtype and linear.part is None else None
        weight = linear._parameters.get("weight")
        plain = original_class(linear) is nn.Linear and weight is not None and weight.dtype is dtype
        return Expansion.of(module, weight) if plain and weight.is_contiguous() else None

    def most_rows(self, module: Any) -> int:
        linear = module._modules[EXPANSION]
        if type(linear) is QuantLinear:
            return UNLIMITED
        call = vars(linear).get(FUSED)
        return call.float_rows if isinstance(call, ProjectionCall) else 1

    def _stored(self, module: Any, linear: QuantLinear) -> Expansion:
        linear.settle()
        packed = linear.pack()._packed
        if self._made is None or self._made_of is not packed:
            weight = linear.quantized
            plain = isinstance(weight, Int8Weight) and weight.weight_scale.shape[1] == 1 and weight.symmetric
            if plain and weight.input_order is None:
                scales = weight.weight_scale.float().flatten()
                self._made = Expansion.of(module, weight.integers(), scales, transposed=True)
            else:
                self._made = Expansion.of(module, weight.dequantize(linear.dtype), transposed=True)
            self._made_of = packed
        return self._made


def compressed_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the attention over compressed keys in a model, which pages of these need."""
    for name, module in model.named_modules():
        if is_known_expansion(module):
            yield FusedSite(name, module, COMPRESSED, PagedLatents, ExpansionState())
