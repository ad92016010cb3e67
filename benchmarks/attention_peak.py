"""Scratch memory of one layer's causal attention over a whole prompt, in a process of its own.

python -m benchmarks.attention_peak HEADS KV_HEADS HEAD_DIM LENGTH...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_accel.attention import BACKENDS, AttentionBackend

from .peak import peak_bytes


def eager(q: Tensor, k: Tensor, v: Tensor) -> None:
    """As transformers does with attn_implementation="eager": mask and scores as matrices."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    length = q.shape[2]
    mask = torch.full((length, length), torch.finfo(q.dtype).min, dtype=q.dtype).triu_(1)
    eager_attention_forward(module, q, k, v, mask[None, None], scaling=q.shape[-1] ** -0.5)


def stock_sdpa(q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor) -> None:
    backend.dense(q, k, v, mask=None, causal=True, scale=q.shape[-1] ** -0.5)


def candidates() -> dict[str, Callable[[Tensor, Tensor, Tensor], None]]:
    backends = {f"hf_accel {backend.name}": partial(ours, backend) for backend in BACKENDS}
    return {"eager": eager, "stock": stock_sdpa, **backends}


@torch.no_grad()
def main(heads: int, kv_heads: int, head_dim: int, *lengths: int) -> None:
    peaks: dict[str, list[int | None]] = {name: [] for name in candidates()}
    for length in lengths:
        q, k, v = (torch.randn(1, h, length, head_dim).bfloat16() for h in (heads, kv_heads, kv_heads))
        for name, run in candidates().items():
            run(q[:, :, :16], k[:, :, :16], v[:, :, :16])  # loads what is loaded at the first call
            peaks[name].append(peak_bytes(partial(run, q, k, v)))
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
