"""The largest tensor that an operation makes on the way: what must never be copied as a whole is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_accel.attention import AttentionBackend

from ...devices import device_of
from .backends import each_backend
from .calls import dense
from .paging import make_case

pytestmark = each_backend


class Largest(TorchDispatchMode):
    """Elements of the largest storage that any operator made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.itemsize)
        return out


@pytest.mark.parametrize("num_queries", [1, 4])
def test_keys_are_not_repeated_for_the_group(backend: AttentionBackend, num_queries: int) -> None:
    q, k = torch.randn(1, 32, num_queries, 64), torch.randn(1, 1, 512, 64)
    with Largest() as largest:
        dense(backend, q, k, k, scale=0.1)
    assert largest.numel <= max(k.numel(), 32 * num_queries * 512)


@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"window": 32}], ids=["softcap", "window"])
def test_scores_of_a_long_prompt_are_never_whole(backend: AttentionBackend, extra: dict[str, Any]) -> None:
    q, k = torch.randn(1, 2, 2048, 8), torch.randn(1, 1, 2048, 8)
    with Largest() as largest:
        dense(backend, q, k, k, scale=0.1, **extra)
    assert largest.numel <= 2 * 256 * 2048


@pytest.mark.parametrize("lengths", [[(1, 9)], [(1, 9), (1, 6)], [(20, 24)]], ids=str)
def test_only_the_needed_blocks_are_gathered(backend: AttentionBackend, lengths: list[tuple[int, int]]) -> None:
    case = make_case([*lengths, (0, 250)], spare_blocks=1000, spare_columns=1000)
    operands = case.operands(device_of(backend))
    with Largest() as largest:
        backend.paged(*operands, return_lse=False)
    assert largest.numel < 2 * 4 * 20 * 24 < case.k_pages.numel() // 10


def test_blocks_behind_the_window_are_not_gathered(backend: AttentionBackend) -> None:
    operands = make_case([(1, 4000), (1, 3000)], window=8).operands(device_of(backend))
    with Largest() as largest:
        backend.paged(*operands, return_lse=False)
    assert largest.numel < 500
