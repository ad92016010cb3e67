"""A checkpoint that was saved quantized: what it must hold, and the layers that it is loaded into.

Nothing of the model is changed before config.json, and the headers and scales in the files, were found to be right:
transformers would cast what has another dtype, and fill in random numbers for what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import HfAccelError, UnsupportedError
from ..linear import ExpertWeights, QuantExperts, QuantLinear, QuantModule
from ..linear.formats import state, zeros
from ..linear.hf import spec_of
from ..patching.survey import experts_sites
from ..patching.ties import broken_ties
from ..patching.weight_sites import ExpertsSite
from .contents import AGAIN, check_floats, check_tensor, headers_of, missing, own_names, shared_names, with_shared
from .readers.reader import Found


def prepare(model: PreTrainedModel, modules: Mapping[str, Mapping[str, Any]], files: Sequence[str]) -> None:
    """Put an empty QuantLinear in the place of each of `modules`, for the checkpoint `files` to be loaded into.

    model: on the meta device. modules: settings by name, as `module_settings` gives them. Raises UnsupportedError for
    settings that this model cannot have, HfAccelError for files that do not hold what they should; the model then
    stays as it was.
    """
    experts = experts_by_name(model)
    layers: dict[str, QuantModule] = {
        name: empty_experts(experts[name], settings) if name in experts else empty_layer(model, name, settings)
        for name, settings in modules.items()
    }
    _check_whole(layers, experts)
    if files and all(str(file).endswith(".safetensors") for file in files):
        _check_files(model, layers, [Path(file) for file in files])
    put_layers(model, layers)


def put_layers(model: PreTrainedModel, layers: Mapping[str, QuantModule]) -> None:
    """Put layers in the place of the Linears, and of the experts, of a model that is being loaded."""
    for submodel, attribute, ties in list(broken_ties(model, layers)):
        setattr(submodel, attribute, ties)
    sites = experts_by_name(model)
    for name, placed in layers.items():
        if isinstance(placed, QuantLinear):
            model.set_submodule(name, placed)
    for experts in dict.fromkeys(sites[name].experts_name for name in layers if name in sites):
        found = {site.key: name for name, site in sites.items() if site.experts_name == experts}
        weights = {key: layer for key, name in found.items() if isinstance(layer := layers.get(name), ExpertWeights)}
        model.set_submodule(experts, QuantExperts(model.get_submodule(experts), weights))


def check_loaded(model: PreTrainedModel) -> None:
    """Check the quantized layers of a model that was just loaded, also from files that `prepare` does not read.

    Raises HfAccelError as `prepare` does.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, QuantModule):
            loaded = {
                f"{name}.{suffix}": Found(tensor.dtype, tuple(tensor.shape), tensor.detach)
                for suffix, tensor in (layer._buffers | layer._parameters).items()
                if tensor is not None and getattr(tensor, "_is_hf_initialized", False)  # transformers' mark: was read
            }
            _check_layer(model, name, layer, loaded)


# -- config.json ---------------------------------------------------------------------------------------


def original_of(model: PreTrainedModel, name: str) -> Any:
    """The Linear in whose place a quantized layer goes. Raises UnsupportedError if there is none."""
    try:
        original = model.get_submodule(name)
    except AttributeError as error:
        raise UnsupportedError(
            f"the checkpoint quantizes {name!r}, which {type(model).__name__} has not; load it with the class that "
            f"config.json names under architectures, or {AGAIN}"
        ) from error
    if type(original) not in (nn.Linear, Conv1D):
        raise UnsupportedError(
            f"the checkpoint quantizes {name!r}, which is a {type(original).__name__} here, no plain Linear; {AGAIN}"
        )
    return original


def empty_layer(
    model: PreTrainedModel, name: str, settings: Mapping[str, Any], *, bias: bool | None = None
) -> QuantLinear:
    """The layer that a checkpoint is loaded into. bias: whether it has one; None: if the original has."""
    original = original_of(model, name)
    weight: Any = original.weight
    try:
        spec = spec_of(settings, weight, is_transposed=isinstance(original, Conv1D))
        has_bias = original.bias is not None if bias is None else bias
        layer = QuantLinear.empty(spec, bias=has_bias, ordered=settings.get("ordered", False))
    except UnsupportedError as error:
        raise UnsupportedError(f"quantization_config in config.json, module {name!r}: {error}; {AGAIN}") from error
    # Without this mark transformers would draw random numbers for the weight, which is no Parameter.
    vars(layer)["_is_hf_initialized"] = True
    return layer


def experts_by_name(model: PreTrainedModel) -> dict[str, ExpertsSite]:
    """The weights of fused experts that can be quantized, by the names of the modules that will hold them."""
    return {site.name: site for site in experts_sites(model, ()) if site.skip is None}


