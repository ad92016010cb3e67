"""Models with compressed keys (multi-head latent attention) run as others do: their latents stay in pages."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, distributed, nn

import hf_accel
from hf_accel import Engine, PagedCache, SpeculativeConfig, UnsupportedError
from hf_accel.attention.expansion import Expansion
from hf_accel.attention.hf.latents import is_known_expansion
from hf_accel.fused.hf.compressed import PagedLatents
from hf_accel.kernels.layouts import Ragged
from hf_accel.undo.state import FUSED

from ..selection import seeds
from .families import VOCABULARY
from .snapshot import snapshot
from .together import (
    NEW_TOKENS,
    PROMPTS,
    WAIT,
    alone,
    check_forks,
    check_preemption,
    check_programme,
    check_sampling,
    check_together,
    check_weights_of_attention,
    in_passes,
    padded,
    together,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, "initializer_range": 0.25, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WIDE = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # multiples of the groups of INT4  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LONGCAT = {
    "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2,
    "zero_expert_num": 2, "head_dim": 4,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "AXK1": EXPERTS, "DeepseekV2": EXPERTS | {"q_lora_rank": None, "topk_method": "greedy"}, "DeepseekV3": EXPERTS,
    "Glm4MoeLite": EXPERTS, "LongcatFlash": LONGCAT, "Mistral4": EXPERTS,
    "MiniCPM3": {"scale_emb": 1, "dim_model_base": 32}, "Youtu": {},
}  # fmt: skip


def model_of(kind: str = "MiniCPM3", **other: Any) -> Any:
    made = getattr(transformers, f"{kind}ForCausalLM", None)
    if made is None:
        pytest.skip(f"this transformers has no {kind}")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return made(made.config_class(**SIZES | KINDS[kind] | other)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    model = model_of(kind)
    check_together(model)


@pytest.mark.parametrize("seed", seeds(0, 6))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption, drafts and other sizes change no request's tokens."""
    numbers = random.Random(seed)
    sizes = {"kv_lora_rank": (8, 18, 40), "qk_nope_head_dim": (3, 16), "v_head_dim": (4, 17)}
    model = model_of(numbers.choice([*KINDS]), **{name: numbers.choice(given) for name, given in sizes.items()})
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


@pytest.mark.parametrize("drafter", ["self-int4", "ngram"])
def test_named_drafters(drafter: str) -> None:
    model = model_of(**WIDE)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    with Engine(model, speculative=SpeculativeConfig(drafter=drafter, num_draft=3)) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected


def test_preemption_and_shared_prefixes() -> None:
    check_preemption(model_of("DeepseekV3"))


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_and_their_copies(settings: dict[str, Any]) -> None:
    model = model_of()
    ids, mask = padded("left")
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    hf_accel.patch(model, weights=None)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cuts", [[30], [13, 1, 16]])
@pytest.mark.parametrize("gradients", [True, False])
def test_passes_over_a_paged_cache(side: str, cuts: list[int], gradients: bool) -> None:
    """With padding behind tokens the module's own code makes the keys of all columns."""
    model, ids = model_of(), torch.randint(1, VOCABULARY, (3, 30))
    mask = torch.ones_like(ids)
    hidden = [slice(None, 5), slice(None, 11)] if side == "left" else [slice(25, None), slice(14, None)]
    mask[1, hidden[0]] = mask[2, hidden[1]] = 0
    with torch.set_grad_enabled(gradients):
        expected = in_passes(model, ids, mask, cuts, cache=None)
        hf_accel.patch(model, weights=None)
        found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


def test_attention_weights_are_stocks() -> None:
    check_weights_of_attention(model_of(attn_implementation="eager"), torch.randint(1, VOCABULARY, (2, 9)))


def test_a_cache_goes_back_and_forks() -> None:
    check_forks(hf_accel.patch(model_of(), weights=None))


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_model_that_is_not_patched_reads_what_it_wrote(dtype: str) -> None:
    model, ids = model_of("DeepseekV3"), torch.randint(1, VOCABULARY, (2, 12))
    expected = model(ids).logits
    cache = PagedCache(model.config, dtype=dtype)
    found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([7, 1, 4], 1)], 1)
    bound = 1e-4 if dtype == "auto" else 0.5
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert cache.layers[0].keys.shape == (2, 1, 12, 16) and cache.layers[0].values.shape == (2, 1, 12, 4)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantized_pages(dtype: str) -> None:
    model = model_of("DeepseekV3")
    ids = torch.randint(1, VOCABULARY, (1, 40))
    expected = model(ids).logits.softmax(-1)
    hf_accel.patch(model, weights=None, cache={"dtype": dtype})
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]
    cache = PagedCache(model.config, dtype=dtype)
    found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(8, 1)], 1).softmax(-1)
    assert (found - expected).abs().sum(-1).mean() < 0.2


