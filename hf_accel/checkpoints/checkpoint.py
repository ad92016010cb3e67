"""A checkpoint that was saved quantized, by us or by another program: the layers that it is loaded into.

Nothing of the model is changed before config.json, the names, dtypes and shapes of all tensors, and the scales, were
found to be right: transformers would cast what has another dtype, and fill in random numbers for what is missing. Its
own loader then reads the files, and so knows shards, device maps and renamed weights; what it collects for a Linear of
another program's checkpoint it hands to the reader of the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..errors import HfAccelError, UnsupportedError
from ..hardware import release
from ..linear import QuantLinear, QuantModule
from ..linear.embedding import QuantEmbedding, is_table
from ..linear.experts import WEIGHT_MODULES
from ..linear.formats import state
from ..patching.originals import broken_ties
from ..patching.survey import sites_named
from ..patching.weight_sites import LinearSite
from .contents import AGAIN, check_floats, missing, own_names, passed_over, renamer, shared_names, with_shared
from .readers.awq import Awq
from .readers.block_fp8 import BlockFp8
from .readers.compressed_tensors import CompressedTensors
from .readers.gguf_reader import Gguf
from .readers.gptq import Gptq
from .readers.mxfp4 import Mxfp4
from .readers.own import Own, check_parts
from .readers.reader import ForeignReader, Found, Parts, Reader, refuse

READERS: dict[str, type[Reader]] = {
    reader.method: reader for reader in (Own, Awq, BlockFp8, CompressedTensors, Gguf, Gptq, Mxfp4)
}
COLLECTED = ".weight_scale"  # a tensor of every quantized layer; the loader collects a layer's parts under this name


def reader_of(config: Mapping[str, Any]) -> Reader | None:
    """Return the reader of a checkpoint with this quantization_config; None if there is none.

    Raises UnsupportedError for a variant of a known format that is not read.
    """
    reader = READERS.get(str(config.get("quant_method")))
    return None if reader is None else reader(config)


def prepare(
    model: PreTrainedModel, reader: Reader, files: Sequence[str], tables: Mapping[str, str] | None = None
) -> list[WeightConverter]:
    """Replace the layer of each weight that a checkpoint holds quantized by an empty one, to be loaded into.

    model: on the meta device. tables: of embeddings that have no weight of their own, the head's name.
    Returns the steps by which transformers' loader hands the parts of a layer to the reader. Raises UnsupportedError
    for what this model cannot have or the reader does not know, HfAccelError for files that do not hold what they
    should; the model then stays as it was.
    """
    headers = reader.headers(model, files)
    parts, others = _by_module(model, reader, headers or ())
    if reader.listed is None and not parts:
        raise refuse(reader.method, "holds no quantized weight under a name that is known")
    of_experts = reader.listed is not None or (isinstance(reader, ForeignReader) and bool(reader.of_experts))
    names = sorted(parts) if reader.listed is None else list(reader.listed)
    sites = sites_named(model, names, of_experts=of_experts)
    layers: dict[str, QuantModule] = {}
    for name in names:
        site = sites.get(name) or _no_site(model, name)
        stored = Parts(name, parts.get(name, {}))
        has_bias = f"{name}.bias" in others if reader.listed is None else site.bias is not None
        spec, ordered = reader.spec(stored, site.matrices(site.parameter)[0])
        if ordered and not site.takes_order:
            raise UnsupportedError(
                f"{name!r} is ordered in config.json, which is not known of {site.counted_as}; {AGAIN}"
            )
        blocks = isinstance(reader, Own) and reader.holds_blocks(name)
        layers[name] = site.empty(spec, ordered=ordered, bias=has_bias, blocks=blocks)
        tables_of_it = tuple(table for table, head in (tables or {}).items() if head == name)
        sites[name] = replace(site, embeddings=tables_of_it)
        if headers is not None:
            if isinstance(reader, Own):
                reader.check(model, layers[name], stored)
            check_parts(stored)
    _check_whole(sites)
    for name, site in sites.items():
        _check_tables(model, site, layers[name])
    if headers is not None:
        _check_others(model, layers, sites, others)
    _put_layers(model, layers, sites)
    return _handing_over(reader, layers) if isinstance(reader, ForeignReader) else []


def is_ours(conversion: Any) -> bool:
    """Return whether it is one of the steps that `prepare` returned, copied or not."""
    return any(isinstance(operation, ReadStored) for operation in getattr(conversion, "operations", ()))


def _put_layers(model: PreTrainedModel, layers: Mapping[str, QuantModule], sites: Mapping[str, LinearSite]) -> None:
    for submodel, attribute, ties in list(broken_ties(model, layers)):
        setattr(submodel, attribute, ties)
    for site in {site.replaced: site for site in sites.values()}.values():
        together = {sites[name].key: layers[name] for name in site.together}
        for name, placed in site.replacements(model, together):
            model.set_submodule(name, placed)
    for placed in model.modules():
        # Without this mark transformers would draw random numbers for a weight that is no Parameter.
        if isinstance(placed, QuantModule | QuantEmbedding):
            vars(placed)["_is_hf_initialized"] = True


# -- layers --------------------------------------------------------------------------------------------


def _no_site(model: PreTrainedModel, name: str) -> LinearSite:
    """Raise UnsupportedError for a name that is none of a layer that can be quantized."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise UnsupportedError(
            f"the checkpoint quantizes {name!r}, which {type(model).__name__} has not; load it with the class that "
            f"config.json names under architectures, or {AGAIN}"
        ) from error
    raise UnsupportedError(
        f"the checkpoint quantizes {name!r}, which is a {type(module).__name__} here, no plain Linear; {AGAIN}"
    )


