from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_accel.recognition.source import GatedCode, gated_code, siblings

from ..fused.models import Attention, ClampedMLP, GatedMLP


class Reassigned(nn.Module):
    def forward(self, x):
        q = self.q_proj(x)
        x = x + 1
        return q + self.k_proj(x)


class Changed(nn.Module):
    def forward(self, x, y):
        return self.q_proj(x) + self.k_proj(y) + self.other(x, y) + self.norm(x + 1)


class Twice(nn.Module):
    def forward(self, x):
        return self.q_proj(x) + self.q_proj(x)


class Branch(nn.Module):
    def forward(self, x):
        return self.down(x) if self.training else self.up(x)


class Constant(nn.Module):
    def forward(self, x):
        return self.down(x * 2)


def test_layers_that_are_called_on_one_variable():
    assert siblings(Attention.forward) == (("q_proj", "k_proj", "v_proj"),)
    assert siblings(GatedMLP.forward) == (("gate_proj", "up_proj"),)


def test_another_variable_or_another_value_is_no_sibling():
    for other in (Reassigned, Changed, Twice):
        assert siblings(other.forward) == ()


class Stepwise(nn.Module):
    def forward(self, hidden):
        """Straight-line code with names for what it computes."""
        gated = self.act(self.gate(hidden))
        product = self.up(hidden) * gated
        return self.down(product)


class ByFunction(nn.Module):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ByUnknownFunction(nn.Module):
    def forward(self, x):
        return self.w2(torch.sigmoid(self.w1(x)) * self.w3(x))


class Scaled(nn.Module):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x) * self.scale)


class OtherInput(nn.Module):
    def forward(self, x, y=None):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Overwritten(nn.Module):
    def forward(self, x):
        x = self.norm(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_the_parts_of_a_gated_mlp():
    assert gated_code(GatedMLP.forward) == GatedCode("gate_proj", "up_proj", "down_proj", "act_fn")
    assert gated_code(Stepwise.forward) == GatedCode("gate", "up", "down", "act")
    assert gated_code(ByFunction.forward) == GatedCode("w1", "w3", "w2", F.silu)


@pytest.mark.parametrize(
    "other", [ClampedMLP, Branch, Constant, ByUnknownFunction, Scaled, OtherInput, Overwritten, nn.Linear, nn.ReLU]
)
def test_other_code_is_no_gated_mlp(other):
    assert gated_code(other.forward) is None


def test_code_without_a_source_is_left_alone():
    scope: dict = {}
    exec("def forward(self, x):\n    return self.q(x) + self.k(x)\n", scope)
    assert siblings(scope["forward"]) == ()
    assert gated_code(scope["forward"]) is None
