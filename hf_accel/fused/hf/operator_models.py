"""Models whose layers attend by torch's operators, and not by transformers' attention functions: Falcon, GPT-J, BLOOM
and others; and those whose layers call these functions with other keys and values than the cache returns: JetMoe and
DiffLlama. In a ragged pass their own code runs, and attends over pages (attention/hf/operator_pass.py).

A model is known by a trial: with one of its layers and random numbers, passes over the tokens of several sequences in
one row give what the model gives for each sequence without a cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ...attention import AttentionSpec, choose_backend
from ...attention.hf.forward import register
from ...attention.hf.operator_call import run_over_pages
from ...attention.hf.operator_pass import OperatorAttention
from ...attention.hf.stock import ATTENTION_NAME, refused_attention, set_implementation, stock_implementation
from ...cache.group import PageGroup
from ...cache.hf import RaggedCache, RaggedEncoderDecoderCache, TokensBefore, model_kinds
from ...cache.hf.cache_argument import cache_name
from ...cache.pages import Pages
from ...cache.step import TokenRange
from ...config import PatchConfig
from ...errors import UnsupportedError
from ...kernels.layouts import PositionBias
from ...models import modules_by_name, padding_token
from ...recognition.cache_code import CACHE_NAMES
from ...recognition.call_form import parameter_names
from ...recognition.code import code_of
from ...recognition.joined_code import attends_to_joined_keys
from ...recognition.operator_code import attends_by_operators, attends_to_changed_keys, attends_without_cache
from ...recognition.small_model import LAYER_INDICES, ROWS, one_layer_model
from ...recognition.trial import RandomNumbers, Tolerance, agree
from ...tensors import model_device
from ...undo.journal import Mixin, mixed_class, original_class
from ...undo.state import FUSED
from ..site import FusedSite, SiteKind
from .operator_bias import (
    OperatorCall,
    aligned_bias,
    bias_given,
    called_for_tokens,
    layer_index,
    one_in_each_layer,
    path_in_layer,
    place_of,
    refuse_hidden,
)
from .running_pass import RunningPass

OPERATORS = SiteKind("operators", "attention modules by operators", "over pages")
BIASES = ("alibi", "position_bias")  # the names of parameters that take a bias of positions
SHORT, LONG = 6, 4096  # lengths for which masks and biases are looked at
CLOSE = Tolerance(of_largest=1e-4)
COUNTS = 5, 1, 3  # the tokens of each sequence in the passes of a trial
PADDING = 3  # the columns in front of prompts in a trial
LEAST_COLUMNS = 1024  # of a bias's table
RAGGED = RaggedCache, RaggedEncoderDecoderCache


class PagedOperators(Mixin):
    """A mixin for a module that attends by operators."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns. Raises NotRaggedError in a ragged pass if its code is not known."""
        given = dict(zip(parameter_names(original_class(self).forward), args, strict=False)) | kwargs
        known: OperatorAttention = self.__dict__[FUSED]
        cache = next((value for value in given.values() if isinstance(value, RAGGED)), None)
        if known.layer is not None:  # its code takes none
            running = RunningPass.now()
            cache = None if running is None else running.cache
        if cache is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return run_over_pages(self, known, cache, given, forward=super().forward)  # type: ignore[arg-type, misc]


