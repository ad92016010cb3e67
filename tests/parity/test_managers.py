"""transformers' own continuous batching of a patched model, which goes on attending by ours meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import hf_accel

from .families import build, prompts

PROMPTS = [prompts(1, length, seed=length)[0].tolist() for length in (5, 9, 7)]


def settings() -> dict[str, Any]:
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return {
        "generation_config": config,
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    }


def answers(manager: Any) -> list[list[int]]:
    names = manager.add_requests(PROMPTS, max_new_tokens=5)
    results = {}
    while len(results) < len(names):
        result = manager.get_result(timeout=20)
        results[result.request_id] = result.generated_tokens
    return [results[name] for name in names]


def alone(model: PreTrainedModel) -> list[list[int]]:
    options = {"max_new_tokens": 5, "do_sample": False}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS]


@contextmanager
def started(model: PreTrainedModel, **stopping: Any) -> Iterator[Any]:
    manager = model.init_continuous_batching(**settings())
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=20, **stopping)


@pytest.mark.parametrize(("family", "weights"), [("llama", "int8"), ("gpt2", None)])
def test_the_context_manager(family: str, weights: str | None) -> None:
    model = build(family)
    stock = alone(model)
    hf_accel.patch(model, weights=weights)
    expected = alone(model)
    assert weights is not None or expected == stock
    with model.continuous_batching_context_manager(**settings()) as manager:
        assert hf_accel.stats(model)["loop"] == "stock: transformers' continuous batching manager"
        assert answers(manager) == expected
        assert model.config._attn_implementation == "hf_accel"
        assert alone(model) == expected  # while the manager's thread is alive
    hf_accel.unpatch(model)
    with model.continuous_batching_context_manager(**settings()) as manager:
        assert answers(manager) == stock


def test_a_manager_that_is_kept_is_found_again_until_the_weights_change() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    with started(model, keep_for_next_session=True) as manager:
        first = answers(manager)
    with started(model, keep_for_next_session=True) as again:
        assert again is manager
        assert answers(again) == first
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    with started(model) as other:
        assert other is not manager
        assert answers(other) == alone(model) != first
    model.destroy_cached_continuous_batching_manager()


def test_generate_over_stock_s_paged_cache() -> None:
    model, ids = build("llama"), torch.tensor([PROMPTS[0]] * 2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)[None]  # as stock returns it
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, cache_implementation="paged", **options), expected)
    assert hf_accel.stats(model)["seconds"] > 0


def test_the_plan_says_whose_managers_they_are() -> None:
    choices = hf_accel.plan(build("llama")).to_dict()["choices"]
    (line,) = (choice for choice in choices if choice["what"] == "managers")
    assert (line["topic"], line["choice"]) == ("generate", "stock's")


def test_a_model_without_ragged_passes_answers_by_the_manager() -> None:
    model = build("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = type(model)(model.config).eval()
    expected = alone(model)
    hf_accel.patch(model, weights=None)
    outputs = model.generate_batch(PROMPTS, **settings())
    assert [output.generated_tokens for output in outputs.values()] == expected
