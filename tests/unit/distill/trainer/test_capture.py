"""Outputs of modules that are taken during one forward pass, and the projections that are learnt from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_accel.distill.trainer.transfer import Capture, Projections, Site
from hf_accel.errors import UnsupportedError


def test_projections_come_from_their_seed_alone() -> None:
    before = torch.get_rng_state()
    first, second = (Projections([1, 3], 4, 6, seed=5) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    weight = first.weights["3"]
    torch.testing.assert_close(weight.T @ weight, torch.eye(4))
    assert first.project(1, torch.randn(2, 5, 4)).shape == (2, 5, 6)


class TestCapture:
    def test_takes_what_runs_while_it_is_open(self) -> None:
        layer = nn.Linear(3, 4)
        capture = Capture({("layer", 1): Site(layer, 1, 3)}, learns=True)
        capture.install()
        first, second = torch.randn(2, 3), torch.randn(2, 3)
        capture.open()
        expected = layer(first)
        torch.testing.assert_close(capture.take()["layer", 1], expected[:, 1:3])
        layer(second)  # as a checkpointed layer does again
        assert not capture.found
        capture.remove()
        assert not layer._forward_hooks

    def test_says_what_did_not_run(self) -> None:
        capture = Capture({("query", 2): Site(nn.Linear(3, 4))}, learns=False)
        capture.install()
        capture.open()
        with pytest.raises(UnsupportedError, match="of the teacher query 2 did not run"):
            capture.take()

    def test_says_what_lost_its_gradient(self) -> None:
        layer = nn.Linear(3, 4)
        capture = Capture({("layer", 1): Site(layer)}, learns=True)
        capture.install()
        capture.open()
        with torch.no_grad():
            layer(torch.randn(1, 3))
        with pytest.raises(UnsupportedError, match="use_reentrant"):
            capture.take()
