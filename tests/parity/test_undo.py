"""unpatch() brings back the model that patch() was given: the same objects, the same bits."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

import hf_accel
from hf_accel import patch as patch_module  # the function, for its module's names
from hf_accel.cache.hf.cache_argument import CACHE_NAME
from hf_accel.linear import QuantLinear

from .families import FAMILIES, build, inputs
from .snapshot import logits, snapshot

GROUPS_OF_32 = hf_accel.WeightConfig(bits=4, group_size=32)
WEIGHTS = {"none": None, "int8": "int8", "int4": GROUPS_OF_32}


def generate(model: PreTrainedModel, **settings: Any) -> Any:
    return model.generate(**inputs("left"), **{"max_new_tokens": 4, "do_sample": False} | settings)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_back_twice(family: str, weights: str) -> None:
    model = build(family)
    before = snapshot(model)
    for _ in range(2):
        assert hf_accel.patch(model, weights=WEIGHTS[weights]) is model
        assert hf_accel.is_patched(model)
        if weights != "none":
            assert not torch.equal(logits(model), logits(build(family)))
        generate(model)
        generate(model, num_beams=2)
        assert hf_accel.unpatch(model) is model
        assert not hf_accel.is_patched(model)
        assert snapshot(model) == before


@pytest.mark.parametrize(
    "keywords",
    [
        {"weights": None, "attention": None, "cache": None},
        {"weights": "int8", "attention": None, "cache": None},
        {"weights": None, "cache": None},
        {"weights": None, "attention": "reference", "cache": hf_accel.CacheConfig(dtype="int8")},
        {"weights": hf_accel.WeightConfig(head=None, skip=["up_proj"], activations="int8")},
    ],
    ids=str,
)
def test_parts(keywords: dict[str, Any]) -> None:
    model = build("llama")
    before = snapshot(model)
    hf_accel.patch(model, **keywords)
    generate(model)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_names_do_not_change() -> None:
    """LoRA's target_modules, device maps and hooks go by name."""
    model = build("gpt2")
    modules = [name for name, _ in model.named_modules()]
    parameters = {name for name, _ in model.named_parameters()}
    hf_accel.patch(model)
    assert [name for name, _ in model.named_modules()] == modules
    assert {name for name, _ in model.named_parameters()} <= parameters
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert isinstance(model, PreTrainedModel)


@pytest.mark.parametrize("weights", ["int8", {"embedding": "auto"}])
def test_tied_head_stays_tied(weights: Any) -> None:
    model = build("gpt2")
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    with hf_accel.patched(model, weights=weights):
        assert isinstance(model.get_output_embeddings(), QuantLinear)
        assert (model.get_input_embeddings().weight is embedding) == (weights == "int8")
    assert model.get_output_embeddings().weight is embedding


