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

from hf_accel.recognition.unchanged import ALL_HOOKS, GLOBAL_HOOKS, HOOKS, Read, Reads, is_unobserved
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


def test_entries_that_must_stay() -> None:
    owner: dict[str, Any] = {"a": [1], "b": None}
    reads = Reads([Read(owner, "a", owner["a"]), Read(owner, "b", None), Read(owner, "c", None)])
    assert reads.hold()
    owner["a"] = [1]  # an equal one
    assert not reads.hold()
    assert not Reads([Read(owner, "a", owner["a"]), Read(owner, "a", None)]).hold(), "read twice, and changed between"
    assert Reads([]).hold()
