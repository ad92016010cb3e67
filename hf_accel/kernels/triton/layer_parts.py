"""RMSNorm, of a sum too, the rotary embedding of queries and keys, and the gate of an MLP: one launch each."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .launch import Launch
from .programs.pointwise import gate_and_multiply, norm, rotate

WIDEST_NORM = (
    2**14
)  # numbers of a row up to which a norm spills no registers on any GPU; wider ones are right, and slower
HEADS = 8  # that one program rotates
GATED = 1024  # numbers that one program gates
GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def norm_launch(
    rows: tuple[Tensor, Tensor | None, Tensor | None], weight: Tensor, out: Tensor, *,
    eps: float, offset: float, round_first: bool,
) -> Launch:  # fmt: skip
    """Return the launch of a norm.

    rows: x, what is added to it before, and the tensor for the sum; the last two may be None. All [..., H],
    contiguous, as is out. weight: [H], contiguous.
    """
    x, added, total = rows
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    return Launch(
        kernel=norm,
        grid=(x.numel() // size if size else 0,),
        arguments={
            "x": x, "added": added, "total": total, "weight": weight, "out": out, "size": size, "eps": eps,
            "offset": offset,
        },
        constants={"ROUND_FIRST": round_first, "BLOCK": block},
        num_warps=min(16, max(1, block // 512)),
        fuses=False,
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True) -> Tensor:
    """Compute the CPU's `rms_norm`, [..., H], with another order of the sum; fastest with H up to WIDEST_NORM."""
    x = x.contiguous()
    out = _normed(x, weight, round_first)
    norm_launch((x, None, None), weight.contiguous(), out, eps=eps, offset=offset, round_first=round_first).run()
    return out


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute x + y, of one shape and dtype, and the `rms_norm` of this sum, with the bits of one after the other."""
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), _normed(x, weight, round_first)
    norm_launch((x, y, total), weight.contiguous(), out, eps=eps, offset=offset, round_first=round_first).run()
    return total, out


def _normed(x: Tensor, weight: Tensor, round_first: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype)


def rope_launch(
    heads: tuple[Tensor, Tensor], rotated: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], *,
    interleaved: bool, round_each: bool,
) -> Launch:  # fmt: skip
    """Return the launch of a rotation.

    heads, rotated: q and k, [B, H, T, D] with a last stride of 1. tables: cos and sin, [B or 1, T, D], of the same
    strides, the last one 1.
    """
    (q, k), (cos, sin) = heads, tables
    batch, _, tokens, size = q.shape
    named = {"q": q, "k": k, "q_out": rotated[0], "k_out": rotated[1]}
    axes = {"batch": 0, "head": 1, "token": 2}
    return Launch(
        kernel=rotate,
        grid=(batch * tokens, sum(-(-x.shape[1] // HEADS) for x in heads)),
        arguments={
            **named, "cos": cos, "sin": sin, "tokens": tokens, "q_heads": q.shape[1], "k_heads": k.shape[1],
            "size": size, **{f"{n}_{axis}": x.stride(d) for n, x in named.items() for axis, d in axes.items()},
            "table_batch": cos.stride(0) if cos.shape[0] > 1 else 0, "table_token": cos.stride(1),
        },
        constants={
            "INTERLEAVED": interleaved, "ROUND_EACH": round_each, "HEADS": HEADS,
            "PAIRS": triton.next_power_of_2(max(1, size // 2)),
        },
        fuses=False,
    )  # fmt: skip


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, round_each: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute the CPU's `rope`. cos, sin: [B or 1, T, D]."""
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    rotated = torch.empty_like(q), torch.empty_like(k)
    rope_launch((q, k), rotated, (cos, sin), interleaved=interleaved, round_each=round_each).run()
    return rotated


def gate_launch(gate: Tensor, up: Tensor, out: Tensor, *, activation: str) -> Launch:
    """Return the launch of a gate; all tensors are contiguous and of one shape. activation: a name of GATES."""
    return Launch(
        kernel=gate_and_multiply,
        grid=(-(-gate.numel() // GATED),),
        arguments={"gate": gate, "up": up, "out": out, "numbers": gate.numel()},
        constants={"ACTIVATION": GATES[activation], "BLOCK": GATED},
    )


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """Compute activation(gate) * up, of one shape and dtype. activation: a name of GATES."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate_launch(gate.contiguous(), up.contiguous(), out, activation=activation).run()
    return out
