"""The launches that write K and V into pages, unchanged or after the rotation of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..layouts import KV
from .launch import Launch
from .layer_parts import HEADS
from .programs.write import FP8, INT4, INT8, PLAIN, rotate_and_write, rotate_head, write


def write_pages(keys: Tensor, values: Tensor, pages: KV, slots: Tensor) -> None:
    """Write keys [N, H, Dk] and values [N, H, Dv] to `slots` [N] int64 of contiguous pages; see KVStorage.write.

    A token whose slot is below 0 is not written.
    """
    writing(keys, values, pages, slots).run()


def writing(keys: Tensor, values: Tensor, pages: KV, slots: Tensor) -> Launch:
    """The launch of write_pages."""
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    num_tokens, num_heads = keys.shape[:2]
    arguments, constants = _of_pages(pages)
    return Launch(
        kernel=write,
        grid=(num_tokens * num_heads,),
        arguments={
            "keys": keys, "values": values, "slots": slots, **arguments,
            "k_token": keys.stride(0), "k_head": keys.stride(1),
            "v_token": values.stride(0), "v_head": values.stride(1), "num_heads": num_heads,
        },
        constants=constants,
        num_warps=1,
        fuses=False,
    )  # fmt: skip


def rotated_heads(x: Tensor) -> Tensor:
    """Rotate queries [N, H, D] for the keys of INT4 pages, or rotate results back, as `rotate` of cache/quantized.py
    does.
    """
    launch = rotating(x)
    launch.run()
    out: Tensor = launch.arguments["out"]
    return out


def rotating(x: Tensor) -> Launch:
    """Return the launch of `rotated_heads`."""
    x = x if x.stride(2) == 1 else x.contiguous()
    num_tokens, num_heads, dim = x.shape
    return Launch(
        kernel=rotate_head,
        grid=(num_tokens * num_heads,),
        arguments={
            "x": x, "out": torch.empty_like(x, memory_format=torch.contiguous_format),
            "x_token": x.stride(0), "x_head": x.stride(1), "num_heads": num_heads,
        },
        constants={"DIM": dim, **_of_dim(dim, "", is_rotated=True)},
        num_warps=1,
        fuses=False,
    )  # fmt: skip


def _of_dim(dim: int, suffix: str, *, is_rotated: bool) -> dict[str, Any]:
    """Return the constants BLOCK and STAGES, with a suffix, for heads of `dim` numbers.

    is_rotated: whether they are rotated for INT4 pages.
    """
    # The factors of two of a head: int4 is rotated in blocks of so many numbers.
    stages = (dim & -dim).bit_length() - 1 if is_rotated else 0
    return {f"BLOCK{suffix}": max(2, triton.next_power_of_2(dim)), f"STAGES{suffix}": stages}


def rope_and_write(
    heads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], pages: KV, slots: Tensor, *,
    interleaved: bool, round_each: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k as `rope` of layer_parts, and write that k and v as write_pages, in one launch.

    heads: q [B, Hq, T, Dk], k [B, H, T, Dk] and v [B, H, T, Dv] of one dtype, with a last stride of 1. tables: cos and
    sin, [B or 1, T, Dk]. slots: [B * T] int64. Returns q and k, in the memory order [B, T, H, D].
    """
    launch = rotating_and_writing(heads, tables, pages, slots, interleaved=interleaved, round_each=round_each)
    launch.run()
    q, k = (launch.arguments[name].transpose(1, 2) for name in ("q_out", "k_out"))
    return q, k


def rotating_and_writing(
    heads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], pages: KV, slots: Tensor, *,
    interleaved: bool, round_each: bool,
) -> Launch:  # fmt: skip
    """The launch of rope_and_write."""
    (q, k, _), (cos, sin) = heads, tables
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    batch, q_heads, tokens, size = q.shape
    arguments, constants = _of_pages(pages)
    strides = {
        f"{name}_{axis}": x.stride(d)
        for name, x in zip("qkv", heads, strict=True)
        for d, axis in enumerate(("batch", "head", "token"))
    }
    return Launch(
        kernel=rotate_and_write,
        grid=(batch * tokens, -(-q_heads // HEADS) + k.shape[1]),
        arguments={
            **dict(zip("qkv", heads, strict=True)), **strides, **arguments, "cos": cos, "sin": sin, "slots": slots,
            "q_out": q.new_empty(batch, tokens, q_heads, size), "k_out": k.new_empty(batch, tokens, k.shape[1], size),
            "tokens": tokens, "q_heads": q_heads, "num_heads": k.shape[1],
            "table_batch": cos.stride(0) if cos.shape[0] > 1 else 0, "table_token": cos.stride(1),
        },
        constants={
            **constants, "INTERLEAVED": interleaved, "ROUND_EACH": round_each, "HEADS": HEADS,
            "PAIRS": triton.next_power_of_2(max(1, size // 2)),
        },
        num_warps=1,
        fuses=False,
    )  # fmt: skip


def _of_pages(pages: KV) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments and constants of a launch that describe the pages."""
    kinds = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.uint8: INT4}
    kind = PLAIN if pages.k_scales is None else kinds[pages.k.dtype]
    stored = [x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in pages[:2]]
    arguments = {
        "k_pages": stored[0], "v_pages": stored[1], "k_scales": pages.k_scales, "v_scales": pages.v_scales,
        "block_size": stored[0].shape[2],
    }  # fmt: skip
    constants: dict[str, Any] = {"KEY_DIM": pages.key_dim, "VALUE_DIM": pages.value_dim, "KIND": kind.value}
    for suffix, dim in (("_K", pages.key_dim), ("_V", pages.value_dim)):
        constants |= _of_dim(dim, suffix, is_rotated=kind is INT4)
    return arguments, constants
