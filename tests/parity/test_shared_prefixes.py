"""Prompts with the same beginning share it in models of every kind of state, and no token changes by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, SpeculativeConfig
from hf_accel.cache.hf.cache_argument import cache_name
from hf_accel.kernels.cpu import refusal

from ..selection import some_long
from .families import DECODER, VOCABULARY, WINDOW, build
from .recurrent_models import LAYERS, gated_unit_of, state_space_of
from .speculating import OracleDrafter
from .together import WAIT, alone


def convolving() -> PreTrainedModel:
    torch.manual_seed(3)
    layers = ["conv", "full_attention", "conv", "full_attention"]
    sizes = DECODER | {"num_hidden_layers": len(layers), "layer_types": layers, "conv_L_cache": 3}
    return Lfm2ForCausalLM(Lfm2Config(**sizes, block_multiple_of=16)).eval()


def recurrent() -> PreTrainedModel:
    torch.manual_seed(3)
    layers = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
    sizes = DECODER | {"num_hidden_layers": len(layers), "layer_types": layers, "head_dim": 8, "num_experts": 0}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)).eval()


def recurrent_alone() -> PreTrainedModel:
    model = recurrent()
    layers = ["linear_attention"] * 3
    sizes = model.config.to_dict() | {"num_hidden_layers": 3, "layer_types": layers}
    torch.manual_seed(3)
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)).eval()


NEEDS_KERNELS = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")


def hybrid(kind: str) -> PreTrainedModel:
    model: PreTrainedModel = state_space_of(kind, LAYERS, tokens=4, repeats=2)
    return model


STATES = ("states", "mamba2", "falcon_h1", "zamba", "lightning", "gated units")
STAYS_WITH_ROW = ("lightning", "gated units")
MODELS = {
    "windows alone": lambda: build("mistral"),
    "windows and full": lambda: build("gemma2"),
    "convolutions": convolving,
    "states": recurrent,
    "mamba2": lambda: hybrid("mamba2"),
    "falcon_h1": lambda: hybrid("falcon_h1"),
    "zamba": lambda: hybrid("zamba"),
    "lightning": lambda: hybrid("minimax"),
    "gated units": lambda: gated_unit_of(("recurrent", "attention"), tokens=4, window=200),
}
KINDS = [pytest.param(kind, marks=NEEDS_KERNELS if kind in STATES else ()) for kind in MODELS]
AS_OTHERS = ("windows alone", "zamba")  # as "windows and full", and as the other state spaces
# In turns one beam and two. With beams, transformers leaves some states behind when beams change places; pages do not.
GIVEN_AGAIN = [
    pytest.param(kind, beams, marks=[*case.marks, *[pytest.mark.long] * (beams != now or kind in AS_OTHERS)])
    for place, case in enumerate(KINDS)
    for kind in case.values
    for now in [1 if kind in STAYS_WITH_ROW else 1 + place % 2]
    for beams in ((1,) if kind in STAYS_WITH_ROW else (1, 2))
]

ALONE = "mamba2"  # keeps states alone, so that nothing says where prompts part
WITH_KEYS = [kind for kind in KINDS if ALONE not in kind.values]
# test_programmes plays requests of these, or of the same kind of state
PLAYED = ("windows and full", "convolutions", "states", "falcon_h1", "gated units")


def chats(seed: int, count: int = 6) -> list[list[int]]:
    """Prompts that begin with one instruction, and later turns of the same chats."""
    numbers = random.Random(seed)
    instruction = [numbers.randrange(1, VOCABULARY) for _ in range(numbers.choice([13, 21, 32]))]
    turns = [
        instruction + [numbers.randrange(1, VOCABULARY) for _ in range(numbers.randint(1, 20))] for _ in range(count)
    ]
    return turns + [turn + [numbers.randrange(1, VOCABULARY) for _ in range(numbers.randint(1, 30))] for turn in turns]


@pytest.mark.parametrize("kind", some_long(WITH_KEYS, *AS_OTHERS))
def test_later_requests_go_on_behind_what_others_have_computed(kind: str) -> None:
    model = MODELS[kind]()
    prompts = chats(0)
    expected = [alone(model, prompt, 5) for prompt in prompts]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=4, max_tokens=2000))
    found = []
    with Engine(model) as engine:
        for prompt in prompts:
            before = engine.stats["prefix_hits"]
            assert engine.submit(prompt, max_new_tokens=5).result(WAIT).tokens == expected[len(found)]
            found.append(engine.stats["prefix_hits"] - before)
    # The first request shows nothing, the second that the instruction is shared, and all later ones go on behind it;
    # the second turns go on behind the first ones.
    assert found[0] == 0 and min(found[2:]) >= 13 // 4
    assert min(hit - len(first) // 4 for hit, first in zip(found[6:], prompts[:6], strict=True)) >= -1


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[*case.marks, *([pytest.mark.long] if kind in PLAYED else [])])
        for case in KINDS
        for kind in case.values
    ],
)
def test_random_programmes_of_requests(kind: str, seed: int) -> None:
    """Chunks, preemption, samples, drafts and cancels, over blocks that are too few to keep everything."""
    numbers = random.Random(seed)
    model = MODELS[kind]()
    prompts = chats(seed, 4)
    numbers.shuffle(prompts)
    lengths = [numbers.randint(1, 12) for _ in prompts]
    expected = [alone(model, prompt, count) for prompt, count in zip(prompts, lengths, strict=True)]
    cache = CacheConfig(block_size=numbers.choice([1, 4, 8]), max_tokens=numbers.choice([160, 400]))
    hf_accel.patch(model, weights=None, cache=cache)
    drafter = OracleDrafter(prompts, expected, right=numbers.choice([0, 1, 3]))
    speculative = SpeculativeConfig(drafter=drafter, num_draft=numbers.choice([1, 4])) if seed % 2 else None
    with Engine(model, speculative=speculative, token_budget=numbers.choice([None, 7, 64])) as engine:
        for _ in range(2):
            jobs = [engine.submit(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
            engine.submit(prompts[0], max_new_tokens=20).cancel()
            assert [job.result(WAIT).tokens for job in jobs] == expected
        assert engine.stats["prefix_hits"] > 0
        assert engine.stats["blocks_used"] == 0


@NEEDS_KERNELS
@pytest.mark.parametrize("make", [recurrent_alone, MODELS[ALONE]])
def test_states_alone(make: Callable[[], PreTrainedModel]) -> None:
    """A prompt that comes again goes on behind its last block; nothing says where prompts part."""
    model = make()
    hf_accel.patch(model, weights=None, cache=CacheConfig(max_tokens=400))
    prompt = chats(1)[0] * 2
    with Engine(model) as engine:
        first = engine.submit(prompt, max_new_tokens=9).result(WAIT).tokens
        assert engine.submit(prompt, max_new_tokens=9).result(WAIT).tokens == first
        assert engine.stats["prefix_hits"] == (len(prompt) - 1) // 16


@pytest.mark.parametrize(("kind", "beams"), GIVEN_AGAIN)
def test_a_cache_that_is_given_again(kind: str, beams: int) -> None:
    """reset() keeps what prompts begin with, for the ragged loop and for stock's."""
    model = MODELS[kind]()
    prompts = [torch.tensor([prompt]) for prompt in chats(2, 4)]
    settings: dict[str, Any] = {"max_new_tokens": 9, "num_beams": beams, "do_sample": False}
    expected = [generated(model, ids, **settings) for ids in prompts]
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=4)
    for ids, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(generated(model, ids, **{cache_name(model): cache}, **settings), tokens)
        cache.reset()
    if kind != ALONE and (kind not in STATES or beams == 1):  # states are kept by the ragged loop alone
        assert cache.statistics()["prefix_hits"] > 0


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_pass_over_a_whole_prompt(kind: str) -> None:
    """It computes all tokens, also those whose blocks are known, so layers must hold them from the first on."""
    model = MODELS[kind]()
    prompt = chats(3)[-1] * 2
    ids = torch.tensor([prompt])
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=4)
    given: dict[str, Any] = {cache_name(model): cache}
    expected = model(ids, **given).logits
    cache.reset()
    generated(model, ids, **given, max_new_tokens=9, do_sample=False)  # keeps states too
    cache.reset()
    assert cache.has_prefixes
    torch.testing.assert_close(model(ids, **given).logits, expected)


def generated(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return tokens


@pytest.mark.parametrize("make", [MODELS["windows and full"], MODELS["windows alone"]])
def test_padding_that_a_window_counts_is_no_prefix(make: Callable[[], PreTrainedModel]) -> None:
    """Padding between tokens moves them apart in transformers' windows: deeper layers then have other keys."""
    model = make()
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (1, 3 * WINDOW))
    mask = torch.ones_like(ids)
    mask[0, WINDOW : WINDOW + 4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=4)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    cache.reset()
    tokens = ids[mask.bool()][None]
    fresh = generated(model, tokens, max_new_tokens=9, do_sample=False)
    assert cache.statistics()["prefix_hits"] == 0
    again = generated(model, tokens, max_new_tokens=9, do_sample=False, past_key_values=cache)
    assert torch.equal(again, fresh) and not cache.statistics()["prefix_hits"]
