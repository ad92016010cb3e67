from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_accel import plan
from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.estimate import estimate
from hf_accel.estimate.shapes import shapes_of
from hf_accel.estimate.workload import WeightTensor, Workload, weight_tensors
from hf_accel.linear import LinearSpec

from .shapes import TINY


@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), [(8, 2, 1), (8, 2, 5), (16, 3, 4), (4, 4, 2), (2, 5, 1)])
def test_the_share_of_experts_that_a_batch_reads(num_experts, top_k, tokens):
    """Against a draw of the experts of every token."""
    draw = random.Random(0)
    rounds = 4000
    chosen = [
        {expert for _ in range(tokens) for expert in draw.sample(range(num_experts), min(top_k, num_experts))}
        for _ in range(rounds)
    ]
    share = sum(map(len, chosen)) / rounds / num_experts
    tensor = WeightTensor(kind="experts", shape=(num_experts, 6, 10), itemsize=2, top_k=top_k)
    workload = Workload(
        tensors=(tensor,), layers=(), weights=None, dtype=torch.bfloat16, kv_dtype=None, context=1, batch=1
    )
    assert workload.weight_bytes_read(tokens) == pytest.approx(share * num_experts * 60 * 2, rel=0.02)


def test_operations_are_two_for_each_weight_that_a_token_meets():
    def operations(kind: str, **more: int) -> float:
        return WeightTensor(kind=kind, shape=(4, 6), itemsize=2, **more).operations_per_token

    assert [operations(kind) for kind in ("linears", "head", "embeddings", "other")] == [48, 48, 0, 0]
    assert operations("experts", top_k=1) == 12


@pytest.mark.parametrize(("outputs", "words"), [(16, 2), (11, 2), (1, 1)])
def test_zero_points_are_counted_with_the_scales(outputs, words):
    def stored(symmetric: bool) -> dict[str, int]:
        config, weight = WeightConfig(bits=4, group_size=32, symmetric=symmetric), torch.empty(outputs, 128).half()
        spec = LinearSpec.of(weight, config)
        return WeightTensor(kind="linears", shape=(outputs, 128), itemsize=2, spec=spec).bytes_by_kind

    assert stored(symmetric=False) == {"linears": outputs * 64, "scales": outputs * 4 * 2 + words * 4 * 4}
    assert stored(symmetric=True)["scales"] == outputs * 4 * 2


@pytest.mark.parametrize("name", TINY)
def test_linears_are_all_that_two_dimensional_linears_hold(name):
    model = shapes_of(TINY[name], dtype=None)
    head = model.get_output_embeddings()
    linear_like = (nn.Linear,) if "gpt2" not in name and "bigcode" not in name else object
    expected = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, linear_like)
        and getattr(module, "weight", None) is not None
        and module.weight.dim() == 2
        and module is not head
        and not isinstance(module, nn.Embedding)
    )
    counted = list(weight_tensors(model, None))
    assert sum(tensor.numel for tensor in counted if tensor.kind == "linears") == expected
    assert sum(tensor.numel for tensor in counted if tensor.kind == "head") == head.weight.numel()


class Doubled(nn.Linear):
    """A linear layer of the user's."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_that_patch_leaves_alone_is_not_quantized():
    """One of the user's is left alone. Falcon's, of a class of its own, computes what a plain one does."""
    model = shapes_of(TINY["falcon, multi-query"], dtype=None)
    layer = model.transformer.h[0].mlp
    layer.dense_h_to_4h = Doubled(*reversed(layer.dense_h_to_4h.weight.shape), bias=False, device="meta")
    tensors = [tensor for tensor in weight_tensors(model, WeightConfig()) if tensor.kind == "linears"]
    left = [tensor for tensor in tensors if tensor.bytes_by_kind == {"linears": tensor.numel * 4}]
    assert [tensor.numel for tensor in left] == [layer.dense_h_to_4h.weight.numel()] and len(tensors) > 1
    assert all(tensor.bytes_by_kind["linears"] == tensor.numel for tensor in tensors if tensor not in left)


def test_a_quantized_model_is_refused():
    model = LlamaForCausalLM(TINY["llama"])
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_buffer("weight_scale", torch.ones(1))
    del layer.weight
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.q_proj of this model holds no plain weight"):
        list(weight_tensors(model, None))


def test_another_librarys_weights_are_refused():
    """bitsandbytes packs two numbers into one, torchao tells of the numbers that it has replaced."""

    class Packed(torch.nn.Parameter):
        pass

    model = LlamaForCausalLM(TINY["llama"])
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = Packed(layer.weight.data[: len(layer.weight) // 2])
    with pytest.raises(UnsupportedError, match=r"q_proj of this model holds no plain weight .*; pass model.config"):
        estimate(model, context=4, bandwidth=1e9)
    assert estimate(model.config, context=4, bandwidth=1e9).weights_bytes


def test_experts_without_a_number_per_token_are_refused():
    model = shapes_of(TINY["mixtral"], dtype=None)
    model.config = TINY["llama"]
    with pytest.raises(UnsupportedError, match="LlamaConfig does not say how many experts a token takes"):
        list(weight_tensors(model, None))


@pytest.mark.parametrize(
    "weights", ["int4", {"bits": 4, "group_size": 64}, {"bits": 8, "head": "int4", "embedding": "int4"}]
)
def test_weights_are_counted_as_the_plan_holds_them(weights):
    """Of the second config, groups fit one weight of each layer's experts, and the others stay with it."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=50, num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=1, **sizes)
    model = MixtralForCausalLM(config)
    planned = plan(model, weights=weights)
    counted = estimate(model, context=8, weights=weights, bandwidth=1e9, compute=1e9)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert sum(counted.weights_by_kind.values()) == planned.bytes_after - buffers
    stays = {p.site.name for p in planned.linears if p.site.of_experts and p.choice is None}
    assert len(stays) == (2 if isinstance(weights, dict) and weights.get("group_size") else 0)
