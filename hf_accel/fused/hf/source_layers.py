"""Decoder layers that attend to a source, such as images, and to no tokens (Mllama), in passes over pages.

Such a layer is left out for a prompt without images. In a ragged pass, where some sequences have images and some have
none, its own code runs on the tokens of the former, and the states of all others stay as they are.

A decoder is known by its code, which says by what argument it takes images and that it finds their keys in its cache,
and by a trial: its first layers give over pages what they give for each sequence alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ...attention.hf import ATTENTION_NAME
from ...attention.hf.forward import register
from ...attention.hf.stock import set_implementation, stock_implementation
from ...cache.hf import RaggedCache, model_kinds, page_groups
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.kinds import SourceKind, SourceRows
from ...cache.pages import Pages
from ...cache.pass_rows import Parts, rows_of_passes
from ...cache.step import Step
from ...config import CacheConfig
from ...errors import UnsupportedError
from ...models import answer_once, layer_lists, layers_config
from ...recognition.cache_code import parameters
from ...recognition.call_form import parameter_names
from ...recognition.small_model import first_layers_model
from ...recognition.source import tree_of
from ...recognition.trial import RandomNumbers, Tolerance, agree
from ...tensors import model_device
from ...undo.journal import Mixin, mixed_class, original_class
from ..site import FusedSite, SiteKind

SOURCE_LAYER = SiteKind("source layers", "cross-attention layers", "over pages")
# What is read of their attention: it takes its keys from the cache where it is given no images.
KEYS_OF_CACHE = tuple(f"{CACHE_NAME}.layers[self.layer_idx].{name}" for name in ("keys", "values"))
CLOSE = Tolerance(of_largest=1e-4)
LENGTHS = (5, 3, None)  # the rows of the sources of a trial; None for a sequence without any
PASSES = (((0, 2), (2, 2)), ((0, 1), (1, 1), (2, 1)), ((0, 1), (1, 2), (2, 1)), ((2, 1),))  # (sequence, tokens)


class OverSources(Mixin):
    """A mixin for a decoder layer: in a ragged pass, it computes the tokens that have a source."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, N, hidden] -> [1, N, hidden]."""
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, RaggedCache)), None)
        once = None if cache is None else cache.once
        if once is None or once.tokens is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        found = hidden_states.clone()
        found[:, once.tokens] = super().forward(hidden_states[:, once.tokens], *args, **kwargs)  # type: ignore[misc]
        return found


def source_layer_sites(model: PreTrainedModel) -> Iterator[FusedSite]:
    """Find the layers of a model that attend to sources alone."""
    for name, layer in _layers_of(model, model_kinds(model.config).layers).items():
        yield FusedSite(name, layer, SOURCE_LAYER, OverSources, None)


def _layers_of(model: nn.Module, kinds: Any) -> dict[str, nn.Module]:
    """Return the decoder layers that keep the keys of sources, by name. kinds: those of each layer."""
    lists = layer_lists(model, len(kinds))
    wanted = [index for index, own in enumerate(kinds) if any(isinstance(kind, SourceKind) for kind in own)]
    return {
        f"{name}.{index}": layers[index]
        for name, layers in lists.items()
        for index in wanted
        if any(getattr(part, "layer_idx", None) == index for part in layers[index].modules())
    }


def source_argument(model: PreTrainedModel) -> str | None:
    """Return by which argument a model's decoder takes what some of its layers attend to; None if nothing is known of
    such layers, and if there are none.
    """
    try:
        if not model_kinds(model.config).has(SourceKind):
            return None
    except UnsupportedError:
        return None
    return answer_once(_source_argument, model)


def is_source_attention(model: PreTrainedModel, module: nn.Module) -> bool:
    """Return whether a module is attention to sources that is known to read pages."""
    return _argument_of(original_class(module).forward) is not None and source_argument(model) is not None


@lru_cache(maxsize=4096)
def _argument_of(forward: Any) -> str | None:
    """Return the name of the argument of which attention makes its keys; None for any other code.

    Its code has to be `if x is not None: ... else: keys, values = <those of the cache>`, with no other use of these.
    """
    tree = tree_of(forward)
    if tree is None:
        return None
    code = ast.unparse(tree)
    uses = [code.count(each) for each in (f"{CACHE_NAME}.layers", *KEYS_OF_CACHE)]
    if uses != [len(KEYS_OF_CACHE), 1, 1]:
        return None
    for node in ast.walk(tree):
        match node:
            case ast.If(
                test=ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]),
                orelse=[ast.Assign() as taken],
            ) if name in parameters(tree) and all(each in ast.unparse(taken) for each in KEYS_OF_CACHE):
                return name
    return None


