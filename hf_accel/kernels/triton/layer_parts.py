"""RMSNorm, the rotary embedding of queries and keys, and the gate of an MLP: one launch, a pass over memory, each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch

LARGEST = 2**15  # numbers of a row that a norm takes
HEADS = 8  # that one program rotates
GATED = 1024  # numbers that one program gates
GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, size, eps, offset, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
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


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(first, second, cos, sin, DTYPE: tl.constexpr, ROUND_EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """first * cos + second * sin of float32 numbers; ROUND_EACH: both products are rounded to DTYPE."""
    one, other = first * cos, second * sin
    if ROUND_EACH:
        one, other = one.to(DTYPE).to(tl.float32), other.to(DTYPE).to(tl.float32)
    return (one + other).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def rope_kernel(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(gate, up, out, numbers, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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


def norm_launch(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, offset: float, round_first: bool) -> Launch:
    """x, out: [..., H], contiguous. weight: [H], contiguous."""
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(x.numel() // size if size else 0,),
        arguments={"x": x, "weight": weight, "out": out, "size": size, "eps": eps, "offset": offset},
        constants={"ROUND_FIRST": round_first, "BLOCK": block},
        num_warps=min(16, max(1, block // 512)),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True) -> Tensor:
    """As the CPU's `rms_norm`, [..., H] with H up to LARGEST, but for the order of the sum."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype)
    norm_launch(x, weight.contiguous(), out, eps=eps, offset=offset, round_first=round_first).run()
    return out


def rope_launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, round_each: bool) -> Launch:
    """x, out: [B, H, T, D] with a last stride of 1. cos, sin: [B or 1, T, D] of the same strides, the last one 1."""
    batch, heads, tokens, size = x.shape
    return Launch(
        kernel=rope_kernel,
        grid=(batch * tokens, -(-heads // HEADS)),
        arguments={
            "x": x, "out": out, "cos": cos, "sin": sin, "tokens": tokens, "heads": heads, "size": size,
            "x_batch": x.stride(0), "x_head": x.stride(1), "x_token": x.stride(2), "out_batch": out.stride(0),
            "out_head": out.stride(1), "out_token": out.stride(2),
            "table_batch": cos.stride(0) if cos.shape[0] > 1 else 0, "table_token": cos.stride(1),
        },
        constants={
            "INTERLEAVED": interleaved, "ROUND_EACH": round_each, "HEADS": HEADS,
            "PAIRS": triton.next_power_of_2(max(1, size // 2)),
        },
    )  # fmt: skip


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, round_each: bool = True
) -> tuple[Tensor, Tensor]:
    """As the CPU's `rope`. cos, sin: [B or 1, T, D]."""
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    rotated = torch.empty_like(q), torch.empty_like(k)
    for x, out in zip((q, k), rotated, strict=True):
        rope_launch(x, out, cos, sin, interleaved=interleaved, round_each=round_each).run()
    return rotated


def gate_launch(gate: Tensor, up: Tensor, out: Tensor, *, activation: str) -> Launch:
    """All contiguous and of one shape. activation: a name of GATES."""
    return Launch(
        kernel=gate_kernel,
        grid=(-(-gate.numel() // GATED),),
        arguments={"gate": gate, "up": up, "out": out, "numbers": gate.numel()},
        constants={"ACTIVATION": GATES[activation], "BLOCK": GATED},
    )


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up of one shape and dtype. activation: a name of GATES."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate_launch(gate.contiguous(), up.contiguous(), out, activation=activation).run()
    return out