def empty_experts(site: ExpertsSite, settings: Mapping[str, Any]) -> ExpertWeights:
    """The weights of experts that a checkpoint is loaded into."""
    try:
        layer = ExpertWeights.empty(spec_of(settings, site.matrices(site.parameter)[0]), site.count)
        if settings.get("ordered", False):
            raise UnsupportedError("ordered=True is not known of experts")
    except UnsupportedError as error:
        raise UnsupportedError(
            f"quantization_config in config.json, module {site.name!r}: {error}; {AGAIN}"
        ) from error
    vars(layer)["_is_hf_initialized"] = True
    return layer


def _check_whole(layers: Mapping[str, QuantModule], experts: Mapping[str, ExpertsSite]) -> None:
    """Raise UnsupportedError if only some weights of the same experts are quantized."""
    whole = {site.experts_name for name, site in experts.items() if name in layers}
    missing = next((name for name, site in experts.items() if site.experts_name in whole and name not in layers), None)
    if missing is not None:
        raise UnsupportedError(f"the checkpoint quantizes only a part of the experts, without {missing!r}; {AGAIN}")


# -- files ---------------------------------------------------------------------------------------------


def _check_files(model: PreTrainedModel, layers: Mapping[str, QuantModule], files: Sequence[Path]) -> None:
    replaced = {f"{name}.{suffix}" for name in layers for suffix in ("weight", "bias")}
    replaced |= {site.tensor_name for name, site in experts_by_name(model).items() if name in layers}
    floats = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor) and name not in replaced}
    quantized = {f"{name}.{suffix}": t for name, layer in layers.items() for suffix, t in _expected(layer).items()}
    found = dict(own_names(model, {**floats, **quantized}, headers_of(files, way_out=f", or {AGAIN}")))
    stored = with_shared(found, shared_names(model, layers))
    for name, layer in layers.items():
        _check_layer(model, name, layer, {key: f for key, f in stored.items() if key.rpartition(".")[0] == name})
    check_floats(model, floats, {name: found for name, found in stored.items() if name not in quantized})


# -- tensors -------------------------------------------------------------------------------------------


def _expected(layer: QuantModule) -> dict[str, Tensor]:
    """The stored form of a layer, on the meta device."""
    weight = zeros(layer.layout, (layer.out_features, layer.in_features), dtype=torch.float32, device="meta")
    bias = {} if layer.bias is None else {"bias": torch.empty(layer.out_features, device="meta")}
    return state(weight) | bias


def _check_layer(model: PreTrainedModel, name: str, layer: QuantModule, found: Mapping[str, Found]) -> None:
    expected = {f"{name}.{suffix}": tensor for suffix, tensor in _expected(layer).items()}
    described = str(layer.layout)
    for key, tensor in expected.items():
        if key not in found:
            raise missing(model, key, described)
        check_tensor(key, tensor, found[key], described)
    for key in sorted(found.keys() - expected.keys()):
        raise HfAccelError(
            f"the checkpoint holds {key!r}, which a layer with {described}, as config.json has it, has not; {AGAIN}"
        )
    _check_scales(f"{name}.weight_scale", found[f"{name}.weight_scale"].read())
    _check_more(name, layer, found)
    if f"{name}.weight_shape" in found:
        stored = found[f"{name}.weight_shape"].read()
        if stored.device.type != "meta" and stored.tolist() != [layer.out_features, layer.in_features]:
            raise HfAccelError(
                f"'{name}.weight_shape' is {stored.tolist()} in the checkpoint, but the layer is "
                f"[{layer.out_features}, {layer.in_features}]; {AGAIN}"
            )


def _check_more(name: str, layer: QuantModule, found: Mapping[str, Found]) -> None:
    """The minima and the order of the inputs, where a layer has them."""
    minimum = found[f"{name}.weight_minimum"].read() if f"{name}.weight_minimum" in found else None
    if minimum is not None and minimum.device.type != "meta" and not minimum.isfinite().all():
        raise HfAccelError(f"'{name}.weight_minimum' holds NaN or infinity in the checkpoint; {AGAIN}")
    order = found[f"{name}.input_order"].read() if f"{name}.input_order" in found else None
    if order is not None and order.device.type != "meta":
        expected = torch.arange(layer.in_features, dtype=order.dtype, device=order.device)
        if not torch.equal(order.sort().values, expected):
            raise HfAccelError(f"'{name}.input_order' does not name each of {layer.in_features} inputs once; {AGAIN}")


def _check_scales(key: str, scale: Tensor) -> None:
    if scale.device.type == "meta":
        return
    wrong = ~scale.isfinite()  # scales of GPTQ, AWQ and llama.cpp may be negative
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise HfAccelError(f"{key!r} holds NaN or infinity at {place} in the checkpoint, which no scale is; {AGAIN}")


def check_numbers(name: str, layer: QuantModule) -> None:
    """Raise HfAccelError if the weight of a layer that was loaded, and is not packed yet, holds what is no number.

    It reads the whole weight, and so comes when the file is read anyway.
    """
    weight = layer.quantized
    wrong = None if weight.weight_scale.device.type == "meta" else weight.not_a_number()
    if wrong is not None:
        raise HfAccelError(f"'{name}.{wrong[0]}' holds NaN at {wrong[1]} in the checkpoint; {AGAIN}")
