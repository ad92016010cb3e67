"""Models with the gated delta rule (Qwen3-Next, Qwen3.5) run as others do: their states stay in pages."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, SpeculativeConfig, UnsupportedError
from hf_accel.cache.states import MOST_STATES
from hf_accel.fused.hf.recurrences import PagedDeltaRule, is_known_recurrence
from hf_accel.kernels.cpu import refusal

from .families import VOCABULARY
from .snapshot import snapshot
from .speculating import OracleDrafter, requests
from .together import NEW_TOKENS, PROMPTS, alone, in_passes, padded, together

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 64, "linear_value_head_dim": 16}  # multiples of INT4's groups
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = [LINEAR, FULL, LINEAR, LINEAR, FULL]
KINDS = ("next", "next_moe", "3.5", "3.5_moe")
WAIT = 60


def model_of(
    kind: str = "next", layers: Sequence[str] = LAYERS, *, tokens: int = 4, repeats: int = 2, **other: Any
) -> Any:
    torch.manual_seed(3)
    sizes = SIZES | {"num_hidden_layers": len(layers), "layer_types": list(layers), "linear_conv_kernel_dim": tokens}
    sizes |= {"linear_num_value_heads": 2 * repeats} | other
    if kind == "next":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, num_experts=0)).eval()
    if kind == "next_moe":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **EXPERTS)).eval()
    if kind == "3.5":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)).eval()
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes, **EXPERTS)).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "repeats"), [(2, 1), (4, 2), (3, 3)])
def test_requests_together_give_the_tokens_of_each_alone(kind: str, tokens: int, repeats: int) -> None:
    model = model_of(kind, tokens=tokens, repeats=repeats)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert together(model) == expected
    ids, mask = padded("left")
    rows = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert rows[:, ids.shape[1] :].tolist() == expected
    assert hf_accel.stats(model)["loop"] == "ragged"


def test_a_model_of_recurrent_layers_alone() -> None:
    """transformers cannot generate with it, but its passes without a cache say what is right."""
    model = model_of(layers=[LINEAR, LINEAR])
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    hf_accel.patch(model, weights=None)
    assert together(model) == expected


@pytest.mark.parametrize("seed", range(8))
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption and drafts change no request's tokens."""
    numbers = random.Random(seed)
    layers = [*numbers.choices([LINEAR, FULL], [3, 2], k=3), FULL, LINEAR]
    model = model_of(numbers.choice(KINDS), layers, tokens=numbers.choice([2, 3, 4]))
    prompts = requests(8, longest=50, seed=seed, shared=numbers.choice([0, 20]))
    lengths = [numbers.randint(1, 30) for _ in prompts]
    expected = [alone(model, prompt, count) for prompt, count in zip(prompts, lengths, strict=True)]
    cache = CacheConfig(block_size=numbers.choice([1, 4, 16]), max_tokens=numbers.choice([160, 400]))
    hf_accel.patch(model, weights=None, cache=cache)
    drafter = OracleDrafter(prompts, expected, right=numbers.choice([0, 1, 2, 5]))
    speculative = SpeculativeConfig(drafter=drafter, num_draft=numbers.choice([1, 3, 6])) if seed % 2 else None
    budget = numbers.choice([None, 7, 64])
    with Engine(model, speculative=speculative, token_budget=budget) as engine:
        jobs = [engine.submit(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        stopped = engine.submit(prompts[0], max_new_tokens=40)
        stopped.cancel()
        assert [job.result(WAIT).tokens for job in jobs] == expected
        samples = engine.submit(prompts[1], max_new_tokens=lengths[1], n=3)
        assert [sample.tokens for sample in samples.results(WAIT)] == [expected[1]] * 3
    assert engine.stats["blocks_used"] == 0


def test_drafts_that_fail_leave_nothing_behind() -> None:
    model = model_of()
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(max_tokens=400))
    for right in (0, 1, 3, 100):
        drafter = OracleDrafter(PROMPTS, expected, right=right)
        with Engine(model, speculative=SpeculativeConfig(drafter=drafter, num_draft=5)) as engine:
            jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
            assert [job.result(WAIT).tokens for job in jobs] == expected
            assert engine.stats["speculation"]["drafted"] > 0


@pytest.mark.parametrize("drafter", ["self-int4", "ngram", "model"])
def test_named_drafters(drafter: str) -> None:
    model, draft = model_of("3.5", **WIDE), model_of("3.5", **WIDE, layers=[LINEAR, FULL])
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    speculative = SpeculativeConfig(drafter=draft if drafter == "model" else drafter, num_draft=3)
    with Engine(model, speculative=speculative) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected
        # Alone, a sequence is given longer drafts.
        assert [engine.submit(p, max_new_tokens=NEW_TOKENS).result(WAIT).tokens for p in PROMPTS] == expected
        counts = engine.stats["speculation"]
    assert drafter == "ngram" or counts["drafted"] > counts["accepted"]


def test_preemption_computes_states_again() -> None:
    model = model_of("3.5")
    expected = [alone(model, prompt, 40) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=4, max_tokens=140))
    with Engine(model) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=40) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected
        assert engine.stats["preemptions"] > 0


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_and_their_copies(settings: dict[str, Any]) -> None:
    model = model_of()
    ids, mask = padded("left")
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    hf_accel.patch(model, weights=None)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["next", "3.5"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("cuts", [[40], [12, 28], [13, 1, 1, 25], [2] * 20])
def test_passes_over_a_paged_cache(kind: str, cuts: list[int], gradients: bool) -> None:
    """There a pass of one column takes padding for a token, so that no such column is padding here.

    With gradients, torch's operators take the place of the kernels.
    """
    model = model_of(kind)
    ids = torch.randint(1, VOCABULARY, (3, 40))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    with torch.set_grad_enabled(gradients):
        expected = in_passes(model, ids, mask, cuts, cache=None)
        hf_accel.patch(model, weights=None)
        found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


def test_padding_behind_tokens_stays_on_transformers_cache() -> None:
    """There it changes the states, and so the tokens."""
    model = model_of()
    ids, mask = padded("right")
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(out, expected)
    cache = PagedCache(model.config)
    before = model(ids, attention_mask=mask, past_key_values=cache).logits[mask.bool()]
    torch.testing.assert_close(before, model(ids, attention_mask=mask).logits[mask.bool()], rtol=1e-4, atol=1e-4)
    longer = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    with pytest.raises(UnsupportedError, match=r"attention_mask hides columns between tokens.*; pad on the left"):
        model(ids[:, :1], attention_mask=longer, past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1]


def test_a_cache_goes_back_and_forks() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    ids = torch.randint(1, VOCABULARY, (2, 30))
    whole = model(ids).logits
    cache = PagedCache(model.config)
    model(ids[:, :20], past_key_values=cache)
    fork = copy.deepcopy(cache)
    model(torch.randint(1, VOCABULARY, (2, 5)), past_key_values=cache)
    cache.crop(-3)
    cache.crop(-2)
    for each in (cache, fork):
        logits = model(ids[:, 20:], past_key_values=each).logits
        torch.testing.assert_close(logits, whole[:, 20:], rtol=1e-4, atol=1e-4)


def test_a_state_that_was_not_kept() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    cache = PagedCache(model.config)
    model(torch.randint(1, VOCABULARY, (1, MOST_STATES + 2)), past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"cannot go back to 33 tokens: the recurrent state.*; crop less"):
        cache.crop(-1)
    cache.crop(-MOST_STATES - 2)
    assert cache.statistics()["blocks_used"] == 0


def test_a_pass_that_fails_leaves_the_state_before_it() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    ids = torch.randint(1, VOCABULARY, (2, 30))
    whole = model(ids).logits
    cache = PagedCache(model.config)
    model(ids[:, :20], past_key_values=cache)
    hook = model.model.layers[2].register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 20:], past_key_values=cache)
    hook.remove()
    logits = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(logits, whole[:, 20:], rtol=1e-4, atol=1e-4)


