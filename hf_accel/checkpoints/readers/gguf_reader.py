"""GGUF files of llama.cpp: their config, and their weights in the bits that they have.

transformers knows the config, the names and the order of the rows of an architecture; here it is asked for them, and
what it would pass over without a word (tensors and settings that it has no place for) is refused.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from ...errors import HfAccelError, UnsupportedError
from ...linear import QuantizedWeight
from ...models import head_dim
from .ggml_blocks import TYPES, BlockType
from .reader import PASSED_OVER, Description, ForeignReader, Found, Parts, refuse

BLOCKS_PART = "gguf_blocks"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Settings that say nothing about a dense model, or that `_check_settings` compares with the config.
HARMLESS = {
    "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size", "attention.sliding_window",
    "rope.scaling.type", "expert_count", "expert_used_count",
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Gguf(ForeignReader):
    """A GGUF file. Its Linears stay in the bits that they have; the other tensors are dequantized as they are read."""

    method = "gguf"
    suffixes: ClassVar[tuple[str, ...]] = (BLOCKS_PART,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: {"path": the file}."""
        self.file = open_gguf(str(config["path"]))
        self.kinds: dict[str, BlockType] = {}  # of the Linears that were described, by name

    @property
    def is_quantized(self) -> bool:
        return any(tensor.type_name not in PLAIN for tensor in self.file.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which transformers loads it by default: float32, or the file's half precision if nothing
        is quantized.
        """
        halves = [kind for kind in ("BF16", "F16") if any(tensor.type_name == kind for tensor in self.file.tensors)]
        return torch.float32 if self.is_quantized or not halves else PLAIN[halves[0]]

    def config(self) -> PreTrainedConfig:
        """Make the model's config of the file's metadata. Raises UnsupportedError for settings that are not known."""
        file = self.file
        if file.architecture not in ARCHITECTURES:
            raise refuse(
                "GGUF", f"has the architecture {file.architecture!r}, of which {', '.join(ARCHITECTURES)} are read"
            )
        folder, name = os.path.split(file.path)
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder or ".", gguf_file=name)
        _check_settings(file, config)
        factors = next((tensor for tensor in file.tensors if tensor.name == ROPE_FACTORS), None)
        if factors is not None:
            rope = dict(config.rope_parameters)
            config.rope_parameters = rope | _scaling(factors.read_floats(), rope["rope_theta"])
        return config

    def headers(self, model: PreTrainedModel, files: Sequence[str] = ()) -> Iterator[tuple[str, Found]]:
        """Return the file's tensors, by the names of `model`; the blocks of a Linear are its part BLOCKS_PART.

        Raises UnsupportedError for a tensor that the model has no place for, and for a type that is not read.
        """
        processor = TENSOR_PROCESSORS.get(self.file.architecture, TensorProcessor)(config=model.config.to_dict())
        names = get_gguf_hf_weights_map(model, processor)
        linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
        for tensor in self.file.tensors:
            if tensor.name == ROPE_FACTORS:
                continue
            if tensor.name not in names:
                what = f"holds {tensor.name!r}, which {type(model).__name__} has no place for"
                raise refuse("GGUF", what, way_out=PASSED_OVER)
            own = names[tensor.name]
            places = [own]
            if model.config.tie_word_embeddings and own == "model.embed_tokens.weight":
                places.append("lm_head.weight")  # the head is read for every token: it keeps its bits
            for place in places:
                if place in linears and tensor.type_name not in PLAIN:
                    yield (
                        f"{place.removesuffix('weight')}{BLOCKS_PART}",
                        tensor.blocks(_row_order(processor, tensor, place)),
                    )
                elif place == own:
                    yield place, tensor.floats(processor)

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        found = stored.tensors[BLOCKS_PART]
        assert isinstance(found, BlocksFound)
        kind = self.kinds[stored.name] = found.kind
        outputs, inputs = shape
        if found.shape != (outputs, inputs // kind.inputs * kind.bytes) or inputs % kind.inputs:
            has = f"{stored.name!r} as {kind.name} in {found.shape}"
            raise HfAccelError(f"the file holds {has}, which is no weight [{outputs}, {inputs}]")
        layout = kind.layout
        if layout.bits == 8 and layout.group_size == inputs and not layout.minima:
            layout = replace(layout, group_size=None)
        return Description(layout)

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        return self.kinds[name].weight(stored[BLOCKS_PART])


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


# -- the file ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file. raw: what the gguf package says of it. data: its bytes, mapped and not yet read."""

    raw: Any
    data: Tensor

    @property
    def name(self) -> str:
        return str(self.raw.name)

    @property
    def type_name(self) -> str:
        return str(self.raw.tensor_type.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in torch's order."""
        return tuple(int(size) for size in reversed(self.raw.shape))

    def blocks(self, order: Tensor | None) -> Found:
        """Return the blocks of a weight, uint8 [out, bytes of a row], its outputs in `order`."""
        if self.type_name not in TYPES:
            known = ", ".join((*PLAIN, *TYPES))
            raise refuse("GGUF", f"holds {self.name!r} as {self.type_name}, of which {known} are read")

        def read() -> Tensor:
            rows = self.data.view(self.shape[0], -1)
            return rows if order is None else rows[order]

        columns = self.data.numel() // self.shape[0]
        return BlocksFound(torch.uint8, (self.shape[0], columns), read, TYPES[self.type_name])

    def floats(self, processor: Any) -> Found:
        """Return the tensor in float32, in the model's form."""

        def read() -> Tensor:
            done = processor.process(weights=self.read_floats().numpy(), name=self.name)
            return torch.from_numpy(done.weights).contiguous()

        return Found(torch.float32, self.shape, read)

    def read_floats(self) -> Tensor:
        import gguf

        values = gguf.dequantize(self.raw.data, self.raw.tensor_type)
        return torch.from_numpy(values if values.flags.writeable else values.copy()).view(self.shape)


@dataclass(frozen=True)
class BlocksFound(Found):
    """Blocks of a type."""

    kind: BlockType


@dataclass(frozen=True)
class GgufFile:
    path: str
    architecture: str
    settings: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def forget_files() -> None:
    """Let go of the file that was read last."""
    _open.cache_clear()


def open_gguf(path: str) -> GgufFile:
    """Read the metadata of a file. Raises HfAccelError for what is no GGUF file, UnsupportedError without gguf."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise HfAccelError(f"{path} cannot be read: {error}") from error
    return _open(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)  # a large vocabulary takes seconds
def _open(path: str, changed: int, size: int) -> GgufFile:
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError("GGUF files are read with the gguf package; pip install gguf") from error
    try:
        reader: Any = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        # Mapped for us alone: tensors may only lie in memory that can be written to.
        data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
        tensors = tuple(
            GgufTensor(one, data[one.data_offset : one.data_offset + int(one.n_bytes)]) for one in reader.tensors
        )
    except Exception as error:  # whatever the package meets in a file that is none
        raise HfAccelError(f"{path} cannot be read as a GGUF file: {error}; copy it again") from error
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise HfAccelError(f"{path} has no general.architecture; copy it again")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise HfAccelError(f"{path} holds a tensor twice: {sorted(n for n in names if names.count(n) > 1)[0]!r}")
    settings = {
        name.removeprefix(f"{architecture}."): v for name, v in fields.items() if name.startswith(f"{architecture}.")
    }
    return GgufFile(path, architecture, settings, tensors)


def _check_settings(file: GgufFile, config: PreTrainedConfig) -> None:
    """Raise UnsupportedError for a setting that transformers does not read, and that may change the model."""
    read: Any = GGUF_CONFIG_MAPPING.get(file.architecture, {})
    known = set(read) | HARMLESS
    head = head_dim(config)
    expected = {
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        "vocab_size": config.vocab_size, "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0,
    }  # fmt: skip
    for name, value in file.settings.items():
        if name not in known or (name in expected and value != expected[name]):
            what = f"has {file.architecture}.{name}={value!r}, which transformers does not read"
            raise refuse("GGUF", what, way_out=PASSED_OVER)


def _scaling(factors: Tensor, theta: float) -> dict[str, Any]:
    """Find the rope_parameters for which llama.cpp wrote these divisors of the frequencies, [head size / 2].

    Source: Llama 3.1, of which the files hold no settings. Raises UnsupportedError for other divisors.
    """
    factor = float(factors.max())
    count = len(factors)
    lengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)  # of the waves, in tokens
    original, low, high = (
        LLAMA3["original_max_position_embeddings"],
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
    )
    smooth = ((original / lengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors.double(), expected, rtol=1e-3):
        what = f"scales rotary frequencies by {ROPE_FACTORS!r}, and not as Llama 3.1 does"
        raise refuse("GGUF", what, way_out=PASSED_OVER)
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _row_order(processor: Any, tensor: GgufTensor, name: str) -> Tensor | None:
    """Return the outputs of the file in the order of the model; None if they are in that order.

    Raises UnsupportedError if transformers changes more of the weight than the order of its outputs.
    """
    outputs = tensor.shape[0]
    marks = torch.arange(2 * outputs, dtype=torch.float32).view(outputs, 2)
    done = torch.from_numpy(processor.process(weights=marks.numpy(), name=tensor.name).weights)
    order = (done[:, 0] / 2).long() if done.shape == marks.shape else None
    if (
        order is None
        or not torch.equal(done, marks[order])
        or not torch.equal(order.sort().values, torch.arange(outputs))
    ):
        raise refuse("GGUF", f"holds {tensor.name!r}, of which {name!r} takes another form")
    return None if torch.equal(order, torch.arange(outputs)) else order
