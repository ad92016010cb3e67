"""The launch that writes K and V into pages."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...layouts import KV
from .launch import Launch
from .programs.write import FP8, INT4, INT8, PLAIN, write


def write_pages(keys: Tensor, values: Tensor, pages: KV, slots: Tensor) -> None:
    """Write keys [N, H, Dk] and values [N, H, Dv] to `slots` [N] int64 of contiguous pages; see KVStorage.write.

    Those of int4 are rotated already, in float32. A token whose slot is below 0 is not written.
    """
    writing(keys, values, pages, slots).run()


def writing(keys: Tensor, values: Tensor, pages: KV, slots: Tensor) -> Launch:
    """The launch of write_pages."""
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    (num_tokens, num_heads, key_dim), value_dim = keys.shape, values.shape[2]
    kinds = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.uint8: INT4}
    kind = PLAIN if pages.k_scales is None else kinds[pages.k.dtype]
    stored = [x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in pages[:2]]
    blocks = [max(2, triton.next_power_of_2(x.shape[-1])) for x in stored]
    return Launch(
        kernel=write,
        grid=(num_tokens * num_heads,),
        arguments={
            "keys": keys, "values": values, "k_pages": stored[0], "v_pages": stored[1],
            "k_scales": pages.k_scales, "v_scales": pages.v_scales, "slots": slots,
            "k_token": keys.stride(0), "k_head": keys.stride(1),
            "v_token": values.stride(0), "v_head": values.stride(1),
            "num_heads": num_heads, "block_size": stored[0].shape[2],
        },
        constants={
            "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_K": blocks[0], "BLOCK_V": blocks[1],
            "KIND": kind.value,
        },
        num_warps=1,
    )  # fmt: skip
