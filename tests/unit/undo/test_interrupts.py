"""Ctrl-C while patch() recovers from another, or while unpatch() works, leaves the model whole."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.patching import originals as originals_module
from hf_accel.patching.pack import replace_linears
from hf_accel.undo import journal as journal_module

from ...parity.families import build
from ...parity.snapshot import snapshot

apply_plan = importlib.import_module("hf_accel.patching.patch").apply_plan  # the function patch hides its module
RECOVERING = {
    (journal_module.__file__, "undo"),
    (journal_module.__file__, "_take_back"),
    (journal_module.__file__, "_place"),
    (journal_module.__file__, "_holders"),
    (originals_module.__file__, "recover"),
    (originals_module.__file__, "restore"),
    (originals_module.__file__, "_read_back"),
}


@contextmanager
def interrupted(step: int | None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a line of what recovers, counted as they run; None: only count."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if (frame.f_code.co_filename, frame.f_code.co_name) not in RECOVERING:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == step:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[], PreTrainedModel]:
    build("gpt2").save_pretrained(tmp_path)
    return lambda: AutoModelForCausalLM.from_pretrained(tmp_path)


def replace_all_then_fail(*args: Any) -> None:
    replace_linears(*args)
    raise ValueError("first")


SHARES = [i / 12 for i in range(13)]


def failed_patch(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, step: int | None) -> tuple[Any, int]:
    """A patch that fails when all weights are replaced, and an interrupt while it recovers."""
    monkeypatch.setitem(apply_plan.__globals__, "replace_linears", replace_all_then_fail)
    with interrupted(step) as count, pytest.raises((ValueError, KeyboardInterrupt)) as error:
        hf_accel.patch(model)
    monkeypatch.undo()
    return error.value, count[0]


def test_a_second_interrupt_while_patch_recovers(
    load: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    before = snapshot(model)
    error, steps = failed_patch(model, monkeypatch, None)
    assert isinstance(error, ValueError)
    assert snapshot(model) == before
    for step in sorted({1 + round(share * (steps - 1)) for share in SHARES} | set(range(1, 12))):
        error, _ = failed_patch(model, monkeypatch, step)
        assert isinstance(error, KeyboardInterrupt)
        assert str(error.__cause__ or error.__context__) == "first"
        assert snapshot(model) == before, step


def test_an_interrupt_while_unpatch_works(load: Callable[[], PreTrainedModel]) -> None:
    """The model is patched still, and can be unpatched, or is as it was."""
    model = load()
    before = snapshot(model)
    hf_accel.patch(model)
    with interrupted(None) as count:
        hf_accel.unpatch(model)
    for step in sorted({1 + round(share * (count[0] - 1)) for share in SHARES}):
        hf_accel.patch(model)
        with interrupted(step), pytest.raises(KeyboardInterrupt):
            hf_accel.unpatch(model)
        if hf_accel.is_patched(model):
            hf_accel.unpatch(model)
        assert snapshot(model) == before, step
