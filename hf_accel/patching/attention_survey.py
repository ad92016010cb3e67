"""Look at a model's attention, its cache and its loop: which can be ours, and why not. Reads, never writes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..attention import AttentionSpec
from ..attention.hf import ATTENTION_NAME
from ..attention.hf.latents import is_known_expansion
from ..attention.hf.stock import (
    attention_refusals,
    eager_agrees,
    module_codes,
    modules_outside,
    refused_attention,
    replaced_function,
    stock_implementation,
)
from ..cache.hf import NOT_PAGED, keeps_states_alone, model_kinds
from ..cache.hf.kinds import blocks_refusal
from ..cache.kinds import CompressedKeys, IndexKeys, KeysAndValues, RecurrentStates
from ..cache.kinds.state_sizes import steps_of_prompts_differ
from ..cache.quantized import QUANTIZED, dims_refusal
from ..config import CacheConfig
from ..errors import UnsupportedError
from ..fused.hf.indexers import is_known_indexer
from ..fused.hf.operator_models import OperatorModel
from ..fused.hf.source_layers import is_source_attention
from ..generation.hf.prompts import PREPARING, own_methods, text_refusal
from ..generation.hf.refusals import OWN_METHODS
from ..kernels.triton import refusal as triton_refusal
from ..models import answer_once, head_dim, is_within, layers_config, num_kv_heads, positions_depend_on_length
from ..parallel.tensor import TensorParallel
from ..recognition.code import attention_code, code_of
from ..recognition.generation_code import counts_nothing
from ..recognition.joined_code import attends_to_joined_keys
from ..recognition.source import source_of
from ..recurrent.hf.convolutions import is_known_convolution
from ..recurrent.hf.matrix_memories import hands_states_on
from ..recurrent.hf.recurrences import known_recurrence, unknown_recurrences_refusal
from ..tensors import model_device
from .decoder_survey import (
    causality_refusal,
    counting_refusal,
    decoder_loop_refusal,
    decoder_refusal,
    sees_whole_prompts,
    tried_operators,
)
from .sequence_survey import is_own_code, own_code
from .survey import split_of

# The implementations that our attention and mask functions can replace.
STOCK_ATTENTION = (
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", ATTENTION_NAME,
)  # fmt: skip
KNOWN_OTHERWISE = is_known_convolution, is_known_indexer, hands_states_on
WINDOW_MASKS = ("sliding_window_causal_mask", "bidirectional_sliding_window_mask", "create_masks_for_generate")


def model_attention_refusal(model: PreTrainedModel) -> str | None:
    """Return why the model's attention cannot be ours, as one clause; None if all of it is known."""
    return answer_once(_model_attention_refusal, model)


def _model_attention_refusal(model: PreTrainedModel) -> str | None:
    if (refusal := refused_attention(model, partial(is_own_code, model))) is not None:
        return refusal
    name = type(model).__name__
    for module in attention_modules(model):
        if (implementation := stock_implementation(model, module)) not in STOCK_ATTENTION:
            return f"its attention was set to {implementation!r}, which may do what ours does not"
        if (replaced := replaced_function(module)) is not None:
            return f"others have replaced {replaced}, which its attention runs"
    if _has_window(layers_config(model.config)) and not _masks_windows(model):
        return f"{name} has a window in its config that its masks leave out"
    unknown = _function_refusal(model)
    return decoder_refusal(model) if unknown is None and model.config.is_encoder_decoder else unknown


def attends_nowhere(model: PreTrainedModel) -> bool:
    """Return whether no layer of the model attends: each keeps a recurrent state, and nothing else."""
    return keeps_states_alone(model.config) and not attention_modules(model) and not attention_refusals(model)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules that call an attention function of transformers' interface, without parts that keep theirs."""
    return list(answer_once(_attention_modules, model))


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for _, module in modules_outside(model) if attention_code(type(module)).attends]  # type: ignore[arg-type]


