from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from hf_accel.cache.kinds import KeysAndValues
from hf_accel.cache.kinds.kind import TokenNumbers
from hf_accel.cache.quantized import QUANTIZED
from hf_accel.errors import UnsupportedError
from hf_accel.estimate.layer_bytes import StatefulLayer, attention_layers
from hf_accel.estimate.workload import AttentionBytes

from .shapes import GEMMA2_2B, TINY


@pytest.mark.parametrize(("context", "window"), [(1, 1), (7, 7), (7, 3), (7, 1), (100, 64)])
def test_prefill_counts_the_pairs_that_are_visible(context, window):
    layer = StatefulLayer(TokenNumbers(3, 1, keys=5, values=5), min(context, window), KeysAndValues(None))
    pairs = sum(1 for query in range(context) for key in range(context) if 0 <= query - key < window)
    assert layer.prefill_operations(context) == 2 * 2 * 3 * 5 * pairs


def test_decode_multiplies_every_head_with_every_kept_token_twice():
    layer = StatefulLayer(TokenNumbers(3, 1, keys=5, values=5), 11, KeysAndValues(None))
    assert layer.decode_operations == 2 * 2 * 3 * 5 * 11


@pytest.mark.parametrize(
    ("dtype", "quantized", "per_vector"),
    [
        (torch.float32, None, 256),
        (torch.bfloat16, None, 128),
        (torch.float32, "int8", 68),
        (torch.bfloat16, "fp8", 66),
        (torch.bfloat16, "int4", 36),
        (torch.float16, "int4", 40),
        (torch.bfloat16, "int8-int4", 51),
    ],
)
def test_kv_bytes(dtype, quantized, per_vector):
    layer = StatefulLayer(TokenNumbers(8, 2, keys=64, values=64), 10, KeysAndValues(None))
    assert layer.kv_bytes(dtype=dtype, quantized=QUANTIZED.get(quantized)) == 2 * 2 * 10 * per_vector


def test_layers_with_and_without_a_window():
    layers = attention_layers(GEMMA2_2B, context=5000)
    assert [layer.tokens for layer in layers] == [4096, 5000] * 13
    assert {layer.numbers for layer in layers} == {TokenNumbers(8, 4, keys=256, values=256)}


def test_layers_that_reuse_keys_and_values_keep_none():
    assert len(attention_layers(TINY["gemma3n, shared KV"], context=10)) == 4


def test_chunked_attention_keeps_a_chunk():
    chunks = LlamaConfig(num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"])
    chunks.attention_chunk_size = 8
    assert [layer.tokens for layer in attention_layers(chunks, context=20)] == [8, 20]


def test_recurrent_layers_are_refused():
    with pytest.raises(UnsupportedError, match=r"LlamaConfig has LinearAttentionLayer layers, unknown to estimate"):
        attention_layers(LlamaConfig(layer_types=["linear_attention"], num_hidden_layers=1), context=10)


@pytest.mark.parametrize(("context", "tiled"), [(10, 6 * 4 * (10 + 100)), (1000, 6 * 4 * (1000 + 128 * 128))])
def test_tiled_attention_holds_a_tile_and_a_sum_per_row(context, tiled):
    assert AttentionBytes.of(context=context, heads=6, dtype=torch.float16).tiled == tiled
