"""Replace the Linears of a plan by quantized layers, a few at a time, and free what they replace as it goes.

No more than a few float originals outlive their quantized form, so that a model never takes much more memory than it
did. Weights are freed after all checks: what is freed can be read back, or was given up by keep_original=False.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import UnsupportedError
from ..hardware import release, trim
from ..linear import BackendChoice, QuantizedWeight, Workers
from ..recognition.unchanged import ALL_HOOKS
from ..tensors import model_device
from ..undo.journal import Journal
from .originals import Originals, Source, Stored
from .plan import Plan
from .weight_plan import WeightPlan

PROGRESS_SECONDS = 1.0  # seconds without a progress bar
TRIM = 2**26  # bytes freed before malloc is asked for them: it keeps them for threads that pack no more


@dataclass(frozen=True)
class Packed:
    """A weight in the form that `choice.backend` reads.

    source: where the original can be read again, None if it is kept. bias: replaces the Linear's own.
    """

    name: str
    choice: BackendChoice
    weight: Any
    source: Source | None
    bias: Tensor | None = None


def replace_linears(
    todo: Plan, journal: Journal, originals: Originals, loaded: Mapping[str, Packed] | None = None
) -> None:
    """Replace each Linear that the plan quantizes.

    loaded: what was packed before, by name, while the weights were read.
    """
    by_name = {linear.site.name: linear for linear in todo.quantized}
    ready = dict(loaded or {})
    waiting = [linear for name, linear in by_name.items() if name not in ready]
    if todo.config.keep_original is False:
        for linear in waiting:
            _check_finite(linear)

    freed = 0
    unplaced: dict[str, dict[str, nn.Module]] = {}

    def replace(packed: Packed) -> None:
        nonlocal freed
        linear = by_name[packed.name]
        site = linear.site
        layers = unplaced.setdefault(site.replaced, {})
        layers[site.key] = site.layer(packed.weight, packed.choice, bias=packed.bias, split=todo.split)
        if len(layers) == len(site.together):
            for name, layer in site.replacements(todo.model, unplaced.pop(site.replaced)):
                _put_in(layer, name, todo.model, journal)
        freed += _let_go(packed, linear, todo, originals)
        if freed >= TRIM:
            trim()
            freed = 0

    while ready:
        replace(ready.pop(next(iter(ready))))
    if waiting:
        _pack_all(waiting, todo, replace)
    if by_name:
        trim()


def replace_parameters(model: nn.Module, new: Mapping[str, Mapping[str, Tensor]], journal: Journal) -> None:
    """Give modules, such as norms, other parameters: `new`, by the names of the module and the parameter."""
    for name, parameters in new.items():
        module = model.get_submodule(name)
        for parameter, value in parameters.items():
            before = module._parameters[parameter]
            assert before is not None
            journal.item(module, "_parameters", parameter, nn.Parameter(value, before.requires_grad))


def _pack_all(linears: Sequence[WeightPlan], todo: Plan, replace: Callable[[Packed], None]) -> None:
    # transformers' own bar, which logging.disable_progress_bar() turns off
    with (
        Workers[Packed](None if model_device(todo.model).type == "cpu" else 1) as workers,
        logging.tqdm(total=len(linears), desc="Quantizing weights", unit=" layers", delay=PROGRESS_SECONDS) as bar,
    ):
        for linear in linears:
            for packed in workers.put(partial(_pack_linear, linear, todo.on_disk)):
                replace(packed)
                bar.update()
        for packed in workers.finish():
            replace(packed)
            bar.update()


def _pack_linear(linear: WeightPlan, on_disk: Mapping[str, Stored] | None) -> Packed:
    assert linear.choice is not None
    tensor = linear.site.read()
    packed = pack_weight(linear, tensor, linear.choice, source=_source(linear, on_disk))
    release(tensor)  # the mapping stays as long as any tensor of the file
    return packed


def pack_quantized(
    linear: WeightPlan, weight: QuantizedWeight, on_disk: Mapping[str, Stored] | None, *, bias: Tensor | None
) -> Packed:
    """Pack a weight that was quantized already, in the form that `replace_linears` takes.

    bias: replaces the Linear's own.
    """
    choice, source = linear.choice, _source(linear, on_disk)
    assert choice is not None
    return Packed(linear.site.name, choice, choice.backend.pack(weight), source, bias)


def _source(linear: WeightPlan, on_disk: Mapping[str, Stored] | None) -> Source | None:
    """Return where the original can be read again; None if it is kept."""
    stored = linear.site.stored_name
    if on_disk is None or not linear.frees or stored not in on_disk:
        return None
    return Source.of(linear.site.parameter, on_disk[stored], stored)


@torch.no_grad()
def pack_weight(linear: WeightPlan, tensor: Tensor, choice: BackendChoice, *, source: Source | None) -> Packed:
    """Quantize the float parameter of a site. Raises UnsupportedError for NaN and infinity, with the layer's name."""
    name, config = linear.site.name, linear.config
    try:
        return Packed(name, choice, linear.site.pack(tensor, config, choice), source)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name!r} cannot be quantized: {error}") from error


def _check_finite(linear: WeightPlan) -> None:
    """Raise UnsupportedError for NaN and infinity, as quantizing would, before the first weight is freed for good."""
    tensor = linear.site.read()
    low, high = tensor.aminmax()
    release(tensor)
    if not (low.isfinite() and high.isfinite()):
        raise UnsupportedError(
            f"{linear.site.name!r} cannot be quantized: the weight holds NaN or infinity; "
            "repair the checkpoint or skip the layer"
        )


def _put_in(layer: nn.Module, full_name: str, model: nn.Module, journal: Journal) -> None:
    original = model.get_submodule(full_name)
    layer.train(original.training)
    for hooks in ALL_HOOKS:  # the very same dicts, so that what is registered on either is there for both
        vars(layer)[hooks] = vars(original)[hooks]
    layer._is_full_backward_hook = original._is_full_backward_hook
    parent_name, _, name = full_name.rpartition(".")
    journal.item(model.get_submodule(parent_name), "_modules", name, layer)


def _let_go(packed: Packed, linear: WeightPlan, todo: Plan, originals: Originals) -> int:
    """Free the weight of the Linear that was replaced, if it may go; returns the bytes."""
    site = linear.site
    size = site.tensor.nbytes
    if not linear.frees or todo.config.keep_original is True:
        return 0
    if todo.config.keep_original is False:
        originals.lose(site.parameter)
    elif packed.source is not None:
        originals.drop(site.parameter, packed.source)
    return size - site.tensor.nbytes
