"""Models whose last layers attend to the keys and values of earlier ones run as others do: these keep nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

import hf_accel
from hf_accel import CacheConfig, PagedCache, SpeculativeConfig

from ..selection import seeds
from .families import VOCABULARY
from .speculating import OracleDrafter, requests
from .together import PROMPTS, alone, check_served, check_together, in_passes, padded, together

FULL, WINDOWED = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7,
    "hidden_size_per_layer_input": 6, "initializer_range": 0.25, "num_kv_shared_layers": 3, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Gemma3n": {"laurel_rank": 4, "altup_num_inputs": 2},
    "Gemma4": {"global_head_dim": 16, "num_global_key_value_heads": 2, "enable_moe_block": False},
}
LAYERS = [WINDOWED, FULL, WINDOWED, FULL, WINDOWED]


def model_of(kind: str = "Gemma3n", layers: list[str] = LAYERS, **other: Any) -> Any:
    config = getattr(transformers, f"{kind}TextConfig")
    own = {"layer_types": layers, "num_hidden_layers": len(layers)}
    own |= {"activation_sparsity_pattern": [0.0] * len(layers)} if kind == "Gemma3n" else {}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return getattr(transformers, f"{kind}ForCausalLM")(config(**SIZES | KINDS[kind] | own | other)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    model = model_of(kind)
    check_together(model)
    assert len(hf_accel.stats(model)) and len(PagedCache(model.config).paged_layers) == 2


@pytest.mark.parametrize("seed", seeds(0, 4))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Which layers reuse others, windows, pools, chunks, samples, preemption and drafts change no request's tokens."""
    numbers = random.Random(seed)
    layers = [FULL, WINDOWED, *numbers.choices([FULL, WINDOWED], k=numbers.randint(1, 3))]
    other = {"num_kv_shared_layers": numbers.randint(1, len(layers) - 2), "sliding_window": numbers.choice([3, 7, 20])}
    model = model_of(numbers.choice([*KINDS]), layers, num_key_value_heads=numbers.choice([1, 2, 4]), **other)
    prompts = requests(6, longest=50, seed=seed, shared=numbers.choice([0, 20]))
    lengths = [numbers.randint(1, 30) for _ in prompts]
    expected = [alone(model, prompt, count) for prompt, count in zip(prompts, lengths, strict=True)]
    cache = CacheConfig(block_size=numbers.choice([4, 16]), max_tokens=numbers.choice([160, 400]))
    hf_accel.patch(model, weights=None, cache=cache)
    drafter = OracleDrafter(prompts, expected, right=numbers.choice([0, 1, 2, 5]))
    speculative = SpeculativeConfig(drafter=drafter, num_draft=numbers.choice([1, 3, 6])) if seed % 2 else None
    check_served(model, prompts, expected, speculative=speculative, token_budget=numbers.choice([None, 7, 64]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[30], [13, 1, 16]])
def test_passes_over_a_paged_cache(kind: str, cuts: list[int]) -> None:
    model, ids = model_of(kind), torch.randint(1, VOCABULARY, (3, 30))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    expected = in_passes(model, ids, mask, cuts, cache=None)
    hf_accel.patch(model, weights=None)
    found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_own_loop_computes_the_last_layers_of_a_few_tokens(kind: str) -> None:
    """Gemma 4 leaves out tokens of a prompt whose logits are not wanted, where its layers keep nothing."""
    model = model_of(kind)
    ids, mask = padded("left")
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(ids, attention_mask=mask, **settings)
    hf_accel.patch(model, weights=None)
    found = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores[0], expected.scores[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_quantized_pages_batch_exactly(dtype: str) -> None:
    model = hf_accel.patch(model_of(head_dim=32), weights=None, cache={"dtype": dtype})
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


def test_other_code_is_not_known() -> None:
    model = model_of()
    kind = type(model.model.layers[0].self_attn)

    class OtherAttention(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, *args: Any, shared_kv_states: Any = None, **kwargs: Any) -> Any:
            if self.is_kv_shared_layer:
                keys, values = shared_kv_states[self.layer_type]
                shared_kv_states = {self.layer_type: (keys * 1.5, values)}
            return super().forward(hidden_states, *args, shared_kv_states=shared_kv_states, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = OtherAttention
    expected = [alone(model, prompt) for prompt in PROMPTS]
    (reason,) = (c["reason"] for c in hf_accel.plan(model).to_dict()["choices"] if c["topic"] == "cache")
    assert "OtherAttention keeps no keys and values, and attends to some in a way of its own" in reason
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected
