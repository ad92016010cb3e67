"""Weights of each stored format on a CPU, in turns with INT8: one row times a weight, and steps of whole models.

No cache holds the weights. One model is of experts as gpt-oss has them, with a part of its layers and sizes; the other
is a Llama of a billion parameters in 4, 3 and 2 bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig

import hf_accel
from hf_accel.config import Layout
from hf_accel.linear import BACKENDS, ExpertWeights, QuantExperts
from hf_accel.linear.experts import WEIGHT_MODULES
from hf_accel.linear.formats import MXFP4, NVFP4, Mxfp4Weight, QuantizedWeight, state, zeros

from ..harness.bench import Bench
from ..harness.models import random_model, read_bytes
from ..harness.tables import Row, Table

SHAPES = ((4096, 2880), (2880, 2880))  # [out, in]
FORMATS = {
    "int8": Layout(), **{f"int{bits}": Layout(bits=bits, group_size=32) for bits in (4, 3, 2)},
    "mxfp4": MXFP4, "nvfp4": NVFP4,
}  # fmt: skip
COLD_BYTES = 2**28  # of the weights of one format that are used in turn
ROUNDS = 21
NOTE = "The seconds of INT8 over those of the format: processor time of one thread, the median of the rounds."
GPT_OSS = {  # 380 MB of experts in INT8, of which a step reads a half; heads and experts per token as in the 20b
    "hidden_size": 1440, "intermediate_size": 1440, "num_local_experts": 8, "num_experts_per_tok": 4,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "vocab_size": 64}  # for its buffers
DENSE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 512, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
BITS = (4, 3, 2)
NEW_TOKENS = 12
BITS_NOTE = (
    "A Llama with its weights in groups of 128 and an INT8 head, in turns. Ratio: the median, turn by turn, of the "
    "seconds in 4 bits over those of the row, with the quarters below and above it; bytes: the same of what a step "
    "reads, which is what the ratio can be where a step does nothing but read. One thread: processor time; all: "
    "seconds."
)
STEP_NOTE = (
    "Milliseconds of a step at batch 1: processor time of one thread, the median of the turns. Ratio: the median, "
    "turn by turn, of the seconds with experts in INT8 over those of the row. The rest: Linears of attention "
    "and the head."
)


def measure(bench: Bench) -> list[Table]:
    rows = [row(*shape) for shape in SHAPES]
    tables = [Table("one row", rows, NOTE), Table("a step of a model of experts", steps(), STEP_NOTE)]
    return [*tables, Table("a step in 4, 3 and 2 bits", steps_by_bits(), BITS_NOTE)]


def steps_by_bits() -> list[Row]:
    """Compare steps of a model in 4, 3 and 2 bits, with one thread and with all."""
    models = {
        bits: hf_accel.patch(
            random_model(LlamaConfig(**DENSE)), weights=hf_accel.WeightConfig(bits), keep_original=False
        )
        for bits in BITS
    }
    sizes, rows = {bits: read_bytes(model) for bits, model in models.items()}, list[Row]()
    for threads, clock in ((1, time.thread_time), (torch.get_num_threads(), time.perf_counter)):
        runs = {str(bits): one_step(model, clock) for bits, model in models.items()}
        times = in_turns(runs, threads)
        for bits in BITS:
            ratios = [first / own for first, own in zip(times[str(BITS[0])], times[str(bits)], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            rows.append({
                "threads": threads, "bits": bits, "ms": 1e3 * statistics.median(times[str(bits)]), "ratio": middle,
                "low_ratio": low, "high_ratio": high, "bytes_ratio": sizes[BITS[0]] / sizes[bits],
            })  # fmt: skip
    return rows


def steps() -> list[Row]:
    """Compare steps of the model with experts in both formats, and everything else in bfloat16, and in INT8."""
    rows: list[Row] = []
    for rest in ("bfloat16", "int8"):
        models = {"int8": model_of(rest), "mxfp4": with_mxfp4(model_of(rest))}
        times = in_turns({name: one_call(model) for name, model in models.items()})
        for name, each in times.items():
            pairs = zip(times["int8"], each, strict=True)
            ratio = statistics.median(first / second for first, second in pairs)
            rows.append({"experts": name, "rest": rest, "ms": 1e3 * statistics.median(each), "ratio": ratio})
    return rows


def model_of(rest: str) -> Any:
    """A model of random weights, with experts in INT8; rest: the format of the Linears and of the head."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**GPT_OSS))
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    for name, buffer in GptOssForCausalLM(GptOssConfig(**GPT_OSS | SMALL)).named_buffers():
        model.get_buffer(name).copy_(buffer)
    left = {"skip": ["q_proj", "k_proj", "v_proj", "o_proj"], "head": None} if rest != "int8" else {}
    return hf_accel.patch(model, weights={"bits": 8, **left}, keep_original=False)


