"""What hf-accel bench measures: a stock model and patched ones over the same weights, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.measuring.requests import draw
from hf_accel.measuring.served import accelerated, padded
from hf_accel.measuring.turns import BASELINE, ratios, take_turns, time_generate
from hf_accel.twin import twin

PATCHED = "patched"
Report = Callable[[str], object]


@dataclass(frozen=True)
class Sizes:
    """context: tokens of a prompt; new: that are generated; batch: requests at once; rounds: of each candidate."""

    context: int
    new: int
    batch: int
    rounds: int


@dataclass(frozen=True)
class Topic:
    """measure: seconds of each candidate in each round. what: they are seconds of."""

    what: str
    measure: Callable[[PreTrainedModel, Mapping[str, Any], Sizes, Report], dict[str, list[float]]]


def measured(topic: Topic, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """A row for each candidate. ratio: how many times faster than stock, the median over rounds, and both ends."""
    rows = []
    for name, values in seconds.items():
        each = ratios(seconds[BASELINE], values)
        rows.append({
            "name": name, "what": topic.what, "seconds": statistics.median(values), "ratio": statistics.median(each),
            "lowest_ratio": min(each), "highest_ratio": max(each),
        })  # fmt: skip
    return rows


def loaded_kernels(model: PreTrainedModel) -> str:
    """The level that our kernels run at here, or why there are none."""
    if model.device.type == "cuda":
        from hf_accel.kernels import triton

        return triton.refusal("cuda") or "Triton"
    return kernels.refusal() or kernels.isa()


# -- topics --------------------------------------------------------------------------------------------


def decode(
    model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report
) -> dict[str, list[float]]:
    """A step of generate() after the prompt."""
    prompt = tokens(model, sizes.batch, sizes.context)

    def step(one: PreTrainedModel) -> float:
        return time_generate(one, prompt, num_new=max(2, sizes.new)).per_step

    return in_turns(both(model, keywords), step, sizes, report)


def prefill(
    model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report
) -> dict[str, list[float]]:
    """A prompt, to its first token."""
    prompt = tokens(model, sizes.batch, sizes.context)

    def first(one: PreTrainedModel) -> float:
        return time_generate(one, prompt, num_new=1).first_token

    return in_turns(both(model, keywords), first, sizes, report)


def batch(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report) -> dict[str, list[float]]:
    """Requests of random lengths: stock pads them into one batch, generate_batch() of the patched one does not."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    requests = draw(
        "exponential", requests=sizes.batch, mean=sizes.new, vocabulary=vocabulary, seed=0,
        prompt_lengths=(max(1, sizes.context // 8), sizes.context),
    )  # fmt: skip

    def serve(one: PreTrainedModel) -> float:
        way = accelerated if hf_accel.is_patched(one) else padded
        return way(one, requests).checked(requests).seconds

    return in_turns(both(model, keywords), serve, sizes, report)


def ladder(
    model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report
) -> dict[str, list[float]]:
    """A decode step, with one measure more after the other; INT8 and INT4 are alternatives."""
    others = {name: value for name, value in keywords.items() if name != "weights"}
    models = {BASELINE: twin(model)}
    steps: dict[str, dict[str, Any]] = {
        "attention and cache": {"weights": None, "fuse": False},
        "fused layers": {"weights": None},
        "int8 weights": {"weights": "int8"},
        "int4 weights": {"weights": "int4"},
    }
    for name, more in steps.items():
        models[name] = hf_accel.patch(twin(model), **{**others, **more, "keep_original": True})
    prompt = tokens(model, sizes.batch, sizes.context)

    def step(one: PreTrainedModel) -> float:
        return time_generate(one, prompt, num_new=max(2, sizes.new)).per_step

    return in_turns(models, step, sizes, report)


TOPICS = {
    "decode": Topic("a decode step", decode),
    "prefill": Topic("a prompt, to its first token", prefill),
    "batch": Topic("all requests", batch),
    "ladder": Topic("a decode step", ladder),
}


def both(model: PreTrainedModel, keywords: Mapping[str, Any]) -> dict[str, PreTrainedModel]:
    """Over the same numbers, so that memory holds the float weights once."""
    return {BASELINE: model, PATCHED: hf_accel.patch(twin(model), **{**keywords, "keep_original": True})}


def in_turns(
    models: Mapping[str, PreTrainedModel], run: Callable[[PreTrainedModel], float], sizes: Sizes, report: Report
) -> dict[str, list[float]]:
    return take_turns({n: partial(run, one) for n, one in models.items()}, rounds=sizes.rounds, report=report)


def tokens(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random ids [batch, length]; speed does not depend on which."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)).to(model.device)


# -- memory --------------------------------------------------------------------------------------------


@torch.no_grad()
def memory(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes) -> list[dict[str, Any]]:
    """Bytes of weights, and of keys and values after a prompt. ratio: to stock's."""
    prompt: Any = tokens(model, sizes.batch, sizes.context)
    stock: Any = DynamicCache(config=model.config)
    model(input_ids=prompt, past_key_values=stock, use_cache=True, logits_to_keep=1)
    plan = hf_accel.plan(model, **keywords)
    held = {"weights": (plan.bytes_before, plan.bytes_after)}
    stock_kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    patched: Any = hf_accel.patch(twin(model), **{**keywords, "keep_original": True})
    patched.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
    held["keys and values"] = (stock_kv, int(hf_accel.stats(patched).get("kv_bytes", stock_kv)))
    return [
        {"name": name, "what": what, "bytes": size, "ratio": before / size}
        for what, (before, after) in held.items()
        for name, size in ((BASELINE, before), (PATCHED, after))
    ]
