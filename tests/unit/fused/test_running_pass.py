"""The pass that a thread runs: nobody else sees it, and it is forgotten when it ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hf_accel.errors import UnsupportedError
from hf_accel.fused.hf.running_pass import RunningPass
from hf_accel.generation.carried import Carried
from hf_accel.linear.adapters import Adapter, LowRankPart, PassAdapters


def test_it_is_that_of_its_thread_and_its_cache() -> None:
    cache, other = object(), object()
    outer, inner = RunningPass(cache), RunningPass(other)
    assert RunningPass.now() is None
    with outer.running(), ThreadPoolExecutor(1) as pool:
        assert RunningPass.now() is RunningPass.over(cache) is outer and RunningPass.over(other) is None
        assert pool.submit(RunningPass.now).result() is None
        with pytest.raises(RuntimeError), inner.running():
            assert RunningPass.now() is inner
            raise RuntimeError("in the middle")
        assert RunningPass.now() is outer
    assert RunningPass.now() is None


@torch.no_grad()
def test_layers_that_run_their_own_code_add_what_it_carries() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1, bias=False)) for _ in range(3))
    for layer in layers:
        layer[0].weight.zero_()
    first, second, outside = (layer[0] for layer in layers)
    part = LowRankPart(torch.ones(1, 1), torch.full((1, 1), 3.0), 1.0)
    adapter = Adapter("own", dict.fromkeys((first, second, outside), part), frozenset({outside}), b"")
    x = torch.ones(3, 1)

    def run(count: int) -> None:
        carried = Carried(adapters=PassAdapters.of([None, adapter], [1, 2]))
        with RunningPass(None, carried=carried).running():
            assert outside(x).flatten().tolist() == [0, 3, 3]  # no layer with a native call has it
            for layer in layers[:count]:
                assert not layer(x).any()
                with RunningPass.own_code(layer), ThreadPoolExecutor(1) as pool:
                    assert layer(x).flatten().tolist() == [0, 3, 3]
                    assert not pool.submit(layer, x).result().any()

    run(2)
    assert not any(module._forward_hooks for module in layers.modules())
    with pytest.raises(UnsupportedError, match="added 2 of 3 parts"):
        run(1)
