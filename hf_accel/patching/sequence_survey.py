"""Look for layers whose own code can compute each sequence of a pass over pages, where no forward of ours knows them.

They are found by their code, and known by a trial: the first layers of the model, on random numbers, give for passes
over the tokens of several sequences in one row what the model gives for each sequence over transformers' own cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.hf import ATTENTION_NAME
from ..attention.hf.forward import register
from ..attention.hf.stock import set_implementation, settable_parts, stock_implementation
from ..cache.hf import model_kinds
from ..cache.kinds import CompressedKeys, ConvolutionInputs, IndexKeys, RecurrentStates, SourceKind
from ..cache.kinds.state_sizes import WITHOUT_LIMITS
from ..cache.pass_rows import Passes
from ..errors import UnsupportedError
from ..fused.hf.compressed import compressed_sites
from ..fused.hf.counted_positions import counted_sites
from ..fused.hf.indexers import indexer_sites, is_known_indexer
from ..fused.hf.operator_models import OperatorModel, operator_model
from ..fused.hf.own_code import OWN_CODE, OwnCode, PagedSequences, own_code_modules
from ..fused.hf.source_layers import is_source_attention, source_layer_sites
from ..fused.kept_states import Recorded
from ..fused.site import FusedSite
from ..models import answer_once, is_within
from ..recognition.code import code_of
from ..recognition.small_model import first_layers_model
from ..recognition.trial import agree
from ..recurrent.hf.convolutions import convolution_sites, is_known_convolution
from ..recurrent.hf.own_caches import own_cache_sites
from ..recurrent.hf.recurrences import known_recurrence, recurrence_sites
from ..undo.journal import mixed_class, original_class
from ..undo.state import FUSED, STOCK_ATTRIBUTE
from .decoder_survey import CLOSE, PADDING
from .tried_passes import PARTED, PASSES, paged_together, stock_alone

MOST_LAYERS = 24  # of a trial: each kind of layer has to be among the first ones


def state_sites(model: PreTrainedModel) -> Iterator[FusedSite]:
    """Find the layers of a model whose pages are read by no other forward than ours, whatever fuse= says."""
    own = own_code(model)
    yield from (
        FusedSite(name, model.get_submodule(name), OWN_CODE, PagedSequences, known) for name, known in own.items()
    )
    yield from (site for site in _known_sites(model) if not is_own_code(model, site.name))


def _known_sites(model: PreTrainedModel) -> Iterator[FusedSite]:
    kinds = model_kinds(model.config)
    yield from counted_sites(model)
    yield from own_cache_sites(model)
    if kinds.has(IndexKeys):
        yield from indexer_sites(model)
    if kinds.has(ConvolutionInputs, RecurrentStates):
        yield from convolution_sites(model)
        yield from recurrence_sites(model)
    if kinds.has(CompressedKeys):
        yield from compressed_sites(model)
    if kinds.has(SourceKind):
        yield from source_layer_sites(model)


def kept_states(model: PreTrainedModel) -> dict[nn.Module, Recorded]:
    """Return what is known of the modules of a model that keep something else than keys and values in pages."""
    return {site.module: site.state for site in state_sites(model) if isinstance(site.state, Recorded)}


def is_own_code(model: PreTrainedModel, name: str) -> bool:
    """Return whether a module with this name is in one whose own code computes each sequence."""
    return any(is_within(name, outer) for outer in own_code(model))


def own_code(model: PreTrainedModel) -> dict[str, OwnCode]:
    """Return the modules whose own code computes each sequence of a pass, by name; none unless a trial shows that it
    gives what transformers does.
    """
    return answer_once(_own_code, model)


def _own_code(model: PreTrainedModel) -> dict[str, OwnCode]:
    if model.config.is_encoder_decoder or not model.can_generate() or model not in settable_parts(model):
        return {}
    modules = [each for each in own_code_modules(model) if _is_unknown(model, each[1])]
    if not modules or isinstance(answer_once(operator_model, model), OperatorModel):
        return {}
    if any(_has_limits(part) for _, module, _ in modules for part in module.modules()):
        return {}
    try:
        model_kinds(model.config)
    except UnsupportedError:
        return {}
    # What one layer selects, or keeps, others may be given: they compute as many tokens in one call.
    selects = any(each.selects for _, _, each in modules)
    known = {name: replace(each, selects=selects and each.attends) for name, _, each in modules}
    whole = {name: replace(each, whole=each.attends) for name, each in known.items()}
    tried = (known, whole) if model_kinds(model.config).has(IndexKeys) else (known,)
    return next(filter(None, (_tried(model, found) for found in tried)), {})


def _is_unknown(model: PreTrainedModel, module: nn.Module) -> bool:
    """Return whether no forward of ours computes a module over pages, for what it or a part of it does."""
    if known_recurrence(module) is not None or is_known_convolution(module):
        return False
    parts = (each for each in module.modules() if not is_known_indexer(each) and not is_source_attention(model, each))
    codes = map(code_of, parts)
    return any(code.refusal is not None or code.unpaged is not None for code in codes)


def _has_limits(module: Any) -> bool:
    """Return whether a module's steps have limits, which transformers keeps in prompts alone. A trial might not reach
    them.
    """
    limits = getattr(module, "time_step_limit", None)
    return limits is not None and tuple(limits) != WITHOUT_LIMITS


def _tried(model: PreTrainedModel, found: dict[str, OwnCode]) -> dict[str, OwnCode] | None:
    """Return the modules with what a trial says of padding in front of tokens; None if passes over pages differ, or if
    transformers computes a token of a prompt otherwise than one by itself, which pages may need.
    """
    register()
    count = _layers_to_try(model, found)
    if count is None:
        return None
    try:
        stock, ours = (_small(model, count) for _ in range(2))
        set_implementation(stock, stock_implementation(model, model.get_decoder()))
        set_implementation(ours, ATTENTION_NAME)
        _mix(model, ours, found)
    except Exception:  # code that is not known may do anything
        return None
    ids = torch.arange(7, 14)[None]
    alone = partial(stock_alone, model, tried=stock)
    paged = partial(paged_together, model, PASSES, tried=ours)

    def dense(tried: Any) -> Tensor:
        logits: Tensor = tried(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits

    def joined(passes: Passes) -> Tensor:
        return torch.cat(alone(passes, padding=0))

    pairs = (
        (partial(alone, padding=0), paged), (partial(dense, stock), partial(dense, ours)),
        (partial(joined, PASSES), partial(joined, PARTED)),
    )  # fmt: skip
    if not all(agree(theirs, others, CLOSE) for theirs, others in pairs):
        return None
    if agree(partial(alone, padding=PADDING), paged, CLOSE):
        return found
    keeps = model_kinds(model.config).has(RecurrentStates)
    return {name: replace(known, moves_from=0, computes_padding=keeps) for name, known in found.items()}


def _layers_to_try(model: PreTrainedModel, found: dict[str, OwnCode]) -> int | None:
    """Return of how many first layers a trial has one of each kind; None if they are too many."""
    decoder: Any = model.get_decoder()
    layers = next(each for each in decoder.children() if isinstance(each, nn.ModuleList))
    names = {module: name for name, module in model.named_modules()}
    kinds: dict[Any, int] = {}
    for number, layer in enumerate(layers):
        own = [name for name in found if is_within(name, names[layer])]
        parts = tuple(type(each) for each in layer.modules())
        kinds.setdefault((parts, tuple(name.removeprefix(names[layer]) for name in own), _settings(layer)), number)
    count = 1 + max(kinds.values())
    return count if count <= MOST_LAYERS else None


def _settings(layer: nn.Module) -> Any:
    """Return the settings of a layer and of its parts by which two layers of the same classes differ."""
    plain = (bool, str, type(None))
    return tuple(
        tuple(sorted((key, str(value)) for key, value in vars(each).items() if isinstance(value, plain)))
        for each in layer.modules()
    )


def _small(model: PreTrainedModel, count: int) -> Any:
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    return first_layers_model(model, {name: count}, token=pad, plain=True)


def _mix(model: PreTrainedModel, small: Any, found: dict[str, OwnCode]) -> None:
    """Give the modules of a small copy the forwards that those of the model would have over pages."""
    sites: list[tuple[str, Any, Any]] = [(name, PagedSequences, known) for name, known in found.items()]
    taken = [name for name, _, _ in sites]
    for site in _known_sites(model):
        if not any(is_within(site.name, name) for name in taken):
            sites.append((site.name, site.mixin, site.state))
    parts = dict(small.named_modules())
    for name, module in small.named_modules():
        if code_of(module).attends:  # calls that are not known go to the function that it has without us
            vars(module)[STOCK_ATTRIBUTE] = stock_implementation(model, model.get_submodule(name))
    for name, mixin, state in sites:
        if name in parts:
            module = parts[name]
            module.__class__ = mixed_class(mixin, original_class(module))
            vars(module)[FUSED] = copy.deepcopy(state)
