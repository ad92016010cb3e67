"""Encoders by transformers, patched, and by other runtimes: whole passes over text, with padding or not, and images.

All take turns, so that what else the machine does slows all of them. Random weights compute as fast as trained ones
do; accuracy is measured on a small classifier that is trained here.
"""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    ViTConfig,
    ViTModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

import hf_accel
from hf_accel.kernels.cpu import refusal
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.tables import Row, Table
from ..setups.encoder_graphs import Call, Inputs, runtimes, why_missing
from .encoder_accuracy import accuracy

MIXED = "8 of 8 to 128"
TEXTS = {"1 x 16": [16], "1 x 128": [128], MIXED: [8, 16, 24, 40, 56, 80, 104, 128], "8 x 128": [128] * 8}
LARGE = {"1 x 128": [128], MIXED: TEXTS[MIXED]}
MANY = {"64 of 8 to 128": torch.linspace(8, 128, 64).long().tolist()}
IMAGES = {"1 image": [1], "8 images": [1] * 8}
WORDS = 20000  # of which tokens are drawn


@dataclass(frozen=True)
class Encoder:
    """batches: the tokens of each row, by what the table calls the batch."""

    make: Callable[[], nn.Module]
    batches: dict[str, list[int]]
    images: bool = False


MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
XLM_R_LARGE = {  # with fewer words, since nothing but a look-up depends on them
    "vocab_size": WORDS, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "pad_token_id": 1, "max_position_embeddings": 514,
}  # fmt: skip
MODELS = {
    "MiniLM-L6": Encoder(lambda: BertModel(BertConfig(**MINILM), add_pooling_layer=False), TEXTS | MANY),
    "BERT base": Encoder(lambda: BertModel(BertConfig(), add_pooling_layer=False), TEXTS),
    "ModernBERT base": Encoder(lambda: ModernBertModel(ModernBertConfig()), TEXTS),
    "ViT base": Encoder(lambda: ViTModel(ViTConfig(), add_pooling_layer=False), IMAGES, images=True),
    "XLM-R large": Encoder(lambda: XLMRobertaModel(XLMRobertaConfig(**XLM_R_LARGE), add_pooling_layer=False), LARGE),
}
QUICK = ("MiniLM-L6", "ViT base")
SECONDS = 6.0  # of each batch, of a quick run a quarter
LEAST = 2  # turns
REST = 0.002  # seconds before each call, in which threads of the one before stop to wait for work
LEAST_COSINE = 0.9999
FLOAT = ("exact", "onnxruntime", "openvino")  # those that must reach it
SPEED = (
    "Stock's float32 seconds over those of each, the median of their ratios in turns. exact: patched with "
    "weights=None; int8: patched. onnxruntime_int8: by its quantize_dynamic, per channel. openvino_int8: weights and "
    "activations by nncf.quantize, all else in the precision that OpenVINO chooses; openvino: all in float32. "
    "torch_int8: torch.ao.quantization.quantize_dynamic. int8_over_openvino_int8: the seconds of openvino_int8 over "
    "ours. A dash: it was not timed."
)
CLOSE = (
    f"The least cosine, over the batches, between all outputs of real tokens and stock's. What computes in float and "
    f"is below {LEAST_COSINE} is not timed."
)


def measure(bench: Bench) -> Iterator[Table]:
    """No tables without kernels."""
    if refusal() is not None:
        return
    quick, cosines = bench.settings.quick, []
    for name in (name for name in MODELS if not quick or name in QUICK):
        with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="hf_accel-encoder-") as folder:
            rows, close = measured(name, bench.settings.seed, SECONDS / 4 if quick else SECONDS, Path(folder))
        yield Table(name, rows, SPEED)
        cosines.append(close)
        gc.collect()
    yield Table("Cosine to stock's outputs", cosines, CLOSE)
    yield accuracy(bench.settings)