def test_int4_pages_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"int4 pages rotate compressed keys whole, .* take 'int8'"):
        hf_accel.patch(model_of(), weights=None, cache={"dtype": "int4"})


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", ["int8", "fp8", {"bits": 4, "group_size": 32}])
@pytest.mark.parametrize("kind", ["MiniCPM3", "DeepseekV3"])
def test_quantized_weights_batch_exactly(kind: str, weights: Any) -> None:
    """What multiplies queries and results is the weight that the layer would multiply by."""
    model = hf_accel.patch(model_of(kind, **WIDE), weights=weights)
    ids = torch.randint(1, VOCABULARY, (1, 20))
    expected = model(ids, use_cache=False).logits.softmax(-1)
    cache = PagedCache(model.config)
    found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([12, 8], 1)], 1).softmax(-1)
    assert (found - expected).abs().sum(-1).mean() < 0.15
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


@torch.no_grad()
def test_a_weight_that_is_written_in_use() -> None:
    model = hf_accel.patch(model_of(**WIDE), weights="int8")
    ids = torch.randint(1, VOCABULARY, (1, 9))
    results = []
    for factor in (1.0, 1.5):
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(factor)
        whole = model(ids, use_cache=False).logits
        results.append(model(ids, past_key_values=PagedCache(model.config)).logits)
        assert (results[-1].softmax(-1) - whole.softmax(-1)).abs().sum(-1).mean() < 0.15
    assert (results[0] - results[1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_token_has_the_same_bits_whatever_is_computed_with_it(dtype: torch.dtype) -> None:
    if hf_accel.kernels.cpu.refusal() is not None:
        pytest.skip("torch rounds by batch size")
    model = hf_accel.patch(model_of().to(dtype), deterministic=True)
    ids = torch.randint(1, VOCABULARY, (3, 30))

    def logits(rows: Tensor, cuts: list[int]) -> Tensor:
        cache = PagedCache(model.config)
        return torch.cat([model(part, past_key_values=cache).logits for part in rows.split(cuts, 1)], 1)

    whole = logits(ids, [30])
    assert torch.equal(logits(ids, [7, 1, 1, 21]), whole)
    assert torch.equal(logits(ids[1:2], [30]), whole[1:2])
    assert torch.equal(logits(ids[2:], [1] * 30), whole[2:])


@torch.no_grad()
def test_many_tokens_are_rotated_by_a_complex_table_as_few_are() -> None:
    """So many run module by module; by a transposed table, which older transformers makes, torch rounds otherwise."""
    if hf_accel.kernels.cpu.refusal() is not None:
        pytest.skip("torch rounds by batch size")
    model = hf_accel.patch(model_of("DeepseekV2", **WIDE, qk_rope_head_dim=16), deterministic=True)
    ids, found = torch.randint(1, VOCABULARY, (1, 280)), []
    for cuts in ([280], [200, 80]):
        cache = PagedCache(model.config)
        found.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split(cuts, 1)], 1))
    assert torch.equal(*found)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_no_farther_from_the_truth_than_stocks(dtype: torch.dtype) -> None:
    model = model_of("DeepseekV3", num_hidden_layers=2, first_k_dense_replace=2, kv_lora_rank=64, qk_nope_head_dim=32)
    model = model.to(dtype)
    ids = torch.randint(1, VOCABULARY, (4, 64))
    truth = copy.deepcopy(model).double()(ids).logits
    stock = model(ids).logits
    hf_accel.patch(model, weights=None)
    ours = torch.cat([model(part, past_key_values=cache).logits for cache in [PagedCache(model.config)]
                      for part in ids.split([40, *[1] * 24], 1)], 1)  # fmt: skip
    assert (ours - truth).abs().mean() <= 1.2 * (stock - truth).abs().mean()


@pytest.mark.parametrize(("counts", "lengths", "more"), [
    ([200, 60], [200, 60], True), ([200], [900], True), ([1] * 40, [900] * 40, False), ([3], [3], True),
    ([20], [4000], False),
])  # fmt: skip
def test_latents_are_read_where_that_takes_fewer_operations(counts: list[int], lengths: list[int], more: bool) -> None:
    ragged = Ragged(torch.tensor([0, *counts]).cumsum(0), torch.tensor(lengths), max(counts), max(lengths))
    rank, key, rotated, value = 512, 128, 64, 128
    pairs = sum(length - place for count, length in zip(counts, lengths, strict=True) for place in range(count))
    absorbed = pairs * (2 * rank + rotated) + sum(counts) * rank * (key + value)
    made = pairs * (key + rotated + value) + sum(lengths) * rank * (key + value)
    for transposed, shape in ((False, (2, value, rank)), (True, (2, rank, value))):
        parts = Expansion(torch.empty(2, key, rank), torch.empty(shape), transposed=transposed)
        assert parts.takes_more(ragged, rotated) is (absorbed > made) is more


