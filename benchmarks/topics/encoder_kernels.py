"""The kernels of encoders against torch's operators: activations, norms, attention and whole layers, in float32.

Torch computes padded rows where sequences differ in length; ours stand end to end. Both take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.kernels.cpu import refusal
from hf_accel.kernels.cpu.attention import attend
from hf_accel.kernels.cpu.encoder_layer import EncoderLayer, EncoderParts, LayerNormOf
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.integer_linear import IntegerLinear, quantize
from hf_accel.kernels.cpu.row_kernels import activate, layer_norm
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

from ..harness.bench import Bench
from ..harness.tables import Row, Table


class Encoder(NamedTuple):
    """The sizes of a layer."""

    hidden: int
    heads: int
    inner: int


ENCODERS = {"MiniLM": Encoder(384, 12, 1536), "BERT base": Encoder(768, 12, 3072)}
BATCHES = {
    "1 x 16": [16],
    "1 x 128": [128],
    "8 x 128": [128] * 8,
    "8 of 16 to 128": [16, 24, 32, 48, 64, 80, 96, 128],
}
SECONDS = 0.5  # of each comparison
EPS = 1e-12
NOTE = (
    "Torch's seconds over ours in turns, the median of their ratios. up_and_gelu: our INT8 product and torch's GELU "
    "over our product that ends with it. int8_layer: torch's float32 layer over ours with INT8 weights. in_one_call: "
    "our kernels called one by one over the same in one call."
)


def measure(bench: Bench) -> list[Table]:
    """No tables without kernels."""
    if refusal() is not None:
        return []
    torch.manual_seed(bench.settings.seed)
    with torch.inference_mode():
        return [
            Table(f"{name}, float32", [row(encoder, *item) for item in BATCHES.items()], NOTE)
            for name, encoder in ENCODERS.items()
        ]


class Layer:
    """The weights of one BERT layer, as torch and as our kernels compute it."""

    def __init__(self, encoder: Encoder) -> None:
        hidden, self.heads, inner = encoder
        shapes = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
        self.weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
        self.biases = [torch.randn(shape[0]) for shape in shapes]
        self.norm = torch.randn(hidden), torch.randn(hidden), EPS
        self.options = AttentionOptions((hidden // self.heads) ** -0.5, causal=False)
        packed = [found[0] for found in (quantize(8, weight, 128) for weight in self.weights) if found is not None]
        self.float_parts = self._parts(
            lambda part, **names: FloatLinear(self.weights[part], self.biases[part], **names)
        )
        self.int8_parts = self._parts(lambda part, **names: IntegerLinear(packed[part], self.biases[part], **names))
        self.plain_up = IntegerLinear(packed[4:5], self.biases[4:5])

    def _parts(self, make: Callable[..., FloatLinear | IntegerLinear]) -> EncoderParts:
        up, norm = make(slice(4, 5), activation="gelu"), LayerNormOf(*self.norm)
        return EncoderParts(
            make(slice(0, 3)), make(slice(3, 4)), up, make(slice(5, 6)), (norm, norm), norms_first=False
        )

    def native(self, parts: EncoderParts) -> EncoderLayer:
        return EncoderLayer(parts, self.heads, self.heads, scale=self.options.scale)

    def by_torch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: [B, T, hidden], mask: [B, 1, 1, T] bool -> [B, T, hidden]."""
        q, k, v = (
            F.linear(x, self.weights[i], self.biases[i]).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for i in range(3)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        middle = self.torch_norm(F.linear(attended, self.weights[3], self.biases[3]) + x)
        inner = F.gelu(F.linear(middle, self.weights[4], self.biases[4]))
        return self.torch_norm(F.linear(inner, self.weights[5], self.biases[5]) + middle)

    def torch_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self.norm)

    def one_by_one(self, x: Tensor, ragged: Ragged) -> Tensor:
        parts = self.int8_parts
        q, k, v = (side.unflatten(1, (self.heads, -1)) for side in parts.qkv(x).chunk(3, dim=1))
        attended = attend(q, KV(k, v), self.options, ragged).flatten(1)
        middle = layer_norm(parts.projection(attended), *self.norm, y=x)
        return layer_norm(parts.down(parts.up(middle)), *self.norm, y=middle)


def row(encoder: Encoder, name: str, lengths: list[int]) -> Row:
    layer, longest = Layer(encoder), max(lengths)
    ragged = Ragged(torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(lengths).int(), longest, longest)
    visible = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = None if visible.all() else visible[:, None, None]
    padded = torch.randn(len(lengths), longest, encoder.hidden)
    x, heads = padded[visible], (encoder.heads, encoder.hidden // encoder.heads)
    inner, padded_inner = torch.randn(len(x), encoder.inner), torch.randn(*padded.shape[:2], encoder.inner)
    q, dense = x.unflatten(1, heads), padded.unflatten(2, heads).transpose(1, 2)
    floats, integers = layer.native(layer.float_parts), layer.native(layer.int8_parts)

    def attend_padded() -> Tensor:
        return F.scaled_dot_product_attention(dense, dense, dense, attn_mask=mask)

    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "gelu": (lambda: F.gelu(padded_inner), lambda: activate(inner, "gelu")),
        "sum_and_norm": (lambda: layer.torch_norm(padded + padded), lambda: layer_norm(x, *layer.norm, y=x)),
        "attention": (attend_padded, lambda: attend(q, KV(q, q), layer.options, ragged)),
        "up_and_gelu": (lambda: F.gelu(layer.plain_up(x)), lambda: layer.int8_parts.up(x)),
        "float_layer": (lambda: layer.by_torch(padded, mask), lambda: floats(x, ragged.cu_q)),
        "int8_layer": (lambda: layer.by_torch(padded, mask), lambda: integers(x, ragged.cu_q)),
        "in_one_call": (lambda: layer.one_by_one(x, ragged), lambda: integers(x, ragged.cu_q)),
    }
    found = {f"{kind}_ratio": ratio(*calls) for kind, calls in pairs.items()}
    print(f"    {name}: {found}", flush=True)
    return {"tokens": name, **found}


def ratio(stock: Callable[[], Tensor], own: Callable[[], Tensor]) -> float:
    """The median ratio of stock's seconds to ours, of calls in turns, after one of each that does not count."""
    found: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(found) < 4:
        found.append(seconds_of(stock) / seconds_of(own))
    return statistics.median(found[1:])


def seconds_of(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
