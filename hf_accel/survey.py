"""Look at a model: which modules could be replaced, which may not and why. Reads, never writes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .attention import AttentionSpec
from .cache.hf import layer_windows
from .config import GROUP_SIZES
from .errors import UnsupportedError
from .linear.hf import METHOD
from .tensors import is_plain


@dataclass(frozen=True)
class LinearSite:
    """A module that multiplies by a weight matrix.

    is_tied: the weight is the input embedding's too. skip: one clause why the module stays, or None.
    """

    name: str
    module: nn.Module
    is_head: bool
    is_tied: bool
    skip: str | None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def weight(self) -> Tensor:
        """[out, in], whatever the module's own layout."""
        return self.parameter.t() if isinstance(self.module, Conv1D) else self.parameter

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters.get("bias")


def check_model(model: object) -> PreTrainedModel:
    """The transformers model to work on, inside of a PEFT wrapper if need be; UnsupportedError if it is none."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"hf_accel works on a transformers PreTrainedModel, not on {type(model).__name__}; "
            "pass the model that from_pretrained returned"
        )
    on_meta = next((n for n, p in inner.named_parameters() if p.device.type == "meta"), None)
    if on_meta is not None:
        raise UnsupportedError(
            f"parameter {on_meta!r} is on the meta device and has no values; load the model's weights first"
        )
    return inner


def linear_sites(model: PreTrainedModel, skip: tuple[str, ...]) -> Iterator[LinearSite]:
    """Every Linear (and GPT-2's Conv1D) with a weight of its own, each with the reason to leave it alone, if any.

    Pruning and weight normalization compute the weight anew in each pass, so that there is none to replace.
    """
    head = model.get_output_embeddings()
    owners = _weight_owners(model)
    other = other_quantizer(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and isinstance(module._parameters.get("weight"), nn.Parameter):
            tied = any(isinstance(owner, nn.Embedding) for owner in owners[id(module.weight)])
            reason = f"the model is quantized by {other}" if other is not None else None
            reason = reason or _reason_to_skip(model, name, module, owners, skip, head)
            yield LinearSite(name, module, is_head=module is head, is_tied=tied, skip=reason)


def check_skip(model: nn.Module, skip: tuple[str, ...]) -> None:
    """Raise UnsupportedError for a name in skip= that is no Linear's, and so would skip nothing."""
    modules = dict(model.named_modules())
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
    for wanted in skip:
        if not any(named(name, wanted) for name in linears):
            hint = _meant(wanted, modules, linears)
            raise UnsupportedError(f"skip={wanted!r} is the name, or the end of the name, of no Linear; {hint}")


def _meant(wanted: str, modules: Iterable[str], linears: list[str]) -> str:
    inside = {
        wanted + name[len(around) :]
        for around in modules
        for name in linears
        if named(around, wanted) and name.startswith(f"{around}.")
    }
    ends = sorted({name.rpartition(".")[2] for name in linears})
    close = sorted(inside) or difflib.get_close_matches(wanted, [*ends, *linears], n=3)
    return f"did you mean {shortened(close)}?" if close else f"there are {shortened(ends)}"


def shortened(names: list[str], most: int = 8) -> str:
    return ", ".join([*map(repr, names[:most]), *(["..."] if len(names) > most else [])])


def named(name: str, wanted: str) -> bool:
    """Whether `wanted` is a module's name or the end of it."""
    return name == wanted or name.endswith("." + wanted)


def common_group_size(model: PreTrainedModel) -> int:
    """The largest group of inputs that divides those of every Linear; the smallest known if none does."""
    widths = [site.weight.shape[1] for site in linear_sites(model, ()) if not site.is_head and site.skip is None]
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    return max(fitting, default=min(GROUP_SIZES))


def other_quantizer(model: PreTrainedModel) -> str | None:
    """Who has quantized the model's weights, if not hf_accel: transformers' name of the method, or their class."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is not None and method != METHOD:
        return str(getattr(method, "value", method))
    weights = [m._parameters.get("weight") for m in model.modules() if isinstance(m, nn.Linear)]
    foreign = [w for w in weights if w is not None and not is_plain(w) and not hasattr(w, "device_mesh")]  # no DTensor
    return type(foreign[0]).__name__ if foreign else None


def _weight_owners(model: PreTrainedModel) -> dict[int, list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    return owners


def _reason_to_skip(
    model: PreTrainedModel,
    name: str,
    module: nn.Module,
    owners: dict[int, list[nn.Module]],
    skip: tuple[str, ...],
    head: nn.Module | None,
) -> str | None:
    if any(named(name, wanted) for wanted in skip):
        return "named in skip="
    if type(module) not in (nn.Linear, Conv1D):
        return f"is a {type(module).__name__}, not a plain Linear"
    shared = [m for m in owners[id(module.weight)] if m is not module and not isinstance(m, nn.Embedding)]
    if shared or (module is not head and len(owners[id(module.weight)]) > 1):
        return "shares its weight with another module"
    if not module.weight.dtype.is_floating_point or module.weight.dtype == torch.float64:
        return f"has {module.weight.dtype} weights"
    if hasattr(module, "_hf_hook"):
        return "is moved between devices by accelerate"
    if "lora_" in name:
        return "is an adapter"
    if _weight_is_read(model, name):
        return "has its weight read by the module around it"
    return _reason_by_role(model.config, module, head)


def _weight_is_read(model: PreTrainedModel, name: str) -> bool:
    """Whether the parent's forward reads the weight itself (T5's `wo`), which would dequantize it in each pass."""
    parent, _, own_name = name.rpartition(".")
    return f"self.{own_name}.weight" in _source(type(model.get_submodule(parent)).forward)


@lru_cache(maxsize=4096)
def _source(forward: Any) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):  # what was typed at a prompt has no source file
        return ""


def _reason_by_role(config: Any, module: nn.Module, head: nn.Module | None) -> str | None:
    out_features = module.nf if isinstance(module, Conv1D) else module.out_features
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    if any(getattr(config, key, None) == out_features for key in experts):
        return "routes tokens to experts"
    if module is not head and type(config).model_type and out_features == getattr(config, "num_labels", None):
        return "is a classification head"
    return None


def attention_refusal(model: PreTrainedModel) -> str | None:
    """Why the model's attention cannot be ours, as one clause; None if it can."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder; its cross-attention stays stock"
    if not model._can_set_attn_implementation():
        return f"the attention of {name} does not go through transformers' AttentionInterface"
    return None


