"""Which layers are kept, and what a config says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_accel import UnsupportedError
from hf_accel.distill.drafts.student import (
    block_influence,
    check_layers,
    choose_layers,
    keep_in_config,
    most_influential,
)


def chosen(total: int, num_layers: Any = None, layers: Any = None, strategy: str = "uniform") -> list[int]:
    return choose_layers(total, num_layers, layers, strategy=strategy, influence=lambda: [0.1, 0.5, 0.2, 0.5])


@pytest.mark.parametrize(
    ("total", "count", "kept"),
    [(6, 3, [0, 2, 4]), (4, 2, [0, 2]), (12, 5, [0, 2, 4, 7, 9]), (5, 5, [0, 1, 2, 3, 4]), (7, 1, [0])],
)
def test_uniform(total: int, count: int, kept: list[int]) -> None:
    assert chosen(total, count) == kept


@pytest.mark.parametrize(
    ("total", "count", "kept"),
    [(12, 2, [0, 11]), (12, 4, [0, 4, 7, 11]), (4, 3, [0, 2, 3]), (6, 6, [0, 1, 2, 3, 4, 5]), (1, 1, [0])],
)
def test_first_last(total: int, count: int, kept: list[int]) -> None:
    assert chosen(total, count, strategy="first_last") == kept


@pytest.mark.parametrize("strategy", ["uniform", "first_last"])
def test_any_count_gives_as_many_layers_in_order(strategy: str) -> None:
    for total in range(2, 40):
        for count in range(2, total + 1):
            kept = chosen(total, count, strategy=strategy)
            assert len(set(kept)) == count and kept == sorted(kept) and kept[0] == 0 and kept[-1] < total
            assert strategy == "uniform" or kept[-1] == total - 1


def test_importance_keeps_the_most_influential() -> None:
    assert chosen(4, 2, strategy="importance") == [1, 3]
    assert most_influential([0.1, 0.5, 0.2, 0.5], 3) == [1, 2, 3]


def test_layers_by_number() -> None:
    assert chosen(6, layers=(0, 2, 5)) == [0, 2, 5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_layers": 0}, "keep 1 to 4"),
        ({"num_layers": 5}, "keep 1 to 4"),
        ({"num_layers": True}, "keep 1 to 4"),
        ({}, "give one of them"),
        ({"num_layers": 2, "layers": [0, 1]}, "give one of them"),
        ({"layers": []}, "at least one"),
        ({"layers": [0, 4]}, "layers 0 to 3"),
        ({"layers": [-1, 2]}, "layers 0 to 3"),
        ({"layers": [1, 1]}, "must rise"),
        ({"layers": [2, 0]}, "must rise"),
        ({"num_layers": 2, "strategy": "best"}, "uniform, first_last, importance"),
        ({"num_layers": 1, "strategy": "first_last"}, "uniform"),
    ],
)
def test_what_cannot_be_kept_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        chosen(4, **arguments)


def test_config_keeps_what_belongs_to_the_kept_layers() -> None:
    config = SimpleNamespace(
        num_hidden_layers=6,
        layer_types=["a", "b", "c", "d", "e", "f"],
        no_rope_layers=(1, 1, 1, 0, 1, 1),
        mlp_only_layers=[0, 3, 4],
        max_window_layers=4,
        first_k_dense_replace=1,
        num_kv_shared_layers=2,
        eos_token_id=[1, 2, 3, 4, 5, 6],
        hidden_size=6,
        rope_parameters={"short_factor": [1, 2, 3, 4, 5, 6]},
        other=[1, 2],
    )
    keep_in_config(config, [1, 3, 4])
    assert vars(config) == {
        "num_hidden_layers": 3,
        "layer_types": ["b", "d", "e"],
        "no_rope_layers": (1, 0, 1),
        "mlp_only_layers": [1, 2],
        "max_window_layers": 2,
        "first_k_dense_replace": 0,
        "num_kv_shared_layers": 1,
        "eos_token_id": [1, 2, 3, 4, 5, 6],
        "hidden_size": 6,
        "rope_parameters": {"short_factor": [1, 2, 3, 4, 5, 6]},
        "other": [1, 2],
    }


class Turn(nn.Module):
    """Turns every pair by an angle, whose cosine is known."""

    def __init__(self, angle: float) -> None:
        super().__init__()
        self.angle = torch.tensor(angle)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        c, s = self.angle.cos(), self.angle.sin()
        return (hidden_states @ torch.stack([torch.stack([c, s]), torch.stack([-s, c])]),)


def test_influence_is_one_less_the_mean_cosine() -> None:
    layers = [Turn(0.0), Turn(0.5), Turn(1.5)]

    def read() -> None:
        for _ in range(3):
            hidden = torch.randn(2, 5, 2)
            for number, layer in enumerate(layers):
                hidden = layer(hidden)[0] if number else layer(hidden_states=hidden)[0]

    expected = [1 - torch.tensor(angle).cos().item() for angle in (0.0, 0.5, 1.5)]
    assert block_influence(layers, read) == pytest.approx(expected, abs=1e-6)
    assert not any(layer._forward_hooks for layer in layers)
    with pytest.raises(UnsupportedError, match="no text"):
        block_influence(layers, lambda: None)


class Layer(nn.Module):
    """With a window in every other place, which only its number says."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.window = None if layer_idx % 2 else 8
        self.dropout = nn.Dropout(0.1)


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(count))


def test_a_layer_must_be_in_its_new_place_what_it_was() -> None:
    teacher = Stack(4).train()
    teacher.layers[2].dropout.p = 0.0  # type: ignore[union-attr, assignment]
    check_layers(teacher, Stack(2).eval(), ["layers"], [2, 3])
    with pytest.raises(UnsupportedError, match=r"layers\.1\.window is None, in the teacher it was 8"):
        check_layers(teacher, Stack(2), ["layers"], [0, 2])
