"""The attention that a model has without us: in parts that keep it, and for calls that ours does not understand."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ...kernels.layouts import KV, AttentionOptions
from ...models import answer_once, is_within, layers_config, modules_by_name
from ...recognition.cache_code import POSITION_BIAS
from ...recognition.code import AttentionCode, attention_code, code_of
from ...recognition.source import source_of
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...undo.journal import original_class
from ...undo.running_code import KNOWN_PACKAGES, function_of, package_of, running_code
from ...undo.state import STOCK_ATTRIBUTE
from .. import AttentionSpec, ReferenceBackend

# -- one call ------------------------------------------------------------------------------------------

ATTENTION_NAME = "hf_accel"  # of ours, by which transformers finds it
SDPA, EAGER = "sdpa", "eager"
TRIED = 5  # tokens on which a function is compared


def name_before_patch(module: nn.Module) -> str:
    """Return the attention implementation that the module has without us."""
    name: str = getattr(module, STOCK_ATTRIBUTE, SDPA)
    return name


def stock_function(module: nn.Module) -> Any:
    """Return the function by which the module attends without us; None if there is none."""
    name = name_before_patch(module)
    return ALL_ATTENTION_FUNCTIONS.get(name, eager_function(module) if name == EAGER else None)


def replaced_function(module: nn.Module) -> str | None:
    """Return what others have replaced: that function, or one that it calls; None if nothing."""
    function = function_of(stock_function(module))
    if not isinstance(function, FunctionType):
        return None
    if package_of(function) not in (*KNOWN_PACKAGES, package_of(original_class(module))):
        return f"the attention function {name_before_patch(module)!r}"
    return running_code(function).others


def collects_attentions() -> bool:
    """Return whether transformers' hooks gather attention weights in the pass that is under way."""
    collector = output_capturing._active_collector.get()
    return collector is not None and any("attentions" in key for key in collector)


def stock_attention(
    module: nn.Module, query: Tensor, kv: KV, mask: Tensor | None, *, left_out: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the model's original attention, and by its eager function the weights where they are asked for.

    query [B, Hq, Q, D] over a dense kv -> [B, Q, Hq, Dv], and weights [B, Hq, Q, T] or None. left_out: whether stock's
    sdpa has no mask here, and follows is_causal instead. Where stock has another function than eager, the result is
    that one's: they differ in rows that see nothing, padding, which a model may read afterwards.
    """
    name, eager = name_before_patch(module), eager_function(module)
    weights = bool(options.pop("output_attentions", False)) or collects_attentions()
    weights = weights and (eager is None or query.shape[1] == kv.k.shape[1] or _shares_heads(eager))
    out = None
    if eager is None or name != EAGER:
        function = AttentionInterface()[SDPA if name == EAGER else name]
        out, scores = function(module, query, kv.k, kv.v, None if left_out else mask, **options)[:2]
        if eager is None or not weights:
            return out, scores
    full = _full_mask(mask, query, kv.k, causal=_is_causal(module, name, options))
    del options["is_causal"]
    if options["scaling"] is None:
        options["scaling"] = query.shape[-1] ** -0.5
    eager_out, scores = eager(module, query, kv.k, kv.v, full, **options)
    return eager_out if out is None else out, scores


def _shares_heads(eager: Any) -> bool:
    """Return whether an eager function repeats heads of keys. That of some files is for layers with as many heads."""
    code = getattr(inspect.unwrap(eager), "__code__", None)
    return code is None or any("repeat" in name or name == "expand" for name in code.co_names)


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
    original = original_class(module)
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
    options["is_causal"] = causal = _is_causal(module, name_before_patch(module), options)
    if sinks is None and options.get("softcap") is None:
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, kv.k, kv.v, mask, **options)
        return result
    causal = causal and mask is None and query.shape[2] > 1
    ours = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"],
        causal=causal,
        softcap=options.get("softcap"),
        sinks=sinks,
        dropout=options["dropout"],
    )
    return ReferenceBackend().dense(query, kv, ours, mask=mask).contiguous(), None


# -- the parts of a model that keep their own attention, mostly towers for images or sound -------------


def set_implementation(copied: nn.Module, name: str) -> None:
    """Give all parts of a copy of a model configs of their own, with this attention implementation."""
    configs: dict[int, Any] = {}
    for module in copied.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            own = configs.setdefault(id(config), copy.deepcopy(config))
            own._attn_implementation_internal = name
            vars(module)["config"] = own


def stock_implementation(model: PreTrainedModel, module: nn.Module) -> str:
    """Return the attention implementation that a module of the model has without us."""
    return implementation_of_config(model, getattr(module, "config", model.config))


def implementation_of_config(model: PreTrainedModel, config: Any) -> str:
    """Return the attention implementation that a part of the model with this config has without us."""
    name = getattr(config, "_attn_implementation", None) or model.config._attn_implementation
    if name != ATTENTION_NAME:
        return str(name)
    part = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config), model)
    return "sdpa" if part._supports_sdpa else "eager"  # it was loaded with our attention


Refusals = list[tuple[PreTrainedModel, str, str, str]]


def module_codes(model: PreTrainedModel) -> list[tuple[str, nn.Module, AttentionCode]]:
    """List the model's modules by name, with the facts about the code of each."""
    return answer_once(_module_codes, model)


def _module_codes(model: PreTrainedModel) -> list[tuple[str, nn.Module, AttentionCode]]:
    return [(name, module, code_of(module)) for name, module in modules_by_name(model)]


def attention_refusals(model: PreTrainedModel) -> Refusals:
    """Return the innermost model around each module whose attention cannot be ours, its name, the reason as a clause,
    and the name of the module.
    """
    return answer_once(_all_refusals, model)


def _all_refusals(model: PreTrainedModel) -> Refusals:
    return list(_refusals(model))


def _refusals(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, str, str, str]]:
    codes = module_codes(model)
    models = {name: module for name, module, _ in codes if isinstance(module, PreTrainedModel)}
    for name, _, code in codes:
        refusal = code.refusal
        if refusal is not None and not (POSITION_BIAS in refusal and _reads_biases(model)):
            around = max((outer for outer in models if is_within(name, outer)), key=len)
            yield models[around], around, refusal, name


