"""Encoders by transformers, by torch's dynamic INT8 and patched: whole passes of BERT models, with padding or not.

All models take turns, so that what else the machine does slows all of them. Random weights compute as fast as trained
ones do.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import hf_accel
from hf_accel.fused.hf.encoder_calls import EncoderCalls
from hf_accel.kernels.cpu import refusal

from ..harness.bench import Bench
from ..harness.tables import Row, Table

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
MODELS: dict[str, dict[str, Any]] = {"MiniLM-L6": MINILM, "BERT base": {}}
BATCHES = {
    "1 x 16": [16],
    "1 x 128": [128],
    "8 of 8 to 128": [8, 16, 24, 40, 56, 80, 104, 128],
    "8 x 128": [128] * 8,
}
SECONDS = 6.0  # of each batch
NOTE = (
    "Stock's float32 seconds over those of each, the median of their ratios in turns. exact: patched with "
    "weights=None. ..._by_module: patched, with each module called by itself. torch_int8: "
    "torch.ao.quantization.quantize_dynamic."
)


def measure(bench: Bench) -> list[Table]:
    """No tables without kernels."""
    if refusal() is not None:
        return []
    with torch.inference_mode():
        return [Table(name, rows(name, sizes, bench.settings.seed), NOTE) for name, sizes in MODELS.items()]


def rows(name: str, sizes: dict[str, Any], seed: int) -> list[Row]:
    torch.manual_seed(seed)
    stock: Any = BertModel(BertConfig(**sizes)).eval()
    exact, int8 = (hf_accel.patch(copy.deepcopy(stock), weights=weights) for weights in (None, "int8"))
    calls = {
        "stock": stock, "exact": exact, "exact_by_module": by_module(exact), "int8": int8,
        "int8_by_module": by_module(int8), "torch_int8": by_torch(stock),
    }  # fmt: skip
    return [row(name, *batch, calls) for batch in BATCHES.items()]


def by_module(model: nn.Module) -> Callable[..., Any]:
    """The model with its modules called one by one."""

    def call(**given: Tensor) -> Any:
        run = EncoderCalls.run
        EncoderCalls.run = lambda *args: None  # type: ignore[method-assign]
        try:
            return model(**given)
        finally:
            EncoderCalls.run = run  # type: ignore[method-assign]

    return call


def by_torch(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        quantized: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
        return quantized


def row(name: str, batch: str, lengths: list[int], calls: dict[str, Callable[..., Any]]) -> Row:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    given = {"input_ids": torch.randint(1000, 20000, mask.shape) * mask, "attention_mask": mask}
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(seconds["stock"]) < 4:
        for each, call in calls.items():
            start = time.perf_counter()
            call(**given)
            seconds[each].append(time.perf_counter() - start)
    stock = seconds.pop("stock")[1:]
    ratios = {each: [base / one for base, one in zip(stock, own[1:], strict=True)] for each, own in seconds.items()}
    found = {f"{each}_ratio": statistics.median(found) for each, found in ratios.items()}
    print(f"    {name}, {batch}: {found}", flush=True)
    return {"tokens": batch, "stock_seconds": statistics.median(stock), **found}