def attends_in_decoder_alone(model: PreTrainedModel, sites: Sequence[AttentionSite]) -> bool:
    """Return whether a model that generates text attends in these modules alone, and each of them is causal."""
    known = {site.module for site in sites if getattr(site.module, "is_causal", True)}
    return model.can_generate() and known.issuperset(attention_modules(model)) and not attention_refusals(model)


def _function_refusal(model: PreTrainedModel) -> str | None:
    """Return a clause if a function that attends in the model does not compute what ours does.

    A module's own function is tried on random input. The sdpa of older transformers leaves a softcap out; newer ones
    do not let a model that has one choose sdpa.
    """
    for site in attention_sites(model, quantized_kv=False):
        name, implementation = type(site.module).__name__, stock_implementation(model, site.module)
        if implementation == "eager" and not eager_agrees(site.module, site.spec):
            return f"the attention function of {name} is not softmax(q k^T) v as we know it"
        if implementation == "sdpa" and site.spec.softcap is not None:
            return f"{name} has a softcap that sdpa leaves out; model.set_attn_implementation('eager') keeps it"
    return None


def cache_refusal(model: PreTrainedModel) -> str | None:
    """Return why generate cannot use a paged cache, as one clause; None if it can."""
    refusal = _pages_refusal(model)
    return refusal if refusal is None or not model.can_generate() else causality_refusal(model) or refusal


def _pages_refusal(model: PreTrainedModel) -> str | None:
    """Return what in the model's code keeps its cache from being paged, as one clause; None if nothing does."""
    name = type(model).__name__
    if not model.can_generate():
        return f"{name} does not generate text"
    refusal = None if attends_nowhere(model) else model_attention_refusal(model)
    if refusal is not None or known_operators(model) is not None:
        return operator_refusal(model, refusal)
    if not getattr(layers_config(model.config), "is_causal", True):
        return f"{name} is configured for bidirectional attention"
    for module_name, module, code in module_codes(model):
        unpaged = code.unpaged
        if unpaged is None or any(known(module) for known in KNOWN_OTHERWISE) or is_source_attention(model, module):
            continue
        if is_own_code(model, module_name) or any(is_within(name, module_name) for name in own_code(model)):
            continue  # a trial has shown what it does, and what those around it do with the cache
        known = known_recurrence(module)
        if known is None:
            return unpaged
        if known.has_limits(module) and not steps_of_prompts_differ(layers_config(model.config)):
            return f"the steps of {type(module).__name__} have limits that its config does not name"
    try:
        kinds = model_kinds(model.config)
    except UnsupportedError as error:
        return str(error).removesuffix(f"; {NOT_PAGED}")
    if not own_code(model):  # or a trial has shown what the layers do
        refusal = _compression_refusal(model, compressed=kinds.has(CompressedKeys)) or _reuse_refusal(model)
        refusal = refusal or answer_once(_unknown_recurrences, model)
        if refusal is not None:
            return refusal
    clauses = (kind.device_refusal(model_device(model)) for kind in kinds.distinct)
    clause = next(filter(None, clauses), None)
    return _bidirectional_refusal(model) if clause is None else f"{name} {clause}"


def _unknown_recurrences(model: PreTrainedModel) -> str | None:
    layers = model_kinds(model.config).layers
    count = sum(isinstance(kind, RecurrentStates) for own in layers for kind in own)
    return unknown_recurrences_refusal(model, count) if count else None


def known_operators(model: PreTrainedModel) -> OperatorModel | None:
    """Return what is known of a model that attends by torch's operators, if its pages can be read that way."""
    own = (code_of(each).unpaged is not None or attends_to_joined_keys(each) for each in attention_modules(model))
    is_rare = model_attention_refusal(model) is not None or any(own)
    if not is_rare or split_of(model) is not None:
        return None
    known = answer_once(tried_operators, model)
    return known if isinstance(known, OperatorModel) else None


