"""Questions about a model are asked once while it is only read, and as often as they are put at any other time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config
from transformers.activations import ACT2FN, GELUActivation

from hf_accel import models
from hf_accel.cache.hf import kinds
from hf_accel.models import answer_once, layers_config, modules_of, reading_once
from hf_accel.recognition.trial import settings_of_activation


class Question:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, subject: Any, *others: Any) -> int:
        self.asked.append((subject, *others))
        return len(self.asked)


def test_a_question_about_an_object_is_asked_once_while_nobody_changes_it() -> None:
    question, first, second = Question(), nn.Identity(), nn.Identity()

    @reading_once
    def read() -> list[int]:
        return [answer_once(question, each, dtype) for each in (first, second, first)
                for dtype in (torch.float32, torch.float16, torch.float32)]  # fmt: skip

    assert read() == [1, 2, 1, 3, 4, 3, 1, 2, 1]
    assert read()[0] == 5  # the model may be another one by now
    assert [answer_once(question, first), answer_once(question, first)] == [9, 10]  # it may be changed in between


def test_an_object_that_is_gone_gives_its_answer_to_no_other() -> None:
    @reading_once
    def read() -> list[int]:
        return [answer_once(len, "a" * size) for size in range(50)]  # each could get the id of the one before

    assert read() == list(range(50))


def test_objects_that_are_said_to_be_equal_are_asked_once() -> None:
    question = Question()
    read = reading_once(lambda: [answer_once(question, each, equal=each % 2 or None) for each in (1, 2, 3, 4)])
    assert read() == [1, 2, 1, 3]


@pytest.mark.parametrize(("first", "second", "is_alike"), [
    (nn.SiLU(), nn.SiLU(), True),
    (nn.SiLU(), nn.SiLU().eval(), False),  # some activations are random in training
    (nn.SiLU(), nn.ReLU(), False),
    (nn.LeakyReLU(0.1), nn.LeakyReLU(0.1), True),
    (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), False),
    (nn.LeakyReLU(1), nn.LeakyReLU(1.0), False),
    (nn.GELU(), nn.GELU(approximate="tanh"), False),
    (GELUActivation(), GELUActivation(use_gelu_python=True), False),
    (ACT2FN["silu"], ACT2FN["silu"], True),
])  # fmt: skip
def test_activations_are_alike_by_class_and_settings(first: nn.Module, second: nn.Module, is_alike: bool) -> None:
    assert settings_of_activation(first) is not None
    assert (settings_of_activation(first) == settings_of_activation(second)) is is_alike


def test_what_holds_numbers_or_is_watched_is_like_nothing_else() -> None:
    watched, replaced = nn.SiLU(), nn.SiLU()
    watched.register_forward_hook(lambda *_: None)
    replaced.forward = torch.relu  # type: ignore[method-assign]
    assert [settings_of_activation(each) for each in (nn.PReLU(), nn.Linear(2, 2), watched, replaced, torch.relu)] == [
        None
    ] * 5


def test_modules_of() -> None:
    shared, model = nn.Linear(2, 2), nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.ModuleList())
    model[0].append(shared)
    model.append(nn.ModuleDict({"one": shared, "two": nn.Sequential(nn.ReLU(), model[0])}))
    model.register_module("none", None)
    found = modules_of(model)
    assert len(found) == len(set(found)) and set(found) == set(model.modules())
    assert found[0] is model


def test_what_is_kept_of_a_config_goes_without_the_modules() -> None:
    """At the end of a process a config may go after the names of modules are gone."""
    config = T5Config(num_layers=1)
    assert layers_config(config) is not config and kinds.model_kinds(config).layers
    found: list[Any] = [models._copied[id(config)], kinds._known[id(config)]]
    for kept in found:
        callback = kept.config.__callback__
        assert callback.func.__code__.co_names == ("pop",)
