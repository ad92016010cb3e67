"""Small modules as model files write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * 0.1 + 1)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class GemmaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.randn(size) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class PlainNorm(nn.Module):
    """FalconMamba's norm: it multiplies by nothing, and its buffer is not read."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.full((size,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class BufferNorm(PlainNorm):
    """A norm whose weight is a buffer, which holds ones so far."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


class ClampedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=2)


class GatedMLP(nn.Module):
    def __init__(self, size: int, hidden: int, act: object = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, hidden, bias=bias)
        self.up_proj = nn.Linear(size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, size, bias=bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SwappedMLP(GatedMLP):
    """The activation is on the other projection, which is called second."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class ClampedMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, out) for out in (size, size // 2, size // 2))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(hidden_states)
        k = self.k_proj(hidden_states)
        return q, k, self.v_proj(hidden_states)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class Rotating(nn.Module):
    """An attention module, as far as its rotation goes."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(4, 4)

    def forward(self, q: Tensor, k: Tensor, *, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, *tables)
