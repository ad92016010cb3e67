"""Decoder layers that attend by torch's operators, as Falcon's do, as one native call in a ragged pass."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.recognition.linear_code import is_plain_linear
from tests.selection import seeds
from tests.unit.fused.test_decoder_layers import PROMPTS, counted, layers_of

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "initializer_range": 0.25,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "one head of keys": {},
    "keys of each head": {"multi_query": False},
    "one after the other": {"parallel_attn": False, "bias": True},
    "eager": {"attn_implementation": "eager"},
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def falcon(**other: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES | other))
    return model.eval()


@torch.no_grad()
def ragged_logits(model: PreTrainedModel) -> list[Tensor]:
    """The logits of every pass of generate_batch, which runs prompts of several lengths together."""
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    try:
        model.generate_batch(PROMPTS, generation_config=config)  # type: ignore[operator]
    finally:
        hook.remove()
    return seen


def check_native_layers(model: Any, share: float) -> None:
    """All three layers are native calls, whose logits are those of the modules within a share of the largest."""
    assert len(layers_of(model)) == 3
    with counted() as calls:
        got = ragged_logits(model)
    assert calls[True] and not calls[False]
    with counted(native=False):
        expected = ragged_logits(model)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().mean() <= share * other.abs().max()
        if not torch.equal(one.argmax(-1), other.argmax(-1)):  # other tokens follow
            assert share > 1e-5
            break


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["float", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_near_the_modules_one_by_one(kind: str, weights: Any, dtype: torch.dtype) -> None:
    stock = falcon(**KINDS[kind]).to(dtype)
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    if weights is None and dtype is torch.bfloat16 and model.config.bias:
        assert not layers_of(model)  # its code rounds a product before it adds the bias
        return
    share = 1e-5 if weights is None and dtype is torch.float32 else 0.05
    check_native_layers(model, share)
    if weights is None and dtype is torch.float32:
        ids = torch.tensor(PROMPTS[:1])
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))  # type: ignore[operator]


@pytest.mark.parametrize("seed", seeds(0, 6))
def test_random_configurations(seed: int) -> None:
    numbers = random.Random(seed)
    heads = numbers.choice([2, 4, 8])
    stock = falcon(
        num_attention_heads=heads, hidden_size=heads * numbers.choice([8, 16, 24]),
        multi_query=numbers.random() < 0.5, parallel_attn=numbers.random() < 0.5, bias=numbers.random() < 0.5,
        ffn_hidden_size=numbers.choice([40, 96]), activation=numbers.choice(["gelu", "silu", "relu"]),
        rope_theta=numbers.choice([100.0, 10000.0]), layer_norm_epsilon=numbers.choice([1e-5, 1e-3]),
    )  # fmt: skip
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    with counted() as calls:
        for length in (1, 2, 17):
            ids = torch.arange(3, 3 + length)[None]
            assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))  # type: ignore[operator]
    assert calls[True] and not calls[False]


@torch.no_grad()
def test_padding_and_masks_run_the_own_code() -> None:
    """A mask that hides more than what comes later is read by the layers' own code."""
    stock = falcon()
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    ids, mask = torch.arange(3, 15).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with counted() as calls:
        got = model(ids, attention_mask=mask, past_key_values=hf_accel.PagedCache(model.config)).logits
    assert not calls[True]
    expected = stock(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [
    {"alibi": True, "attn_implementation": "eager"}, {"new_decoder_architecture": True, "num_kv_heads": 2},
], ids=str)  # fmt: skip
def test_others_run_module_by_module(other: dict[str, Any]) -> None:
    stock = falcon(**other)
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    assert not layers_of(model)
    ids = torch.tensor(PROMPTS[:1])
    assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))  # type: ignore[operator]


# -- a bias of positions that the model makes for all layers (ALiBi) ------------------------------------

ALIBI: dict[str, Any] = {
    "BLOOM": lambda: bloom(), "BLOOM, other residual": lambda: bloom(apply_residual_connection_post_layernorm=True),
    "BLOOM, 6 heads": lambda: bloom(n_head=6),
    "MPT": lambda: mpt(), "Falcon": lambda: falcon(alibi=True, multi_query=False, parallel_attn=False),
    "Falcon, one head of keys": lambda: falcon(alibi=True),
}  # fmt: skip
PLAIN = {name: value for name, value in SIZES.items() if "num" not in name}


def bloom(**other: Any) -> PreTrainedModel:
    config = transformers.BloomConfig(**PLAIN | {"n_layer": 3, "n_head": 4} | other)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.BloomForCausalLM(config).eval()


def mpt() -> PreTrainedModel:
    plain = {name: value for name, value in PLAIN.items() if name != "hidden_size"}
    config = transformers.MptConfig(**plain, d_model=96, n_layers=3, n_heads=4, max_seq_len=64)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.MptForCausalLM(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["float", "int8", "int4"])
@pytest.mark.parametrize("name", ALIBI)
def test_a_bias_of_the_model(name: str, weights: Any, dtype: torch.dtype) -> None:
    stock = ALIBI[name]().to(dtype)
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    share = 1e-5 if weights is None and dtype is torch.float32 else 0.02
    check_native_layers(model, share)
    if weights is None and dtype is torch.float32:
        ids, options = torch.tensor(PROMPTS[:1]), OPTIONS | {"max_new_tokens": 40}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))  # type: ignore[operator]


@pytest.mark.parametrize("name", ["BLOOM", "MPT", "Falcon"])
def test_without_the_bias_tokens_are_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see a bias that is left out."""
    model = hf_accel.patch(ALIBI[name](), weights=None)
    before = ragged_logits(model)
    monkeypatch.setattr("hf_accel.fused.hf.native_calls.position_bias_fields", lambda *given: (0, 0, 0, 0))
    assert not torch.allclose(ragged_logits(model)[0], before[0], rtol=1e-3)


@torch.no_grad()
def test_changes_are_seen() -> None:
    model = hf_accel.patch(falcon(), weights=None)
    before, layer = ragged_logits(model), layers_of(model)[1]
    layer.mlp.dense_4h_to_h.weight.mul_(-1)
    layer.mlp.act = nn.SiLU()
    after = ragged_logits(model)
    assert not torch.allclose(after[0], before[0], rtol=1e-2)
    with counted(native=False):
        for one, other in zip(after, ragged_logits(model), strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


# -- linear layers with a class of their own -------------------------------------------------------------


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 2


class LeavesItsBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class HasASetting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * getattr(self, "scale", 1)


def test_what_a_linear_layer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.models.falcon.modeling_falcon.FalconLinear
    assert is_plain_linear(nn.Linear(4, 6)) and is_plain_linear(kind(4, 6)) and is_plain_linear(kind(4, 6, bias=False))
    monkeypatch.setattr("hf_accel.recognition.linear_code.is_known_class", lambda kind: True)
    assert not any(is_plain_linear(each(4, 6)) for each in (Doubles, LeavesItsBias))
    layer = HasASetting(4, 6)
    layer.scale = 3
    assert not is_plain_linear(layer)
    monkeypatch.undo()
    assert not is_plain_linear(HasASetting(4, 6))  # which others wrote


def test_quantized_layers_are_undone() -> None:
    model = falcon()
    ids, layer = torch.tensor(PROMPTS[:1]), model.transformer.h[0].mlp.dense_h_to_4h
    before = model(ids).logits
    hf_accel.patch(model, weights="int8")
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is QuantLinear
    hf_accel.unpatch(model)
    assert model.transformer.h[0].mlp.dense_h_to_4h is layer and torch.equal(model(ids).logits, before)
