from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_accel.cache.kinds import KeysAndValues
from hf_accel.cache.kinds.kind import TokenNumbers
from hf_accel.config import WeightConfig
from hf_accel.estimate.layer_bytes import StatefulLayer
from hf_accel.estimate.workload import WeightTensor, Workload
from hf_accel.linear import LinearSpec

# Two layers of attention (2 heads of 4), one MLP matrix of 5 x 3, four experts of 7 numbers, a head of 11 x 3.
WORKLOAD = Workload(
    tensors=(
        WeightTensor(kind="linears", shape=(5, 3), itemsize=2),
        WeightTensor(kind="experts", shape=(4, 7), itemsize=2, top_k=1),
        WeightTensor(kind="head", shape=(11, 3), itemsize=2),
        WeightTensor(kind="embeddings", shape=(11, 3), itemsize=2),
        WeightTensor(kind="other", shape=(3,), itemsize=2),
    ),
    layers=(StatefulLayer(TokenNumbers(2, 1, keys=4, values=4), 6, KeysAndValues(None)),) * 2,
    weights=None,
    dtype=torch.bfloat16,
    kv_dtype=None,
    context=6,
    batch=3,
)
KV = 3 * 2 * 2 * 6 * 4 * 2  # batch, layers, K and V, tokens, head_dim, bytes
DENSE = 2 * (15 + 33 + 3)


def test_decode_runs_one_token_of_each_sequence():
    experts = 4 * 7 * 2 * (1 - 0.75**3)
    assert WORKLOAD.decode.nbytes == pytest.approx(KV + DENSE + experts)
    assert WORKLOAD.decode.operations == 3 * (2 * (15 + 7 + 33) + 2 * (4 * 2 * 4 * 6))


def test_prefill_runs_every_token_but_the_head_only_for_the_last():
    experts = 4 * 7 * 2 * (1 - 0.75**18)
    assert WORKLOAD.prefill.nbytes == pytest.approx(KV + DENSE + experts)
    assert WORKLOAD.prefill.operations == 3 * (2 * (6 * (15 + 7) + 33) + 2 * (4 * 2 * 4 * 21))  # 21 causal pairs


def test_what_is_quantized_is_counted_by_itself():
    spec = LinearSpec.of(torch.empty(5, 3), WeightConfig(bits=8))
    first, *others = WORKLOAD.tensors
    quantized = dataclasses.replace(WORKLOAD, tensors=(dataclasses.replace(first, spec=spec), *others))
    assert WORKLOAD.decode.quantized == WORKLOAD.prefill.quantized == 0
    assert (quantized.decode.quantized, quantized.prefill.quantized) == (3 * 2 * 15, 3 * 2 * 15 * 6)
    assert quantized.decode.operations == WORKLOAD.decode.operations


def test_rows_are_the_tokens_of_a_pass():
    assert (WORKLOAD.decode.rows, WORKLOAD.prefill.rows) == (3, 18)
    assert (WORKLOAD.decode.queries, WORKLOAD.prefill.queries) == (1, 6)
    assert WORKLOAD.decode.layers == 2


def test_attention_is_counted_by_itself():
    assert WORKLOAD.decode.attention == 3 * 2 * (4 * 2 * 4 * 6)
    assert WORKLOAD.prefill.attention == 3 * 2 * (4 * 2 * 4 * 21)


@pytest.mark.parametrize(
    ("activations", "rounds"), [("auto", (False, True, True)), ("fp8", (True, True, True)), (None, (False,) * 3)]
)
def test_fp8_is_multiplied_as_such_in_calls_of_many_rows(activations, rounds):
    """Experts share the rows, and a head is stored in INT8."""
    config = WeightConfig(format="fp8", activations=activations)
    fp8 = LinearSpec.of(torch.empty(5, 3), config)
    linear, experts, head, *others = WORKLOAD.tensors
    tensors = (
        dataclasses.replace(linear, spec=fp8), dataclasses.replace(experts, spec=fp8),
        dataclasses.replace(head, spec=LinearSpec.of(torch.empty(11, 3), config.for_head)), *others,
    )  # fmt: skip
    whole = dataclasses.replace(WORKLOAD, tensors=tensors)
    for (context, operations), is_rounded in zip(((64, 0), (86, 30), (342, 30 + 14)), rounds, strict=True):
        work = dataclasses.replace(whole, context=context).prefill
        expected = 44 if activations == "fp8" else operations
        assert work.fp8 == (3 * context * expected if is_rounded else 0), context
        assert work.quantized == 3 * (context * 44 + 2 * 33)


def test_at_a_shorter_context_of_fewer_sequences():
    shorter = WORKLOAD.at(context=4, batch=1)
    assert shorter.kv_bytes == KV // 3 * 4 // 6
    assert WORKLOAD.at(context=6, batch=3) == WORKLOAD


def test_bytes_at_rest():
    assert WORKLOAD.kv_bytes == KV
    assert WORKLOAD.weights_by_kind == {"linears": 30, "experts": 56, "head": 66, "embeddings": 66, "other": 6}
    assert WORKLOAD.activation_bytes == 3 * 6 * (2 * 3 + 3 * 5) * 2


def test_an_int8_cache_is_read_in_int8():
    quantized = dataclasses.replace(WORKLOAD, kv_dtype="int8")
    assert WORKLOAD.decode.nbytes - quantized.decode.nbytes == 3 * 2 * 2 * 6 * (4 * 2 - (4 + 2))
