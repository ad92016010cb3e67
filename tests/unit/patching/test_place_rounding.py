"""A plan says which functions of single numbers torch rounds by what else is in a pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3NextConfig, Qwen3NextForCausalLM

import hf_accel
from hf_accel.kernels.cpu import refusal

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"torch's linears round by batch size: {refusal()}")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gpt2(activation: str, width: int) -> Any:
    sizes = {"n_layer": 1, "n_embd": 192, "n_head": 2, "vocab_size": 50, "n_inner": width}
    return GPT2LMHeadModel(GPT2Config(**sizes, activation_function=activation)).eval()


def gated(kv_heads: int) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "num_experts": 0}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **heads, layer_types=["full_attention"])).eval()


@pytest.mark.parametrize(
    ("model", "threads", "names"),
    [
        (lambda: gpt2("mish", 45), 1, "MishActivation"), (lambda: gpt2("mish", 96), 1, ""),
        (lambda: gpt2("mish", 96), 2, "MishActivation"), (lambda: gpt2("mish", 192), 2, ""),
        (lambda: gpt2("mish", 192), 3, ""), (lambda: gpt2("mish", 192), 4, "MishActivation"),
        (lambda: gpt2("silu", 45), 3, ""), (lambda: gpt2("gelu", 45), 3, ""), (lambda: gpt2("relu", 45), 3, ""),
        (lambda: gated(2), 1, ""), (lambda: gated(2), 2, "the sigmoid of Qwen3NextAttention"),
        (lambda: gated(1), 1, "the sigmoid of Qwen3NextAttention"),
    ],
)  # fmt: skip
def test_what_a_plan_says(model: Any, threads: int, names: str) -> None:
    torch.set_num_threads(threads)
    clauses = [f"{names} is torch's, which rounds by a number's place in a pass"] if names else []
    assert hf_accel.plan(model(), weights="int8").variant == clauses


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@torch.no_grad()
def test_an_activation_of_a_token_has_the_same_bits_in_any_pass(activation: str) -> None:
    model = hf_accel.patch(gpt2(activation, 45), weights="int8", deterministic=True)
    act = model.transformer.h[0].mlp.act
    x = torch.randn(9, 45) * 3
    assert torch.equal(act(x), torch.cat([act(row[None]) for row in x]))
    torch.testing.assert_close(act(x), hf_accel.unpatch(model).transformer.h[0].mlp.act(x), rtol=1e-5, atol=1e-6)
