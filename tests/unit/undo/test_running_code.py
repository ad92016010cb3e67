"""The code that runs when a class's modules are called: found by names, and seen to change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.bert import modeling_bert
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

from hf_accel.undo.running_code import RunningCode, looked_up, running_code

# What runs, and what others may put in the place of something that it calls.
REPLACED: dict[str, tuple[Any, Any, str]] = {
    "a forward": (modeling_llama.LlamaMLP, modeling_llama.LlamaMLP, "forward"),
    "a method": (modeling_gemma.GemmaRMSNorm, modeling_gemma.GemmaRMSNorm, "_norm"),
    "the forward of a base": (nn.Linear, nn.Linear, "forward"),
    "a function of the file": (modeling_llama.LlamaAttention, modeling_llama, "apply_rotary_pos_emb"),
    "what a function of the file calls": (modeling_llama.LlamaAttention, modeling_llama, "rotate_half"),
    "a function of torch": (nn.Linear, F, "linear"),
    "a function of torch by its short name": (modeling_llama.LlamaRMSNorm, torch, "rsqrt"),
    "torch's call": (modeling_bert.BertLayer, nn.Module, "__call__"),
    "what torch's call calls": (modeling_bert.BertLayer, nn.Module, "_call_impl"),
    "a call of its own": (modeling_llama.LlamaMLP, modeling_llama.LlamaMLP, "__call__"),
    "a function alone": (modeling_llama.eager_attention_forward, modeling_llama, "repeat_kv"),
}


def wrapped(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize("name", REPLACED)
def test_what_others_replace_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called, owner, attribute = REPLACED[name]
    before = running_code(called)
    assert before.others is None
    assert before.hold()
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, wrapped(getattr(owner, attribute)))
        assert not before.hold()
        assert attribute in str(running_code(called).others)
    assert before.hold()
    assert running_code(called).others is None


def test_what_is_taken_away_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(modeling_llama.LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return self.doubled(x)

        def doubled(self, x: Any) -> Any:
            return 2 * super().forward(x)

    code = running_code(Own)
    assert code.others is None, "a class of others may have what code it likes"
    assert {lookup.name for lookup in code.lookups} >= {"doubled", "forward"}
    monkeypatch.delattr(Own, "doubled")
    assert not code.hold()
    assert running_code(Own) is not code


def test_what_replaces_nothing_is_no_others() -> None:
    """A file's own imports and functions that Python has are not taken for a replacement."""
    assert RunningCode(random.uniform).others is None
    for kind in vars(modeling_llama).values():
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            assert running_code(kind).others is None
            assert running_code(kind) is running_code(kind)


def test_names_of_code() -> None:
    def code(self: Any, x: Any) -> Any:
        return [torch.nn.functional.silu(self.up(part)) for part in wrapped(x)]

    assert {("torch", "nn", "functional", "silu"), ("wrapped",), ("", "up")} <= set(looked_up(code.__code__))
    assert ("torch",) not in looked_up(code.__code__), "the module is no function"
