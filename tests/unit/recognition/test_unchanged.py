"""Unchanged and unwatched: one list of hooks, and one way to ask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers.activations import get_activation

from hf_accel.recognition.unchanged import ALL_HOOKS, GLOBAL_HOOKS, HOOKS, Read, Reads, is_unobserved, others_code
from hf_accel.undo.running_code import is_known_code


def test_torch_has_these_hooks_and_no_others() -> None:
    own = {name for name in vars(nn.Module()) if "hook" in name and isinstance(vars(nn.Module())[name], dict)}
    assert {name for name in own if "state_dict" not in name} == set(ALL_HOOKS)
    assert set(HOOKS) < set(ALL_HOOKS)
    assert all(ours is theirs for ours, theirs in zip(
        GLOBAL_HOOKS, (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks), strict=True
    ))  # fmt: skip


@pytest.mark.parametrize(
    "register",
    [
        lambda module, see: module.register_forward_hook(see),
        lambda module, see: module.register_forward_pre_hook(see),
        lambda module, see: torch_modules.register_module_forward_hook(see),
        lambda module, see: torch_modules.register_module_forward_pre_hook(see),
    ],
    ids=["hook", "pre-hook", "global hook", "global pre-hook"],
)
def test_who_watches_a_module(register: Callable[[nn.Module, Any], Any]) -> None:
    module = nn.Linear(2, 2)
    assert is_unobserved(module)
    handle = register(module, lambda *given: None)
    assert not is_unobserved(module)
    handle.remove()
    assert is_unobserved(module)
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_unobserved(module)


def test_whose_code() -> None:
    def own(x: Any) -> Any:
        return x

    assert is_known_code(nn.Linear.forward)
    assert is_known_code(get_activation)
    assert not is_known_code(own)
    assert not is_known_code(functools.wraps(nn.Linear.forward)(own)), "the code is ours, whatever its name"
    assert not is_known_code(torch.add), "nothing is known of what is not Python"


class Doubled(nn.Linear):
    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


class Named(nn.Linear):
    """Others wrote the class, and it computes what torch's does."""

    def __repr__(self) -> str:
        return "named"


def test_where_code_of_others_runs() -> None:
    module = nn.Linear(2, 2)
    for _ in range(2):  # what is known of a class is kept
        assert others_code([nn.ReLU(), module, Named(2, 2)]) is None
        assert others_code([module, Doubled(2, 2)]) == "the class Doubled"
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *given: None)
        assert others_code([nn.ReLU(), module]) == "a hook on a Linear"
        handle.remove()
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert others_code([module]) == "a forward that was set on a Linear"


def test_code_of_a_class_that_others_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert others_code([nn.Linear(2, 2)]) is None
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert others_code([nn.Linear(2, 2)]) is not None
    monkeypatch.undo()
    assert others_code([nn.Linear(2, 2)]) is None


def test_entries_that_must_stay() -> None:
    owner: dict[str, Any] = {"a": [1], "b": None}
    reads = Reads([Read(owner, "a", owner["a"]), Read(owner, "b", None), Read(owner, "c", None)])
    assert reads.hold()
    owner["a"] = [1]  # an equal one
    assert not reads.hold()
    assert not Reads([Read(owner, "a", owner["a"]), Read(owner, "a", None)]).hold(), "read twice, and changed between"
    assert Reads([]).hold()
