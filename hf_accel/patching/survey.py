"""Look at a model: which modules could be replaced, which may not and why. Reads, never writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention import AttentionSpec
from ..attention.hf import ATTENTION_NAME
from ..attention.hf.stock import attention_refusals, eager_agrees, modules_outside, stock_implementation, stock_parts
from ..cache.hf import NOT_PAGED, layer_kinds, layer_windows
from ..cache.quantized import QUANTIZED, dim_refusal
from ..config import GROUP_SIZES, CacheConfig, GroupSize, WeightConfig
from ..errors import UnsupportedError
from ..fused.hf.convolutions import is_known_convolution
from ..fused.hf.recurrences import is_known_recurrence, recurrent_pages_refusal
from ..generation.hf.refusals import OWN_METHODS
from ..linear.experts import WEIGHT_MODULES
from ..linear.hf import METHOD, experts_refusal, holds_experts, lost_on_saving, with_outputs_first
from ..models import head_dim, layers_config, num_kv_heads, positions_depend_on_length, spans_processes
from ..parallel.tensor import TensorParallel, tensor_parallel
from ..recognition.code import attention_code, code_of, source_of
from ..tensors import is_plain_tensor, is_sharded, local_tensor, model_device
from .check import check_skip, named
from .offloaded import hook_refusal


@dataclass(frozen=True)
class LinearSite:
    """A module that multiplies by a weight matrix, or looks rows up in it.

    is_tied: the weight is the input embedding's too. skip: one clause why the module stays, or None.
    """

    name: str
    module: nn.Module
    is_head: bool
    is_tied: bool
    skip: str | None

    @property
    def kind(self) -> str:
        """The plural by which the plan counts such sites."""
        return "head" if self.is_head else "linears"

    @property
    def is_read_whole(self) -> bool:
        """True if a decode step reads all of the weight."""
        return True

    @property
    def tensor_name(self) -> str:
        """The name of the weight in the model."""
        return f"{self.name}.weight"

    @property
    def count(self) -> int:
        """Weights in the parameter: one for each expert."""
        return 1

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Return the parameter, or another tensor of its shape, as weights [out, in]."""
        return [tensor.t() if isinstance(self.module, Conv1D) else tensor]

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def tensor(self) -> Tensor:
        """The parameter's numbers, or, of a model that is split over ranks, those that this rank holds."""
        return local_tensor(self.parameter)

    @property
    def weight(self) -> Tensor:
        """[out, in], whatever the module's own layout."""
        return self.tensor.t() if isinstance(self.module, Conv1D) else self.tensor

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters.get("bias")