def with_mxfp4(model: Any) -> Any:
    """Round the experts to MXFP4, in the model itself."""
    for module in [module for module in model.modules() if isinstance(module, QuantExperts)]:
        for name, held in module.weights.items():
            shape = (held.out_features, held.in_features)
            empty = Mxfp4Weight.empty(MXFP4, shape, dtype=held.dtype, device="cpu")
            weight = empty.rounded(held.quantized.dequantize(torch.float32))
            made = ExpertWeights(weight, held.experts, activations="auto", dtype=held.dtype)
            module.add_module(WEIGHT_MODULES[name], made.pack())
    return model


def one_call(model: Any) -> Callable[[], float]:
    """Return what takes some steps and returns the processor seconds of one."""
    ids = torch.tensor([[3, 5, 7, 11]])
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    def run() -> float:
        start = time.thread_time()
        model.generate(ids, **asked)
        return (time.thread_time() - start) / NEW_TOKENS

    return run


def one_step(model: Any, clock: Callable[[], float]) -> Callable[[], float]:
    """Return what returns the seconds of a step by this clock, without those of reading the prompt."""
    ids = torch.tensor([[3, 5, 7, 11]])
    asked = {"do_sample": False, "attention_mask": torch.ones_like(ids)}

    def run() -> float:
        times = [clock()]
        for count in (1, 1 + NEW_TOKENS):
            model.generate(ids, max_new_tokens=count, **asked)
            times.append(clock())
        return (times[2] - 2 * times[1] + times[0]) / NEW_TOKENS

    return run


def in_turns(runs: Mapping[str, Callable[[], float]], threads: int = 1) -> dict[str, list[float]]:
    """Return the results of each, called in turn with the others; the first ones are left out."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rounds = [{name: run() for name, run in runs.items()} for _ in range(ROUNDS + 2)][2:]
    torch.set_num_threads(before)
    return {name: [one[name] for one in rounds] for name in runs}


@torch.inference_mode()
def row(out_features: int, in_features: int) -> Row:
    backend = next(backend for backend in BACKENDS if backend.name == "cpu")
    count = max(2, COLD_BYTES // (out_features * in_features))
    packed = {
        name: [backend.pack(filled(layout, (out_features, in_features))) for _ in range(count)]
        for name, layout in FORMATS.items()
    }
    x, threads = torch.randn(1, in_features), torch.get_num_threads()
    torch.set_num_threads(1)

    def seconds(weights: Sequence[object]) -> float:
        start = time.thread_time()
        for weight in weights:
            backend.run(x, weight, None)
        return time.thread_time() - start

    rounds = [{name: seconds(weights) for name, weights in packed.items()} for _ in range(ROUNDS)]
    torch.set_num_threads(threads)
    ratios = {name: statistics.median(r["int8"] / max(r[name], 1e-9) for r in rounds) for name in FORMATS}
    return {"weight": f"{out_features} x {in_features}", **{f"{name}_ratio": ratio for name, ratio in ratios.items()}}


def filled(layout: Layout, shape: tuple[int, int]) -> QuantizedWeight:
    """A weight whose numbers are random and whose scales are about 1 / 64."""
    weight = zeros(layout, shape, dtype=torch.float32, device="cpu")
    for name, tensor in state(weight).items():
        if name in ("weight", "weight_packed"):
            tensor.view(torch.uint8).random_(0, 128)
        elif name == "weight_scale":
            tensor.fill_(1 / 64 if tensor.is_floating_point() else 121)
    return weight
