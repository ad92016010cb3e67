"""Activations as one native call: near stock's numbers, and stock wherever that is not known."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu

import hf_accel
from hf_accel.fused.composed_activation import NativeActivation, composed_activation
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gelu_new", "gelu_tanh"), ("gelu_fast", "gelu_tanh"), ("gelu_accurate", "gelu_tanh"),
        ("quick_gelu", "gelu_quick"), ("gelu_python", "gelu"), ("gelu", None), ("relu", None), ("silu", "silu"),
        ("gelu_pytorch_tanh", "gelu_tanh"), ("mish", None), ("relu2", "relu_squared"), ("gelu_10", None),
        ("tanh", None),
    ],
)  # fmt: skip
def test_what_is_composed(name: str, ours: str | None) -> None:
    form = composed_activation(ACT2FN[name], torch.float32)
    assert (None if form is None else form.name) == ours


def test_an_activation_in_the_file_of_its_model() -> None:
    form = composed_activation(BloomGelu(), torch.float32)
    assert form is not None and form.name == "gelu_tanh"


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def test_modules_of_others_are_left_alone() -> None:
    assert composed_activation(Own(), torch.float32) is None
    assert composed_activation(ACT2FN["gelu_new"], torch.float64) is None


def native_activation(name: str) -> Any:
    stock = ACT2FN[name]
    ours, form = copy.copy(stock), composed_activation(stock, torch.float32)
    ours.__class__ = mixed_class(NativeActivation, type(stock))
    vars(ours)[FUSED] = form
    return ours


@torch.no_grad()
def test_numbers_are_stocks() -> None:
    stock, ours = ACT2FN["gelu_new"], native_activation("gelu_new")
    for x in (torch.randn(3, 5, 7) * 4, torch.randn(5, 8)[:, ::2], torch.tensor([0.0, -0.0, 1e30, float("nan")])):
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-6, atol=1e-6, equal_nan=True)
    for x in (torch.tensor(1.5), torch.empty(0, 3), torch.randn(4).bfloat16(), torch.randn(4).double()):
        assert torch.equal(ours(x), stock(x))


def test_gradients_are_stocks() -> None:
    x = torch.randn(9, requires_grad=True)
    native_activation("gelu_new")(x).sum().backward()
    ours, x.grad = x.grad, None
    ACT2FN["gelu_new"](x).sum().backward()
    assert ours is not None and x.grad is not None and torch.equal(ours, x.grad)


@torch.no_grad()
def test_gpt2() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    stock = GPT2LMHeadModel(config).eval()
    ours, ids = hf_accel.patch(copy.deepcopy(stock), weights=None), torch.arange(1, 20)[None]
    (line,) = [line for line in hf_accel.plan(stock, weights=None).lines if line.what == "2 activations"]
    assert line.choice == "one native call"
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-5)
    hf_accel.unpatch(ours)
    assert torch.equal(ours(ids).logits, stock(ids).logits)


@torch.no_grad()
def test_a_module_that_models_share_stays_as_it_is() -> None:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50}
    first, second = (OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)).eval() for _ in range(2))
    shared = first.transformer.h[0].mlp.act
    assert shared is second.transformer.h[1].mlp.act, "transformers makes one for all models"
    ids = torch.arange(1, 20)[None]
    stock = second(ids).logits
    hf_accel.patch(first, weights=None)
    assert first.transformer.h[0].mlp.act is first.transformer.h[1].mlp.act is not shared
    assert torch.equal(second(ids).logits, stock) and FUSED not in vars(shared)
    hf_accel.patch(second, weights=None)
    hf_accel.unpatch(first)
    assert first.transformer.h[0].mlp.act is shared