@dataclass
class OperatorModel:
    """The needs of a model that attends by operators in a ragged pass.

    sites: what is known of its attention modules, by name. call: how it is called.
    bias: what its attention adds to scores, for sequences of as many tokens as there are columns; None for nothing.
    counts_padding: whether it counts positions by itself, and padding in front of a prompt with them.
    """

    sites: dict[str, OperatorAttention]
    call: OperatorCall
    bias: PositionBias | None = None
    counts_padding: bool = False

    @property
    def specs(self) -> list[AttentionSpec]:
        """Return what each attention module asked of its backend in the trial."""
        return [site.spec for site in self.sites.values() if site.spec is not None]

    def inputs(self, cache: RaggedCache, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the inputs of a ragged pass for ids and positions [N]. The mask is as large as the one column that
        the RaggedCache tells of. Code that counts positions by itself learns them from this cache.
        """
        cache.before = TokensBefore(positions) if self.call.counts else None
        given: dict[str, Any] = {"input_ids": ids[None]}
        if not self.call.by_interface:
            given["attention_mask"] = ids.new_ones(1, 1)
        return given | {"position_ids": positions[None]} if self.call.takes_positions else given

    def bias_for(self, model: PreTrainedModel, length: int) -> PositionBias | None:
        """Return the bias for sequences of up to `length` tokens. Raises UnsupportedError if the model makes none."""
        if self.bias is None or self.bias.table.shape[1] >= length:
            return self.bias
        old, by_distance = self.bias
        found = bias_given(model, next(iter(self.sites.items())), self.call, max(LEAST_COLUMNS, 2 * length))
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


def attends_alone(known: OperatorModel | None) -> bool:
    """Return whether a model attends by torch's operators, and calls no attention function of transformers."""
    return known is not None and not known.call.by_interface


def operator_model(model: PreTrainedModel, whole_prompts: bool = False) -> OperatorModel | str | None:
    """Return what is known of a model that attends by operators, or why nothing is, as one clause; None for a model
    that does not attend by operators. whole_prompts: see OperatorCall.
    """
    names = [name for name, module in modules_by_name(model) if attends_by_operators(type(module))]  # type: ignore[arg-type]
    by_interface = without_cache = False
    if not names:
        names = [name for name, module in modules_by_name(model) if attends_to_changed_keys(module)]
        by_interface = bool(names)
    takes_cache = CACHE_NAMES & {*parameter_names(original_class(model).forward)}
    if not names and model.can_generate() and not takes_cache:
        names = [name for name, module in modules_by_name(model) if attends_without_cache(type(module))]  # type: ignore[arg-type]
        without_cache = bool(names)
    if not names:
        return None
    takes_positions = "position_ids" in parameter_names(original_class(model).forward)
    call = OperatorCall(
        takes_positions, by_interface=by_interface, without_cache=without_cache, whole_prompts=whole_prompts
    )
    elsewhere = f"{type(model).__name__} attends by itself in other places than its decoder's layers"
    if not one_in_each_layer(model, names, call):
        names = list(called_for_tokens(model, names))
    if not one_in_each_layer(model, names, call):
        return elsewhere
    known = _known(model, names, call)
    if takes_positions or isinstance(known, OperatorModel):
        return known
    counting = _known(model, names, replace(call, counts=True))
    return counting if isinstance(counting, OperatorModel) else known


def decoder_operators(model: PreTrainedModel) -> OperatorModel | None:
    """Return the modules of the decoder of an encoder-decoder that attend by operators, before they are tried.

    Those that call transformers' attention functions are given ours in a ragged pass alone. None if the attention of
    the model can be ours, other modules than those of layers attend, or not each layer has the same of them.
    """
    decoder = {*model.get_decoder().modules()}
    if refused_attention(model) is None and not any(map(attends_to_joined_keys, decoder)):
        return None
    sites, indices = {}, defaultdict(list)  # indices of layers, by the place of modules in them
    for name, module in modules_by_name(model):
        code = code_of(module)
        if module in decoder and (code.attends or code.refusal is not None):
            if not code.attends and not attends_by_operators(type(module)):  # type: ignore[arg-type]
                return None
            implementation = stock_implementation(model, module) if code.attends else None
            sites[name] = replace(_untried(module), implementation=implementation)
            indices[place_of(name)].append(layer_index(module))
    layers = list(range(len(model_kinds(model.config).layers)))
    if not sites or any(sorted(found) != layers for found in indices.values()):
        return None
    return OperatorModel(sites, OperatorCall(takes_positions=False))


def read_by_operators(model: nn.Module, known: OperatorModel) -> None:
    """Let the modules that attend by operators read pages in a model that was made for a trial."""
    modules = dict(model.named_modules())
    for name, site in known.sites.items():
        if name in modules:
            modules[name].__class__ = mixed_class(PagedOperators, type(modules[name]))
            modules[name].__dict__[FUSED] = site


def with_tried(model: PreTrainedModel, known: OperatorModel) -> OperatorModel | None:
    """Return what is known of all layers after a trial of the first ones; None if others may differ from them."""
    kinds = {name: (place_of(name), _kind(model.get_submodule(name))) for name in known.sites}
    tried = {kinds[name]: site for name, site in known.sites.items() if site.spec is not None}
    if not tried.keys() >= {*kinds.values()}:
        return None
    return replace(known, sites={name: replace(tried[kind]) for name, kind in kinds.items()})


def _known(model: PreTrainedModel, names: list[str], call: OperatorCall) -> OperatorModel | str:
    """Return what is known of a model whose modules with these names attend, or why nothing is, as one clause."""
    found: dict[Any, OperatorModel] = {}
    sites = {}
    for number, name in enumerate(names):
        kind = _kind(model.get_submodule(name))
        if kind not in found:
            made = _tried(model, name, call)
            if isinstance(made, str):
                return made
            found[kind] = made
        site = next(iter(found[kind].sites.values()))
        sites[name] = replace(site, layer=number if call.without_cache else None)
    counts_padding = {each.counts_padding for each in found.values()}
    if len(counts_padding) > 1:
        return f"layers of {type(model).__name__} differ in what they make of padding"
    return replace(next(iter(found.values())), sites=sites)


def operator_sites(model: PreTrainedModel, known: OperatorModel | None, config: PatchConfig) -> Iterator[FusedSite]:
    """Find the modules that attend by operators, each with its backend."""
    device_type = model_device(model).type
    quantized_kv = config.cache is not None and config.cache.dtype != "auto"
    for name, site in ({} if known is None else known.sites).items():
        if site.spec is None:
            continue  # nothing can be tried before the weights are there
        spec = replace(site.spec, dtype=model.dtype, device_type=device_type, quantized_kv=quantized_kv)
        backend, _ = choose_backend(spec, config.attention or "auto", row_invariant=config.deterministic)
        state = replace(site, spec=spec, backend=backend)
        yield FusedSite(name, model.get_submodule(name), OPERATORS, PagedOperators, state)


def _kind(module: nn.Module) -> Any:
    """Return what two modules have in common if one trial is enough for both."""
    plain = {
        name: value for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name not in LAYER_INDICES
    }  # fmt: skip
    return type(module), tuple(sorted(plain.items())), tuple(module._modules)


# -- the trial -----------------------------------------------------------------------------------------


@torch.no_grad()
def _tried(model: PreTrainedModel, name: str, call: OperatorCall) -> OperatorModel | str:
    """Try an attention module; returns what is known of the model with it alone, or why nothing is, as one clause."""
    module: Any = model.get_submodule(name)
    known = _untried(module)
    unknown = f"{type(module).__name__} computes attention in a way that is not known"
    known.layer, known.unmasked = 0 if call.without_cache else None, call.whole_prompts
    trial = OperatorModel({name: known}, call)
    try:
        bias, shorter = (bias_given(model, (name, known), call, length) for length in (2 * SHORT, SHORT))
        bias_given(model, (name, known), call, LONG)  # where a window in a mask shows
        if call.whole_prompts:
            refuse_hidden(model, (name, known), call, LONG)
        trial.bias = aligned_bias(shorter, bias)
        pad = padding_token(model)
        stock, ours = (one_layer_model(model, name, token=pad) for _ in range(2))
        if call.by_interface:
            register()
            set_implementation(ours, ATTENTION_NAME)
        read_by_operators(ours, OperatorModel({path_in_layer(model, name): known}, call))
    except (UnsupportedError, Exception) as error:
        return f"{unknown} ({_first_line(error)})"
    ids = (RandomNumbers()(2, 9) * 1e3).long() % ROWS
    if call.counts:  # code may count no token that pads
        ids[:, 1] = pad
    no_padding = ids[:, :0]

    def expected() -> Any:
        return _padded(stock, no_padding, ids, call) if call.whole_prompts else stock(ids, use_cache=False).logits

    if not agree(expected, lambda: _in_passes(ours, trial, ids), CLOSE) or known.spec is None:
        return unknown
    padding = torch.full((2, PADDING), pad) if call.counts else ids[:, :PADDING]
    if agree(lambda: _padded(stock, padding, ids, call), expected, CLOSE):
        return trial
    trial.counts_padding = call.counts and agree(
        lambda: _padded(stock, padding, ids, call), lambda: _in_passes(ours, trial, ids, first=PADDING), CLOSE
    )
    return trial if trial.counts_padding else unknown


def _untried(module: Any) -> OperatorAttention:
    """Return what the code of a module shows before it is tried."""
    parameters = parameter_names(original_class(module).forward)
    mask = next((each for each in parameters if "mask" in each and "encoder" not in each), None)
    return OperatorAttention(None, None, mask, next((each for each in parameters if each in BIASES), None))


def _padded(model: Any, padding: Tensor, ids: Tensor, call: OperatorCall) -> Tensor:
    """Return the logits of ids [B, Q] with padding on the left, the last of them computed as generated tokens are."""
    cache, results = DynamicCache(), []
    shown = torch.cat([padding, ids], dim=1)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = [shown.shape[1]] if call.without_cache else [shown.shape[1] - left for left in (2, 1, 0)]
    for start, end in pairwise([0, *ends]):
        inputs = {"position_ids": positions[:, start:end]} if call.takes_positions else {}
        output = model(
            input_ids=shown[:, start:end],
            attention_mask=mask[:, :end],
            use_cache=True,
            **{cache_name(model): cache},
            **inputs,
        )
        results.append(output.logits)
    return torch.cat(results, dim=1)[:, padding.shape[1] :]


def _in_passes(model: Any, known: OperatorModel, ids: Tensor, *, first: int = 0) -> Tensor:
    """Compute logits [B, Q, V] of ids [B, Q] in passes over a few tokens of each sequence.

    first: the position of the first token of each.
    """
    group = PageGroup(
        window=None, num_blocks=4, block_size=4, growable=True, prefix_sharing=False, quantized=None
    )  # fmt: skip
    pages = Pages([group])
    cache = RaggedCache(pages.groups, [(0,)], one_column=not known.call.by_interface)
    sequences = [pages.begin() for _ in ids]
    results, start = [], 0
    counts = (ids.shape[1] - 2, 1, 1) if known.call.whole_prompts else COUNTS
    for count in counts:
        for sequence in sequences:
            pages.append(sequence, count)
        seen = [count] * count if known.call.whole_prompts and not start else None
        cache.step = pages.step([TokenRange(sequence, start, count, seen=seen) for sequence in sequences])
        cache.bias = known.bias
        positions = torch.arange(first + start, first + start + count).repeat(len(ids))
        inputs = known.inputs(cache, ids[:, start : start + count].flatten(), positions)
        with RunningPass(cache).running():
            logits = model(**inputs, **{cache_name(model): cache}, use_cache=True, return_dict=True).logits
        results.append(logits.view(len(ids), count, -1))
        start += count
    return torch.cat(results, dim=1)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