def _check_tables(model: PreTrainedModel, site: LinearSite, head: QuantModule) -> None:
    """Raise UnsupportedError for an embedding that cannot look its rows up in the head that config.json names."""
    for name in site.embeddings:
        modules = model.named_modules(remove_duplicate=False)
        found = next((m for n, m in modules if n == name and isinstance(m, nn.Embedding)), None)
        shape = None if found is None else (found.num_embeddings, found.embedding_dim)
        is_fit = isinstance(head, QuantLinear) and is_table(head.layout)
        if not is_fit or shape != (head.out_features, head.in_features):
            raise UnsupportedError(
                f"quantization_config in config.json, tables: {name!r} is no embedding of {type(model).__name__} with "
                f"the shape of its head; {AGAIN}"
            )


def _check_whole(sites: Mapping[str, LinearSite]) -> None:
    """Raise UnsupportedError if only some weights of the same experts are quantized."""
    lacking = next((name for site in sites.values() for name in site.together if name not in sites), None)
    if lacking is not None:
        raise UnsupportedError(f"the checkpoint quantizes only a part of the experts, without {lacking!r}; {AGAIN}")


# -- tensors -------------------------------------------------------------------------------------------


def _by_module(
    model: PreTrainedModel, reader: Reader, headers: Iterable[tuple[str, Found]]
) -> tuple[dict[str, dict[str, Found]], dict[str, Found]]:
    """Return the parts of quantized weights, by module and suffix, and the other tensors, by name."""
    expected = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    expected |= {f"{name}.weight": torch.empty(0) for name in reader.listed or ()}
    names_of = renamer(model, expected)
    parts: dict[str, dict[str, Found]] = {}
    others: list[tuple[str, Found]] = []
    for stored_as, found in headers:
        weight, suffix = reader.place(stored_as)
        names, is_whole = names_of(weight)
        module, _, key = names[0].rpartition(".")
        name = f"{module}.{WEIGHT_MODULES[key]}" if key in WEIGHT_MODULES else module
        if not reader.is_part(suffix, found) or (reader.listed is not None and name not in reader.listed):
            others.append((stored_as, found))
        elif names[0] not in expected and passed_over(model, names[0]):
            continue
        elif not is_whole or found.shape is None:
            raise refuse(reader.method, f"holds {weight!r} quantized, which the model has joined with others")
        else:
            parts.setdefault(name, {})[suffix] = found
    return parts, dict(own_names(model, expected, others))


def _check_others(
    model: PreTrainedModel,
    layers: Mapping[str, QuantModule],
    sites: Mapping[str, LinearSite],
    others: Mapping[str, Found],
) -> None:
    """Check everything but the quantized weights."""
    replaced = {site.tensor_name for site in sites.values()}
    replaced |= {f"{site.replaced}.bias" for site in sites.values() if site.bias is not None}
    replaced |= {f"{name}.weight" for site in sites.values() for name in site.embeddings}
    floats = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor) and name not in replaced}
    floats |= {f"{name}.bias": layer.bias for name, layer in layers.items() if isinstance(layer.bias, Tensor)}
    stored = with_shared(others, [names & floats.keys() for names in shared_names(model, layers)])
    for name, site in sites.items():
        key = f"{name}.bias"
        if key not in stored and site.bias is not None:
            raise missing(model, key)
        if key in stored and key not in floats:
            raise HfAccelError(f"the checkpoint holds {key!r}, which {type(model).__name__} has not; {AGAIN}")
        if site.tensor_name in stored:
            raise HfAccelError(f"the checkpoint holds {name!r} both quantized and as a float weight; copy it again")
    check_floats(model, floats, stored)


# -- the steps of transformers' loader -----------------------------------------------------------------


def _handing_over(reader: ForeignReader, layers: Mapping[str, QuantModule]) -> list[WeightConverter]:
    return [
        WeightConverter(
            source_patterns=list(suffixes),
            target_patterns=f"{module}{COLLECTED}",
            operations=[ReadStored(reader, layers, suffixes)],
        )
        for module, suffixes in reader.collected().items()
    ]


class ReadStored(ConversionOps):
    """The parts of a layer -> the tensors of ours. suffixes: of the patterns by which parts are collected."""

    def __init__(self, reader: ForeignReader, layers: Mapping[str, QuantModule], suffixes: Mapping[str, str]) -> None:
        self.reader, self.layers, self.suffixes = reader, layers, suffixes
        self.hf_quantizer = self  # a mark by which transformers leaves the dtypes as they are

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadStored:
        return self  # transformers copies a converter for each layer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        name = more["full_layer_name"].removesuffix(COLLECTED)
        if name not in self.layers:
            raise UnsupportedError(f"{name!r} is no layer that the checkpoint was found to hold")
        layer = self.layers[name]
        parts = {self.suffixes[pattern]: tensors[0] for pattern, tensors in input_dict.items()}
        shape = (layer.out_features, layer.in_features)
        tensors = self.reader.own_tensors(name, parts, shape)
        if tensors is None:
            tensors = state(self.reader.convert(name, parts, shape))
            for part in parts.values():
                release(part)  # transformers holds its mapping until the whole model is loaded
        # The name under which they were collected comes first: by it transformers finds out that names are whole.
        first = {f"{name}{COLLECTED}": tensors[COLLECTED[1:]]}
        return first | {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
