from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

from hf_accel import HfAccelError
from hf_accel.undo.journal import Journal


class Wrapper(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


class Other(nn.Sequential):
    """A class to be switched to."""


def state(model: nn.Module) -> dict[str, list[tuple[str, int]]]:
    return {name: [(key, id(value)) for key, value in vars(m).items()] for name, m in model.named_modules()}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_undo_takes_back_in_reverse_order() -> None:
    module, journal = model(), Journal()
    module.present = "old"
    before, first = state(module), module[0]
    journal.attribute(module, "present", "new")
    journal.attribute(module, "present", "newer")
    journal.attribute(module, "absent", 1)
    journal.item(module, "_modules", "0", nn.Linear(2, 2))
    journal.item(module, "_forward_pre_hooks", 17, print)
    journal.attribute(module, "__class__", Other)
    assert (module.present, module.absent, type(module)) == ("newer", 1, Other)
    assert module[0] is not first
    journal.check()
    journal.undo()
    assert state(module) == before
    assert module[0] is first
    assert type(module) is nn.Sequential
    assert module._forward_pre_hooks == {}
    assert not journal.writes


def test_none_is_a_value() -> None:
    module, journal = model(), Journal()
    module.present = None
    journal.attribute(module, "present", 1)
    journal.undo()
    assert vars(module)["present"] is None


def test_a_hook_that_was_removed_in_between() -> None:
    module, journal = model(), Journal()
    journal.item(module, "_forward_pre_hooks", 17, print)
    module._forward_pre_hooks.clear()
    journal.undo()
    assert module._forward_pre_hooks == {}


@pytest.mark.parametrize("depth", [1, 3])
def test_wrapper_keeps_its_place(depth: int) -> None:
    module, journal = model(), Journal()
    original, ours = module[0], nn.Linear(2, 2)
    journal.item(module, "_modules", "0", ours)
    for _ in range(depth):
        module[0] = Wrapper(module[0])
    outermost = module[0]
    journal.check()
    journal.undo()
    assert module[0] is outermost
    leaf = outermost
    while isinstance(leaf, Wrapper):
        leaf = leaf.inside
    assert leaf is original


def test_wrapper_around_the_original_that_is_no_module_of_ours() -> None:
    module, journal = model(), Journal()
    journal.item(module, "_modules", "0", nn.Linear(2, 2))
    module[0] = Wrapper(nn.Linear(2, 2))
    with pytest.raises(HfAccelError, match=r"module '0' of Sequential was replaced by Wrapper"):
        journal.check()


def test_children_of_a_module_that_another_one_has_replaced() -> None:
    """Both hold the same child, and the one that comes back is out of the tree while the writes are taken back."""
    module, journal = nn.Sequential(nn.Sequential(nn.SiLU())), Journal()
    inner, child = module[0], module[0][0]
    journal.item(inner, "_modules", "0", nn.SiLU())
    journal.item(module, "_modules", "0", nn.Sequential(inner[0]))
    journal.check(module)
    journal.undo(module)
    assert module[0] is inner and inner[0] is child


@pytest.mark.parametrize("replacement", [nn.Linear(2, 2), None])
def test_check_refuses_and_changes_nothing(replacement: nn.Module | None) -> None:
    module, journal = model(), Journal()
    journal.attribute(module, "marked", True)
    journal.item(module, "_modules", "0", nn.Linear(2, 2))
    module._modules["0"] = replacement
    with pytest.raises(HfAccelError, match="put hf_accel's module back, or reload the model"):
        journal.check()
    assert module.marked
    assert len(journal.writes) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_travels_with_its_model(copied: object) -> None:
    module, journal = model(), Journal()
    journal.item(module, "_modules", "0", nn.Identity())
    journal.attribute(module, "marked", True)
    other, other_journal = copied((module, journal))  # type: ignore[operator]
    other_journal.undo()
    assert isinstance(other[0], nn.Linear)
    assert "marked" not in vars(other)
    assert isinstance(module[0], nn.Identity)
    assert module.marked


def test_pickles_with_a_class_that_has_no_name() -> None:
    """As patch() switches a model to one that is made for it alone."""
    module, journal = model(), Journal()
    journal.attribute(module, "__class__", type("Unnamed", (nn.Sequential,), {}))
    assert pickle.loads(pickle.dumps(journal.writes[0].new)) is None
    journal.undo()
    assert type(module) is nn.Sequential