def test_turns_over_one_cache() -> None:
    model = model_of("3.5")
    first = PROMPTS[0]
    answer = alone(model, first)
    second = first + answer + PROMPTS[1]
    expected = alone(model, second)
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config)
    assert alone(model, first, past_key_values=cache) == answer
    assert alone(model, second, past_key_values=cache) == expected
    assert alone(model, second, past_key_values=cache) == expected, "it holds all of the prompt, and more"


def test_pages_are_made_for_the_states_in_use() -> None:
    """A pool of a fixed size has room for many states, which together would fill the memory."""
    model = hf_accel.patch(model_of(), weights=None, cache={"max_tokens": 10**9})
    cache = PagedCache(model.config, max_tokens=10**4)
    for _ in range(3):
        model(torch.randint(1, VOCABULARY, (5, 40)), past_key_values=cache)  # a state for each
        model(torch.randint(1, VOCABULARY, (5, 1)), past_key_values=cache)  # and another
        assert {len(cache.pages.groups[-1].storages[layer].pages.k) for layer in (0, 2, 3)} == {16}
        cache.reset()
    model(torch.randint(1, VOCABULARY, (9, 4)), past_key_values=cache)  # few tokens, whose states are all kept
    assert 36 <= len(cache.pages.groups[-1].storages[0].pages.k) <= 64


