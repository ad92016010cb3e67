"""Write a model as a GGUF file, which llama.cpp and what is built on it run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import UnsupportedError
from ...hardware.atomic import replaced_file
from ...linear import QuantLinear, QuantModule
from ...linear.embedding import QuantEmbedding
from ...linear.formats import ByteWeight, LowBitWeight, QuantizedWeight
from ...patching.printed import Line
from ..readers.ggml_blocks import TYPES
from .gguf_model import check_gguf, frequency_factors, rotated_rows, write_settings
from .gguf_tokenizer import write_no_tokenizer, write_tokenizer
from .savable import Saved, check_room, refuse_infinite, savable

FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
BLOCK = 32
FILE_TYPES = {
    "F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0", "Q4_1": "MOSTLY_Q4_1",
}  # fmt: skip


def save_gguf(
    model: nn.Module, path: str | os.PathLike[str], *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Saved:
    """Write a Llama, Mistral, Qwen2 or Qwen3 model, patched or not, as one GGUF file; returns what was written.

    What a patched model computes with is what the file holds: INT8 becomes Q8_0, fewer bits become Q4_0, or Q4_1 where
    there are zero points, with the same integers, because our scales are for whole blocks of 32 inputs. Scales
    are rounded to float16, which keeps all bits of those of a bfloat16 or float16 model but the smallest. A layer
    whose inputs are no multiple of 32, or that another program quantized in a way that has no such blocks (groups of
    16, K blocks of 8 bits, act-order), is written dequantized. All else is written as it is, in the model's dtype;
    norms and biases in float32. A quantized head is written as such, also where it is the embedding's copy.

    tokenizer: a byte-level BPE, or a BPE with byte fallback as in Llama 2; without one the file has no vocabulary
        and takes token ids alone.
    The file is replaced whole: a process killed at any moment leaves the old file or the new one.
    Raises UnsupportedError, with nothing written, for other models and tokenizers, and without the package gguf;
    HfAccelError if the disk does not take it.
    """
    return write_gguf(model, Path(path), tokenizer=tokenizer)


def write_gguf(
    model: nn.Module,
    path: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> Saved:
    """Do as `save_gguf`, with matrices that are not quantized in `dtype`."""
    inner = savable(model)
    architecture = check_gguf(inner)
    if path.is_dir():
        raise UnsupportedError(f"{path} is a folder; name a file in it, as {path / 'model.gguf'}")
    entries = list(_entries(inner, dtype or inner.dtype))
    size = sum(entry.bytes for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path, size)

    import gguf

    with replaced_file(path) as unfinished:
        writer: Any = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, architecture.name)])
        try:
            _write(writer, gguf, inner, entries)
            if tokenizer is None:
                write_no_tokenizer(writer)
            else:
                write_tokenizer(writer, tokenizer, inner.config.vocab_size)
            _write_tensors(writer, gguf, entries)
        finally:
            writer.close()
    return Saved(path, size, tuple(_lines(inner, entries)))


# -- tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A tensor to write. name: in the model. kind: of its blocks or numbers. make: its bytes, uint8 [rows, bytes]."""

    name: str
    shape: tuple[int, ...]
    kind: str
    bytes: int
    make: Callable[[], Tensor]
    scale_error: float = 0.0


