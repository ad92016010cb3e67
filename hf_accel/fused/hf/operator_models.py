"""Models whose layers attend by torch's operators, and not by transformers' attention functions: Falcon, GPT-J, BLOOM
and others. In a ragged pass their own code runs, and attends over pages (attention/hf/operator_pass.py).

A model is known by a trial: with one of its layers and random numbers, passes over the tokens of several sequences in
one row give what the model gives for each sequence without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...attention import AttentionSpec, choose_backend
from ...attention.hf.operator_pass import OperatorAttention, run_over_pages
from ...cache.group import PageGroup
from ...cache.hf import RaggedCache
from ...cache.pages import Pages
from ...cache.step import TokenRange
from ...config import PatchConfig
from ...errors import UnsupportedError
from ...kernels.layouts import PositionBias
from ...models import layers_config
from ...recognition.call_form import parameter_names
from ...recognition.operator_code import attends_by_operators
from ...recognition.small_model import LAYER_INDICES, ROWS, one_layer_model
from ...recognition.trial import RandomNumbers, Tolerance, agree
from ...tensors import model_device
from ...undo.journal import Mixin, mixed_class, original_class
from ...undo.state import FUSED
from ..site import FusedSite, SiteKind

OPERATORS = SiteKind("operators", "attention modules by operators", "over pages")
BIASES = ("alibi", "position_bias")  # the names of parameters that take a bias of positions
SHORT, LONG = 6, 4096  # lengths for which masks and biases are looked at
CLOSE = Tolerance(of_largest=1e-4)
LEAST_COLUMNS = 1024  # of a bias's table


class PagedOperators(Mixin):
    """A mixin for a module that attends by operators."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns. Raises NotRaggedError in a ragged pass if its code is not known."""
        given = dict(zip(parameter_names(original_class(self).forward), args, strict=False)) | kwargs
        cache = next((value for value in given.values() if isinstance(value, RaggedCache)), None)
        if cache is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        known: OperatorAttention = self.__dict__[FUSED]
        return run_over_pages(self, known, cache, given, forward=super().forward)  # type: ignore[arg-type, misc]


