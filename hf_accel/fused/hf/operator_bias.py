"""Look at what a model gives to its attention by operators: masks, and a bias of positions; and to which modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...attention.hf.operator_pass import OperatorAttention
from ...cache.hf import TokensBefore
from ...cache.hf.cache_argument import cache_name
from ...errors import UnsupportedError
from ...kernels.layouts import PositionBias
from ...models import layers_config
from ...recognition.call_form import parameter_names
from ...recognition.small_model import LAYER_INDICES, ROWS, one_layer_model
from ...undo.journal import original_class


@dataclass(frozen=True)
class OperatorCall:
    """The form in which a model that attends by operators is called.

    takes_positions: whether its forward takes position_ids. counts: whether it counts positions by itself, from the
    tokens that its cache holds. by_interface: whether it calls transformers' attention functions, with other keys and
    values than its cache returns. without_cache: whether it takes no cache, so that transformers' loop computes all
    tokens again for each new one. whole_prompts: whether the tokens of a prompt see all of it.
    """

    takes_positions: bool
    counts: bool = False
    by_interface: bool = False
    without_cache: bool = False
    whole_prompts: bool = False


class _Given(Exception):
    """The arguments that an attention module was given."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("a trial ends here")
        self.given = args, kwargs


class _Catch(nn.Module):
    """Takes the place of an attention module, and raises what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Given(args, kwargs)


class _LongCache(DynamicCache):
    """A cache that holds so many tokens that a table of positions may be too small: code that counts hears of none."""

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return TokensBefore(torch.zeros(1, dtype=torch.int64))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        layer: Any = self.layers[0]
        return int(layer.get_seq_length())


@torch.no_grad()
def refuse_hidden(
    model: PreTrainedModel, site: tuple[str, OperatorAttention], call: OperatorCall, length: int
) -> None:
    """Raise UnsupportedError if the tokens of a prompt of `length` do not all see each other. site: see bias_given.

    A model that takes no positions is asked about a prompt as long as the tables of a small model.
    """
    name, known = site
    inputs = {"input_ids": torch.ones(1, length if call.takes_positions else ROWS, dtype=torch.int64)}
    if call.takes_positions:
        inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
    given = _caught(model, name, inputs, use_cache=False)
    mask = given.get(known.mask) if known.mask else None
    if isinstance(mask, Tensor) and bool((mask != mask.flatten()[0]).any()):
        raise UnsupportedError("its mask hides tokens of a prompt")


def _given(model: PreTrainedModel, name: str, call: OperatorCall, length: int) -> dict[str, Any]:
    """Return what the model gives to an attention module for the last of `length` tokens of one sequence."""
    layer: Any = DynamicLayer()
    layer.keys = layer.values = torch.zeros(1, 1, 1, 1).expand(1, 1, length - 1, 1)
    layer.dtype, layer.device, layer.is_initialized = torch.float32, torch.device("cpu"), True
    cache = _LongCache() if call.counts else DynamicCache()
    cache.layers = [layer]
    inputs: dict[str, Any] = {"input_ids": torch.ones(1, 1, dtype=torch.int64), cache_name(model): cache}
    if call.counts:
        inputs["attention_mask"] = torch.ones(1, length, dtype=torch.int64)
    if call.takes_positions:
        inputs["position_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    return _caught(model, name, inputs, use_cache=True)


def _caught(model: PreTrainedModel, name: str, inputs: dict[str, Any], *, use_cache: bool) -> dict[str, Any]:
    """Return what the model gives to an attention module for these inputs."""
    try:
        one_layer_model(model, name, _Catch())(**inputs, use_cache=use_cache)
    except _Given as caught:
        args, kwargs = caught.given
        parameters = parameter_names(original_class(model.get_submodule(name)).forward)
        return dict(zip(parameters, args, strict=False)) | kwargs
    raise UnsupportedError("the model does not call its attention")


@torch.no_grad()
def bias_given(
    model: PreTrainedModel, site: tuple[str, OperatorAttention], call: OperatorCall, length: int
) -> PositionBias | None:
    """Return what the model gives to be added to the scores of the last of `length` tokens; None for nothing.

    site: the name of an attention module, and what is known of it, of which masks_biased is set. Raises
    UnsupportedError if that token may not see all tokens.
    """
    name, known = site
    given = _given(model, name, call, length)
    mask, bias = (given.get(name) if name else None for name in (known.mask, known.bias))
    numbers = None
    if isinstance(mask, Tensor) and mask.is_floating_point():
        if bool((mask < -1e4).any()):
            raise UnsupportedError("its mask hides more than the tokens behind a query")
        known.masks_biased = bool(mask.count_nonzero())
        numbers = mask if known.masks_biased else None
    elif isinstance(mask, Tensor) and bool((mask != mask.flatten()[0]).any()):
        raise UnsupportedError("its mask hides more than the tokens behind a query")
    if numbers is None and isinstance(bias, Tensor):
        numbers = bias
    if numbers is None:
        return None
    table = numbers.select(-2, numbers.shape[-2] - 1).reshape(-1, numbers.shape[-1])[:, -length:].float()
    return PositionBias(table.contiguous(), by_distance=False)


def aligned_bias(shorter: PositionBias | None, longer: PositionBias | None) -> PositionBias | None:
    """Return the longer bias, with what two lengths show: whether it is one of distances."""
    if shorter is None or longer is None:
        return None
    count = shorter.table.shape[1]
    if torch.equal(shorter.table, longer.table[:, :count]):
        return longer
    if torch.equal(shorter.table, longer.table[:, -count:]):
        return longer._replace(by_distance=True)
    raise UnsupportedError("its bias depends on more than positions or distances")


# -- which modules attend ------------------------------------------------------------------------------


def layer_index(module: nn.Module) -> int:
    found = (vars(module).get(name) for name in LAYER_INDICES)
    return next((index for index in found if isinstance(index, int)), -1)


def one_in_each_layer(model: PreTrainedModel, names: list[str], call: OperatorCall) -> bool:
    """Return whether as many modules attend as the decoder has layers, one in each."""
    layers = getattr(layers_config(model.config), "num_hidden_layers", None)
    if call.without_cache:
        return len(names) == layers
    return sorted(layer_index(model.get_submodule(name)) for name in names) == list(range(layers or 0))


@torch.no_grad()
def called_for_tokens(model: PreTrainedModel, names: list[str]) -> Iterator[str]:
    """Yield the names of modules that tokens alone are given to. Others wait for an encoder's output.

    Modules that stand in the same place of their layers are tried once.
    """
    called: dict[str, bool] = {}
    for name in names:
        place = place_of(name)
        if place not in called:
            called[place] = _is_called(model, name)
        if called[place]:
            yield name


def place_of(name: str) -> str:
    """Return the place of a module in its layer, whichever layer that is."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _is_called(model: PreTrainedModel, name: str) -> bool:
    """Return whether the model calls an attention module for tokens alone, or cannot be asked."""
    try:
        one_layer_model(model, name, _Catch())(input_ids=torch.ones(1, 1, dtype=torch.int64), use_cache=False)
    except Exception:  # of the module, or of code that is not known
        return True
    return False


def path_in_layer(model: nn.Module, name: str) -> str:
    """Return the name of a module in the model of its layer alone: lists on the way have one module."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if isinstance(model.get_submodule(".".join(parts[:place])), nn.ModuleList):
            parts = [*parts[:place], "0", *parts[place + 1 :]] if part == "0" else parts
    inside, walked = [], model
    for part in parts:
        inside.append("0" if isinstance(walked, nn.ModuleList) else part)
        walked = walked.get_submodule(part)
    return ".".join(inside)
