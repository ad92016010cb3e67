"""Folds: the places where the module that computes a Linear's inputs can take their scales off again, exactly.

No names are known: a decoder layer is run in float32 with random scales folded in, and a fold counts as exact if all
else in the layer comes out as without it. Layers of one structure are tried once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...models import layer_lists, layers_config
from ..plan import Fold
from .windows import feed

TOKENS = 8  # that a layer is tried on
TOLERANCE = 1e-4  # of the largest value, in float32
OFFSETS = (0.0, 1.0)  # what a norm adds to its weight: Gemma's stores the difference to 1


def folded_parameters(module: nn.Module, scales: Tensor, offset: float | None) -> dict[str, Tensor]:
    """Return parameters with which a producer, a norm or a Linear, puts out what it did, divided by scales [out]."""
    found = {}
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        by_row = name == "weight" and parameter.dim() == 2 and not isinstance(module, Conv1D)
        divisor = scales.unsqueeze(1) if by_row else scales
        added = (offset or 0.0) if name == "weight" else 0.0
        found[name] = ((parameter.float() + added) / divisor - added).to(parameter.dtype)
    return found


def foldable(module: nn.Module, scales: Tensor, offset: float | None) -> Tensor:
    """Return scales [out] rounded as a norm's dtype rounds them, so that folding them into the norm loses nothing."""
    if offset is None:
        return scales
    weight = module._parameters["weight"]
    assert weight is not None
    after = folded_parameters(module, scales, offset)["weight"].float()
    ratio = (weight.float() + offset) / (after + offset)
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, scales)


@torch.no_grad()
def find_folds(model: PreTrainedModel, linears: Iterable[str]) -> list[Fold]:
    """Return the exact folds in a copy of a model, which is only run. linears: the names of those to be quantized."""
    wanted, layers = set(linears), _layers(model)
    embedding: Any = model.get_input_embeddings()
    calls = _first_calls(model, layers, torch.arange(TOKENS).unsqueeze(0) % embedding.weight.shape[0])
    known: dict[Any, list[Fold]] = {}
    found: list[Fold] = []
    for name, layer in layers.items():
        own = {n.removeprefix(f"{name}.") for n in wanted if n.startswith(f"{name}.")}
        signature = (_signature(layer), *sorted(own))
        if signature not in known and name in calls:
            known[signature] = list(Probe(layer, own, *calls[name]).folds())
        found += [fold.within(name) for fold in known.get(signature, ())]
    return found


def _layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    count = getattr(layers_config(model.config), "num_hidden_layers", None)
    lists = layer_lists(model, count) if count else {}
    return {f"{name}.{index}": layer for name, layers in lists.items() for index, layer in enumerate(layers)}


def _signature(layer: nn.Module) -> Any:
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, p.shape) for name, p in layer.named_parameters())


def _first_calls(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments that each layer is called with when the model gets ids [1, n]."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = [layer.register_forward_pre_hook(_noting(calls, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        feed(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _noting(calls: dict[str, Any], name: str) -> Callable[..., None]:
    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (args, kwargs))

    return note


class Probe:
    """A decoder layer in float32, which is run with scales folded in and without."""

    def __init__(self, layer: nn.Module, linears: set[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.layer = copy.deepcopy(layer).float()
        self.modules = dict(self.layer.named_modules())
        self.linears = linears
        self.args: Any = _as_float(args)
        self.kwargs: Any = _as_float(dict(kwargs))
        self.generator = torch.Generator().manual_seed(0)

    def folds(self) -> Iterator[Fold]:
        """Return the folds that change nothing but the folded modules."""
        inputs, self.expected = self.run()
        units: dict[int, list[str]] = {}
        for name, tensor in inputs.items():
            units.setdefault(id(tensor), []).append(name)
        for names in units.values():
            if self.linears.issuperset(names):
                candidates = self._candidates(names, inputs)
                fold = next((fold for fold in candidates if self.is_exact(fold)), None)
                if fold is not None:
                    yield fold

    def run(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the inputs of the Linears, in the order of their calls, and all outputs."""
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                outputs[name] = output
            if isinstance(module, nn.Linear | Conv1D) and args:
                inputs[name] = args[0]

        hooks = [module.register_forward_hook(partial(note, name)) for name, module in self.modules.items()]
        try:
            self.layer(*self.args, **self.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return inputs, outputs

    def _candidates(self, names: list[str], inputs: Mapping[str, Tensor]) -> Iterator[Fold]:
        """Yield norms whose output the Linears are called on, and Linears called before a Linear of their width."""
        x = inputs[names[0]]
        for name, module in self.modules.items():
            weight = module._parameters.get("weight")
            if self.expected.get(name) is x and weight is not None and weight.shape == x.shape[-1:]:
                yield from (Fold(name, tuple(names), offset) for offset in OFFSETS)
        called = list(inputs)
        if len(names) == 1:
            for name in reversed(called[: called.index(names[0])]):
                if name in self.linears and self.expected[name].shape[-1] == x.shape[-1]:
                    yield Fold(name, tuple(names), None)

    def is_exact(self, fold: Fold) -> bool:
        """Return whether the layer, and all Linears but the producer, give the same with random scales folded in."""
        producer = self.modules[fold.producer]
        consumers = [self.modules[name] for name in fold.consumers]
        width = self.expected[fold.producer].shape[-1]
        scales = torch.exp2(2 * torch.rand(width, generator=self.generator) - 1).to(producer.weight.device)
        changed = [(producer, folded_parameters(producer, scales, fold.offset))]
        for module in consumers:
            rows = scales.unsqueeze(1) if isinstance(module, Conv1D) else scales
            changed.append((module, {"weight": module.weight * rows}))
        before = [
            (module._parameters[name], module._parameters[name].clone()) for module, new in changed for name in new
        ]
        for module, new in changed:
            for name, value in new.items():
                module._parameters[name].copy_(value)
        try:
            got = self.run()[1]
        finally:
            for parameter, value in before:
                parameter.copy_(value)
        compared = ("", *(name for name in self.linears if name in self.expected and name != fold.producer))
        return all(_agrees(got[name], self.expected[name]) for name in compared)


def _agrees(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _as_float(value: Any) -> Any:
    """Return the value with all tensors within it in float32."""
    match value:
        case Tensor() if value.is_floating_point():
            return value.float()
        case tuple() | list():
            return type(value)(map(_as_float, value))
        case dict():
            return {key: _as_float(entry) for key, entry in value.items()}
    return value
