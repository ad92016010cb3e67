"""generate_batch: stock's dict of outputs, each prompt as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_accel
from hf_accel import UnsupportedError

from .families import FAMILIES, VOCABULARY, build
from .speculating import answers, requests, speculative, stock, target

PROMPTS = requests(32, longest=12, seed=9, shared=4)
ENDS = list(range(2, 30))


def tokens(outputs: Any) -> list[list[int]]:
    return [output.generated_tokens for output in outputs.values()]


def alone(family: str, prompt: list[int], config: GenerationConfig) -> list[int]:
    ids = torch.tensor([prompt])
    out = stock(family).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", [None, "near model", "free cascade"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prompts(family: str, drafter: str | None) -> None:
    config = None if drafter is None else speculative(drafter, family)
    model = target(family)
    outputs = model.generate_batch(PROMPTS, max_new_tokens=12, do_sample=False, speculative=config)
    assert tokens(outputs) == answers(family, PROMPTS, 12)
    assert [output.prompt_ids for output in outputs.values()] == PROMPTS
    assert {output.status for output in outputs.values()} == {RequestStatus.FINISHED}
    assert hf_accel.stats(model)["new_tokens"] == 32 * 12


def test_a_kept_method_is_transformers_own_after_unpatch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    hf_accel.patch(model, weights=None)
    kept = model.generate_batch
    hf_accel.unpatch(model)
    monkeypatch.setattr(type(model), "generate_batch", lambda self, inputs, **given: (self, inputs, given))
    assert kept(PROMPTS, max_new_tokens=2) == (model, PROMPTS, {"max_new_tokens": 2})


def test_a_config_for_each_prompt() -> None:
    """Lengths, ends, penalties and minimums of their own, under drafts."""
    configs = [
        GenerationConfig(
            max_new_tokens=3 + number, do_sample=False, eos_token_id=ENDS if number % 2 else None, pad_token_id=0,
            repetition_penalty=1.0 + 0.4 * (number % 3), min_new_tokens=number % 4,
            no_repeat_ngram_size=number % 2 * 2,
        )
        for number in range(12)
    ]  # fmt: skip
    before = [config.to_dict() for config in configs]
    expected = [alone("llama", *pair) for pair in zip(PROMPTS, configs, strict=False)]
    for drafter in ("near model", "suffix"):
        outputs = target("llama").generate_batch(PROMPTS[:12], configs, speculative=speculative(drafter, "llama"))
        assert tokens(outputs) == expected
    assert [config.to_dict() for config in configs] == before


def test_samples() -> None:
    """Named as stock names them; the same with the same seed, and the same whatever is looked up."""
    settings = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "num_return_sequences": 3}
    found = []
    for drafter in (None, None, "suffix", "random"):
        config = None if drafter is None else speculative(drafter, "llama")
        torch.manual_seed(5)
        found.append(target("llama").generate_batch(PROMPTS[:4], **settings, speculative=config))
    assert list(found[0])[:3] == ["req_0__child#0", "req_0__child#1", "req_0"]
    assert len({tuple(each) for each in tokens(found[0])}) == 12
    assert all(tokens(other) == tokens(found[0]) for other in found)


@torch.no_grad()
def test_logprobs() -> None:
    from transformers import ContinuousBatchingConfig

    settings = ContinuousBatchingConfig(return_logprobs=True)
    outputs = target("llama").generate_batch(
        PROMPTS[:3], continuous_batching_config=settings, max_new_tokens=6, do_sample=False,
        speculative=speculative("near model", "llama"),
    )  # fmt: skip
    for prompt, output in zip(PROMPTS, outputs.values(), strict=False):
        logits = stock("llama")(torch.tensor([prompt + output.generated_tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("setting", [{"encoder_no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 1.5}])
def test_settings_that_read_the_prompt(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By generate_batch and by an Engine, where each request has a prompt of its own."""
    model, config = target("llama"), GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, **setting)
    expected = [alone("llama", prompt, config) for prompt in PROMPTS[:6]]
    assert expected != answers("llama", PROMPTS[:6], 8)
    assert tokens(model.generate_batch(PROMPTS[:6], config)) == expected
    monkeypatch.setattr(model, "generation_config", config)
    with hf_accel.Engine(model) as engine:
        asked = [engine.submit(prompt, max_new_tokens=8, temperature=0) for prompt in PROMPTS[:6]]
        assert [request.result(60).tokens for request in asked] == expected


