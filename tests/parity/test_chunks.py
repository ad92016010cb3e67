"""Models whose tokens attend within chunks (Llama 4) run as others do: a chunk is a sequence to attention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.masking_utils import create_chunked_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_accel
from hf_accel import CacheConfig, PagedCache, UnsupportedError
from hf_accel.attention.hf.mask import CausalMask, as_known, chunk_of
from hf_accel.cache.kinds.chunks import chunks_of
from hf_accel.fused.hf.counted_positions import CountedAttention

from ..selection import seeds, some_long
from .families import VOCABULARY
from .snapshot import snapshot
from .together import (
    NEW_TOKENS,
    PROMPTS,
    alone,
    check_preemption,
    check_programme,
    check_sampling,
    check_together,
    in_passes,
    padded,
    together,
)

CHUNKED, FULL = "chunked_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 48, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_local_experts": 4,
    "attention_chunk_size": 16, "initializer_range": 0.25, "interleave_moe_layer_step": 2,
    "tie_word_embeddings": False, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "attn_scale": 3.0, "floor_scale": 1000,
}  # fmt: skip


def model_of(**other: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Llama4ForCausalLM(Llama4TextConfig(**SIZES | other)).eval()


@pytest.mark.parametrize(
    ("chunk", "block"), some_long([pytest.param(*each) for each in [(16, 16), (8, 4), (12, 3), (64, 16)]], 8, 64)
)
def test_requests_together_give_the_tokens_of_each_alone(chunk: int, block: int) -> None:
    model = model_of(attention_chunk_size=chunk)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=block))
    assert [alone(model, prompt) for prompt in PROMPTS] == expected == together(model)
    assert hf_accel.stats(model)["loop"] == "ragged"


def test_prompts_of_one_batch() -> None:
    check_together(model_of())


@pytest.mark.parametrize("seed", seeds(0, 6))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Chunks, layers without positions, temperatures, preemption, drafts and pools change no request's tokens."""
    numbers = random.Random(seed)
    chunk, layers = numbers.choice([4, 8, 12, 20]), numbers.randint(2, 4)
    own = {"layer_types": [*numbers.choices([CHUNKED, FULL], k=layers - 1), CHUNKED]}
    own |= {"no_rope_layers": numbers.choices([0, 1], k=layers), "num_hidden_layers": layers}
    own |= {"floor_scale": numbers.choice([3, 10, 1000]), "use_qk_norm": numbers.random() < 0.5}
    own |= {"num_key_value_heads": numbers.choice([1, 2, 4]), "attn_temperature_tuning": seed != 2}
    model = model_of(attention_chunk_size=chunk, **own)
    check_programme(model, numbers, block_sizes=[1, 2, 4], seed=seed)


def test_preemption_and_shared_prefixes() -> None:
    check_preemption(model_of(floor_scale=6))


def test_padding_that_transformers_counts() -> None:
    """Its temperature depends on columns, so a batch with padding that reaches the next one runs its own loop."""
    model, (ids, mask) = model_of(floor_scale=8), padded("left")
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(ids, **settings)
    hf_accel.patch(model, weights=None)
    with pytest.warns(hf_accel.HfAccelWarning, match="its attention counts padding in the positions of tokens"):
        assert torch.equal(model.generate(ids, **settings), expected)
    assert hf_accel.stats(model)["loop"].startswith("stock")
    assert together(model) != expected[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cuts", [[30], [13, 1, 16]])
@pytest.mark.parametrize("gradients", [True, False])
def test_passes_over_a_paged_cache(side: str, cuts: list[int], gradients: bool) -> None:
    model, ids = model_of(attention_chunk_size=8, floor_scale=7), torch.randint(1, VOCABULARY, (3, 30))
    mask = torch.ones_like(ids)
    hidden = [slice(None, 5), slice(None, 11)] if side == "left" else [slice(25, None), slice(14, None)]
    mask[1, hidden[0]] = mask[2, hidden[1]] = 0
    with torch.set_grad_enabled(gradients):
        expected = in_passes(model, ids, mask, cuts, cache=None)
        hf_accel.patch(model, weights=None)
        found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config, block_size=4))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_passes_without_pages(side: str) -> None:
    model, ids = model_of(attention_chunk_size=5), torch.randint(1, VOCABULARY, (2, 23))
    mask = torch.ones_like(ids)
    mask[1, slice(None, 4) if side == "left" else slice(19, None)] = int(side == "none")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    hf_accel.patch(model, weights=None, cache=None)
    found = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("left", [None, [0, 0], [3, 0], [9, 4]])
