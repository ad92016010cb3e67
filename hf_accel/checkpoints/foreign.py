"""A quantized checkpoint of another program: the layers that it is loaded into, and the steps that read it.

Nothing of the model is changed before the names, dtypes and shapes of all tensors, and the scales, were found to be
right. transformers' own loader reads the files, and so knows shards, device maps and renamed weights; what it collects
for a quantized Linear it hands to the reader of the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D

from ..errors import HfAccelError, UnsupportedError
from ..hardware import release
from ..linear import QuantLinear
from ..linear.formats import state
from .checkpoint import empty_layer, original_of, put_layers
from .contents import check_floats, headers_of, own_names, passed_over, shared_names, with_shared
from .readers.awq import Awq
from .readers.block_fp8 import BlockFp8
from .readers.compressed_tensors import CompressedTensors
from .readers.gguf_reader import Gguf
from .readers.gptq import Gptq
from .readers.reader import Found, Parts, Reader, refuse

READERS: dict[str, type[Reader]] = {reader.method: reader for reader in (Awq, BlockFp8, CompressedTensors, Gguf, Gptq)}
COLLECTED = ".weight_scale"  # every quantized layer has it: under this name the loader collects a layer's parts


def reader_of(config: Mapping[str, Any]) -> Reader | None:
    """What reads a checkpoint with this quantization_config; None: nothing here does.

    Raises UnsupportedError for a variant of a known format that is not read.
    """
    reader = READERS.get(str(config.get("quant_method")))
    return None if reader is None else reader(config)


def headers(model: PreTrainedModel, reader: Reader, files: Sequence[str]) -> Iterable[tuple[str, Found]]:
    """What a checkpoint holds, by the names that transformers' loader is given."""
    if isinstance(reader, Gguf):
        return reader.headers(model)
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise refuse(reader.method, "is not in safetensors files, and other files can hold programs")
    return headers_of([Path(file) for file in files])


def prepare_foreign(model: PreTrainedModel, reader: Reader, files: Sequence[str]) -> dict[str, QuantLinear]:
    """Put an empty QuantLinear in the place of each Linear that the files hold quantized; returns them by name.

    model: on the meta device. Raises UnsupportedError for what cannot be read, HfAccelError for files that do not hold
    what they should; the model then stays as it was.
    """
    parts, others = _by_module(model, reader, headers(model, reader, files))
    if not parts:
        raise refuse(reader.method, "holds no quantized weight under a name that is known")
    layers: dict[str, QuantLinear] = {}
    for name, stored in sorted(parts.items()):
        original = original_of(model, name)
        shape = original.weight.shape[::-1] if isinstance(original, Conv1D) else original.weight.shape
        settings = reader.describe(Parts(name, stored), (shape[0], shape[1])).settings
        _check_finite(name, stored)
        layers[name] = empty_layer(model, name, settings, bias=f"{name}.bias" in others)
    _check_others(model, layers, others)
    put_layers(model, layers)
    return layers


def _by_module(
    model: PreTrainedModel, reader: Reader, found_there: Iterable[tuple[str, Found]]
) -> tuple[dict[str, dict[str, Found]], dict[str, Found]]:
    """The parts of quantized weights, by module and suffix; and the other tensors, by name."""
    expected = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    parts: dict[str, dict[str, Found]] = {}
    others: list[tuple[str, Found]] = []
    for stored_as, found in found_there:
        module, _, suffix = stored_as.rpartition(".")
        if not reader.is_part(suffix, found):
            others.append((stored_as, found))
            continue
        (name, whole), *more = own_names(model, expected, [(f"{module}.weight", found)])
        if name not in expected and passed_over(model, name):
            continue
        if more or whole.shape is None:
            raise refuse(reader.method, f"holds {module!r} quantized, which the model has joined with others")
        parts.setdefault(name.rpartition(".")[0], {})[suffix] = found
    return parts, dict(own_names(model, expected, others))


def _check_finite(name: str, stored: Mapping[str, Found]) -> None:
    for suffix, found in stored.items():
        is_float = isinstance(found.dtype, torch.dtype) and found.dtype.is_floating_point and found.dtype.itemsize > 1
        if is_float and not found.read().isfinite().all():
            raise HfAccelError(f"'{name}.{suffix}' holds NaN or infinity in the checkpoint; copy it again")


def _check_others(model: PreTrainedModel, layers: Mapping[str, QuantLinear], others: Mapping[str, Found]) -> None:
    """Everything but the quantized weights."""
    replaced = {f"{name}.{suffix}" for name in layers for suffix in ("weight", "bias")}
    floats = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor) and name not in replaced}
    floats |= {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}
    stored = with_shared(others, [names & floats.keys() for names in shared_names(model, layers)])
    for name, layer in layers.items():
        if layer.bias is None and original_of(model, name).bias is not None:
            raise HfAccelError(
                f"the checkpoint has no '{name}.bias', which {type(model).__name__} needs; copy it again"
            )
        if f"{name}.weight" in stored:
            raise HfAccelError(f"the checkpoint holds {name!r} both quantized and as a float weight; copy it again")
    check_floats(model, floats, stored)


def converters(reader: Reader, layers: Mapping[str, QuantLinear]) -> list[WeightConverter]:
    """The steps by which transformers' loader hands the parts of each layer to the reader."""
    sources = list(reader.patterns())
    return [
        WeightConverter(source_patterns=sources, target_patterns=COLLECTED, operations=[ReadStored(reader, layers)])
    ]


def is_ours(conversion: Any) -> bool:
    """Return whether it is one of `converters`, copied or not."""
    return any(isinstance(operation, ReadStored) for operation in getattr(conversion, "operations", ()))


class LazyTensor:
    """A tensor that is read when transformers' loader takes it, as the slices of safetensors are."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self.dtype, self.shape = found.dtype, torch.Size(found.shape or ())

    def __getitem__(self, index: Any) -> Tensor:
        return self._found.read()[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32" if self.is_floating_point() else "U8"

    def is_floating_point(self) -> bool:
        return self.dtype is torch.float32


def state_dict_of(model: PreTrainedModel, reader: Gguf) -> dict[str, LazyTensor]:
    """What from_pretrained takes as state_dict. model: of the same config, on the meta device."""
    return {name: LazyTensor(found) for name, found in reader.headers(model)}


class ReadStored(ConversionOps):
    """The parts of a layer -> the tensors of a QuantLinear."""

    def __init__(self, reader: Reader, layers: Mapping[str, QuantLinear]) -> None:
        self.reader, self.layers, self.suffixes = reader, layers, reader.patterns()
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
        tensors = self.reader.loose(name, parts, shape)
        if tensors is None:
            tensors = state(self.reader.convert(name, parts, shape))
            for part in parts.values():
                release(part)  # transformers holds its mapping until the whole model is loaded
        # The name under which they were collected comes first: by it transformers finds out that names are whole.
        first = {f"{name}{COLLECTED}": tensors[COLLECTED[1:]]}
        return first | {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
