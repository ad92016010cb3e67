"""The model's original attention, for the calls that our attention does not understand."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import output_capturing

from ...kernels.layouts import KV, AttentionOptions
from ...recognition.module_code import attention_code
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...undo.journal import Mixin
from ...undo.state import STOCK_ATTRIBUTE
from .. import AttentionSpec, ReferenceBackend

SDPA, EAGER = "sdpa", "eager"
TRIED = 5  # tokens on which a function is compared


def name_before_patch(module: nn.Module) -> str:
    """Return the attention implementation that the module has without us."""
    name: str = getattr(module, STOCK_ATTRIBUTE, SDPA)
    return name


def collects_attentions() -> bool:
    """Return whether transformers' hooks gather attention weights in the pass that is under way."""
    collector = output_capturing._active_collector.get()
    return collector is not None and any("attentions" in key for key in collector)


def stock_attention(
    module: nn.Module, query: Tensor, kv: KV, mask: Tensor | None, *, left_out: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the model's original attention; eager where weights are asked for, which no other function returns.

    query [B, Hq, Q, D] over a dense kv -> [B, Q, Hq, Dv], and weights [B, Hq, Q, T] or None. left_out: whether stock's
    sdpa has no mask here, and follows is_causal instead.
    """
    name, eager = name_before_patch(module), eager_function(module)
    weights = bool(options.get("output_attentions")) or collects_attentions()
    if eager is None or (name != EAGER and not weights):
        function = AttentionInterface()[SDPA if name == EAGER else name]
        result = function(module, query, kv.k, kv.v, None if left_out else mask, **options)
        return result[0], result[1]
    full = _full_mask(mask, query, kv.k, causal=_is_causal(module, name, options))
    del options["is_causal"]
    if options["scaling"] is None:
        options["scaling"] = query.shape[-1] ** -0.5
    out, scores = eager(module, query, kv.k, kv.v, full, **options)
    return out, scores


def _is_causal(module: nn.Module, name: str, options: dict[str, Any]) -> bool:
    """Return whether a missing mask means causal attention: in sdpa it does, in eager it means no mask."""
    asked = options["is_causal"]
    return name != EAGER and bool(getattr(module, "is_causal", True) if asked is None else asked)


def _full_mask(mask: Tensor | None, query: Tensor, key: Tensor, *, causal: bool) -> Tensor | None:
    """Return the mask for stock's eager attention, which adds it to the scores."""
    q_length, kv_length = query.shape[2], key.shape[2]
    if mask is None and causal and q_length > 1:
        ones = torch.ones(q_length, kv_length, dtype=torch.bool, device=query.device)
        mask = ones.tril(kv_length - q_length)[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.where(mask, 0.0, lowest).to(query.dtype)


def eager_function(module: nn.Module) -> Any:
    """Return the plain-torch attention in the file of a module's class; None if there is none."""
    kind: type = type(module)
    original: type = kind.__bases__[1] if issubclass(kind, Mixin) else kind
    name = attention_code(original).eager
    return None if name is None else getattr(sys.modules.get(original.__module__), name, None)


def eager_agrees(module: nn.Module, spec: AttentionSpec) -> bool:
    """Return whether the module's own eager function and our reference give the same on random numbers."""
    eager, numbers = eager_function(module), RandomNumbers()
    shapes = ((spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.value_dim))
    query, key, value = (numbers(1, heads, TRIED, width) for heads, width in shapes)
    sinks = numbers(spec.num_heads) if spec.sinks else None
    wanted = AttentionOptions(spec.head_dim**-0.5, softcap=spec.softcap, sinks=sinks)
    mask = torch.full((TRIED, TRIED), torch.finfo(torch.float32).min, device="cpu").triu(1)[None, None]
    given = {name: value for name, value in {"softcap": spec.softcap, "s_aux": sinks}.items() if value is not None}
    twin = unwatched_twin(module, _parameters={} if sinks is None else {"sinks": sinks})
    return eager is not None and agree(
        lambda: eager(twin, query, key, value, mask, scaling=wanted.scale, dropout=0.0, **given)[0],
        lambda: ReferenceBackend().dense(query, KV(key, value), wanted),
        Tolerance(relative=1e-4, absolute=1e-5),
    )


def recorded_attention(
    module: nn.Module, query: Tensor, kv: KV, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention by torch's operators alone, for a recorded pass. mask: None, or of four dimensions."""
    sinks = options.get("s_aux", options.get("sinks"))
    if sinks is None and options.get("softcap") is None:
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, kv.k, kv.v, mask, **options)
        return result
    asked = options["is_causal"]
    causal = mask is None and query.shape[2] > 1 and (getattr(module, "is_causal", True) if asked is None else asked)
    ours = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"],
        causal=causal,
        softcap=options.get("softcap"),
        sinks=sinks,
        dropout=options["dropout"],
    )
    return ReferenceBackend().dense(query, kv, ours, mask=mask).contiguous(), None