def _entries(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[Entry]:
    """Yield the tensors to write. Parameters that are tied come once; a quantized head is one more."""
    if dtype not in FLOAT_TYPES:
        raise UnsupportedError(f"a model in {dtype} cannot be written as GGUF; convert it with model.float() first")
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield _quantized(f"{name}.weight", module, model.config, dtype)
        elif isinstance(module, QuantEmbedding):
            shape, table = (module.num_embeddings, module.embedding_dim), module.head
            yield _dense(f"{name}.weight", partial(_floats, table, dtype), shape, dtype=dtype)
    for name, parameter in model.named_parameters():
        rows = rotated_rows(name, model.config)
        yield _dense(name, parameter.detach, tuple(parameter.shape), dtype=dtype, rows=rows)
    factors = frequency_factors(model.config)
    if factors is not None:
        yield _dense("rope_freqs.weight", lambda: factors, tuple(factors.shape), dtype=torch.float32)


def _floats(layer: QuantModule, dtype: torch.dtype) -> Tensor:
    return layer.quantized.dequantize(dtype)


def _quantized(name: str, layer: QuantLinear, config: Any, dtype: torch.dtype) -> Entry:
    rows, weight = rotated_rows(name, config), layer.quantized
    refuse_infinite(name, weight.weight_scale)
    kind = ggml_type_of(weight)
    if kind is None:
        return _dense(name, lambda: layer.quantized.dequantize(dtype), weight.shape, dtype=dtype, rows=rows)
    size = weight.shape[0] * weight.shape[1] // TYPES[kind].inputs * TYPES[kind].bytes
    return Entry(name, weight.shape, kind, size, lambda: blocks(layer.quantized, rows), rounding_of_scales(weight))


def _dense(
    name: str, read: Callable[[], Tensor], shape: tuple[int, ...], *, dtype: torch.dtype, rows: Tensor | None = None
) -> Entry:
    kind = dtype if len(shape) > 1 else torch.float32

    def make() -> Tensor:
        tensor = read().to("cpu", kind)
        refuse_infinite(name, tensor)
        return (tensor if rows is None else tensor[rows]).contiguous().view(torch.uint8)

    size = torch.Size(shape).numel() * kind.itemsize
    return Entry(name, shape, FLOAT_TYPES[kind], size, make)


# -- blocks of 32 inputs, as readers/ggml_blocks.py reads them; source: ggml-common.h ---------------------------------


def ggml_type_of(weight: QuantizedWeight) -> str | None:
    """Return the name of the blocks that hold a weight [out, in]; None if there are none for its shape and scales."""
    if (
        weight.format != "int"
        or weight.shape[1] % BLOCK
        or weight.group_size % BLOCK
        or weight.input_order is not None
    ):
        return None
    if weight.weight_scale.abs().max() > torch.finfo(torch.float16).max:
        return None
    if weight.bits == 8:
        return "Q8_0" if weight.symmetric else None
    return "Q4_0" if weight.symmetric else "Q4_1"


def blocks(weight: QuantizedWeight, rows: Tensor | None = None) -> Tensor:
    """Pack a weight -> uint8 [out, in / 32 * bytes of a block]. rows: the order of the outputs, int64 [out]."""
    order = slice(None) if rows is None else rows
    integers, scale = weight.integers()[order], weight.weight_scale[order]
    out_features, in_features = integers.shape
    repeats = in_features // BLOCK // scale.shape[1]
    values = integers.reshape(-1, BLOCK)
    factor = scale.repeat_interleave(repeats, dim=1).reshape(-1, 1)
    if isinstance(weight, ByteWeight):
        parts = [_half(factor), values.view(torch.uint8)]
    else:
        # Q4_0 takes 8 off; what is added in Q4_1 is the smaller, and the more exact in float16, the lower its levels.
        nibbles = (values + (8 if weight.symmetric else 1 << weight.bits - 1)).view(torch.uint8)
        packed = nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4
        parts = [_half(factor), packed]
        if isinstance(weight, LowBitWeight) and not weight.symmetric:
            parts.insert(1, _half(_shift(weight)[order].repeat_interleave(repeats, dim=1).reshape(-1, 1)))
    return torch.cat(parts, dim=1).reshape(out_features, -1)


def _shift(weight: LowBitWeight) -> Tensor:
    """Return what is added to (q + 2^(bits - 1)) * scale, [out, groups]."""
    if weight.weight_minimum is not None:
        return -weight.weight_minimum
    zero_point = weight.zero_points()
    assert zero_point is not None
    return (zero_point.float() + (1 << weight.bits - 1)) * -weight.weight_scale.float()


def _half(column: Tensor) -> Tensor:
    """Return [n, 1] in float16 as bytes [n, 2]."""
    return column.to(torch.float16).contiguous().view(torch.uint8)


def rounding_of_scales(weight: QuantizedWeight) -> float:
    """Return the largest change of a scale, or of an offset, by float16, as a share of it."""
    added = [_shift(weight)] if isinstance(weight, LowBitWeight) and not weight.symmetric else []
    return max(_rounding(numbers.double()) for numbers in (weight.weight_scale, *added))


def _rounding(numbers: Tensor) -> float:
    change = (numbers.to(torch.float16).double() - numbers).abs()
    return float((change / numbers.abs().clamp(min=torch.finfo(torch.float64).tiny)).max())


# -- the file ------------------------------------------------------------------------------------------


def _write(writer: Any, gguf: Any, model: PreTrainedModel, entries: list[Entry]) -> None:
    """Write the settings, and where each tensor will be."""
    writer.add_type("model")
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[_main_kind(entries)]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_settings(writer, model.config)
    architecture = getattr(gguf.MODEL_ARCH, check_gguf(model).name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for entry in entries:
        target = names.get_name(entry.name, try_suffixes=(".weight", ".bias"))
        target = entry.name if target is None and entry.name == "rope_freqs.weight" else target
        if target is None:
            raise UnsupportedError(f"llama.cpp has no place for {entry.name!r} in a {model.config.model_type} model")
        writer.add_tensor_info(
            target, entry.shape, None, entry.bytes, raw_dtype=getattr(gguf.GGMLQuantizationType, entry.kind)
        )


def _write_tensors(writer: Any, gguf: Any, entries: list[Entry]) -> None:
    """Write the tensors one after the other, so that no more than one is in memory twice."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(entry.make().numpy(), tensor_endianess=gguf.GGUFEndian.LITTLE)


def _main_kind(entries: list[Entry]) -> str:
    """Return the kind of most bytes among the matrices."""
    counted: Counter[str] = Counter()
    for entry in entries:
        if len(entry.shape) > 1:
            counted[entry.kind] += entry.bytes
    return counted.most_common(1)[0][0]


def _lines(model: PreTrainedModel, entries: list[Entry]) -> Iterator[Line]:
    layers = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    matrices = [entry for entry in entries if len(entry.shape) > 1]
    for (kind, quantized), count in Counter((entry.kind, entry.name in layers) for entry in matrices).items():
        if not quantized:
            reason = "as they are"
        elif kind in TYPES:
            error = max(entry.scale_error for entry in matrices if entry.kind == kind)
            reason = "the same integers; scales " + (
                f"change by up to {error:.1e}" if error else "are exact in float16"
            )
        else:
            reason = "dequantized: no blocks hold them (inputs no multiple of 32, or as another program made them)"
        yield Line("weights", f"{count} matrices", kind, reason)
    yield Line("weights", f"{len(entries) - len(matrices)} vectors", "F32", "norms and biases")