def _reads_biases(model: PreTrainedModel) -> bool:
    """Return whether our attention reads a bias of positions in a model: over pages, which others have no need of."""
    return has_encoder(model) and bool(model.can_generate())


def has_encoder(model: PreTrainedModel) -> bool:
    """Return whether the decoder of a model, or of the part that generates its tokens, has an encoder."""
    return bool(model.config.is_encoder_decoder or getattr(layers_config(model.config), "is_encoder_decoder", False))


def stock_parts(model: PreTrainedModel) -> dict[str, str]:
    """Return the parts that keep their own attention, by name, each with the reason, as one clause.

    Such a part has a config of its own, in which transformers looks up the attention and the masks of that part
    alone; or it is an encoder that looks nothing up. It cannot be one that the decoder is in.
    """
    return answer_once(_stock_parts, model)


def _stock_parts(model: PreTrainedModel) -> dict[str, str]:
    parts: dict[str, str] = {}
    decoder = {*model.get_decoder().modules()} if has_encoder(model) else set()
    for part, name, refusal, _ in attention_refusals(model):
        if part in decoder:  # which may have a copy of the config
            continue
        if not any(_has_decoders_config(model, module) for module in part.modules()) or _looks_nothing_up(model, part):
            parts.setdefault(name, refusal)
    return parts


def _has_decoders_config(model: PreTrainedModel, module: nn.Module) -> bool:
    return id(getattr(module, "config", None)) in (id(model.config), id(layers_config(model.config)))


LOOKED_UP = ("_attn_implementation", "_mask(")  # what the code of a model calls for its attention and its masks


def _looks_nothing_up(model: PreTrainedModel, part: PreTrainedModel) -> bool:
    """Return whether a part is an encoder that makes its own masks and computes all its attention by itself."""
    if not has_encoder(model) or part is not model.get_encoder():
        return False
    sources = [source_of(original_class(each)) for each in part.modules() if isinstance(each, PreTrainedModel)]
    known = not any(source is None or name in source for source in sources for name in LOOKED_UP)
    return known and not any(attention_code(original_class(each)).attends for each in part.modules())


def refused_attention(model: PreTrainedModel, is_known: Callable[[str], bool] | None = None) -> str | None:
    """Return why attention that transformers looks up in the decoder's config cannot be ours, as one clause.

    is_known: says of a module, by its name, that it may attend by itself.
    """
    if not settable_parts(model):
        return f"the attention of {type(model).__name__} does not go through transformers' AttentionInterface"
    parts = stock_parts(model)
    refusals = ((each, name) for _, part, each, name in attention_refusals(model) if part not in parts)
    return next((refusal for refusal, name in refusals if is_known is None or not is_known(name)), None)


def modules_outside(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the model's modules by name, except for those in parts that keep their own attention."""
    parts = stock_parts(model)
    for name, module, _ in module_codes(model):
        if not any(is_within(name, part) for part in parts):
            yield name, module


def settable_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the outermost models whose attention transformers can set; none if that of the decoder is not in them.

    Transformers looks for its interface in the file of a class. That of a model with a tower, which computes attention
    by itself, may have none, and hold a decoder of another file.
    """
    if model._can_set_attn_implementation():
        return [model]
    decoder, found = layers_config(model.config), dict[str, PreTrainedModel]()
    for name, part in model.named_modules():
        settable = isinstance(part, PreTrainedModel) and part._can_set_attn_implementation()
        if settable and not any(is_within(name, outer) for outer in found):
            found[name] = part
    parts = list(found.values())
    return parts if decoder is not model.config and any(part.config is decoder for part in parts) else []


def set_our_attention(model: PreTrainedModel, set_implementation: Callable[[str], None]) -> None:
    """Set our attention through transformers' own method, except in the parts that keep theirs."""
    inside = [module for name in stock_parts(model) for module in model.get_submodule(name).modules()]
    apart = [m for m in inside if isinstance(m, PreTrainedModel) and not _has_decoders_config(model, m)]
    kept = [(m.config, stock_implementation(model, m)) for m in apart]
    for part in settable_parts(model):
        if part is model:
            set_implementation(ATTENTION_NAME)
        else:
            part.set_attn_implementation(ATTENTION_NAME)
    for config, name in kept:
        config._attn_implementation_internal = name