# -- exceptions ----------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def test_exception_inside_generate() -> None:
    model = build("llama")
    before = snapshot(model)
    hf_accel.patch(model)
    expected = generate(model)

    def stop(ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise Broken

    with pytest.raises(Broken):
        generate(model, stopping_criteria=[stop])
    assert torch.equal(generate(model), expected)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_exception_inside_generate_lets_go_of_the_cache() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    caches: list[Any] = []

    def stop(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        caches.append(weakref.ref(kwargs[CACHE_NAME]))
        if len(caches) == 3:
            raise Broken

    model.register_forward_pre_hook(stop, with_kwargs=True)
    with pytest.raises(Broken):
        generate(model)
    gc.collect()  # of the exception's frames
    assert caches[0]() is None


def test_prompt_that_failed_is_no_prefix() -> None:
    """Its blocks were planned for, and in the layers after the exception never written."""
    model = hf_accel.patch(build("llama"), weights=None)
    cache = hf_accel.PagedCache(model.config, block_size=4)
    expected = generate(model)
    handle = model.model.layers[0].mlp.register_forward_hook(_raise)
    with pytest.raises(Broken):
        generate(model, past_key_values=cache)
    handle.remove()
    cache.reset()
    assert torch.equal(generate(model, past_key_values=cache), expected)
    assert cache.statistics()["prefix_hits"] == 0


def test_exception_in_a_layer_leaves_the_cache_usable() -> None:
    """A pass that stops half-way is taken out of the cache again by the next one."""
    model = hf_accel.patch(build("llama"), weights=None)
    cache = hf_accel.PagedCache(model.config, block_size=4)
    ids = inputs("single")["input_ids"]
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        handle = model.model.layers[0].mlp.register_forward_hook(_raise)
        with pytest.raises(Broken):
            model(ids[:, 6:], past_key_values=cache)
        handle.remove()
        actual = model(ids[:, 6:], past_key_values=cache).logits
        expected = build("llama")(ids).logits[:, 6:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def _raise(*_: Any) -> None:
    raise Broken


def fail_at(call: int) -> Callable[..., Any]:
    """Do as before, but raise at the given call."""
    calls = iter(range(1000))

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                raise Broken
            return original(*args, **kwargs)

        return wrapped

    return wrap


POINTS = [
    ("_replace_config", 0),
    ("break_ties", 0),
    ("AccelQuantizer", 0),
    ("_switch_attention", 0),
    ("GenerationState", 0),
    ("mixed_class", 0),
    ("RemovableHandle", 0),
    ("replace_linears", 0),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "call"), POINTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_exception_in_the_middle_of_patch(family: str, name: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    before = snapshot(model)
    functions = inspect.unwrap(patch_module).__globals__
    monkeypatch.setitem(functions, name, fail_at(call)(functions[name]))
    with pytest.raises(Broken):
        hf_accel.patch(model)
    monkeypatch.undo()
    assert snapshot(model) == before
    hf_accel.unpatch(hf_accel.patch(model))
    assert snapshot(model) == before


@pytest.mark.parametrize("attribute", ["set_attn_implementation", "get_output_embeddings"])
def test_exception_in_transformers(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before = snapshot(model)
    monkeypatch.setattr(type(model), attribute, _raise)
    with pytest.raises(Broken):
        hf_accel.patch(model)
    monkeypatch.undo()
    assert snapshot(model) == before


def test_attention_that_does_not_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before = snapshot(model)
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    with pytest.raises(hf_accel.UnsupportedError, match="attention=None"):
        hf_accel.patch(model)
    monkeypatch.undo()
    assert snapshot(model) == before


# -- what happens to a model while it is patched -------------------------------------------------------


def register_all(module: nn.Module, log: list[str]) -> list[Any]:
    """A hook of every kind that torch has on a call; backward hooks only where torch can call them."""
    handles = [
        module.register_forward_pre_hook(lambda *_: log.append("pre")),
        module.register_forward_pre_hook(lambda *_: log.append("pre with kwargs"), with_kwargs=True),
        module.register_forward_hook(lambda *_: log.append("forward")),
        module.register_forward_hook(lambda *_: log.append("forward with kwargs"), with_kwargs=True),
        module.register_forward_hook(lambda *_: log.append("always"), always_call=True),
    ]
    if not isinstance(module, PreTrainedModel):
        handles.append(module.register_full_backward_pre_hook(lambda *_: log.append("backward pre")))
        handles.append(module.register_full_backward_hook(lambda *_: log.append("backward")))
    return handles


def calls(model: PreTrainedModel, log: list[str]) -> list[str]:
    log.clear()
    model(**inputs("single")).logits.sum().backward()
    model.zero_grad()
    return list(log)


HOOKED = {"model.layers.0.mlp.up_proj": 7, "model.layers.1.mlp": 7, "lm_head": 7, "": 5}


@pytest.mark.parametrize(("name", "number"), HOOKED.items())
def test_hooks_from_before_fire_throughout(name: str, number: int) -> None:
    model = build("llama")
    log: list[str] = []
    register_all(model.get_submodule(name), log)
    before = snapshot(model)
    fired = calls(model, log)
    assert len(fired) == number
    hf_accel.patch(model)
    assert calls(model, log) == fired
    hf_accel.unpatch(model)
    assert calls(model, log) == fired
    assert snapshot(model) == before


@pytest.mark.parametrize(("name", "number"), HOOKED.items())
def test_hooks_from_while_patched_stay_and_can_be_removed(name: str, number: int) -> None:
    model = build("llama")
    log: list[str] = []
    hf_accel.patch(model)
    handles = register_all(model.get_submodule(name), log)
    fired = calls(model, log)
    assert len(fired) == number
    hf_accel.unpatch(model)
    assert calls(model, log) == fired
    for handle in handles:
        handle.remove()
    assert calls(model, log) == []


@pytest.mark.parametrize("again", [False, True], ids=["unpatched", "patched again"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_forward_that_was_kept_while_patched(family: str, again: bool) -> None:
    """Hooks of accelerate and a Trainer keep the forward that they wrap, and users their own."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: forward(*args, **kwargs)

    model = hf_accel.patch(build(family), weights=None)
    kept = model.generate
    for module in [*model.modules()][1:]:
        module.forward = around(module.forward)  # type: ignore[method-assign]
    hf_accel.unpatch(model)
    if again:
        hf_accel.patch(model, weights=None)
    assert torch.allclose(logits(model), logits(build(family)), atol=1e-4)
    own = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(kept(**inputs("left"), **own), build(family).generate(**inputs("left"), **own))


def test_hook_that_is_removed_while_patched_is_gone() -> None:
    model = build("llama")
    log: list[str] = []
    handles = register_all(model.model.layers[0].mlp.up_proj, log)
    with hf_accel.patched(model):
        for handle in handles:
            handle.remove()
    assert calls(model, log) == []


def test_always_called_hook_sees_the_exception() -> None:
    model = build("llama")
    layer, log = model.model.layers[0].mlp.up_proj, []
    layer.register_forward_hook(lambda *_: log.append("always"), always_call=True)
    hf_accel.patch(model)
    layer = model.model.layers[0].mlp.up_proj
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, 5))
    assert log == ["always"]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_train_and_to_reach_the_originals(weights: str) -> None:
    model = build("gpt2")
    hf_accel.patch(model, weights=WEIGHTS[weights])
    model.train().to(torch.bfloat16)
    hf_accel.unpatch(model)
    assert {module.training for module in model.modules()} == {True}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = build("gpt2", dtype=torch.bfloat16)
    assert torch.equal(logits(model.eval()), logits(expected))


class Adapter(nn.Module):
    """As PEFT does it: the layer it adapts is a child of its own."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 1


@pytest.mark.parametrize("layers", [1, 2])
def test_adapter_keeps_its_place(layers: int) -> None:
    model = build("llama")
    mlp = model.model.layers[0].mlp
    original = mlp.up_proj
    hf_accel.patch(model)
    for _ in range(layers):
        mlp.up_proj = Adapter(mlp.up_proj)
    adapter = mlp.up_proj
    hf_accel.unpatch(model)
    assert mlp.up_proj is adapter
    assert [m for m in adapter.modules() if not isinstance(m, Adapter)] == [original]


def test_replaced_module_is_an_error_and_changes_nothing() -> None:
    model = build("llama")
    original = model.model.layers[1].mlp.up_proj
    hf_accel.patch(model)
    mlp = model.model.layers[1].mlp
    ours, mlp.up_proj = mlp.up_proj, nn.Linear(32, 64, bias=False)
    patched = snapshot(model)
    with pytest.raises(hf_accel.HfAccelError, match=r"'up_proj' of LlamaMLP was replaced by Linear after patch"):
        hf_accel.unpatch(model)
    assert hf_accel.is_patched(model)
    assert snapshot(model) == patched
    mlp.up_proj = ours
    hf_accel.unpatch(model)
    assert mlp.up_proj is original


def test_pruned_layer_is_left_alone() -> None:
    model = build("llama")
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    expected = logits(model)
    hf_accel.patch(model)
    assert not isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    assert isinstance(model.model.layers[1].mlp.up_proj, QuantLinear)
    hf_accel.unpatch(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_nothing_keeps_a_model_that_is_dropped(family: str, weights: str | None, undo: bool) -> None:
    """What is remembered of classes and code must not hold a model, nor what served it."""
    model = hf_accel.patch(build(family), weights=weights)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    with hf_accel.Engine(model, speculative="ngram") as engine:
        engine.submit([5, 6, 7, 5, 6], max_new_tokens=3).result(60)
    parts = [weakref.ref(part) for part in (engine, *model.modules(), *model.parameters())]
    if undo:
        hf_accel.unpatch(model)
    del model, engine
    gc.collect()
    assert [part() for part in parts if part() is not None] == []


@pytest.mark.parametrize("name", ["generate", "_sample", "_prefill", "forward"])
def test_a_class_that_was_derived_while_patched_calls_the_one_before_it(name: str) -> None:
    """By super(), or by a method that it has kept: both are those of the model's own class after unpatch."""
    model = hf_accel.patch(build("llama"), weights=None)
    base, called = type(model), []
    kept = getattr(base, name)

    class Derived(base):  # type: ignore[misc, valid-type]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            called.append("generate")
            return super().generate(*args, **kwargs)

        @property
        def named(self) -> str:
            return str(super().base_model_prefix)

    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return kept(self, *args, **kwargs)

    if name != "generate":
        setattr(Derived, name, keeping)
    model.__class__ = Derived
    expected = generate(build("llama"))
    assert torch.equal(generate(model), expected)
    hf_accel.unpatch(model)
    assert not any("hf_accel" in each.__module__ for each in type(model).__mro__)
    called.clear()
    assert torch.equal(generate(model), expected)
    assert {"generate", name} <= {*called}
    assert model.named == "model"