def test_few_blocks() -> None:
    """Who can never fit fails alone; the others wait, and are preempted."""
    model = hf_accel.patch(build("llama"), weights=None, cache=hf_accel.CacheConfig(block_size=4, max_tokens=96))
    prompts = [*PROMPTS[:10], list(range(1, 95)), *PROMPTS[10:12]]
    outputs = list(model.generate_batch(prompts, max_new_tokens=20, do_sample=False, speculative="suffix").values())
    assert outputs[10].status is RequestStatus.FAILED and "make 114 tokens, the cache holds 96" in outputs[10].error
    del outputs[10]
    assert [output.generated_tokens for output in outputs] == answers("llama", PROMPTS[:12], 20)
    assert hf_accel.stats(model)["preemptions"] > 0


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1 must be a list of at least one token id"),
        ([[1], [1.5]], {}, "prompt 1 must be a list of at least one token id"),
        (["a text"], {}, r"prompt 0 is a text; give its token ids: tokenizer\(text\)\['input_ids'\]"),
        ([{"role": "user", "content": "a"}], {}, r"prompt 0 is a chat message; .*apply_chat_template\(messages"),
        (
            [[{"role": "user", "content": "a"}]],
            {},
            "prompt 0 is a list of chat messages; .*apply_chat_template",
        ),
        ({"input_ids": [[1]]}, {}, "inputs is a dict, as a tokenizer returns it; give lists of token ids"),
        ([torch.ones(2, 2, dtype=torch.int64)], {}, r"prompt 0 has the shape \(2, 2\); give each row"),
        ([[1], [VOCABULARY]], {}, f"prompt 1 holds .* the model has 0 to {VOCABULARY - 1}"),
        ([[1]], {"num_beams": 2}, "cannot search with num_beams=2; set it to 1"),
        (
            [[1]],
            {"max_new_token": 2},
            r"generate_batch\(\) got .* 'max_new_token'; did you mean 'max_new_tokens'",
        ),
        ([[1]], {"logits_processor": []}, r"use generate\(logits_processor=\), or Engine.submit\(processors=\)$"),
        ([[1]], {"xyzzy": 1}, "unknown keyword 'xyzzy'; it takes the fields of a GenerationConfig$"),
        ([[1]], {"scheduler_type": "prefill_first"}, "scheduler_type='prefill_first' has no meaning"),
        ([[1], [2]], {"generation_config": [GenerationConfig()]}, "1 configs for 2 prompts"),
        ([[1]], {"speculative": "ngrams"}, "drafter='ngrams' is not known"),
    ],
    ids=str,
)
def test_what_cannot_be(prompts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        target("llama").generate_batch(prompts, **settings)


@pytest.mark.parametrize(
    "given", [None, ContinuousBatchingConfig(max_batch_tokens=64)], ids=["alone", "beside a config"]
)
def test_fields_of_transformers_config_as_keywords(given: ContinuousBatchingConfig | None) -> None:
    """As transformers spelt them in generate_batch, and spells them in its config now."""
    shared, apart = (
        hf_accel.patch(build("llama"), weights=None, cache=hf_accel.CacheConfig(block_size=4)) for _ in range(2)
    )
    settings = {"max_new_tokens": 4, "do_sample": False, "continuous_batching_config": given}
    prompts = [PROMPTS[0][:4] * 3] * 3
    outputs = [
        shared.generate_batch(prompts, **settings),
        apart.generate_batch(prompts, allow_block_sharing=False, **settings),
    ]
    assert tokens(outputs[0]) == tokens(outputs[1]) == answers("llama", prompts, 4)
    assert hf_accel.stats(shared)["prefix_hits"] > 0 == hf_accel.stats(apart)["prefix_hits"]
    assert given is None or given.allow_block_sharing  # the user's own config stays
