"""transformers' own continuous batching of a patched model, which goes on attending by ours meanwhile."""

from __future__ import annotations

import asyncio
import queue
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
        assert hf_accel.stats(model)["loop"] == "ragged"
        assert answers(manager) == expected
        assert model.config._attn_implementation == "hf_accel"
        assert alone(model) == expected  # while the manager's thread is alive
    hf_accel.unpatch(model)
    with model.continuous_batching_context_manager(**settings()) as manager:
        assert answers(manager) == stock


def test_a_manager_that_is_kept_is_found_again() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    with started(model, keep_for_next_session=True) as manager:
        first = answers(manager)
    with started(model, keep_for_next_session=True) as again:
        assert again is manager
        assert answers(again) == first
        hits = manager.session.statistics()["prefix_hits"]
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    with started(model) as again:
        assert again is manager
        assert answers(again) == alone(model) != first
        assert manager.session.statistics()["prefix_hits"] == hits  # nothing that other weights have computed
    with started(model) as other:
        assert other is not manager
    model.destroy_cached_continuous_batching_manager()


# -- one request -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return hf_accel.patch(build("llama"), weights=None)


def test_results_are_streamed_and_asked_for_by_name(model: PreTrainedModel) -> None:
    expected = alone(model)
    with started(model) as manager:
        one = manager.add_request(PROMPTS[0], streaming=True, record_timestamps=True)
        other = manager.add_request(PROMPTS[1], request_id="mine")
        assert other == "mine"
        steps = list(manager.request_id_iter(one))
        assert [step.generated_tokens for step in steps] == [expected[0][:n] for n in range(1, 6)]
        assert [step.is_finished() for step in steps] == [False] * 4 + [True]
        assert len(steps[-1].timestamps) == 5 and steps[-1].timestamps == sorted(steps[-1].timestamps)
        result = manager.get_result("mine", timeout=20)
        assert (result.generated_tokens, result.prompt_ids) == (expected[1], PROMPTS[1])
        assert result.timestamps is None and result.lifespan[0] < result.lifespan[1]
        assert manager.get_result("mine", timeout=0.01) is None


def test_requests_may_come_before_the_start_and_differ(model: PreTrainedModel) -> None:
    manager = model.init_continuous_batching(**settings())
    names = [
        manager.add_request(PROMPTS[0], max_new_tokens=2),
        manager.add_request(PROMPTS[0], eos_token_id=alone(model)[0][2]),
        manager.add_request(PROMPTS[0], do_sample=True, temperature=5.0, top_k=50),
    ]
    assert names == ["req_0", "req_1", "req_2"] and not manager.is_running()
    manager.start()
    given = [manager.get_result(timeout=20) for _ in names]
    results = {result.request_id: result.generated_tokens for result in given}
    manager.stop()
    assert not manager.is_running() and hf_accel.stats(model)["finished"] == 3
    expected = alone(model)[0]
    assert (results["req_0"], results["req_1"]) == (expected[:2], expected[:3])
    assert results["req_2"] != expected


def test_samples_of_one_prompt_are_children(model: PreTrainedModel) -> None:
    asked = settings()
    asked["generation_config"].update(num_return_sequences=3, do_sample=True)
    asked["continuous_batching_config"].seed = 4
    runs = []
    for _ in range(2):
        with model.continuous_batching_context_manager(**asked) as manager:
            manager.add_request(PROMPTS[0])
            results = [manager.get_result(timeout=20) for _ in range(3)]
        runs.append({result.request_id: result.generated_tokens for result in results})
    assert runs[0] == runs[1] and set(runs[0]) == {"req_0", "req_0__child#0", "req_0__child#1"}
    assert len({tuple(tokens) for tokens in runs[0].values()}) > 1


