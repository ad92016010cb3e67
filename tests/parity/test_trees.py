"""Trees of drafted tokens: tokens are those without drafts, however the tree branches and whatever runs beside it.

Each test compares the tokens of 40 requests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.kernels import cpu as kernels

from .families import build
from .speculating import OracleTree, RandomDrafter, by_engine, requests, target

NEW_TOKENS = 28  # with 20, arrivals on a busy machine left 50 to 61 branches
AT_ONCE = 8  # requests: their trees have room in the passes of every CPU, whose most rows differ
PROMPTS = requests(24, shared=17, seed=3)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 12, "repetition_penalty": 1.2}


@functools.cache
def plain(family: str, dtype: str, weights: str | None, sampled: bool) -> list[list[int]]:
    """The tokens without drafts."""
    options = {"options": SAMPLED | {"seed": 5}} if sampled else {}
    return by_engine(
        target(family, 4, dtype, weights), PROMPTS, NEW_TOKENS, spread=False, max_running=AT_ONCE, **options
    )[0]


def _until(tokens: list[int], ends: Any) -> list[int]:
    found = [index for index, token in enumerate(tokens) if token in ends]
    return tokens[: found[0] + 1] if found else tokens


def assert_same(
    family: str, block_size: int, *, dtype: str = "auto", weights: str | None = None, sampled: bool = False,
    verify: Any = "token", num_draft: int = 4, max_nodes: int = 12, ends: Any = (), **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compare the tokens of all prompts; returns the statistics of the drafts."""
    expected = plain(family, dtype, weights, sampled)
    known = {(tuple(p), 5 if sampled else 0): answer for p, answer in zip(PROMPTS, expected, strict=True)}
    config = SpeculativeConfig(drafter=OracleTree(known), num_draft=num_draft, max_nodes=max_nodes, verify=verify)
    options = {**(SAMPLED | {"seed": 5} if sampled else {"seed": 0}), "stop_token_ids": ends}
    expected = [_until(answer, ends) for answer in expected]
    tokens, stats = by_engine(
        target(family, block_size, dtype, weights),
        PROMPTS,
        NEW_TOKENS,
        speculative=config,
        options=options,
        **{"max_running": AT_ONCE, **settings},
    )
    assert tokens == expected
    found: dict[str, Any] = stats["speculation"]
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks(block_size: int, sampled: bool) -> None:
    stats = assert_same("llama", block_size, sampled=sampled)
    assert stats["branched"] > 50 and stats["tokens_per_pass"] > 1.5


SETTINGS: dict[str, dict[str, Any]] = {
    "one token a pass": {"token_budget": 1},
    "fifteen tokens a pass": {"token_budget": 15},
    "few blocks": {"max_tokens": 96},
    "few blocks, small budget": {"max_tokens": 96, "token_budget": 19},
    "few at once": {"max_running": 2, "sampled": True},
    "deep": {"num_draft": 7, "max_nodes": 30},
    "wide": {"num_draft": 1, "max_nodes": 3, "sampled": True},
    "INT8 weights": {"weights": "int8"},
    "INT8 keys": {"dtype": "int8", "sampled": True},
    "INT4 keys": {"dtype": "int4"},
    "FP8 keys": {"dtype": "fp8"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings: dict[str, Any]) -> None:
    stats = assert_same("llama", 4, **settings)
    if settings.get("token_budget") != 1:
        assert stats["branched"] > 0 and stats["no_trees"] is None


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_bits(dtype: str) -> None:
    """Where no row depends on others, probabilities are the same bits: with trees, and with prompts in small parts."""
    cache = hf_accel.CacheConfig(block_size=4, dtype=dtype)  # type: ignore[arg-type]
    model = hf_accel.patch(build("llama"), weights=None, cache=cache, deterministic=True)

    def answers(**settings: Any) -> list[tuple[list[int], Any]]:
        with hf_accel.Engine(model, max_running=AT_ONCE, **settings) as engine:
            handles = [engine.submit(prompt, max_new_tokens=NEW_TOKENS, logprobs=2, seed=0) for prompt in PROMPTS]
            results = [handle.result(60) for handle in handles]
            found = (engine.stats["speculation"] or {}).get("branched", 0)
        assert found > 50 or "speculative" not in settings
        return [(result.tokens, result.logprobs) for result in results]

    expected = answers()
    drafter = OracleTree({(tuple(p), 0): tokens for p, (tokens, _) in zip(PROMPTS, expected, strict=True)})
    assert answers(speculative=SpeculativeConfig(drafter=drafter, num_draft=4, max_nodes=12)) == expected
    assert answers(token_budget=15) == expected


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt2"])
def test_families(family: str) -> None:
    assert assert_same(family, 4, sampled=family == "mistral")["branched"] > 50


def test_shared_random_numbers() -> None:
    """Tokens do not depend on drafts, and are others than with verify="token"."""
    options = {"options": SAMPLED | {"seed": 5}}
    config = SpeculativeConfig(drafter=RandomDrafter(), num_draft=1, verify="seeded")
    expected, _ = by_engine(target("llama"), PROMPTS, NEW_TOKENS, speculative=config, **options)
    assert expected != plain("llama", "auto", None, True)
    known = {(tuple(prompt), 5): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    config = SpeculativeConfig(drafter=OracleTree(known), num_draft=4, max_nodes=12, verify="seeded")
    tokens, stats = by_engine(target("llama"), PROMPTS, NEW_TOKENS, speculative=config, max_running=AT_ONCE, **options)
    assert tokens == expected and stats["speculation"]["branched"] > 50


def test_drawn_blocks() -> None:
    assert assert_same("llama", 4, sampled=True, verify="block")["branched"] > 50


def test_ends_inside_of_branches() -> None:
    """Texts end at a token wherever a branch has it, and samples of one prompt go their own ways."""
    ends = [3, 30, 31, 50, 77, 90]
    stats = assert_same("llama", 3, ends=ends, sampled=True)
    assert stats["branched"] > 5
