"""Models that select the tokens they attend to run as others do: the keys of their indexers stay in pages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel
from hf_accel import PagedCache
from hf_accel.attention.hf.selected import masked
from hf_accel.fused.hf.indexers import PagedIndexer, is_known_indexer

from ..selection import seeds
from .families import VOCABULARY
from .older import skip_older_code
from .snapshot import snapshot
from .together import (
    PROMPTS,
    alone,
    check_forks,
    check_preemption,
    check_programme,
    check_sampling,
    check_together,
    check_weights_of_attention,
    in_passes,
    together,
)

# Many heads of an indexer: where each of them gives a key nothing, keys are equal, and it is chance which is selected.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, "head_dim": 4, "initializer_range": 0.25, "tie_word_embeddings": False,
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "index_n_heads": 24, "index_head_dim": 8, "index_topk": 9,
    "mlp_layer_types": ["dense", "dense", "sparse"], "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SHARED = {"indexer_types": ["full", "shared", "full"]}
KINDS: dict[str, dict[str, Any]] = {"AXK2": {}, "DeepseekV32": {}, "GlmMoeDsa": SHARED, "HYV4": SHARED}


def model_of(kind: str = "DeepseekV32", **other: Any) -> Any:
    made = getattr(transformers, f"{kind}ForCausalLM", None)
    if made is None:
        pytest.skip(f"this transformers has no {kind}")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = made(made.config_class(**SIZES | KINDS[kind] | other)).eval()
        for parameter in model.parameters():
            if parameter.ndim < 2:  # as they begin, some have no effect
                parameter.data += 0.1 * torch.randn_like(parameter)
        model = model.float()
    skip_older_code(model, "Attention makes K and V of what it caches in a way of its own")
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [5, 16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str, most: int) -> None:
    model = model_of(kind, index_topk=most)
    check_together(model)


@pytest.mark.parametrize("seed", seeds(0, 6))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption, drafts and other sizes change no request's tokens."""
    numbers = random.Random(seed)
    sizes = {"kv_lora_rank": (8, 18), "index_topk": (3, 12, 40), "index_n_heads": (24, 40), "index_head_dim": (8, 12)}
    model = model_of([*KINDS][seed % len(KINDS)], **{name: numbers.choice(given) for name, given in sizes.items()})
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


def test_preemption_and_shared_prefixes() -> None:
    check_preemption(model_of())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cuts", [[30], [13, 1, 16]])
def test_passes_over_a_paged_cache(side: str, cuts: list[int]) -> None:
    model, ids = model_of("GlmMoeDsa"), torch.randint(1, VOCABULARY, (3, 30))
    mask = torch.ones_like(ids)
    hidden = [slice(None, 5), slice(None, 11)] if side == "left" else [slice(25, None), slice(14, None)]
    mask[1, hidden[0]] = mask[2, hidden[1]] = 0
    expected = in_passes(model, ids, mask, cuts, cache=None)
    hf_accel.patch(model, weights=None)
    found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


def test_attention_weights_are_stocks() -> None:
    check_weights_of_attention(model_of(attn_implementation="eager"), torch.randint(1, VOCABULARY, (2, 20)))


def test_a_cache_goes_back_and_forks() -> None:
    check_forks(hf_accel.patch(model_of(), weights=None), near=1e-3)


def test_a_model_that_is_not_patched_reads_what_it_wrote() -> None:
    model, ids = model_of("GlmMoeDsa"), torch.randint(1, VOCABULARY, (2, 22))
    expected, cache = model(ids).logits, PagedCache(model.config)
    found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([13, 1, 8], 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(cache.paged_layers) == 5  # latents of three layers, and keys of two indexers


def test_quantized_pages_batch_exactly() -> None:
    model = hf_accel.patch(model_of(), weights=None, cache={"dtype": "int8"})
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


def test_sampling_draws_stocks_numbers() -> None:
    check_sampling(model_of())


def test_patch_is_undone_exactly() -> None:
    model = model_of("GlmMoeDsa")
    before = snapshot(model)
    hf_accel.patch(model, weights=None)
    assert sum(isinstance(module, PagedIndexer) for module in model.modules()) == 2
    assert snapshot(hf_accel.unpatch(model)) == before


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_selection_hides_all_else(dtype: torch.dtype) -> None:
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool).tril(2)
    given = mask if dtype is torch.bool else torch.zeros(2, 1, 3, 5).masked_fill(~mask, torch.finfo(dtype).min)
    indices = torch.tensor([[[0, 4], [1, 2], [3, 4]]] * 2, dtype=torch.int32)
    found: Tensor = masked(given, indices, 5)  # type: ignore[assignment]
    assert (found if dtype is torch.bool else found == 0)[0, 0].tolist() == [
        [True, False, False, False, False], [False, True, True, False, False], [False, False, False, True, True],
    ]  # fmt: skip
    assert masked(given, torch.zeros(2, 3, 5, dtype=torch.int32), 5) is given


def test_other_code_is_not_known() -> None:
    model = model_of()
    indexer = model.model.layers[0].self_attn.indexer
    assert is_known_indexer(indexer)

    class OtherScores(type(indexer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs).flip(-1)

    class OtherNorm(type(indexer.k_norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).cumsum(1)

    norm = indexer.k_norm.__class__
    indexer.k_norm.__class__ = OtherNorm
    assert not is_known_indexer(indexer)
    indexer.k_norm.__class__ = norm
    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = OtherScores
    expected = [alone(model, prompt) for prompt in PROMPTS]
    (reason,) = (c["reason"] for c in hf_accel.plan(model).to_dict()["choices"] if c["topic"] == "cache")
    assert "selects tokens by other indexers than those that are known" in reason
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected


def test_the_plan_says_that_a_choice_depends_on_how_a_prompt_is_cut() -> None:
    assert any("indexer's choice" in clause for clause in hf_accel.plan(model_of(), weights=None).variant)
    with pytest.raises(hf_accel.UnsupportedError, match="indexer's choice"):
        hf_accel.plan(model_of(), weights=None, deterministic=True)
