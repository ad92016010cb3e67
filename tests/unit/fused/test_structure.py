from __future__ import annotations

from torch import nn

from hf_accel.fused.structure import own_names, siblings

from .models import Attention, ClampedMLP, GatedMLP


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


def test_the_names_of_plain_code_only():
    assert own_names(GatedMLP.forward) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
    assert "clamp" in (own_names(ClampedMLP.forward) or {"clamp"})
    for other in (Branch, Constant):
        assert own_names(other.forward) is None


def test_code_without_a_source_is_left_alone():
    scope: dict = {}
    exec("def forward(self, x):\n    return self.q(x) + self.k(x)\n", scope)
    assert siblings(scope["forward"]) == ()
    assert own_names(scope["forward"]) is None