@pytest.mark.parametrize("chunk", [1, 3, 6, 40])
def test_masks_mean_what_stocks_say(chunk: int, left: list[int] | None) -> None:
    columns = None if left is None else torch.stack([torch.arange(11) >= count for count in left])
    stock = Llama4TextConfig(**SIZES | {"attention_chunk_size": chunk}, attn_implementation="eager")
    ours = Llama4TextConfig(**SIZES | {"attention_chunk_size": chunk})
    ours._attn_implementation = "hf_accel"
    given = {"inputs_embeds": torch.zeros(2, 11, 4), "attention_mask": columns, "past_key_values": None}
    found: Any = create_chunked_causal_mask(config=ours, **given)
    assert isinstance(found, CausalMask) and chunk_of(found) == chunk and as_known(found) is None
    expected: Tensor = create_chunked_causal_mask(config=stock, **given) == 0
    real = torch.ones(2, 11, dtype=torch.bool) if columns is None else columns
    assert torch.equal(found.whole()[:, 0][real], expected[:, 0][real])
    assert chunk_of(found & True) is None


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunks_of_a_run_of_tokens(chunk: int) -> None:
    for start in range(12):
        for count in range(1, 15):
            parts = chunks_of(start, count, chunk)
            seen = [(stop - number + place, first) for number, first, stop in parts for place in range(number)]
            assert seen == [(token, token // chunk * chunk) for token in range(start, start + count)]


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_quantized_pages_batch_exactly(dtype: str) -> None:
    model = hf_accel.patch(model_of(head_dim=32), weights=None, cache={"dtype": dtype})
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


def test_chunks_that_are_no_whole_blocks() -> None:
    model = model_of(attention_chunk_size=12)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    with pytest.raises(
        UnsupportedError, match=r"chunks of 12 tokens do not begin with .* CacheConfig\(block_size=4\)"
    ):
        PagedCache(model.config)
    (reason,) = (c["reason"] for c in hf_accel.plan(model).to_dict()["choices"] if c["topic"] == "cache")
    assert "take CacheConfig(block_size=4)" in reason
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected


def test_sampling_draws_stocks_numbers() -> None:
    check_sampling(model_of())


def test_patch_is_undone_exactly() -> None:
    model = model_of()
    before = snapshot(model)
    hf_accel.patch(model, weights=None)
    assert sum(isinstance(module, CountedAttention) for module in model.modules()) == 4
    assert snapshot(hf_accel.unpatch(model)) == before


def test_other_code_is_not_known() -> None:
    model = model_of(floor_scale=6)
    kind = type(model.model.layers[0].self_attn)

    class OtherAttention(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, past_key_values: Any = None, cache: Any = None, **kwargs: Any) -> Any:
            cache = past_key_values if cache is None else cache
            seen = cache.get_seq_length(self.layer_idx) if cache is not None else 0
            keys, values = cache.update(*kwargs.pop("made"), self.layer_idx)
            attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface("eager")
            return attend(self, hidden_states * seen, keys, values, None)

    for layer in model.model.layers:
        layer.self_attn.__class__ = OtherAttention
    (reason,) = (c["reason"] for c in hf_accel.plan(model).to_dict()["choices"] if c["topic"] == "cache")
    assert "counts the tokens of its cache in a way of its own" in reason