# -- the trial ---------------------------------------------------------------------------------------------


def _source_argument(model: PreTrainedModel) -> str | None:
    kinds = model_kinds(model.config).layers
    layers = _layers_of(model, kinds)
    wanted = sum(any(isinstance(kind, SourceKind) for kind in own) for own in kinds)
    forwards = [original_class(part).forward for layer in layers.values() for part in layer.modules()]
    names = {name for forward in forwards if (name := _argument_of(forward)) is not None}
    if len(layers) != wanted or len(names) != 1:
        return None
    name = next(iter(names))
    decoder = _decoder_of(model, next(iter(layers)))
    if decoder is None or name not in parameter_names(original_class(decoder).forward):
        return None
    if model_device(model).type == "meta":
        return name  # nothing can be tried before the weights are there
    register()
    trial = _SourceTrial(model, decoder, name)
    return name if agree(trial.stock, trial.paged, CLOSE) else None


def _decoder_of(model: nn.Module, layer: str) -> Any:
    """Return the innermost model around a layer with this name; None if there is none."""
    parts = layer.split(".")
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts) - 1, -1, -1))
    return next((each for each in around if isinstance(each, PreTrainedModel)), None)


class _SourceTrial:
    """Passes of a decoder's first layers, with one that attends to a source, on random numbers.

    argument: by which it takes sources.
    """

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel, argument: str) -> None:
        self.model, self.decoder, self.argument = model, decoder, argument
        self.config = layers_config(model.config)
        self.kinds = model_kinds(model.config).layers
        numbers, width = RandomNumbers(), self.config.hidden_size
        self.sources = [None if rows is None else numbers(rows, width) for rows in LENGTHS]
        self.ids = [torch.arange(7 + 10 * number, 17 + 10 * number) for number in range(len(LENGTHS))]

    def _small(self, implementation: str) -> Any:
        first = next(i for i, own in enumerate(self.kinds) if any(isinstance(kind, SourceKind) for kind in own))
        small = first_layers_model(self.decoder, {"": max(first + 1, 2)})
        set_implementation(small, implementation)
        return small

    @torch.no_grad()
    def stock(self) -> tuple[Tensor, ...]:
        """Compute each sequence alone, token by token: of more at once, stock's sdpa shows each another source."""
        small = self._small(stock_implementation(self.model, self.decoder))
        outputs = []
        for number, source in enumerate(self.sources):
            cache = DynamicCache(config=self.config)
            for place in range(_total(number)):
                given = {self.argument: source[None]} if source is not None and not place else {}
                ids = self.ids[number][None, place : place + 1]
                output = small(
                    input_ids=ids, position_ids=torch.tensor([[place]]), use_cache=True, return_dict=True,
                    **{CACHE_NAME: cache}, **given,
                )  # fmt: skip
                outputs.append(output.last_hidden_state[0])
        return torch.cat(outputs).split(1)

    @torch.no_grad()
    def paged(self) -> tuple[Tensor, ...]:
        """Compute the same over pages, several sequences in one row."""
        small = self._small(ATTENTION_NAME)
        for layer in _layers_of(small, self.kinds[: len(layer_list(small))]).values():
            layer.__class__ = mixed_class(OverSources, type(layer))
        groups, groups_of_layer = page_groups(self.model.config, CacheConfig(block_size=4), capacity=64)
        pages = Pages(groups)
        cache = RaggedCache(groups, groups_of_layer)
        sequences = [
            pages.begin(source=None if source is None else SourceRows(source, self.argument))
            for source in self.sources
        ]

        def compute(parts: Parts, step: Step) -> Tensor:
            ids = torch.cat([self.ids[number][span.start : span.stop] for number, span in parts])
            cache.step, cache.positions = step, torch.tensor([place for _, span in parts for place in span])
            assert cache.once is not None
            output = small(
                input_ids=ids[None], position_ids=cache.positions[None], use_cache=True, return_dict=True,
                **{CACHE_NAME: cache}, **cache.once.arguments,
            )  # fmt: skip
            cache.check_read()
            states: Tensor = output.last_hidden_state[0]
            return states

        return torch.cat(rows_of_passes(pages, sequences, PASSES, compute)).split(1)


def _total(number: int) -> int:
    """Return the tokens of a sequence in all passes of a trial."""
    return sum(count for parts in PASSES for each, count in parts if each == number)


def layer_list(decoder: nn.Module) -> nn.ModuleList:
    """Return the first list of modules in a decoder: its layers."""
    return next(module for module in decoder.modules() if isinstance(module, nn.ModuleList))