class Adapted(nn.Module):
    """A layer of another library's around a linear one."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 1.5 + self.linear(x.flip(-1))


@pytest.mark.parametrize("how", ["adapter", "hook", "forward"])
def test_a_changed_expansion_is_run_by_its_own_code(how: str) -> None:
    model = model_of()

    def change() -> None:
        for layer in model.model.layers:
            attention = layer.self_attn
            if how == "adapter":
                attention.kv_b_proj = Adapted(attention.kv_b_proj)
            elif how == "hook":
                attention.kv_b_proj.register_forward_hook(lambda module, given, out: out * 1.5)
            else:
                forward = attention.kv_b_proj.forward
                attention.kv_b_proj.forward = lambda x, forward=forward: forward(x) * 1.5

    hf_accel.patch(model, weights=None)
    before = [alone(model, prompt) for prompt in PROMPTS]
    change()
    found = [alone(model, prompt) for prompt in PROMPTS], together(model)
    model = model_of()
    change()
    expected = [alone(model, prompt) for prompt in PROMPTS]
    assert found == (expected, expected) and expected != before


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "weights"), [
    (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8"),
    (torch.float32, {"bits": 4, "group_size": 32}),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["MiniCPM3", "DeepseekV3", "DeepseekV2"])
@pytest.mark.covering(1)
def test_a_native_call_has_the_bits_of_the_modules(kind: str, dtype: torch.dtype, weights: Any) -> None:
    if hf_accel.kernels.cpu.refusal() is not None:
        pytest.skip("a layer runs module by module without the kernels")
    # torch rounds the products of a complex table once where it takes fewer at once
    model = hf_accel.patch(model_of(kind, **WIDE, qk_rope_head_dim=16).to(dtype), weights=weights)
    layers, ids = model.model.layers, torch.randint(1, VOCABULARY, (3, 24))

    def logits() -> Tensor:
        cache = PagedCache(model.config)
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split([14, 1, 1, 5, 3], 1)], 1)

    native = logits()
    assert all(vars(layer)[FUSED].programme is not None for layer in layers)
    calls: list[nn.Module] = []
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda module, given, out: calls.append(module))
    assert torch.equal(logits(), native) and len(calls) == 5 * len(layers)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", ["MiniCPM3", "DeepseekV2"])
def test_patch_is_undone_exactly(kind: str, fuse: bool) -> None:
    model = model_of(kind)
    before = snapshot(model)
    hf_accel.patch(model, weights=None, fuse=fuse)
    assert sum(isinstance(module, PagedLatents) for module in model.modules()) == 3
    expected = alone(model, PROMPTS[0])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert alone(copied, PROMPTS[0]) == expected
        assert not any(isinstance(module, PagedLatents) for module in hf_accel.unpatch(copied).modules())
    assert snapshot(hf_accel.unpatch(model)) == before


def test_sampling_draws_stocks_numbers() -> None:
    model = model_of()
    check_sampling(model)


def test_other_code_is_not_known() -> None:
    attention = model_of().model.layers[0].self_attn
    assert is_known_expansion(attention)

    class Other(type(attention)):  # type: ignore[misc]
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys, values * 1.01

    model = model_of()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Other
    expected = [alone(model, prompt) for prompt in PROMPTS]
    (reason,) = (c["reason"] for c in hf_accel.plan(model).to_dict()["choices"] if c["topic"] == "cache")
    assert "Other makes K and V of what it caches in a way of its own" in reason
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected
    attention.expand_kv = lambda *given: given
    assert not is_known_expansion(attention)


def test_pages_for_other_keys_are_refused() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    config = transformers.LlamaConfig(num_hidden_layers=3, num_attention_heads=4, hidden_size=32)
    with pytest.raises(UnsupportedError, match=r"compressed keys of None numbers, and layer 0 has 16; make the cache"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=PagedCache(config))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, hidden_size=32,
                                          num_attention_heads=4, intermediate_size=32, vocab_size=99))  # fmt: skip
    with pytest.raises(UnsupportedError, match="compressed keys of 16 numbers, and a layer writes 4 heads of 8; use"):
        llama(torch.tensor([PROMPTS[0]]) % 99, past_key_values=PagedCache(model.config))


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_estimate_counts_what_the_cache_keeps(dtype: str | None) -> None:
    model = model_of()
    estimate = hf_accel.estimate(model, context=1000, weights=None, kv_dtype=dtype)
    numbers = 16 + 4  # the latent and the rotated part, for all heads
    each = numbers * 4 if dtype is None else numbers + 2 * 4
    assert estimate.kv_bytes == 3 * 1000 * each
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=8, dtype=dtype or "auto")
    model.generate(torch.randint(1, VOCABULARY, (1, 992)), max_new_tokens=9, past_key_values=cache)
    assert cache.statistics()["kv_bytes"] == estimate.kv_bytes


def test_ranks_cannot_share_them_out() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match="no rank knows how to attend over a part of the compressed keys"):
            hf_accel.patch(model_of(), weights=None, context_parallel=distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
