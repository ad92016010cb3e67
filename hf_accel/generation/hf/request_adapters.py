"""Adapters of requests, from the folders that PEFT saves: LoRA of linear layers, and what of it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...cache.hf import page_groups
from ...cache.pages import Pages
from ...cache.pass_rows import Parts, rows_of_passes
from ...cache.step import Step
from ...config import CacheConfig
from ...errors import UnsupportedError
from ...fused.hf.layer_calls import TracedForward
from ...kernels.cpu.library import FLOATS
from ...linear import QuantLinear
from ...linear.adapters import Adapter, LowRankPart, PassAdapters
from ...tensors import model_device
from ...undo.state import state_of
from ..carried import Carried
from .adapter_folder import WEIGHTS, factor_in, matrices_in, named_layers, reason_left_out, salt_of, settings_of
from .model_runner import ModelRunner


class LoadedAdapters:
    """The adapters that requests of one model can name. Any thread may use it."""

    def __init__(self, model: PreTrainedModel, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """pause: makes a block within which no pass runs."""
        self._model, self._pause = model, pause
        self._loaded: dict[str, Adapter] = {}
        self._tried: set[frozenset[nn.Module]] = set()  # layers of adapters
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in list(self._loaded.values()))

    def load(self, name: str, path: str | PathLike[str]) -> None:
        """Load an adapter. Raises UnsupportedError for a name that is taken, and what read_adapter raises."""
        adapter = read_adapter(self._model, name, path)
        layers = frozenset(adapter.parts)
        if layers not in self._tried:
            with self._pause():
                refuse_other_rows(self._model, adapter)
        with self._lock:
            self._tried.add(layers)
            if name in self._loaded:
                raise UnsupportedError(
                    f"an adapter {name!r} is loaded already; unload it first, or give this one another name"
                )
            self._loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that have it go on with it. Raises UnsupportedError if there is none."""
        with self._lock:
            self.named(name)
            del self._loaded[name]

    def named(self, name: str) -> Adapter:
        """Return an adapter. Raises UnsupportedError if there is none of this name."""
        adapter = self._loaded.get(name)
        if adapter is None:
            known = ", ".join(map(repr, self._loaded)) or "none is"
            raise UnsupportedError(f"no adapter {name!r} is loaded ({known}); call load_adapter({name!r}, path)")
        return adapter


def read_adapter(model: PreTrainedModel, name: str, path: str | PathLike[str]) -> Adapter:
    """Read the folder of a LoRA adapter that PEFT has saved, for a patched model.

    Its matrices are kept in the dtype of the model, and multiplied with float32 sums. Raises UnsupportedError for
    another kind of adapter, for one that does not fit the model, and for a model whose requests can have none.
    """
    where = f"adapter {name!r} ({path})"
    refusal = model_refusal(model)
    if refusal is not None:
        raise UnsupportedError(f"{where}: requests of this model can have no adapter: {refusal}")
    config, tensors = settings_of(Path(path), where), matrices_in(Path(path), where)
    layers = named_layers(tensors, where)
    parts: dict[nn.Module, LowRankPart] = {}
    known = _known_layers(model)
    for layer, matrices in layers.items():
        module, reason = known.get(layer), None
        if module is None:
            reason = _layer_refusal(model, layer)
        elif module in parts:
            reason = "the model calls one module by two names"
        else:
            reason = reason_left_out(layer, config) or _shape_refusal(module, matrices)
        if reason is not None or module is None:
            raise UnsupportedError(f"{where}: {layer!r}: {reason}; load it into the model that it was trained for")
        if not (module.in_features and module.out_features):  # of no shared expert: nothing is added
            continue
        dtype, device = _dtype_of(module), model_device(model)
        a, b = (matrices[each].to(device=device, dtype=dtype) for each in "AB")
        parts[module] = LowRankPart(a, b, factor_in(layer, config, len(a), where))
    if not parts:
        raise UnsupportedError(f"{where}: {WEIGHTS} holds nothing that could be added to a layer")
    LowRankPart.put_together(parts.values())
    traced = {child for layer in model.modules() if isinstance(layer, TracedForward) for child in layer.modules()}
    return Adapter(name, parts, frozenset(parts.keys() - traced), salt_of(config, tensors))


def adapters_of_prompts(model: PreTrainedModel, given: Any, count: int) -> list[Adapter | None]:
    """Return the adapters of `count` prompts. given: the folder of one, a list of one or None for each, or None.

    Raises UnsupportedError for a list of another length, and what read_adapter and refuse_other_rows raise.
    """
    paths = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(paths) != count:
        raise UnsupportedError(f"adapter has {len(paths)} folders for {count} prompts; give one, or one each")
    read = {path: read_adapter(model, str(path), path) for path in {*paths} - {None}}
    for each in read.values():
        if each.outside:
            refuse_other_rows(model, each)
    return [read.get(path) for path in paths]


# -- a trial -------------------------------------------------------------------------------------------------