@dataclass(frozen=True)
class ExpertsSite(LinearSite):
    """A parameter of fused experts. name: of the module that will hold it. module: the experts. key: the parameter."""

    key: str = ""

    @property
    def kind(self) -> str:
        return "weights of experts"

    @property
    def experts_name(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def tensor_name(self) -> str:
        return f"{self.experts_name}.{self.key}"

    @property
    def count(self) -> int:
        return int(self.parameter.shape[0])

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        return list(with_outputs_first(self.module, tensor))

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def weight(self) -> Tensor:
        """[experts, out, in]"""
        return with_outputs_first(self.module, self.tensor)

    @property
    def bias(self) -> None:
        """Biases of experts stay where they are."""


def experts_sites(model: PreTrainedModel, skip: Sequence[str]) -> Iterator[ExpertsSite]:
    """Find the weights of all fused experts, each with the reason to leave the experts alone, if any."""
    other, is_lost = other_quantizer(model), lost_on_saving(model)
    for name, module in model.named_modules():
        if not holds_experts(module):
            continue
        keys = [key for key in WEIGHT_MODULES if key in module._parameters]
        names = {key: f"{name}.{WEIGHT_MODULES[key]}" for key in keys}
        reason = f"the model is quantized by {other}" if other is not None else None
        if reason is None and any(named(one, wanted) for one in (name, *names.values()) for wanted in skip):
            reason = "named in skip="
        if reason is None and any(is_lost(one) for one in names.values()):
            reason = "are renamed or joined with others when they are saved, so that they would not be found again"
        reason = reason or experts_refusal(module)
        for key in keys:
            yield ExpertsSite(names[key], module, is_head=False, is_tied=False, skip=reason, key=key)


def linear_sites(model: PreTrainedModel, skip: Sequence[str]) -> Iterator[LinearSite]:
    """Find every Linear (and GPT-2's Conv1D) with a weight of its own, each with the reason to leave it alone, if any.

    Pruning and weight normalization compute the weight again in each pass, so that there is none to replace.
    """
    head, owners = model.get_output_embeddings(), weight_owners(model)
    other, is_lost, split = other_quantizer(model), lost_on_saving(model), split_of(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and isinstance(module._parameters.get("weight"), nn.Parameter):
            tied = any(isinstance(owner, nn.Embedding) for owner in owners[id(module.weight)])
            reason = f"the model is quantized by {other}" if other is not None else None
            reason = reason or _reason_to_skip(model, name, owners, skip)
            if reason is None and is_lost(name):
                reason = "is renamed or joined with others when it is saved, so that it would not be found again"
            if reason is None and split is not None and is_sharded(module.weight):
                reason = split.refusal(name, module)
            yield LinearSite(name, module, is_head=module is head, is_tied=tied, skip=reason)


def sites_for(model: PreTrainedModel, config: WeightConfig) -> list[LinearSite]:
    """Return all sites for a config. Raises UnsupportedError for names in skip= and for groups that do not fit."""
    check_skip(model, config.skip)
    sites = list(linear_sites(model, config.skip))
    experts = list(experts_sites(model, config.skip))
    if config.layout.group_size is not None and not config.is_nf4:  # whose blocks go over the ends of rows
        _check_groups(sites, config.bits, config.layout.group_size)
    head = config.for_head
    if head is not None and head.layout.group_size is not None:
        _check_head(sites, head.layout.group_size)
    return [*sites, *experts]


def _check_groups(sites: Iterable[LinearSite], bits: int, group_size: int) -> None:
    """Raise UnsupportedError unless groups of this size divide the inputs of every Linear that would be quantized."""
    widths = {site.name: site.weight.shape[1] for site in sites if not site.is_head and site.skip is None}
    cut = [name for name, width in widths.items() if width % group_size]
    if not cut:
        return
    fitting = [size for size in GROUP_SIZES if not any(width % size for width in widths.values())]
    ends = sorted({name.rpartition(".")[2] for name in cut})
    resized = f"weights={{'bits': {bits}, 'group_size': {max(fitting)}}}" if fitting else "weights='int8'"
    raise UnsupportedError(
        f"group_size={group_size} does not divide the {widths[cut[0]]} inputs of {cut[0]!r}; use {resized}, or leave "
        f"such layers as they are: weights={{'bits': {bits}, 'group_size': {group_size}, 'skip': {ends}}}"
    )


def _check_head(sites: Iterable[LinearSite], group_size: int) -> None:
    """Raise UnsupportedError unless groups of this size divide the inputs of the head."""
    head = next((site for site in sites if site.is_head and site.skip is None), None)
    if head is not None and head.weight.shape[1] % group_size:
        raise UnsupportedError(
            f"group_size={group_size} does not divide the {head.weight.shape[1]} inputs of {head.name!r}; leave head= "
            "out, or choose another group_size="
        )


def common_group_size(model: PreTrainedModel) -> GroupSize:
    """Return the largest group of inputs that divides those of every Linear; the smallest known if none does."""
    widths = [site.weight.shape[1] for site in linear_sites(model, ()) if not site.is_head and site.skip is None]
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    return max(fitting, default=min(GROUP_SIZES))


def split_of(model: PreTrainedModel) -> TensorParallel | None:
    """Return how a model is split over ranks; None if it is whole. Raises what `tensor_parallel` raises."""
    return tensor_parallel(model) if spans_processes(model) else None


def other_quantizer(model: PreTrainedModel) -> str | None:
    """Return who else has quantized the weights: transformers' name of the method, or the weights' class."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is not None and method != METHOD:
        return str(getattr(method, "value", method))
    weights = [m._parameters.get("weight") for m in model.modules() if isinstance(m, nn.Linear)]
    local = [w for w in weights if w is not None and not is_sharded(w)]  # a DTensor is not quantized
    foreign = [w for w in local if not is_plain_tensor(w)]
    return type(foreign[0]).__name__ if foreign else None


def weight_owners(model: PreTrainedModel) -> dict[int, list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    return owners


def _reason_to_skip(
    model: PreTrainedModel, name: str, owners: dict[int, list[nn.Module]], skip: Sequence[str]
) -> str | None:
    module, head = model.get_submodule(name), model.get_output_embeddings()
    if any(named(name, wanted) for wanted in skip):
        return "named in skip="
    if type(module) not in (nn.Linear, Conv1D):
        return f"is a {type(module).__name__}, not a plain Linear"
    shared = [m for m in owners[id(module.weight)] if m is not module and not isinstance(m, nn.Embedding)]
    if shared or (module is not head and len(owners[id(module.weight)]) > 1):
        return "shares its weight with another module"
    if not module.weight.dtype.is_floating_point or module.weight.dtype == torch.float64:
        return f"has {module.weight.dtype} weights"
    if "lora_" in name:
        return "is an adapter"
    if weight_is_read(model, name):
        return "has its weight read by the module around it"
    return hook_refusal(module, model) or _reason_by_role(model.config, module, head)


def weight_is_read(model: PreTrainedModel, name: str) -> bool:
    """Return whether the parent's forward reads the weight itself (T5's `wo`), and would dequantize it each time."""
    parent, _, own_name = name.rpartition(".")
    return f"self.{own_name}.weight" in (source_of(type(model.get_submodule(parent)).forward) or "")


def _reason_by_role(config: Any, module: nn.Module, head: nn.Module | None) -> str | None:
    out_features = module.nf if isinstance(module, Conv1D) else module.out_features
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    if any(getattr(config, key, None) == out_features for key in experts):
        return "routes tokens to experts"
    if module is not head and type(config).model_type and out_features == getattr(config, "num_labels", None):
        return "is a classification head"
    return None


# The implementations that our attention and mask functions can replace.
STOCK_ATTENTION = (
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", ATTENTION_NAME,
)  # fmt: skip
WINDOW_MASKS = ("sliding_window_causal_mask", "bidirectional_sliding_window_mask", "create_masks_for_generate")


def model_attention_refusal(model: PreTrainedModel) -> str | None:
    """Return why the model's attention cannot be ours, as one clause; None if all of it is known."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder; its cross-attention stays stock"
    if not model._can_set_attn_implementation():
        return f"the attention of {name} does not go through transformers' AttentionInterface"
    parts = stock_parts(model)
    for _, part, refusal in attention_refusals(model):
        if part not in parts:
            return refusal
    for module in attention_modules(model):
        implementation = stock_implementation(model, module)
        if implementation not in STOCK_ATTENTION:
            return f"its attention was set to {implementation!r}, which may do what ours does not"
    if _has_window(layers_config(model.config)) and not _masks_windows(model):
        return f"{name} has a window in its config that its masks leave out"
    return _function_refusal(model)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules that call an attention function of transformers' interface, without parts that keep theirs."""
    return [module for _, module in modules_outside(model) if attention_code(type(module)).attends]  # type: ignore[arg-type]


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
    name = type(model).__name__
    if not model.can_generate():
        return f"{name} does not generate text"
    refusal = model_attention_refusal(model)
    if refusal is not None:
        return refusal
    if getattr(layers_config(model.config), "kv_lora_rank", None):
        return f"{name} caches compressed keys and makes K from them on the way to its attention"
    if not getattr(layers_config(model.config), "is_causal", True):
        return f"{name} is configured for bidirectional attention"
    for module in model.modules():
        unpaged = code_of(module).unpaged
        if unpaged is not None and not (is_known_convolution(module) or is_known_recurrence(module)):
            return unpaged
    try:
        kinds = layer_kinds(model.config)
    except UnsupportedError as error:
        return str(error).removesuffix(f"; {NOT_PAGED}")
    if any(kind.convolves for kind in kinds) and model_device(model).type not in ("cpu", "meta"):
        return f"{name} has convolutions, whose pages are read on a CPU alone"
    if any(kind.recurs for kind in kinds) and (refusal := recurrent_pages_refusal(model_device(model))) is not None:
        return f"{name} has recurrent layers, {refusal}"
    return _bidirectional_refusal(model)


# Phi-3 has its own prepare_inputs_for_generation only for rotary scaling that depends on the length, which is refused
# before. A method that uses this name is therefore allowed.
LONG_ROPE = "original_max_position_embeddings"


def loop_refusal(model: PreTrainedModel) -> str | None:
    """Return why a model cannot compute tokens of several sequences in one row, as one clause; None if it can."""
    name = type(model).__name__
    parameters = inspect.signature(type(model).forward).parameters
    if "position_ids" not in parameters:
        return f"{name} takes no position_ids"
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if set(needed) - {"self", "input_ids"}:
        return f"{name} needs more than token ids"
    if positions_depend_on_length(model.config):
        return "its rotary scaling depends on the length of the batch"
    if getattr(model, "_is_stateful", False) and cache_refusal(model) is not None:
        return f"{name} keeps a recurrent state that cannot go back"
    for method in OWN_METHODS:
        own = getattr(type(model), method)
        if own is not getattr(GenerationMixin, method) and LONG_ROPE not in own.__code__.co_names:
            return f"{name} has a {method} of its own"
    return None


def pages_refusal(model: PreTrainedModel, cache: CacheConfig | None) -> str | None:
    """Return why pages of the requested dtype cannot hold the model's heads, as one clause; None if they can."""
    quantized = None if cache is None else QUANTIZED.get(cache.dtype)
    if quantized is None:
        return None
    specs = [site.spec for site in attention_sites(model, quantized_kv=True)]
    refusals = (dim_refusal(dim, quantized) for spec in specs for dim in (spec.head_dim, spec.value_dim))
    return next(filter(None, refusals), None)


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
    """
    sites = [s for s in attention_sites(model, quantized_kv=False) if stock_implementation(model, s.module) != "eager"]
    if sites and not any(getattr(site.module, "is_causal", True) for site in sites):
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
    config = layers_config(model.config)
    try:
        windows = layer_windows(config)
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
            f"the {spec.num_kv_heads} K/V heads of {name!r} do not divide by tp_size={divisor}; load the model with "
            "a tp_size that divides them"
        )
    return replace(spec, num_heads=spec.num_heads // divisor, num_kv_heads=spec.num_kv_heads // divisor)


def _spec(model: PreTrainedModel, module: nn.Module, window: int | None, *, quantized_kv: bool) -> AttentionSpec:
    config = layers_config(model.config)
    num_heads, size = config.num_attention_heads, getattr(module, "head_dim", None) or head_dim(config)
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
