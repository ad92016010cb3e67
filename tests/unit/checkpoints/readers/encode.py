"""Checkpoints as other programs write them, made number by number from integers that are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, Tensor]


def words(levels: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Levels [n, m] -> int32 [n, m * bits / 32]; order: of the levels of a word, from the lowest bits."""
    count = 32 // bits
    out = torch.zeros(levels.shape[0], levels.shape[1] // count, dtype=torch.int64)
    for place, which in enumerate(order or range(count)):
        out |= levels[:, which::count].long() << (bits * place)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def gptq(levels: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None, *, bits: int, less: int = 1) -> Parts:
    """levels [out, in], zeros and scales [out, groups]; index: group of each input."""
    group = levels.shape[1] // scales.shape[1]
    index = torch.arange(levels.shape[1]) // group if index is None else index
    return {
        "qweight": words(levels, bits).t().contiguous(),
        "qzeros": words((zeros.t() - less).contiguous() % 2**bits, bits),
        "scales": scales.t().contiguous(),
        "g_idx": index.to(torch.int32),
    }


def awq(levels: Tensor, zeros: Tensor, scales: Tensor) -> Parts:
    return {
        "qweight": words(levels.t().contiguous(), 4, AWQ_ORDER),
        "qzeros": words(zeros.t().contiguous(), 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }


def packed(levels: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int = 4) -> Parts:
    """compressed-tensors' pack-quantized; levels and zeros unsigned."""
    parts = {"weight_packed": words(levels, bits), "weight_scale": scales, "weight_shape": torch.tensor(levels.shape)}
    if zeros is not None:
        rows = torch.cat([zeros, zeros.new_zeros(-len(zeros) % 8, zeros.shape[1])])
        parts["weight_zero_point"] = words(rows.t().contiguous(), 4).t().contiguous()
    return parts


def dense(levels: Tensor, zeros: Tensor | int, scales: Tensor, index: Tensor | None = None) -> Tensor:
    """The weight [out, in] in float64 that all of them stand for."""
    group = levels.shape[1] // scales.shape[1]
    index = torch.arange(levels.shape[1]) // group if index is None else index
    zeros = zeros[:, index] if isinstance(zeros, Tensor) else zeros
    return (levels.double() - zeros) * scales.double()[:, index]


def write(
    model: PreTrainedModel, folder: Path, config: Mapping[str, Any],
    encode: Callable[[str, Tensor], tuple[Parts, Tensor]], *, skip: tuple[str, ...] = ("lm_head",), shards: int = 1,
) -> dict[str, Tensor]:  # fmt: skip
    """Save `model` with the Linears encoded; returns what they then are, in float64, by name."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(skip):
            parts, weights[name] = encode(name, module.weight.detach())
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    names = sorted(tensors)
    files = {f"model-{n + 1:05}-of-{shards:05}.safetensors": names[n::shards] for n in range(shards)}
    (folder / "model.safetensors").unlink()
    for file, inside in files.items():
        save_file({name: tensors[name].contiguous() for name in inside}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": dict(config)}))
    return weights
