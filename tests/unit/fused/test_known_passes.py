"""Once a pass: no layer is asked again where nothing can change within a pass, and each of them wherever it can."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import LlamaModel, PreTrainedModel

import hf_accel
from hf_accel.fused.hf.layer_calls import LayerCalls
from hf_accel.fused.hf.pass_watch import PassWatch
from hf_accel.fused.hf.running_pass import RunningPass
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.state import FUSED, state_of
from tests.families.models import build, family

from .test_decoder_layers import counted, layers_of, llama

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

IDS = torch.tensor([[5, 9, 12, 40, 7]])
NEW = 6


@torch.no_grad()
def tokens(model: Any) -> list[int]:
    ids: list[int] = model.generate(IDS, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0].tolist()
    return ids


@contextmanager
def asked() -> Iterator[list[object]]:
    """The layers that were asked, one after the other."""
    found: list[object] = []
    ask = LayerCalls.ask

    def noted(self: LayerCalls[Any], *args: Any) -> Any:
        found.append(self)
        return ask(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCalls, "ask", noted)
        yield found


def patched(**changes: Any) -> PreTrainedModel:
    model = llama(**changes)
    hf_accel.patch(model, weights=None)
    tokens(model)  # programmes are made
    return model


def questions(model: PreTrainedModel) -> int:
    """How often a layer is asked in generate()."""
    tokens(model)  # a change is seen, and what depends on it is made again
    with asked() as found:
        tokens(model)
    return len(found)


def test_one_layer_is_asked_for_all() -> None:
    model = patched()
    with counted() as calls:
        assert questions(model) == NEW
    assert not calls[False]


def test_each_window_asks_for_itself() -> None:
    model = build(family("Gemma2ForCausalLM")).eval()
    hf_accel.patch(model, weights=None)
    tokens(model)
    windows = set(model.config.layer_types)
    assert len(windows) == 2
    assert questions(model) == NEW * 2


class Own(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OwnLlama(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def hooked(name: str) -> Callable[[Any], Any]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda *given: None)


def own_forward(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x)


def own_module(model: Any) -> None:
    model.model.rotary_emb = Own(model.model.rotary_emb)


def own_module_within(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj = Own(model.model.layers[1].mlp.gate_proj)


def inserted_module(model: Any) -> None:
    class Same(nn.Module):
        attention_type = "full_attention"

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return x

    model.model.layers.insert(1, Same())
    model.config.num_hidden_layers += 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on the head": hooked("lm_head"),
    "a hook on the model": hooked(""),
    "a hook on a layer": hooked("model.layers.1"),
    "a hook on all modules": lambda model: torch_modules.register_module_forward_pre_hook(lambda *given: None),
    "a forward": own_forward,
    "a module": own_module,
    "a module within a layer": own_module_within,
    "a module between layers": inserted_module,
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_of_others_lets_each_layer_be_asked(name: str) -> None:
    model = patched()
    handle = CHANGES[name](model)
    try:
        assert questions(model) == NEW * 3
    finally:
        if handle is not None:
            handle.remove()
    if handle is not None:
        assert questions(model) == NEW


def test_classes_of_others_let_each_layer_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama()
    own.model.__class__ = OwnLlama
    hf_accel.patch(own, weights=None)
    assert questions(own) == NEW * 3
    model = patched()
    kind = type(model.model.rotary_emb)  # which no layer calls
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs))
    assert questions(patched()) == questions(model) == NEW * 3
    monkeypatch.undo()
    assert questions(model) == NEW


def test_what_a_hook_changes_within_a_pass_is_seen() -> None:
    """The hook comes after layers were known; a model without our layers says what is right."""
    model, passes = patched(), [0]
    last: Any = model.model.layers[2].mlp.down_proj
    weights = [nn.Parameter(last.weight.detach() * factor) for factor in (-9, 4, 1)]

    def change(module: nn.Module, args: Any, out: Any) -> None:
        passes[0] += 1
        last.weight = weights[passes[0] % 3]

    before = tokens(model)
    model.model.layers[0].register_forward_hook(change)
    got = tokens(model)
    passes[0] = 0
    with counted(native=False):
        expected = tokens(model)
    assert got == expected != before


@pytest.mark.covering(1)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("change", ["scaling", "weight", "memory", "module", "hook"])
def test_what_changes_between_passes_is_seen(at: int, change: str) -> None:
    model = patched()
    attention: Any = model.model.layers[at].self_attn
    before, seen = tokens(model), []
    if change == "scaling":
        attention.scaling = 3.0
    elif change == "weight":
        attention.o_proj.weight = nn.Parameter(attention.o_proj.weight.detach() * -3)
    elif change == "memory":
        attention.o_proj.weight.data = attention.o_proj.weight.data * -3
    elif change == "module":
        attention.o_proj = nn.Linear(64, 64)
    else:
        attention.o_proj.register_forward_hook(lambda module, args, out: seen.append(1) or out * -3)
    got = tokens(model)
    with counted(native=False):
        assert tokens(model) == got != before
    assert bool(seen) is (change == "hook")


def test_layers_that_take_other_numbers_of_tokens_ask_for_themselves() -> None:
    model = patched()
    programmes = [vars(layer)[FUSED].programme for layer in layers_of(model)]
    programmes[1].max_tokens = 3  # as one with other weights
    vars(layers_of(model)[1])[FUSED].kind = (*vars(layers_of(model)[0])[FUSED].kind[:-4], *programmes[1].limits)
    with counted() as calls:
        tokens(model)
    assert calls[False] == 1, "the prompt has more"


def test_copies_know_nothing_yet() -> None:
    model = patched()
    twin = copy.deepcopy(model)
    watch: PassWatch = state_of(twin).generation.passes
    assert watch._around is None
    assert state_of(model).generation.passes._around is not None
    assert tokens(twin) == tokens(model)
    assert questions(twin) == NEW


def test_a_pass_is_forgotten_when_it_ends() -> None:
    """An error within a pass leaves nothing known for the next one."""
    model, passes = patched(), []
    note = RunningPass.note

    def fails(self: RunningPass, *args: Any) -> None:
        passes.append(self)
        if len(passes) == 4:
            raise RuntimeError("in the middle")
        note(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningPass, "note", fails)
        with pytest.raises(RuntimeError, match="in the middle"):
            tokens(model)
    assert len(set(map(id, passes))) == 2
    expected = tokens(model)
    with counted(native=False):
        assert tokens(model) == expected
