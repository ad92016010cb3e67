"""RMSNorm, of a sum too, the rotary embedding of queries and keys, and the gate of an MLP; see ../layer_parts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .order import let_the_next_begin, wait_for_the_one_before


@triton.jit
def norm(
    x,
    added,
    total,
    weight,
    out,
    size,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norm one row of x into out [rows, size].

    added: what is added to x before; total: where the sum goes. Both or none.
    """
    start = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    is_there = place < size
    factor = tl.load(weight + place, mask=is_there, other=0).to(tl.float32) + offset
    wait_for_the_one_before(OVERLAPS)
    row = tl.load(x + start + place, mask=is_there, other=0).to(tl.float32)
    if added is not None:
        row += tl.load(added + start + place, mask=is_there, other=0).to(tl.float32)
        row = row.to(x.dtype.element_ty)  # the norm is that of the rounded sum, which other code reads too
        tl.store(total + start + place, row, mask=is_there)
        row = row.to(tl.float32)
    mean = tl.sum(row * row, axis=0) / size
    row = row * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if ROUND_FIRST:
        row = row.to(x.dtype.element_ty).to(tl.float32)
    let_the_next_begin(OVERLAPS)
    tl.store(out + start + place, (row * factor).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def rotated(first, second, cos, sin, DTYPE: tl.constexpr, ROUND_EACH: tl.constexpr):
    """Compute first * cos + second * sin of float32 numbers. ROUND_EACH: both products are rounded to DTYPE."""
    one, other = first * cos, second * sin
    if ROUND_EACH:
        one, other = one.to(DTYPE).to(tl.float32), other.to(DTYPE).to(tl.float32)
    return (one + other).to(DTYPE)


@triton.jit
def rotate_heads(
    x, out, head, heads, size, cos, sin, x_head, out_head,
    INTERLEAVED: tl.constexpr, ROUND_EACH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate some heads [HEADS, 1] of one token. x, out, cos, sin: pointers to the values of this token."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    pair = tl.arange(0, PAIRS)[None, :]
    first_place = pair * 2 if INTERLEAVED else pair
    second_place = pair * 2 + 1 if INTERLEAVED else pair + size // 2
    is_pair = pair < size // 2
    first_cos = tl.load(cos + first_place, mask=is_pair, other=0).to(tl.float32)
    second_cos = tl.load(cos + second_place, mask=is_pair, other=0).to(tl.float32)
    first_sin = tl.load(sin + first_place, mask=is_pair, other=0).to(tl.float32)
    second_sin = tl.load(sin + second_place, mask=is_pair, other=0).to(tl.float32)
    is_there = (head < heads) & is_pair
    first = tl.load(x + head * x_head + first_place, mask=is_there, other=0).to(tl.float32)
    second = tl.load(x + head * x_head + second_place, mask=is_there, other=0).to(tl.float32)
    to = out + head * out_head
    tl.store(to + first_place, rotated(first, -second, first_cos, first_sin, DTYPE, ROUND_EACH), mask=is_there)
    tl.store(to + second_place, rotated(second, first, second_cos, second_sin, DTYPE, ROUND_EACH), mask=is_there)


@triton.jit
def rotate(
    q, k, q_out, k_out, cos, sin, tokens, q_heads, k_heads, size,
    q_batch, q_head, q_token, k_batch, k_head, k_token, q_out_batch, q_out_head, q_out_token,
    k_out_batch, k_out_head, k_out_token, table_batch, table_token,
    INTERLEAVED: tl.constexpr, ROUND_EACH: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token of q, and after the heads of q those of k, by tables [batch or 1, tokens, size].

    q and k, and what they become: [batch, heads, tokens, size].
    """
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    cos += batch * table_batch + token * table_token
    sin += batch * table_batch + token * table_token
    of_q = (q_heads + HEADS - 1) // HEADS
    block = tl.program_id(1)
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    if block < of_q:
        head += block * HEADS
        q += batch * q_batch + token * q_token
        q_out += batch * q_out_batch + token * q_out_token
        rotate_heads(q, q_out, head, q_heads, size, cos, sin, q_head, q_out_head, INTERLEAVED, ROUND_EACH, PAIRS)
    else:
        head += (block - of_q) * HEADS
        k += batch * k_batch + token * k_token
        k_out += batch * k_out_batch + token * k_out_token
        rotate_heads(k, k_out, head, k_heads, size, cos, sin, k_head, k_out_head, INTERLEAVED, ROUND_EACH, PAIRS)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Compute the activation of float32 numbers; see GATES of ../layer_parts.py."""
    if ACTIVATION == 0:
        return tl.div_rn(x, 1 + tl.exp(-x))
    elif ACTIVATION == 1:
        return x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return tl.div_rn(x, 1 + tl.exp(-2 * inner))  # x (1 + tanh(inner)) / 2


@triton.jit
def gate_and_multiply(gate, up, out, numbers, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Compute out = activation(gate) * up, each [numbers]; the activation is rounded to their dtype, as in torch."""
    wait_for_the_one_before(OVERLAPS)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < numbers
    x = activated(tl.load(gate + place, mask=is_there, other=0).to(tl.float32), ACTIVATION)
    x = x.to(gate.dtype.element_ty).to(tl.float32)
    x = x * tl.load(up + place, mask=is_there, other=0).to(tl.float32)
    let_the_next_begin(OVERLAPS)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=is_there)
