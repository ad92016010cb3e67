"""The gated delta rule with a projection for each of its inputs: Olmo Hybrid, Kimi Linear, Ling."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel
from hf_accel import PagedCache
from hf_accel.cache.kinds.state_sizes import state_sizes
from hf_accel.kernels.cpu import refusal
from hf_accel.recurrent.hf.delta_attention import DeltaAttention
from hf_accel.recurrent.hf.recurrences import known_recurrence
from hf_accel.recurrent.hf.state_pass import PagedRecurrence

from ..selection import seeds
from .families import VOCABULARY
from .snapshot import snapshot
from .together import (
    PROMPTS,
    alone,
    check_preemption,
    check_programme,
    check_sampling,
    check_together,
    in_passes,
    together,
)

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")

LINEAR, FULL = "linear_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 4, "initializer_range": 0.25, "tie_word_embeddings": False, "linear_conv_kernel_dim": 4,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "linear_num_heads": 2, "linear_head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "OlmoHybrid": DELTA, "KimiLinear": LATENT, "BailingHybrid": LATENT | {"q_lora_rank": 12, "kda_lower_bound": -3.0},
}  # fmt: skip
LAYERS = [LINEAR, FULL, LINEAR, LINEAR, FULL]


def model_of(kind: str = "KimiLinear", layers: list[str] = LAYERS, **other: Any) -> Any:
    made = getattr(transformers, f"{kind}ForCausalLM", None)
    if made is None:
        pytest.skip(f"this transformers has no {kind}")
    own = {"layer_types": layers, "num_hidden_layers": len(layers), "mlp_layer_types": ["dense"] * len(layers)}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = made(made.config_class(**SIZES | KINDS[kind] | own | other)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):  # some are not initialized
                parameter.data = torch.randn_like(parameter)
        return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("other", [{}, {"linear_conv_kernel_dim": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str, other: dict[str, Any]) -> None:
    model = model_of(kind, **other)
    check_together(model)


@pytest.mark.parametrize("given", [
    ("OlmoHybrid", {"linear_allow_neg_eigval": False}), ("OlmoHybrid", {"linear_num_key_heads": 4}),
    ("BailingHybrid", {"kda_safe_gate": True}), ("BailingHybrid", {"kda_safe_gate": False}),
], ids=str)  # fmt: skip
def test_forms_of_the_rule(given: tuple[str, dict[str, Any]]) -> None:
    model = model_of(given[0], **given[1])
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert together(model) == expected
    assert any(isinstance(module, PagedRecurrence) for module in model.modules())


@pytest.mark.parametrize("seed", seeds(0, 6))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption, drafts and other sizes change no request's tokens."""
    numbers, kind = random.Random(seed), [*KINDS][seed % len(KINDS)]
    layers = [*numbers.choices([LINEAR, FULL], k=numbers.randint(1, 3)), LINEAR, FULL]
    own: dict[str, Any] = {"linear_conv_kernel_dim": numbers.choice([2, 4])}
    if kind == "OlmoHybrid":
        own |= {"linear_key_head_dim": numbers.choice([4, 12]), "linear_value_head_dim": numbers.choice([5, 16])}
    else:
        own |= {"linear_num_heads": numbers.choice([1, 3]), "linear_head_dim": numbers.choice([4, 20])}
    model = model_of(kind, layers, **own)
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


def test_preemption_and_shared_prefixes() -> None:
    check_preemption(model_of())


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradients", [True, False])
def test_passes_over_a_paged_cache(kind: str, gradients: bool) -> None:
    model, ids = model_of(kind), torch.randint(1, VOCABULARY, (3, 30))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    with torch.set_grad_enabled(gradients):
        expected = in_passes(model, ids, mask, [30], cache=None)
        hf_accel.patch(model, weights=None)
        found = in_passes(model, ids, mask, [13, 1, 16], cache=PagedCache(model.config))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_as_large_as_the_config_says(kind: str) -> None:
    model = model_of(kind)
    for module in model.modules():
        known: Any = known_recurrence(module) if "conv1d" in module._modules else None
        if known is not None:
            assert isinstance(known, DeltaAttention) and known.sizes(module) == state_sizes(model.config)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_batch_exactly(kind: str) -> None:
    model = hf_accel.patch(model_of(kind), weights="int8")
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


def test_sampling_draws_stocks_numbers() -> None:
    check_sampling(model_of("OlmoHybrid"))


@pytest.mark.parametrize("kind", KINDS)
def test_patch_is_undone_exactly(kind: str) -> None:
    model = model_of(kind)
    before = snapshot(model)
    hf_accel.patch(model, weights=None)
    assert snapshot(hf_accel.unpatch(model)) == before


def test_other_code_is_not_known() -> None:
    mixer = model_of().model.layers[0].self_attn
    assert known_recurrence(mixer) is not None

    class Other(type(mixer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return super().forward(hidden_states, **kwargs) * 1.01

    class OtherGate(type(mixer.forget_gate)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states).cumsum(1)

    gate = mixer.forget_gate.__class__
    mixer.forget_gate.__class__ = OtherGate
    assert known_recurrence(mixer) is None
    mixer.forget_gate.__class__, mixer.__class__ = gate, Other
    assert known_recurrence(mixer) is None