def operator_refusal(model: PreTrainedModel, refusal: str | None) -> str | None:
    """Return why a model that reads pages by code of its own cannot do so, as one clause; None if it can.

    refusal: why its attention cannot be ours; None if it can, and code between it and the cache is its own.
    """
    if known_operators(model) is None:
        known = answer_once(tried_operators, model)
        return f"{refusal}, and {known}" if isinstance(known, str) else refusal
    try:
        kinds = model_kinds(model.config)
    except UnsupportedError as error:
        return str(error).removesuffix(f"; {NOT_PAGED}")
    takes_windows = any(map(attends_to_joined_keys, attention_modules(model)))  # from its pages
    if all(isinstance(kind, KeysAndValues) and (takes_windows or kind.window is None) for kind in kinds.distinct):
        return None
    return refusal or f"{type(model).__name__} keeps other things than keys and values of all tokens"


def _compression_refusal(model: PreTrainedModel, *, compressed: bool) -> str | None:
    """Return why the pages of a model cannot hold what its attention caches, as one clause; None if they can.

    compressed: whether the config says that it caches compressed keys.
    """
    for module in attention_modules(model):
        code = code_of(module)
        known = bool(code.expands) and is_known_expansion(module)
        if code.caches and known is not compressed:
            return f"{type(module).__name__} makes K and V of what it caches in a way of its own"
    if compressed and split_of(model) is not None:
        return f"the compressed keys of {type(model).__name__} are not shared out over ranks"
    return None


def _reuse_refusal(model: PreTrainedModel) -> str | None:
    """Return a clause if a layer that keeps no keys and values attends to others than another layer has given it."""
    kinds = model_kinds(model.config).layers
    indexers = sum(isinstance(kind, IndexKeys) for own in kinds for kind in own)
    if indexers and indexers != sum(map(is_known_indexer, model.modules())):
        return f"{type(model).__name__} selects tokens by other indexers than those that are known"
    decoder = type(layers_config(model.config))
    # The layers of an encoder, of which there may be more than of its decoder, keep nothing.
    encoder = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
    for site in attention_sites(model, quantized_kv=False):
        index: Any = site.module.layer_idx
        if type(site.module.config) is not decoder or site.module in encoder:
            continue  # a tower may number its layers too
        if (index >= len(kinds) or not kinds[index]) and not code_of(site.module).reuses:
            return f"{type(site.module).__name__} keeps no keys and values, and attends to some in a way of its own"
    return None


def loop_refusal(model: PreTrainedModel) -> str | None:
    """Return why a model cannot compute tokens of several sequences in one row, as one clause; None if it can."""
    if model.config.is_encoder_decoder:
        return decoder_loop_refusal(model)
    name = type(model).__name__
    parameters = inspect.signature(type(model).forward).parameters
    counts = "position_ids" in parameters or (attends_nowhere(model) and counts_nothing(model))
    if not counts and known_operators(model) is None and (refusal := counting_refusal(model)) is not None:
        return refusal
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if set(needed) - {"self", "input_ids"}:
        return f"{name} needs more than token ids"
    if positions_depend_on_length(model.config):
        return "its rotary scaling depends on the length of the batch"
    if getattr(model, "_is_stateful", False) and cache_refusal(model) is not None:
        return f"{name} keeps a recurrent state that cannot go back"
    prepares = own_methods(model)
    for method in OWN_METHODS:
        if method not in PREPARING and getattr(type(model), method) is not getattr(GenerationMixin, method):
            return f"{name} has a {method} of its own"
    refusal = text_refusal(model) if prepares else None
    return None if refusal is None else f"{name} has a {prepares[0]} of its own, and {refusal}"


def pages_refusal(model: PreTrainedModel, cache: CacheConfig | None) -> str | None:
    """Return why pages of the requested dtype cannot hold the model's heads, as one clause; None if they can."""
    if cache is not None and (refusal := blocks_refusal(model.config, cache)) is not None:
        return refusal
    if cache is None or (quantized := QUANTIZED.get(cache.dtype)) is None:
        return None
    if quantized.differ and triton_refusal(model_device(model).type) is None:
        return "no Triton kernel reads keys and values of two dtypes; take 'int8' or 'int4'"
    clauses = (kind.dtype_refusal(quantized) for kind in model_kinds(model.config).distinct)
    if (clause := next(filter(None, clauses), None)) is not None:
        return clause
    operators, sites = known_operators(model), attention_sites(model, quantized_kv=True)
    specs = [site.spec for site in sites] + ([] if operators is None else operators.specs)
    return next(filter(None, (dims_refusal(spec.head_dim, spec.value_dim, quantized) for spec in specs)), None)


