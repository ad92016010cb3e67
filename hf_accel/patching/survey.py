"""Look at a model: which modules could be replaced, which may not and why. Reads, never writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config import PatchConfig, WeightConfig
from ..errors import UnsupportedError
from ..keywords import named
from ..linear.embedding import TABLE
from ..linear.experts import WEIGHT_MODULES, holds_experts
from ..linear.hf import METHOD, experts_refusal, lost_on_saving
from ..linear.quant_convolution import LINEAR
from ..models import modules_by_name, spans_processes
from ..parallel.tensor import TensorParallel, tensor_parallel
from ..recognition.generation_code import reads_weight_of
from ..recognition.linear_code import is_plain_linear
from ..recognition.row_convolution import sizes_of_linear
from ..recognition.source import source_of
from ..recognition.unchanged import has_own_forward
from ..recognition.window_products import is_product, product_convolutions
from ..tensors import is_plain_tensor, is_sharded, model_device
from ..undo.journal import original_class
from .check import MOVED, check_linear_names, hook_refusal, is_offloaded
from .convolution_site import ConvolutionSite
from .weight_groups import with_groups
from .weight_sites import EmbeddingSite, ExpertsSite, LinearSite, OffloadedSite

SCALED_LOOK_UP = "return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)"


def experts_sites(model: PreTrainedModel, skip: Sequence[str]) -> Iterator[ExpertsSite]:
    """Find the weights of all fused experts, each with the reason to leave the experts alone, if any."""
    other, is_lost = other_quantizer(model), lost_on_saving(model)
    for name, module in modules_by_name(model):
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
            yield ExpertsSite(names[key], module, skip=reason, key=key)


def linear_sites(model: PreTrainedModel, skip: Sequence[str]) -> Iterator[LinearSite]:
    """Find every Linear (and GPT-2's Conv1D, and convolutions of known modules that are products) with a weight of its
    own, each with the reason to leave it alone, if any.

    Pruning and weight normalization compute the weight again in each pass, so that there is none to replace.
    """
    head, owners = model.get_output_embeddings(), weight_owners(model)
    other, is_lost, split = other_quantizer(model), lost_on_saving(model), split_of(model)
    convolutions = product_convolutions(model)
    for name, module in modules_by_name(model):
        is_linear = isinstance(module, nn.Linear | Conv1D) or module in convolutions
        if is_linear and isinstance(module._parameters.get("weight"), nn.Parameter):
            tied = any(isinstance(owner, nn.Embedding) for owner in owners[id(module.weight)])
            reason = f"the model is quantized by {other}" if other is not None else None
            reason = reason or _reason_to_skip(model, name, owners, skip)
            if reason is None and is_lost(name):
                reason = "is renamed or joined with others when it is saved, so that it would not be found again"
            if reason is None and split is not None and is_sharded(module.weight):
                reason = split.refusal(name, module)
            if module in convolutions:
                reason = reason or convolutions[module]
                yield ConvolutionSite.of(name, module, MOVED if reason is None and is_offloaded(module) else reason)
                continue
            kind = OffloadedSite if is_offloaded(module) else LinearSite
            yield kind(name, module, is_head=module is head, is_tied=tied, skip=reason)


def sites_for(
    model: PreTrainedModel, config: WeightConfig, *, device_type: str | None = None
) -> tuple[list[LinearSite], str | None]:
    """Return all sites for a config, and why the embedding stays as it is although `config` may quantize it.

    device_type: where the weights will be, if the model is on meta still.
    Raises UnsupportedError for names in skip= and for groups that do not fit.
    """
    check_linear_names(model, config)
    on_cpu = (device_type or model_device(model).type) in ("cpu", "meta")
    sites = with_groups(model, list(linear_sites(model, config.skip)), config, on_cpu=on_cpu)
    experts = list(experts_sites(model, config.skip))
    return with_embedding(model, config, [*sites, *experts])


def split_of(model: PreTrainedModel) -> TensorParallel | None:
    """Return how a model is split over ranks; None if it is whole. Raises what `tensor_parallel` raises."""
    return tensor_parallel(model) if spans_processes(model) else None


def check_other_quantizer(model: PreTrainedModel, config: PatchConfig) -> None:
    """Raise UnsupportedError if weights= was given for a model that another library has quantized.

    Two quantizers cannot save one checkpoint.
    """
    other = other_quantizer(model)
    asked = "weights" in config.explicit and config.weights is not None and not config.weights.only_if_faster
    if other is not None and asked:
        raise UnsupportedError(
            f"weights= was asked for, but the model is quantized by {other} already; leave weights= out, or load the "
            "float model"
        )


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
    if type(module) not in (Conv1D, nn.Conv1d) and not is_plain_linear(module):
        return f"is a {type(module).__name__}, not a plain Linear"
    shared = [m for m in owners[id(module.weight)] if m is not module and not isinstance(m, nn.Embedding)]
    if shared or (module is not head and len(owners[id(module.weight)]) > 1):
        return "shares its weight with another module"
    if not module.weight.dtype.is_floating_point or module.weight.dtype == torch.float64:
        return f"has {module.weight.dtype} weights"
    shape: Any = module.weight.shape
    if 0 in shape:  # of shared experts that a model has none of
        return f"has no weights, as its shape is {list(shape)}"
    if "lora_" in name:
        return "is an adapter"
    if weight_is_read(model, name):
        return "has its weight read by the module around it"
    return hook_refusal(module, model) or _reason_by_role(model.config, module, head)


def weight_is_read(model: PreTrainedModel, name: str) -> bool:
    """Return whether the parent's forward reads the weight itself, and would dequantize it each time."""
    parent, _, own_name = name.rpartition(".")
    return reads_weight_of(original_class(model.get_submodule(parent)).forward, own_name)


def _reason_by_role(config: Any, module: nn.Module, head: nn.Module | None) -> str | None:
    out_features = sizes_of_linear(module)[1]
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    if any(getattr(config, key, None) == out_features for key in experts):
        return "routes tokens to experts"
    if module is not head and type(config).model_type and out_features == getattr(config, "num_labels", None):
        return "is a classification head"
    return None


# -- by name -------------------------------------------------------------------------------------------


def sites_named(model: PreTrainedModel, names: Iterable[str], *, of_experts: bool = True) -> dict[str, LinearSite]:
    """Return the sites whose weights a checkpoint holds quantized under these names, without names that are of none.

    of_experts: whether the weight of experts may be one of them.
    """
    wanted = list(names)
    all_experts = experts_sites(model, ()) if of_experts and wanted else ()
    experts = {site.name: site for site in all_experts if site.skip is None}
    found = {name: experts.get(name) or _site_named(model, name) for name in wanted}
    return {name: site for name, site in found.items() if site is not None}


def _site_named(model: PreTrainedModel, name: str) -> LinearSite | None:
    around, _, last = name.rpartition(".")
    module, parent = _submodule(model, name), _submodule(model, around)
    if module is not None and (type(module) is Conv1D or is_plain_linear(module)):
        return LinearSite(name, module)
    if last == LINEAR and is_product(parent):
        return ConvolutionSite(name, parent)  # type: ignore[arg-type]
    if last == TABLE and isinstance(parent, nn.Embedding) and parent is input_embedding(model):
        return EmbeddingSite(name, parent)
    return None


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


# -- the input embedding -------------------------------------------------------------------------------


def with_embedding(
    model: PreTrainedModel, config: WeightConfig, sites: list[LinearSite]
) -> tuple[list[LinearSite], str | None]:
    """Return the sites, with what `config` lets the input embedding look its rows up in, and why it stays as it is.

    sites: those of all linear layers. An embedding is quantized by itself only where that was asked for.
    """
    if config.embedding is None:
        return sites, None
    embedding = input_embedding(model)
    name = next((name for name, module in modules_by_name(model) if module is embedding), "")
    weight = embedding._parameters.get("weight") if isinstance(embedding, nn.Embedding) else None
    if not name or weight is None:
        return sites, "it has no embedding with a weight in floating point"
    head = next((site for site in sites if site.is_head and site.module._parameters["weight"] is weight), None)
    if head is None:
        own = EmbeddingSite(f"{name}.{TABLE}", embedding)
        refusal = _own_refusal(model, own, config) or _refusal(model, name, embedding, {embedding})
        return (sites, refusal) if refusal else ([*sites, own], None)
    refusal = _head_refusal(model, head, config) or _refusal(model, name, embedding, {embedding, head.module})
    if refusal is not None:
        shared = replace(head, remark=f"the embedding stays as it is: {refusal}")
    else:
        shared = replace(head, embeddings=(name,), remark=f"{name} looks its rows up in it")
    return [shared if site is head else site for site in sites], refusal


def input_embedding(model: PreTrainedModel) -> Any:
    """Return the module that turns tokens into vectors; None if the model has none."""
    try:
        found: Any = model.get_input_embeddings()
    except NotImplementedError:  # a model of several inputs, or of images alone
        return None
    return found if isinstance(found, nn.Module) else None  # Perceiver's is a parameter


def _head_refusal(model: PreTrainedModel, head: LinearSite, config: WeightConfig) -> str | None:
    """Return why an embedding cannot look its rows up in the head, whose weight is its own."""
    if config.head is None or head.skip is not None:
        return f"its head stays as it is: {head.skip or 'head=None'}"
    if config.embedding == "auto" and not (isinstance(model, GenerationMixin) and model.can_generate()):
        return "the model does not generate text"
    wanted = "int8" if config.embedding == "auto" else config.embedding
    return None if config.head == wanted else f"it is the weight of the head, which gets {config.head.upper()}"


def _own_refusal(model: PreTrainedModel, site: EmbeddingSite, config: WeightConfig) -> str | None:
    """Return why an embedding gets no quantized weight of its own."""
    if config.for_embedding is None:
        return "it shares no weight with a head"
    other = other_quantizer(model)
    if other is not None:
        return f"the model is quantized by {other}"
    weight = site.parameter
    if is_sharded(weight) or not is_plain_tensor(weight) or not weight.dtype.is_floating_point:
        return "its weight is no plain float tensor"
    if lost_on_saving(model)(site.name):
        return "it is renamed or joined with others when it is saved, so that it would not be found again"
    return None


def _refusal(model: PreTrainedModel, name: str, embedding: nn.Embedding, owners: set[nn.Module]) -> str | None:
    """Return why an embedding must stay. Known are those that look up, and those of Gemma, which multiply by a number
    then.
    """
    kind, weight = type(embedding).__name__, embedding.weight
    if set(weight_owners(model)[id(weight)]) != owners:
        return "other modules have its weight too"
    if [module for _, module in model.named_modules(remove_duplicate=False)].count(embedding) > 1:
        return f"{kind} is in the model twice"
    if is_sharded(weight) or hasattr(embedding, "_hf_hook") or has_own_forward(embedding):
        return f"{kind} is moved or split by others"
    if type(embedding) is not nn.Embedding:
        body = [line.strip() for line in (source_of(type(embedding).forward) or "").splitlines()]
        if body[1:] != [SCALED_LOOK_UP] or not isinstance(getattr(embedding, "scalar_embed_scale", None), float):
            return f"the forward of {kind} is not known"
    if embedding.max_norm is not None:
        return f"{kind} has a max_norm, which changes rows that are looked up"
    if embedding.sparse or embedding.scale_grad_by_freq:
        return f"{kind} is set up to be trained, by sparse or scale_grad_by_freq"
    if weight_is_read(model, name):
        return "the module around it reads its weight"
    return None
