"""A whole encoder layer as one call: the bits of its kernels one by one, and transformers' BERT and ViT layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.vit.modeling_vit import ViTLayer

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.attention import attend
from hf_accel.kernels.cpu.encoder_layer import EncoderLayer, EncoderParts, LayerNormOf
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.integer_linear import IntegerLinear, quantize
from hf_accel.kernels.cpu.row_kernels import add, add_layer_norm, layer_norm
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

HIDDEN, INNER, HEADS, KV_HEADS, EPS = 96, 160, 4, 2, 1e-6
DIM = HIDDEN // HEADS
STARTS = torch.tensor([0, 7, 8, 8, 30], dtype=torch.int32)
SCALE = DIM**-0.5


def linear(bits: int, sizes: list[int], inputs: int, **names: Any) -> IntegerLinear | FloatLinear:
    weights, biases = [torch.randn(size, inputs) / 8 for size in sizes], [torch.randn(size) for size in sizes]
    if bits == 32:
        return FloatLinear(weights, biases, **names)
    found = [quantize(bits, weight, 32) for weight in weights]
    return IntegerLinear([result[0] for result in found if result is not None], biases, **names)


def make_parts(bits: int, *, norms_first: bool, epilogue: str | None = None) -> EncoderParts:
    up = {"epilogue": epilogue} if epilogue else {"activation": "gelu"}
    return EncoderParts(
        linear(bits, [HIDDEN, DIM * KV_HEADS, DIM * KV_HEADS], HIDDEN),
        linear(bits, [HIDDEN], HIDDEN),
        linear(bits, [INNER] * (2 if epilogue else 1), HIDDEN, **up),
        linear(bits, [HIDDEN], INNER),
        (
            LayerNormOf(torch.randn(HIDDEN), torch.randn(HIDDEN), EPS),
            LayerNormOf(torch.randn(HIDDEN).half(), None, EPS),
        ),
        norms_first,
    )


def one_by_one(parts: EncoderParts, x: Tensor, reach: int | None, bias: Tensor | None) -> Tensor:
    first, second = parts.norms
    qkv = parts.qkv(layer_norm(x, *first) if parts.norms_first else x)
    q, k, v = (side.unflatten(1, (-1, DIM)) for side in qkv.split([HIDDEN, DIM * KV_HEADS, DIM * KV_HEADS], dim=1))
    lengths = STARTS.diff()
    ragged = Ragged(STARTS, lengths, int(lengths.max()), int(lengths.max()))
    options = AttentionOptions(SCALE, causal=False, window=None if reach is None else reach + 1)
    attended = parts.projection(attend(q, KV(k, v), options, ragged, ahead=reach, bias=bias).flatten(1))
    if not parts.norms_first:
        middle = layer_norm(attended, *first, y=x)
        return layer_norm(parts.down(parts.up(middle)), *second, y=middle)
    normed, middle = add_layer_norm(attended, x, *second[:2], eps=second.eps)
    return add(middle, parts.down(parts.up(normed)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norms_first", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 32])
def test_bits_of_the_kernels_one_by_one(bits: int, norms_first: bool, dtype: torch.dtype) -> None:
    x, bias = torch.randn(30, HIDDEN).to(dtype), torch.randn(HEADS, 61)
    for epilogue, reach, given in ((None, None, None), ("gelu", 3, bias)):
        parts = make_parts(bits, norms_first=norms_first, epilogue=epilogue)
        layer = EncoderLayer(parts, HEADS, KV_HEADS, scale=SCALE, reach=reach)
        out = layer(x, STARTS, bias=given)
        assert torch.equal(out, one_by_one(parts, x, reach, given)) and out.isfinite().all()
        assert torch.equal(layer(x[8:], STARTS[3:] - 8, bias=given), out[8:])  # a sequence alone


def of_modules(modules: list[torch.nn.Linear], **names: Any) -> FloatLinear:
    return FloatLinear([m.weight for m in modules], [m.bias for m in modules], **names)


def norm_of(module: torch.nn.LayerNorm) -> LayerNormOf:
    return LayerNormOf(module.weight, module.bias, module.eps)


SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_hidden_layers": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def linears_of(layer: torch.nn.Module) -> list[torch.nn.Linear]:
    """Queries, keys, values, projection, up, down: the order in which both classes have them."""
    return [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]


def norms_of(layer: torch.nn.Module) -> list[torch.nn.LayerNorm]:
    return [module for module in layer.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_is_transformers_layer(kind: str) -> None:
    torch.manual_seed(0)
    config: Any = BertConfig(**SIZES) if kind == "bert" else ViTConfig(**SIZES)
    config._attn_implementation = "eager"
    stock = (BertLayer if kind == "bert" else ViTLayer)(config).eval()
    for norm in norms_of(stock):
        torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    q, k, v, projection, up, down = linears_of(stock)
    parts = EncoderParts(
        of_modules([q, k, v]), of_modules([projection]), of_modules([up], activation="gelu"), of_modules([down]),
        (norm_of(norms_of(stock)[0]), norm_of(norms_of(stock)[1])), norms_first=kind == "vit",
    )  # fmt: skip
    layer = EncoderLayer(parts, HEADS, HEADS, scale=SCALE)
    x = torch.randn(30, HIDDEN)
    with torch.no_grad():
        out = layer(x, STARTS)
        for begin, end in ((0, 7), (7, 8), (8, 30)):
            wanted = stock(x[None, begin:end])
            wanted = wanted[0] if isinstance(wanted, tuple) else wanted
            torch.testing.assert_close(out[begin:end], wanted.reshape(end - begin, HIDDEN), atol=2e-6, rtol=2e-6)


def test_memory_that_moves_is_found() -> None:
    parts = make_parts(32, norms_first=False)
    layer, x = EncoderLayer(parts, HEADS, KV_HEADS, scale=SCALE), torch.randn(30, HIDDEN)
    before = layer(x, STARTS)
    weight = parts.norms[0].weight
    assert isinstance(parts.down, FloatLinear) and weight is not None
    parts.down.weights[0].data, weight.data = torch.randn(HIDDEN, INNER) / 8, torch.randn(HIDDEN)
    out = layer(x, STARTS)
    assert not torch.equal(out, before) and torch.equal(out, one_by_one(parts, x, None, None))


def test_refuses() -> None:
    parts = make_parts(32, norms_first=False)
    layer, x = EncoderLayer(parts, HEADS, KV_HEADS, scale=SCALE), torch.randn(30, HIDDEN)
    with pytest.raises(UnsupportedError, match="which should be"):
        EncoderLayer(parts._replace(down=parts.projection), HEADS, KV_HEADS, scale=SCALE)
    with pytest.raises(UnsupportedError, match="3 heads and 2 of keys"):
        EncoderLayer(parts, 3, KV_HEADS, scale=SCALE)
    for wrong in (x[:, :-1], x.double(), x[:29]):
        with pytest.raises(UnsupportedError, match="of which sequences take 30"):
            layer(wrong, STARTS)
    with pytest.raises(UnsupportedError, match="no_grad"):
        layer(x.clone().requires_grad_(), STARTS)
    short = parts._replace(norms=(LayerNormOf(torch.ones(3), None, EPS), parts.norms[1]))
    with pytest.raises(UnsupportedError, match=r"a norm's weight of torch.float32 \(3,\) for 96"):
        EncoderLayer(short, HEADS, KV_HEADS, scale=SCALE)(x, STARTS)