def test_states_are_never_quantized() -> None:
    model = hf_accel.patch(model_of(), weights=None, cache={"dtype": "int8"})
    cache = PagedCache(model.config, dtype="int8")
    model(torch.tensor([PROMPTS[0]]), past_key_values=cache)
    dtypes = [layer.group.storages[layer.layer_idx].pages.k.dtype for layer in cache.paged_layers]
    assert dtypes == [torch.float32 if name == LINEAR else torch.int8 for name in LAYERS]
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}])
def test_quantized_weights_batch_exactly(weights: Any) -> None:
    model = hf_accel.patch(model_of(**WIDE), weights=weights)
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["next", "3.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_token_has_the_same_bits_whatever_is_computed_with_it(kind: str, dtype: torch.dtype) -> None:
    """Also with head sizes that fill no vectors, and however a prompt is cut."""
    model = hf_accel.patch(model_of(kind, repeats=3).to(dtype), deterministic=True)
    ids = torch.randint(1, VOCABULARY, (3, 30))

    def logits(rows: Tensor, cuts: list[int]) -> Tensor:
        cache = PagedCache(model.config)
        return torch.cat([model(part, past_key_values=cache).logits for part in rows.split(cuts, 1)], 1)

    whole = logits(ids, [30])
    assert torch.equal(logits(ids, [7, 1, 1, 21]), whole)
    assert torch.equal(logits(ids[1:2], [30]), whole[1:2])
    assert torch.equal(logits(ids[2:], [1] * 30), whole[2:])
    expected = [alone(model, prompt) for prompt in PROMPTS]
    with Engine(model, token_budget=9) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected


@pytest.mark.parametrize("fuse", [True, False])
def test_patch_is_undone_exactly(fuse: bool) -> None:
    model = model_of()
    before = snapshot(model)
    hf_accel.patch(model, weights=None, fuse=fuse)
    assert sum(isinstance(module, PagedDeltaRule) for module in model.modules()) == LAYERS.count(LINEAR)
    alone(model, PROMPTS[0])
    assert snapshot(hf_accel.unpatch(model)) == before


def test_sampling_draws_stocks_numbers() -> None:
    model = model_of()
    ids, mask = padded("left")
    torch.manual_seed(5)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True)
    hf_accel.patch(model, weights=None)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True), expected)


def test_other_code_with_the_same_parts_is_not_known() -> None:
    layer = model_of().model.layers[0].linear_attn
    assert is_known_recurrence(layer)

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(hidden_states, *args, **kwargs) * 1.01

    other = copy.copy(layer)
    other.__class__ = Other
    assert not is_known_recurrence(other)
    layer.activation = "gelu"
    assert not is_known_recurrence(layer)


def test_a_changed_layer_keeps_the_model_on_transformers_cache() -> None:
    model = model_of()
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.conv1d = nn.Conv1d(56, 56, 4, groups=56, padding=3, bias=True)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert not any(isinstance(module, PagedDeltaRule) for module in model.modules())
    assert [alone(model, prompt) for prompt in PROMPTS] == expected


def test_a_model_that_is_not_patched_says_how_to_read_pages() -> None:
    model = model_of()
    with pytest.raises(UnsupportedError, match=r"call hf_accel\.patch\(model\) first"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=PagedCache(model.config))


def test_an_argument_that_is_not_known() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    module, cache = model.model.layers[0].linear_attn, PagedCache(model.config)
    with pytest.raises(UnsupportedError, match="it is given cu_seq_lens_q="):
        module(torch.randn(1, 3, 32), cache_params=cache, cu_seq_lens_q=torch.zeros(2))


def test_estimate_counts_what_the_cache_keeps() -> None:
    model = model_of()
    estimate = hf_accel.estimate(model, context=1000, weights=None)
    keys_and_values = 2 * 2 * 2 * 8 * 1000 * 4  # layers, K and V, heads, numbers of each, tokens, bytes
    channels = 2 * 2 * 8 + 4 * 6
    state = 4 * 8 * 6 + 3 * channels  # of a token: heads of key_dim x value_dim, and the inputs of the convolution
    assert estimate.kv_bytes == keys_and_values + 3 * 2 * state * 4  # layers, and the state before and after a token
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=8)
    model.generate(torch.randint(1, VOCABULARY, (1, 992)), max_new_tokens=9, past_key_values=cache)
    assert cache.statistics()["kv_bytes"] == estimate.kv_bytes


def test_ranks_cannot_share_out_states() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match="was asked for, but layers that are no attention need all"):
            hf_accel.patch(model_of(), weights=None, context_parallel=distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