def test_cancel_and_stop(model: PreTrainedModel) -> None:
    manager = model.init_continuous_batching(**settings())
    manager.start()
    with manager.pause():
        cancelled = manager.add_request(PROMPTS[0], max_new_tokens=200)
        other = manager.add_request(PROMPTS[1], max_new_tokens=100)
        manager.cancel_request(cancelled)
        manager.cancel_request("nobody")
    assert manager.get_result(other, timeout=20).generated_tokens[:5] == alone(model)[1]
    assert manager.get_result(cancelled, timeout=0.05) is None
    with manager.pause():
        late = manager.add_request(PROMPTS[2], max_new_tokens=200)
    manager.stop(hard_stop=True)
    result = manager.get_result(late, timeout=20)
    assert result.is_finished() and "stopped before the request had ended" in result.error
    assert manager.session.statistics()["blocks_used"] == 0
    with pytest.raises(hf_accel.HfAccelError, match="closed"):
        manager.add_request(PROMPTS[0])


def test_a_handler_is_called_in_its_event_loop(model: PreTrainedModel) -> None:
    async def ask(manager: Any) -> list[Any]:
        results: asyncio.Queue[Any] = asyncio.Queue()
        manager.register_result_handler("mine", results.put_nowait)
        manager.add_request(PROMPTS[0], request_id="mine", streaming=True)
        got = [await asyncio.wait_for(results.get(), 20)]
        while not got[-1].is_finished():
            got.append(await asyncio.wait_for(results.get(), 20))
        return got

    with started(model) as manager:
        got = asyncio.run(ask(manager))
    assert got[-1].generated_tokens == alone(model)[0] and len(got) == 5


def test_one_request_that_fails_fails_alone(model: PreTrainedModel) -> None:
    with started(model) as manager:
        much = manager.add_request(PROMPTS[0], max_new_tokens=10**6)  # 16 blocks of 256 tokens never hold it
        fine = manager.add_request(PROMPTS[1])
        assert "max_tokens" in manager.get_result(much, timeout=20).error
        assert manager.get_result(fine, timeout=20).generated_tokens == alone(model)[1]
        with pytest.raises(hf_accel.UnsupportedError, match=r"the prompt of 'req_2' holds"):
            manager.add_request([10**6])
        with pytest.raises(hf_accel.UnsupportedError, match="unknown keyword 'temprature'"):
            manager.add_request(PROMPTS[0], temprature=2.0)


def test_log_probabilities(model: PreTrainedModel) -> None:
    asked = settings()
    asked["continuous_batching_config"].return_logprobs = True
    with model.continuous_batching_context_manager(**asked) as manager:
        manager.add_request(PROMPTS[0])
        result = manager.get_result(timeout=20)
    logits = model(torch.tensor([result.prompt_ids + result.generated_tokens])).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(result.generated_tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_what_a_config_cannot_ask_for(model: PreTrainedModel) -> None:
    asked = settings()
    asked["continuous_batching_config"].scheduler_type = "prefill_first"
    with pytest.raises(hf_accel.UnsupportedError, match="scheduler_type='prefill_first' has no meaning"):
        model.init_continuous_batching(**asked)
    asked = settings()
    asked["continuous_batching_config"].max_queue_size = 1
    manager = model.init_continuous_batching(**asked)
    manager.add_request(PROMPTS[0])
    with pytest.raises(queue.Full), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_accel.generation.hf.continuous.QUEUE_SECONDS", 0.01)
        manager.add_request(PROMPTS[1])


def test_unpatch_waits_for_the_manager() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    with started(model), pytest.raises(hf_accel.UnsupportedError, match="ContinuousManager"):
        hf_accel.unpatch(model)
    hf_accel.unpatch(model)


def test_generate_over_stock_s_paged_cache() -> None:
    model, ids = build("llama"), torch.tensor([PROMPTS[0]] * 2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)[None]  # as stock returns it
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, cache_implementation="paged", **options), expected)
    assert hf_accel.stats(model)["seconds"] > 0


def test_the_plan_says_whose_managers_they_are() -> None:
    choices = hf_accel.plan(build("llama")).to_dict()["choices"]
    (line,) = (choice for choice in choices if choice["what"] == "init_continuous_batching()")
    assert (line["topic"], line["choice"]) == ("generate", "ragged")


def test_a_model_without_ragged_passes_answers_by_the_manager() -> None:
    model = build("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = type(model)(model.config).eval()
    expected = alone(model)
    hf_accel.patch(model, weights=None)
    outputs = model.generate_batch(PROMPTS, **settings())
    assert [output.generated_tokens for output in outputs.values()] == expected
