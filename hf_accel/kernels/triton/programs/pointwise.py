"""RMSNorm, the rotary embedding of queries and keys, and the gate of an MLP; see ../layer_parts.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(x, weight, out, size, eps, offset, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """One row of x and out [rows, size]."""
    start = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    is_there = place < size
    row = tl.load(x + start + place, mask=is_there, other=0).to(tl.float32)
    mean = tl.sum(row * row, axis=0) / size
    row = row * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if ROUND_FIRST:
        row = row.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + place, mask=is_there, other=0).to(tl.float32) + offset
    tl.store(out + start + place, (row * factor).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _rotated(first, second, cos, sin, DTYPE: tl.constexpr, ROUND_EACH: tl.constexpr):
    """first * cos + second * sin of float32 numbers; ROUND_EACH: both products are rounded to DTYPE."""
    one, other = first * cos, second * sin
    if ROUND_EACH:
        one, other = one.to(DTYPE).to(tl.float32), other.to(DTYPE).to(tl.float32)
    return (one + other).to(DTYPE)


@triton.jit
def rotate(
    x, out, cos, sin, tokens, heads, size, x_batch, x_head, x_token, out_batch, out_head, out_token, table_batch,
    table_token, INTERLEAVED: tl.constexpr, ROUND_EACH: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token of x and out [batch, heads, tokens, size], by tables [batch or 1, tokens, size]."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, PAIRS)
    first_place = pair * 2 if INTERLEAVED else pair
    second_place = pair * 2 + 1 if INTERLEAVED else pair + size // 2
    is_pair = pair < size // 2
    table = batch * table_batch + token * table_token
    first_cos = tl.load(cos + table + first_place, mask=is_pair, other=0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + table + second_place, mask=is_pair, other=0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + table + first_place, mask=is_pair, other=0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + table + second_place, mask=is_pair, other=0).to(tl.float32)[None, :]
    is_there = (head < heads) & is_pair[None, :]
    heads_of_x = x + batch * x_batch + token * x_token + head * x_head
    first = tl.load(heads_of_x + first_place[None, :], mask=is_there, other=0).to(tl.float32)
    second = tl.load(heads_of_x + second_place[None, :], mask=is_there, other=0).to(tl.float32)
    to = out + batch * out_batch + token * out_token + head * out_head
    rotated = _rotated(first, -second, first_cos, first_sin, DTYPE, ROUND_EACH)
    tl.store(to + first_place[None, :], rotated, mask=is_there)
    rotated = _rotated(second, first, second_cos, second_sin, DTYPE, ROUND_EACH)
    tl.store(to + second_place[None, :], rotated, mask=is_there)


@triton.jit
def gate_and_multiply(gate, up, out, numbers, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(gate) * up, each [numbers]; the activation is rounded to their dtype, as torch does it."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < numbers
    x = tl.load(gate + place, mask=is_there, other=0).to(tl.float32)
    if ACTIVATION == 0:
        x = tl.div_rn(x, 1 + tl.exp(-x))
    elif ACTIVATION == 1:
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = tl.div_rn(x, 1 + tl.exp(-2 * inner))  # x (1 + tanh(inner)) / 2
    x = x.to(gate.dtype.element_ty).to(tl.float32)
    x = x * tl.load(up + place, mask=is_there, other=0).to(tl.float32)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=is_there)