def cache_refusal(model: PreTrainedModel) -> str | None:
    """Why generate cannot use a paged cache, as one clause; None if it can."""
    if not model.can_generate():
        return f"{type(model).__name__} does not generate text"
    refusal = attention_refusal(model)
    if refusal is not None:
        return refusal
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        return f"{type(model).__name__} caches compressed keys and makes K from them on the way to its attention"
    if not getattr(model.config.get_text_config(decoder=True), "is_causal", True):
        return f"{type(model).__name__} is configured for bidirectional attention"
    try:
        layer_windows(model.config)
    except UnsupportedError as error:
        return str(error).removesuffix("; use cache=None")
    return None


@dataclass(frozen=True)
class AttentionSite:
    name: str
    module: nn.Module
    spec: AttentionSpec


def attention_sites(model: PreTrainedModel, *, quantized_kv: bool) -> list[AttentionSite]:
    """The decoder's self-attention modules, with what their attention op is asked for."""
    config = model.config.get_text_config(decoder=True)
    try:
        windows = layer_windows(config)
    except UnsupportedError:
        windows = []
    sites = []
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if not (isinstance(index, int) and "attention" in type(module).__name__.lower() and hasattr(module, "config")):
            continue
        sites.append(AttentionSite(name, module, _spec(config, model, module, windows, index, quantized_kv)))
    return sites


def _spec(
    config: Any, model: PreTrainedModel, module: nn.Module, windows: list[int | None], index: int, quantized_kv: bool
) -> AttentionSpec:
    num_heads = config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // num_heads
    return AttentionSpec(
        dtype=model.dtype,
        device_type=model.device.type,
        head_dim=head_dim,
        value_dim=getattr(module, "v_head_dim", None) or head_dim,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        window=windows[index] if index < len(windows) else None,
        softcap=getattr(config, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None) is not None,
        quantized_kv=quantized_kv,
        dropout=False,
    )