def measured(name: str, seed: int, seconds: float, folder: Path) -> tuple[list[Row], Row]:
    """The speeds of one model, a row for each batch; and how close the outputs of each are to stock's."""
    torch.manual_seed(seed)
    encoder = MODELS[name]
    stock = encoder.make().eval()
    batches = {batch: inputs_of(encoder, lengths) for batch, lengths in encoder.batches.items()}
    makers, left_out = {"exact": lambda: patched(stock, None), "int8": lambda: patched(stock, "int8")}, {}
    makers |= {"torch_int8": lambda: by_torch(stock)}
    few = [1, 1] if encoder.images else [5, 8]
    calibration = [inputs_of(encoder, few if encoder.images else [40, 128]) for _ in range(4)]
    makers |= runtimes(stock, inputs_of(encoder, few), calibration, folder)
    calls, cosines = {"stock": hidden_of(stock)}, {}
    expected = [(given, calls["stock"](given)) for given in batches.values()]
    for each, make in makers.items():
        print(f"    {name}: making {each}", flush=True)
        reason = None if each in ("exact", "int8", "torch_int8") else why_missing(each)
        try:
            call = None if reason else make()
            cosines[each] = call and min(cosine(call(given), hidden, given) for given, hidden in expected)
        except Exception as error:  # it is another library's, and the others can be timed
            call, reason = None, f"{type(error).__name__}: {error}"
        if call is not None and each in FLOAT and cosines[each] < LEAST_COSINE:
            call, reason = None, f"its outputs have a cosine of {cosines[each]:.5f} to stock's"
        if call is None:
            left_out[each] = reason
            continue
        calls[each] = call
    close = {f"{each}_cosine": cosines.get(each) for each in makers}
    reasons = "; ".join(f"{each}: {reason}" for each, reason in left_out.items())
    print(f"    {name}: {close}; left out: {reasons or 'none'}", flush=True)
    rows = [row(batch, given, calls, columns=list(makers), least=seconds) for batch, given in batches.items()]
    return rows, {"model": name, **close, "left_out": reasons or None}


def inputs_of(encoder: Encoder, lengths: list[int]) -> Inputs:
    if encoder.images:
        return {"pixel_values": torch.randn(len(lengths), 3, 224, 224)}
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    tokens = torch.randint(1000, WORDS, mask.shape)
    return {"input_ids": tokens.where(mask.bool(), 1), "attention_mask": mask}


def hidden_of(model: nn.Module) -> Call:
    def call(given: Inputs) -> Tensor:
        hidden: Tensor = model(**given).last_hidden_state
        return hidden

    return call


def patched(stock: Any, weights: Any) -> Call:
    return hidden_of(hf_accel.patch(twin(stock), weights=weights))


def by_torch(stock: nn.Module) -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return hidden_of(torch.ao.quantization.quantize_dynamic(copy.deepcopy(stock), {nn.Linear}, torch.qint8))


def cosine(one: Tensor, other: Tensor, given: Inputs) -> float:
    """Of all values at real tokens."""
    if "attention_mask" in given:
        one, other = (x[given["attention_mask"].bool()] for x in (one, other))
    return torch.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0).item()


def row(batch: str, given: Inputs, calls: dict[str, Call], *, columns: list[str], least: float) -> Row:
    """Timed in turns for `least` seconds. Each has been called on the same batch before, to be checked."""
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    end = time.perf_counter() + least
    while time.perf_counter() < end or len(seconds["stock"]) < LEAST:
        for each, call in calls.items():
            time.sleep(REST)
            start = time.perf_counter()
            call(given)
            seconds[each].append(time.perf_counter() - start)
    found = {f"{each}_ratio": ratio(seconds, "stock", each) for each in columns}
    found["int8_over_openvino_int8_ratio"] = ratio(seconds, "openvino_int8", "int8")
    print(f"    {batch}: {found}", flush=True)
    return {"batch": batch, "stock_seconds": statistics.median(seconds["stock"]), **found}


def ratio(seconds: dict[str, list[float]], base: str, own: str) -> float | None:
    if base not in seconds or own not in seconds:
        return None
    return statistics.median(one / other for one, other in zip(seconds[base], seconds[own], strict=True))