@dataclass
class OperatorModel:
    """The needs of a model that attends by operators in a ragged pass.

    sites: what is known of its attention modules, by name. takes_positions: whether its forward takes position_ids.
    bias: what its attention adds to scores, for sequences of as many tokens as there are columns; None for nothing.
    """

    sites: dict[str, OperatorAttention]
    takes_positions: bool
    bias: PositionBias | None

    @property
    def specs(self) -> list[AttentionSpec]:
        """Return what each attention module asked of its backend in the trial."""
        return [site.spec for site in self.sites.values() if site.spec is not None]

    def inputs(self, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the inputs of a ragged pass for ids and positions [N]. The mask is as large as the one column that
        the RaggedCache tells of."""
        given: dict[str, Any] = {"input_ids": ids[None], "attention_mask": ids.new_ones(1, 1)}
        return given | {"position_ids": positions[None]} if self.takes_positions else given

    def bias_for(self, model: PreTrainedModel, length: int) -> PositionBias | None:
        """Return the bias for sequences of up to `length` tokens. Raises UnsupportedError if the model makes none."""
        if self.bias is None or self.bias.table.shape[1] >= length:
            return self.bias
        name, known = next(iter(self.sites.items()))
        old, by_distance = self.bias
        found = _bias_of(model, name, known, max(LEAST_COLUMNS, 2 * length))
        table = old if found is None else found.table
        columns = table.shape[1]
        kept = table[:, columns - old.shape[1] :] if by_distance else table[:, : old.shape[1]]
        if columns < length or not torch.equal(kept, old.to(kept.device)):
            raise UnsupportedError(
                f"the bias of {type(model).__name__} is for {columns} tokens, and a sequence has {length}; make "
                "prompts and max_new_tokens shorter"
            )
        self.bias = PositionBias(table.to(old.device), by_distance)
        return self.bias


def operator_model(model: PreTrainedModel) -> OperatorModel | str | None:
    """Return what is known of a model that attends by operators, or why nothing is, as one clause; None for a model
    that does not attend by operators."""
    names = [name for name, module in model.named_modules() if attends_by_operators(type(module))]  # type: ignore[arg-type]
    if not names:
        return None
    layers = getattr(layers_config(model.config), "num_hidden_layers", None)
    indices = [_layer_index(model.get_submodule(name)) for name in names]
    if model.config.is_encoder_decoder or sorted(indices) != list(range(layers or 0)):
        return f"{type(model).__name__} attends by itself in other places than its decoder's layers"
    takes_positions = "position_ids" in parameter_names(original_class(model).forward)
    found: dict[Any, OperatorAttention] = {}
    sites, bias = {}, None
    for name in names:
        kind = _kind(model.get_submodule(name))
        if kind not in found:
            made = _tried(model, name, takes_positions)
            if isinstance(made, str):
                return made
            found[kind], bias = made
        sites[name] = replace(found[kind])
    return OperatorModel(sites, takes_positions, bias)


def operator_sites(model: PreTrainedModel, known: OperatorModel | None, config: PatchConfig) -> Iterator[FusedSite]:
    """Find the modules that attend by operators, each with its backend."""
    device_type = model_device(model).type
    quantized_kv = config.cache is not None and config.cache.dtype != "auto"
    for name, site in ({} if known is None else known.sites).items():
        assert site.spec is not None
        spec = replace(site.spec, dtype=model.dtype, device_type=device_type, quantized_kv=quantized_kv)
        backend, _ = choose_backend(spec, config.attention or "auto", row_invariant=config.deterministic)
        state = replace(site, spec=spec, backend=backend)
        yield FusedSite(name, model.get_submodule(name), OPERATORS, PagedOperators, state)


def _layer_index(module: nn.Module) -> int:
    found = (vars(module).get(name) for name in LAYER_INDICES)
    return next((index for index in found if isinstance(index, int)), -1)


def _kind(module: nn.Module) -> Any:
    """Return what two modules have in common if one trial is enough for both."""
    plain = {
        name: value for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name not in LAYER_INDICES
    }  # fmt: skip
    return type(module), tuple(sorted(plain.items())), tuple(module._modules)


# -- the trial -----------------------------------------------------------------------------------------


@torch.no_grad()
def _tried(
    model: PreTrainedModel, name: str, takes_positions: bool
) -> tuple[OperatorAttention, PositionBias | None] | str:
    """Try an attention module; returns what is known of it and the model's bias, or why nothing is, as one clause."""
    module: Any = model.get_submodule(name)
    parameters = parameter_names(original_class(module).forward)
    mask = next((each for each in parameters if "mask" in each and "encoder" not in each), None)
    known = OperatorAttention(None, None, mask, next((each for each in parameters if each in BIASES), None))
    unknown = f"{type(module).__name__} computes attention in a way that is not known"
    try:
        bias = _bias_of(model, name, known, 2 * SHORT)
        shorter = _bias_of(model, name, known, SHORT)
        _bias_of(model, name, known, LONG)  # where a window in a mask shows
        bias = _aligned(shorter, bias)
        trial = OperatorModel({name: known}, takes_positions, bias)
        stock, ours = one_layer_model(model, name), one_layer_model(model, name)
        inner = ours.get_submodule(_path(model, name))
        inner.__class__ = mixed_class(PagedOperators, type(inner))
        vars(inner)[FUSED] = known
    except (UnsupportedError, Exception) as error:
        return f"{unknown} ({_first_line(error)})"
    ids = (RandomNumbers()(2, 9) * 1e3).long() % ROWS
    same = agree(
        lambda: stock(input_ids=ids, use_cache=False).logits,
        lambda: _in_passes(ours, trial, ids, (5, 1, 3)),
        CLOSE,
    )
    same = same and agree(
        lambda: _padded(stock, ids, takes_positions), lambda: stock(input_ids=ids, use_cache=False).logits, CLOSE
    )
    return (known, bias) if same and known.spec is not None else unknown


def _padded(model: Any, ids: Tensor, takes_positions: bool) -> Tensor:
    """Return the logits of ids [B, Q] with padding on the left, the last of them computed as generated tokens are."""
    padding, cache, results = ids[:, :3], DynamicCache(), []
    shown = torch.cat([padding, ids], dim=1)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = [shown.shape[1] - 2, shown.shape[1] - 1, shown.shape[1]]
    for start, end in pairwise([0, *ends]):
        inputs = {"position_ids": positions[:, start:end]} if takes_positions else {}
        output = model(
            input_ids=shown[:, start:end],
            attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
            **inputs,
        )
        results.append(output.logits)
    return torch.cat(results, dim=1)[:, padding.shape[1] :]


def _in_passes(model: Any, known: OperatorModel, ids: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Compute logits [B, Q, V] of ids [B, Q] in passes over so many tokens of each sequence."""
    group = PageGroup(
        window=None, num_blocks=4, block_size=4, growable=True, prefix_sharing=False, quantized=None
    )  # fmt: skip
    pages = Pages([group])
    cache, sequences = RaggedCache(pages.groups, [(0,)], one_column=True), [pages.begin() for _ in ids]
    results, start = [], 0
    for count in counts:
        for sequence in sequences:
            pages.append(sequence, count)
        cache.step = pages.step([TokenRange(sequence, start, count) for sequence in sequences])
        cache.bias = known.bias
        positions = torch.arange(start, start + count).repeat(len(ids))
        inputs = known.inputs(ids[:, start : start + count].flatten(), positions)
        logits = model(**inputs, past_key_values=cache, use_cache=True, return_dict=True).logits
        results.append(logits.view(len(ids), count, -1))
        start += count
    return torch.cat(results, dim=1)


def _path(model: nn.Module, name: str) -> str:
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


# -- what the model gives to its attention -------------------------------------------------------------


class _Given(Exception):
    """The arguments that an attention module was given."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("a trial ends here")
        self.given = args, kwargs


class _Catch(nn.Module):
    """Takes the place of an attention module, and raises what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Given(args, kwargs)


def _given(model: PreTrainedModel, name: str, length: int) -> dict[str, Any]:
    """Return what the model gives to an attention module for the last of `length` tokens of one sequence."""
    layer = DynamicLayer()
    layer.keys = layer.values = torch.zeros(1, 1, 1, 1).expand(1, 1, length - 1, 1)
    layer.dtype, layer.device, layer.is_initialized = torch.float32, torch.device("cpu"), True
    cache = DynamicCache()
    cache.layers = [layer]
    inputs: dict[str, Any] = {"input_ids": torch.ones(1, 1, dtype=torch.int64), "past_key_values": cache}
    if "position_ids" in parameter_names(original_class(model).forward):
        inputs["position_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    try:
        one_layer_model(model, name, _Catch())(**inputs, use_cache=True)
    except _Given as caught:
        args, kwargs = caught.given
        parameters = parameter_names(original_class(model.get_submodule(name)).forward)
        return dict(zip(parameters, args, strict=False)) | kwargs
    raise UnsupportedError("the model does not call its attention")


@torch.no_grad()
def _bias_of(model: PreTrainedModel, name: str, known: OperatorAttention, length: int) -> PositionBias | None:
    """Return what the model gives to be added to the scores of the last of `length` tokens; None for nothing.

    Sets known.masks_biased. Raises UnsupportedError if that token may not see all tokens.
    """
    given = _given(model, name, length)
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


def _aligned(shorter: PositionBias | None, longer: PositionBias | None) -> PositionBias | None:
    """Return the longer bias, with what two lengths show: whether it is one of distances."""
    if shorter is None or longer is None:
        return None
    count = shorter.table.shape[1]
    if torch.equal(shorter.table, longer.table[:, :count]):
        return longer
    if torch.equal(shorter.table, longer.table[:, -count:]):
        return longer._replace(by_distance=True)
    raise UnsupportedError("its bias depends on more than positions or distances")
