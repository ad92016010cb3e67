"""Greedy tokens under speculation are stock's, whoever drafts, whatever runs beside, however blocks fall."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.state import find_state

from .families import FAMILIES, build
from .snapshot import snapshot
from .speculating import (
    MAKERS,
    OracleDrafter,
    answers,
    by_engine,
    by_generate,
    by_generate_batch,
    near,
    requests,
    speculative,
    target,
)

NEW_TOKENS = 20
PROMPTS = requests(9)
FEWER, FEWER_TOKENS = PROMPTS[:6], 12  # where no memory has to run short


def assert_all_ways(family: str, drafter: str) -> None:
    model, expected = target(family), answers(family, FEWER, FEWER_TOKENS)
    config = speculative(drafter, family)
    assert by_generate(model, FEWER, FEWER_TOKENS, speculative=config) == expected
    assert hf_accel.stats(model)["loop"] == "ragged" and hf_accel.stats(model)["drafted"] > 0
    assert by_generate_batch(model, FEWER, FEWER_TOKENS, speculative=config) == expected
    tokens, stats = by_engine(model, FEWER, FEWER_TOKENS, speculative=config)
    assert tokens == expected and stats["speculation"]["drafted"] > 0


@pytest.mark.parametrize("drafter", MAKERS)
def test_every_drafter(drafter: str) -> None:
    assert_all_ways("llama", drafter)


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", ["near model", "self-int4", "draft head"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama"}))
def test_every_family(family: str, drafter: str) -> None:
    assert_all_ways(family, drafter)


@pytest.mark.long
@pytest.mark.parametrize("drafter", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_in_every_family(family: str, drafter: str) -> None:
    assert_all_ways(family, drafter)


SETTINGS: dict[str, dict[str, Any]] = {
    "one token a pass": {"token_budget": 1},
    "seven tokens a pass": {"token_budget": 7},
    "no budget": {"token_budget": None},
    "few blocks": {"max_tokens": 96},
    "few blocks, small budget": {"max_tokens": 96, "token_budget": 7},
    "few at once": {"max_running": 2},
}


def assert_engine(family: str, drafter: str, block_size: int, settings: dict[str, Any], *, count: int) -> None:
    prompts = requests(count, shared=17, seed=3)
    model, expected = target(family, block_size), answers(family, prompts, NEW_TOKENS)
    tokens, stats = by_engine(model, prompts, NEW_TOKENS, speculative=speculative(drafter, family), **settings)
    assert tokens == expected
    assert "max_tokens" not in settings or stats["preemptions"] > 0 or block_size == 16
    if family in ("llama", "qwen2", "gpt2"):  # the others' windows have no index
        assert stats["prefix_hits"] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_budgets_blocks_and_preemption(block_size: int, settings: dict[str, Any]) -> None:
    assert_engine("llama", "near model", block_size, settings, count=10)


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", ["self-int4", "suffix"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_preemption_with_windows(family: str, drafter: str) -> None:
    prompts = requests(10, longest=3, seed=3)  # shorter than the window: they enter, and then need more
    model, expected = target(family, 1), answers(family, prompts, NEW_TOKENS)
    config = speculative(drafter, family)
    tokens, stats = by_engine(model, prompts, NEW_TOKENS, speculative=config, max_tokens=30, spread=False)
    assert tokens == expected and stats["preemptions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("drafter", ["self-int4", "cascade"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_budgets_everywhere(family: str, drafter: str, block_size: int, settings: dict[str, Any]) -> None:
    assert_engine(family, drafter, block_size, settings, count=16)


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["near model", "self-int4"])
def test_two_hundred_prompts(drafter: str) -> None:
    prompts = requests(200, seed=11)
    expected = answers("llama", prompts, 64)
    config = speculative(drafter, "llama")
    tokens, _ = by_engine(target("llama"), prompts, 64, speculative=config, max_running=32)
    assert tokens == expected


# -- exact counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft", [1, 3, 7])
def test_an_oracle_needs_as_few_passes_as_there_can_be(num_draft: int) -> None:
    """The prompt's pass brings one token, each further one num_draft + 1."""
    expected = answers("llama", PROMPTS, NEW_TOKENS)
    config = SpeculativeConfig(drafter=OracleDrafter(PROMPTS, expected), num_draft=num_draft)
    for prompt, answer in zip(PROMPTS[:3], expected[:3], strict=True):
        tokens, stats = by_engine(target("llama"), [prompt], NEW_TOKENS, speculative=config)
        assert tokens == [answer]
        assert stats["passes"] == 1 + -(-(NEW_TOKENS - 1) // (num_draft + 1))
        assert stats["speculation"]["accepted"] == stats["speculation"]["drafted"]


@pytest.mark.parametrize("right", [0, 1, 2, 5])
def test_a_draft_is_kept_up_to_its_first_wrong_token(right: int) -> None:
    expected = answers("llama", PROMPTS, NEW_TOKENS)
    config = SpeculativeConfig(drafter=OracleDrafter(PROMPTS, expected, right), num_draft=4)
    tokens, stats = by_engine(target("llama"), PROMPTS, NEW_TOKENS, speculative=config)
    assert tokens == expected
    assert (stats["speculation"]["accepted"] > 0) == (right > 0)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_the_model_itself_accepts_all_of_its_own_drafts() -> None:
    """A copy drafts over pages of its own: with row-invariant kernels it says what the target says."""
    model = hf_accel.patch(build("llama"), weights=None, cache=hf_accel.CacheConfig(block_size=4), deterministic=True)
    config = SpeculativeConfig(drafter=copy.deepcopy(model), num_draft=3)
    tokens, stats = by_engine(model, PROMPTS, NEW_TOKENS, speculative=config)
    assert tokens == answers("llama", PROMPTS, NEW_TOKENS)
    assert stats["speculation"]["accepted"] == stats["speculation"]["drafted"] > 0


# -- models that are not stock's ----------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "weights"), [("int8", None), ("auto", "int8"), ("int8", "int8")])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_quantized_models_say_what_they_say_without_speculation(family: str, dtype: str, weights: str | None) -> None:
    model = target(family, 4, dtype, weights)
    plain, _ = by_engine(model, PROMPTS, NEW_TOKENS, spread=False, token_budget=None)
    alone = [by_engine(model, [prompt], NEW_TOKENS)[0][0] for prompt in PROMPTS[:2]]
    assert plain[:2] == alone
    for drafter in ("suffix", "near model", "random") if weights else ("suffix", "near model", "self-int4"):
        config = speculative(drafter, family)
        tokens, stats = by_engine(model, PROMPTS, NEW_TOKENS, speculative=config, max_tokens=160)
        assert tokens == plain and stats["speculation"]["drafted"] > 0
        assert by_generate(model, PROMPTS, NEW_TOKENS, speculative=config) == plain


# -- what must not change -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_unpatch_after_speculation_is_exact(family: str) -> None:
    """The INT4 twin shares the Parameters and nothing else."""
    model = build(family)
    before = snapshot(model)
    hf_accel.patch(model, weights=None)
    logits = model(torch.tensor([PROMPTS[1]])).logits
    for drafter in ("self-int4", "near model"):
        by_engine(model, PROMPTS[:3], 8, speculative=speculative(drafter, family))
        by_generate(model, PROMPTS[:3], 8, speculative=speculative(drafter, family))
    assert torch.equal(model(torch.tensor([PROMPTS[1]])).logits, logits)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_draft_models_and_configs_stay_as_they_are() -> None:
    model, draft = target("llama"), near("llama")
    before = snapshot(draft), draft.generation_config.to_dict(), model.generation_config.to_dict()
    config = model.generation_config.__class__(max_new_tokens=8, do_sample=False, repetition_penalty=1.3)
    given = config.to_dict()
    ids = torch.tensor([PROMPTS[1]])
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, assistant_model=draft)
    model.generate_batch([PROMPTS[1]], generation_config=config, speculative=draft)
    by_engine(model, PROMPTS[:2], 8, speculative=draft)
    assert (snapshot(draft), draft.generation_config.to_dict(), model.generation_config.to_dict()) == before
    assert config.to_dict() == given
    assert find_state(draft) is None