LENGTHS, LAST = (7, 10), 2  # tokens of the prompts of a trial, and of those the ones that its last pass computes
SAME = 0.1  # the most that may differ of what an adapter changes: rounding, but no other rows


def refuse_other_rows(model: PreTrainedModel, adapter: Adapter) -> None:
    """Raise UnsupportedError if a layer of the adapter is called on other rows than those of a pass, or in another
    order, as an expert is: two prompts, of which one has an adapter, must get together what each gets alone.

    So does one that is never called, as of attention to an encoder that is not there. No pass may run meanwhile.
    """
    numbers = torch.Generator().manual_seed(0)
    device = model_device(model)
    parts = {layer: _noise(layer, numbers, device) for layer in adapter.parts}
    tried = Adapter(adapter.name, parts, adapter.outside, b"")
    first, second = LENGTHS
    try:
        together = _logits(model, [(first, tried), (second, None)])
        alone, other = _logits(model, [(first, tried)]), _logits(model, [(second, None)])
        changed = (alone - _logits(model, [(first, None)])).norm()
    except UnsupportedError as error:
        raise UnsupportedError(f"adapter {adapter.name!r}: a trial has failed: {error}") from error
    if not (together - torch.cat((alone, other))).norm() <= SAME * changed:
        raise UnsupportedError(
            f"adapter {adapter.name!r}: {type(model).__name__} gives two prompts other results together than alone if "
            "one of them has an adapter of these layers; use PEFT and generate()"
        )


def _noise(layer: Any, numbers: torch.Generator, device: torch.device) -> LowRankPart:
    sizes = ((2, layer.in_features), (layer.out_features, 2))
    a, b = (torch.randn(size, generator=numbers).to(device, _dtype_of(layer)) for size in sizes)
    return LowRankPart(a, b, 0.5 * layer.in_features**-0.5)


@torch.no_grad()
def _logits(model: PreTrainedModel, rows: list[tuple[int, Adapter | None]]) -> Tensor:
    """Return the logits [N, V] of prompts of so many tokens, in float32. Two passes compute them, so that tokens of
    the second one attend to those of the first.
    """
    groups, groups_of_layer = page_groups(model.config, CacheConfig(), capacity=64)
    pages, runner = Pages(groups), ModelRunner(model, groups, groups_of_layer)
    firsts = [(number, length - LAST) for number, (length, _) in enumerate(rows)]
    lasts = [(number, LAST) for number, _ in firsts]

    def compute(parts: Parts, step: Step) -> Tensor:
        ids = [place for _, span in parts for place in span]  # which are also their positions
        adapters = PassAdapters.of([adapter for _, adapter in rows], [len(span) for _, span in parts])
        return runner(ids, ids, step, list(range(len(ids))), carried=Carried(adapters=adapters)).float()

    return torch.cat(rows_of_passes(pages, [pages.begin() for _ in rows], (firsts, lasts), compute))


# -- the model -----------------------------------------------------------------------------------------------


def model_refusal(model: PreTrainedModel) -> str | None:
    """Return why requests of a patched model can have no adapter, as one clause; None if they can."""
    state = state_of(model).generation
    if state.agreement.size > 1:
        return "several processes share it"
    if state.inner is not None:
        return "its generate() calls that of a part of it"
    if model.config.is_encoder_decoder:
        return "an encoder reads their prompts outside of its passes"
    if len({each.device for each in model.parameters()}) > 1:
        return "it is on several devices"
    if any(hasattr(module, "base_layer") for module in model.modules()):
        return "PEFT has put adapters into it already, which apply to all requests; unload those"
    return None


def _known_layers(model: Any) -> dict[str, nn.Module]:
    """Return the layers that an adapter may change, by their names: linear layers of the decoder, of which each pass
    asks its own rows.
    """
    decoder = model.get_decoder()
    inside, head = set(decoder.modules()), model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) and module in inside and module is not head and _dtype_of(module) in FLOATS
    }


def _layer_refusal(model: nn.Module, layer: str) -> str:
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        return f"{type(model).__name__} has no such layer"
    if not isinstance(module, nn.Linear):
        return f"it is a {type(module).__name__}, and adapters of requests are for linear layers"
    return "it is not a linear layer of the decoder, whose rows are those of a pass"


def _dtype_of(module: nn.Module) -> torch.dtype:
    if isinstance(module, QuantLinear):
        return module.compute_dtype
    weight = module._parameters.get("weight")
    return torch.float64 if weight is None else weight.dtype  # which no kernel knows


def _shape_refusal(module: Any, matrices: Mapping[str, Tensor]) -> str | None:
    a, b = matrices["A"], matrices["B"]
    wanted = (module.out_features, module.in_features)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not len(a):
        return f"its matrices {list(a.shape)} and {list(b.shape)} have no common rank"
    if (b.shape[0], a.shape[1]) != wanted:
        return f"it changes a layer {[b.shape[0], a.shape[1]]}, and that of the model is {list(wanted)}"
    return None if a.dtype in FLOATS and b.dtype in FLOATS else f"its matrices are {a.dtype} and {b.dtype}"