def _has_window(config: Any) -> bool:
    try:
        return bool(getattr(config, "sliding_window", None))
    except RuntimeError:  # its layers have configs of their own
        return True


def _masks_windows(model: PreTrainedModel) -> bool:
    """Return whether some part makes masks for a window. Which layers get them is checked in each pass."""
    parts: set[Any] = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    return any(name in (source_of(part) or "") for part in parts for name in WINDOW_MASKS)


def _bidirectional_refusal(model: PreTrainedModel) -> str | None:
    """Return a clause if the modules that keep K and V are not causal, and their attention function follows
    `is_causal`.

    One module that is causal is enough: others may attend to an encoder's output, which a decoder alone never gets.
    Where the model's own methods prepare the calls of its decoder, they are asked what the tokens of a prompt see.
    """
    is_encoder = getattr(model.config, "is_decoder", None) is False
    if own_methods(model) and not (is_encoder and causality_refusal(model) is not None):
        return None
    sites = [s for s in attention_sites(model, quantized_kv=False) if stock_implementation(model, s.module) != "eager"]
    if sites and not any(getattr(site.module, "is_causal", True) for site in sites) and not sees_whole_prompts(model):
        return f"{sites[0].name!r} is not causal"
    return None


@dataclass(frozen=True)
class AttentionSite:
    """An attention module of the decoder, its name, and what its attention needs of a backend."""

    name: str
    module: nn.Module
    spec: AttentionSpec


def attention_sites(model: PreTrainedModel, *, quantized_kv: bool) -> list[AttentionSite]:
    """List the decoder's self-attention modules, with what each needs of a backend."""
    return list(answer_once(_attention_sites, model, quantized_kv))


def _attention_sites(model: PreTrainedModel, quantized_kv: bool) -> list[AttentionSite]:
    config = layers_config(model.config)
    try:
        windows = model_kinds(config).mask_windows
    except UnsupportedError:
        windows = []
    if getattr(config, "num_attention_heads", None) is None:  # a model of several parts, each with its own
        return []
    sites, split = [], split_of(model)
    for name, module in modules_outside(model):
        index = getattr(module, "layer_idx", None)
        if not (isinstance(index, int) and "attention" in type(module).__name__.lower() and hasattr(module, "config")):
            continue
        window = windows[index] if 0 <= index < len(windows) else None
        spec = _spec(model, module, window, quantized_kv=quantized_kv)
        sites.append(AttentionSite(name, module, spec if split is None else _on_rank(spec, name, split)))
    return sites


def _on_rank(spec: AttentionSpec, name: str, split: TensorParallel) -> AttentionSpec:
    """Return the spec with the heads that one rank has."""
    divisor = split.heads_divisor(name)
    if spec.num_kv_heads % divisor:
        raise UnsupportedError(
            f"the {spec.num_kv_heads} K/V heads of {name!r} do not divide by tp_size={divisor}; take one that does"
        )
    return replace(spec, num_heads=spec.num_heads // divisor, num_kv_heads=spec.num_kv_heads // divisor)


def _spec(model: PreTrainedModel, module: nn.Module, window: int | None, *, quantized_kv: bool) -> AttentionSpec:
    config = layers_config(model.config)
    num_heads = config.num_attention_heads
    size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or head_dim(config)
    groups = getattr(module, "num_key_value_groups", None)  # layers may differ
    return AttentionSpec(
        dtype=model.dtype,
        device_type=model_device(model).type,
        head_dim=size,
        value_dim=getattr(module, "v_head_dim", None) or size,
        num_heads=num_heads,
        num_kv_heads=num_heads // groups if groups else num_kv_heads(config),
        window=window,
        softcap=getattr(config, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None) is not None,
        quantized_kv=quantized_kv,
        dropout=False,
    )
