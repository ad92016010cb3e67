"""The topics of hf-accel bench: a stock model and patched ones over the same weights, measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_accel
from hf_accel.cache.hf.cache_argument import cache_name
from hf_accel.kernels import cpu as kernels
from hf_accel.models import vocabulary_size
from hf_accel.patching.twin import twin
from hf_accel.verify.certificate import Cost
from hf_accel.verify.cost import measure_cost, text_windows

from .measurement import (
    BASELINE,
    WrongResultError,
    accelerated,
    draw,
    one_padded_batch,
    ratios,
    take_turns,
    time_generate,
)

PATCHED = "patched"
COMPARED = 256  # tokens of the prompt that are computed by both before anything is timed
MOST_DIVERGENCE = 1.0  # nats a token; the coarsest weights that are of use stay far below it
Report = Callable[[str], object]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    context: tokens of a prompt; new: generated tokens; batch: requests; rounds: calls of each candidate.
    """

    context: int
    new: int
    batch: int
    rounds: int


@dataclass(frozen=True)
class Turns:
    """The result of a topic. seconds: of each candidate in each round. costs: how patched models differ from stock."""

    seconds: dict[str, list[float]]
    costs: dict[str, Cost]

    def rows(self, what: str) -> list[dict[str, Any]]:
        """Return one row for each candidate. what: the name of what was timed.

        ratio: how many times faster than stock, the median over rounds, and both ends. kl: divergence from stock in
        nats a token; same_top: the share of tokens after which both find the same one likeliest.
        """
        rows = []
        for name, values in self.seconds.items():
            each, cost = ratios(self.seconds[BASELINE], values), self.costs.get(name)
            rows.append({
                "name": name, "what": what, "seconds": statistics.median(values), "ratio": statistics.median(each),
                "lowest_ratio": min(each), "highest_ratio": max(each),
                "kl": cost.kl if cost else 0.0, "same_top": cost.same_top if cost else 1.0,
            })  # fmt: skip
        return rows


@dataclass(frozen=True)
class Topic:
    """A topic. what: the name of what `measure` times."""

    what: str
    measure: Callable[[PreTrainedModel, Mapping[str, Any], Sizes, Report], Turns]


def loaded_kernels(model: PreTrainedModel) -> str:
    """Return the instruction set that our kernels use here, or why there are none."""
    if model.device.type == "cuda":
        from hf_accel.kernels import triton

        return triton.refusal("cuda") or "Triton"
    return kernels.refusal() or kernels.isa()


# -- topics --------------------------------------------------------------------------------------------


def decode(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report) -> Turns:
    """Measure a step of generate() after the prompt."""
    prompt = tokens(model, sizes.batch, sizes.context)

    def step(one: PreTrainedModel) -> float:
        return time_generate(one, prompt, num_new=max(2, sizes.new)).per_step

    return in_turns(both(model, keywords), step, sizes, report)


def prefill(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report) -> Turns:
    """Measure a prompt, up to its first token."""
    prompt = tokens(model, sizes.batch, sizes.context)

    def first(one: PreTrainedModel) -> float:
        return time_generate(one, prompt, num_new=1).first_token

    return in_turns(both(model, keywords), first, sizes, report)


def batch(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report) -> Turns:
    """Measure requests of random lengths: stock pads them into one batch, generate_batch() of the patched model does
    not.
    """
    vocabulary = vocabulary_size(model)
    requests = draw(
        "exponential", requests=sizes.batch, mean=sizes.new, vocabulary=vocabulary, seed=0,
        prompt_lengths=(max(1, sizes.context // 8), sizes.context),
    )  # fmt: skip

    def serve(one: PreTrainedModel) -> float:
        way = accelerated if hf_accel.is_patched(one) else one_padded_batch
        return way(one, requests).checked(requests).seconds

    return in_turns(both(model, keywords), serve, sizes, report)


def ladder(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report) -> Turns:
    """Measure a decode step with one optimization more after the other; INT8 and INT4 are alternatives."""
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
    """Make both models over the same numbers, so that memory holds the float weights once."""
    return {BASELINE: model, PATCHED: hf_accel.patch(twin(model), **{**keywords, "keep_original": True})}


def in_turns(
    models: Mapping[str, PreTrainedModel], run: Callable[[PreTrainedModel], float], sizes: Sizes, report: Report
) -> Turns:
    costs = compare(models, sizes.context, report)
    candidates = {name: partial(run, one) for name, one in models.items()}
    return Turns(take_turns(candidates, rounds=sizes.rounds, report=report), costs)


def compare(models: Mapping[str, PreTrainedModel], context: int, report: Report) -> dict[str, Cost]:
    """Compare each patched model with stock on random tokens, which are harder than text.

    Raises WrongResultError for a model that computes something else, which is then not timed.
    """
    stock = models[BASELINE]
    windows = text_windows([tokens(stock, 1, max(2, min(context, COMPARED)))[0]])
    costs = {}
    for name, one in models.items():
        if one is stock:
            continue
        report(f"comparing {name} with stock")
        cost = costs[name] = measure_cost(one, stock, windows, name=BASELINE, text="random tokens")
        if not cost.kl <= MOST_DIVERGENCE:  # NaN too
            raise WrongResultError(
                f"{name}: after random tokens its answers diverge from stock's by {cost.kl:.3g} nats a token, and "
                f"more than {MOST_DIVERGENCE:g} is no rounding: nothing was timed; take more bits (--weights int8 or "
                "none), and if that does not help, hf-accel verify shows where they part"
            )
    return costs


def tokens(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Draw random ids [batch, length]; speed does not depend on them."""
    vocabulary = vocabulary_size(model)
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)).to(model.device)


# -- memory --------------------------------------------------------------------------------------------


@torch.no_grad()
def memory(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes) -> list[dict[str, Any]]:
    """Measure bytes of weights, and of keys and values after a prompt. ratio: to stock's."""
    plan = hf_accel.plan(model, **keywords)
    held = {"weights": (plan.bytes_before, plan.bytes_after)}
    if not model.config.is_encoder_decoder:  # which keeps nothing after an answer, since no other could share it
        held["keys and values"] = _kept_after(model, keywords, tokens(model, sizes.batch, sizes.context))
    return [
        {"name": name, "what": what, "bytes": size, "ratio": before / size}
        for what, (before, after) in held.items()
        for name, size in ((BASELINE, before), (PATCHED, after))
    ]


def _kept_after(model: Any, keywords: Mapping[str, Any], prompt: Tensor) -> tuple[int, int]:
    """Return the bytes of keys and values that stock and a patched model keep of a prompt [B, T]."""
    stock: Any = DynamicCache(config=model.config)
    model(input_ids=prompt, **{cache_name(model): stock}, use_cache=True, logits_to_keep=1)
    stock_kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    patched: Any = hf_accel.patch(twin(model), **{**keywords, "keep_original": True})
    patched.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
    return stock_kv, int(hf_accel.stats(patched).get("kv_bytes", stock_kv))
