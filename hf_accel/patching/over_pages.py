"""Plans what a model that reads pages needs, or quantized weights: how its decoder is called, and modules with a
forward of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from ..attention.hf.stock import EAGER, stock_implementation
from ..config import PatchConfig
from ..fused.hf.dtype_readers import dtype_readers
from ..fused.hf.mask_readers import mask_readers
from ..fused.hf.operator_models import OperatorModel, operator_sites
from ..fused.hf.own_masks import own_masks
from ..fused.hf.part_activations import part_activations
from ..fused.hf.source_layers import source_argument
from ..generation.hf.drafting import refuse_drafts
from ..generation.hf.generation_state import STOCK_FORM, DecoderForm
from ..generation.hf.given_decoder import GivenDecoder, given_decoder
from ..generation.hf.model_runner import counts_positions
from ..generation.hf.prompts import own_methods, text_form
from .attention_survey import (
    attends_nowhere,
    attention_sites,
    cache_refusal,
    known_operators,
    loop_refusal,
    pages_refusal,
)
from .decoder_survey import (
    counts_padding,
    generating_part,
    leaves_cache_out,
    most_tokens,
    reads_ahead,
    reads_padding,
    rows_hidden_in,
    sees_whole_prompts,
)
from .plan import FusedPlan
from .sequence_survey import state_sites
from .weight_plan import WeightPlan


@dataclass(frozen=True)
class InnerGenerator:
    """A part of a model whose generate() the model's own generate() calls.

    stock_cache, stock_loop, form: see Plan, of this part. given: the GivenDecoder around it; None for a part that is
    given no rows to attend to, or in a way that is not known.
    """

    name: str
    stock_cache: str | None
    stock_loop: str | None
    form: DecoderForm
    given: GivenDecoder | None = None


def inner_generator(model: PreTrainedModel, config: PatchConfig) -> InnerGenerator | None:
    """Return the part whose generate() that of the model's class calls; None if it calls none, or several."""
    found = generating_part(model)
    if found is None:
        return None
    name, part = found
    if config.speculative is not None:
        refuse_drafts(model, config.speculative, f"its generate() calls that of {name!r}")
    given = given_decoder(model, part)
    planned = [_inner(name, each, config) for each in (given, part) if each is not None]
    return next((each for each in planned if each.stock_loop is None), planned[-1])


def no_pages(model: PreTrainedModel, config: PatchConfig) -> str | None:
    """Return why generate cannot use a paged cache of these settings, as one clause; None if it can."""
    if config.attention is None:
        return "attention=None leaves attention stock"
    return cache_refusal(model) or pages_refusal(model, config.cache)


def _inner(name: str, part: Any, config: PatchConfig) -> InnerGenerator:
    """Return what is planned of a part, or of the GivenDecoder around it."""
    stock_cache = "cache=None" if config.cache is None else no_pages(part, config)
    stock_loop = stock_cache or loop_refusal(part)
    given = part if isinstance(part, GivenDecoder) else None
    return InnerGenerator(name, stock_cache, stock_loop, decoder_form(part, stock_cache, stock_loop), given)


def decoder_form(model: PreTrainedModel, stock_cache: str | None, stock_loop: str | None) -> DecoderForm:
    """Return how ragged passes call the model's decoder.

    stock_cache, stock_loop: why the model has no pages, and no ragged passes; None if it has.
    """
    if stock_cache is not None:
        return STOCK_FORM
    prepares = stock_loop is None and bool(own_methods(model))
    texts = text_form(model) if prepares else None
    operators = known_operators(model)
    whole = stock_loop is None and _sees_whole_prompts(model, operators)
    return DecoderForm(
        prepares=prepares,
        planes=None if texts is None else texts.planes,
        reads_texts=whole or (texts is not None and not texts.is_ids),
        hides_rows=rows_hidden_in(model) if model.config.is_encoder_decoder else None,
        reads_ahead=model.config.is_encoder_decoder and reads_ahead(model),
        most_tokens=most_tokens(model) if model.config.is_encoder_decoder else None,
        needs_no_cache=model.config.is_encoder_decoder and leaves_cache_out(model),
        counts_padding=stock_loop is None and _counts_padding(model, operators),
        operators=operators,
        makes_masks=texts is not None and texts.makes_masks,
        uncounted=None if texts is None else texts.uncounted,
        whole_prompts=whole,
        reads_padding=attends_nowhere(model) and reads_padding(model),
        source=None if stock_loop is not None else source_argument(model),
    )


def _sees_whole_prompts(model: PreTrainedModel, operators: OperatorModel | None) -> bool:
    if operators is not None:
        return operators.call.whole_prompts
    sites = attention_sites(model, quantized_kv=False)  # a trial of causal ones would show nothing
    return not all(getattr(site.module, "is_causal", True) for site in sites) and sees_whole_prompts(model)


def _counts_padding(model: PreTrainedModel, operators: OperatorModel | None) -> bool:
    if operators is not None:
        return operators.counts_padding
    return counts_positions(model) and counts_padding(model)


def with_pages(model: PreTrainedModel, config: PatchConfig, fused: FusedPlan, form: DecoderForm) -> FusedPlan:
    """Add what reads pages by a forward of ours, and what rounds a token by others, whatever fuse= says."""
    sites = (*state_sites(model), *operator_sites(model, form.operators, config))
    sites += tuple(own_masks(model))
    called = {part for site in fused.sites for part in site.module.modules()}  # by a call of ours
    sites += tuple(site for site in part_activations(model) if site.module not in called)
    taken = {site.module for site in sites}  # a module has one mixin
    kept = (site for site in fused.sites if site.module not in taken)
    return replace(fused, sites=(*kept, *sites))


def with_given(config: PatchConfig, fused: FusedPlan, inner: InnerGenerator | None) -> FusedPlan:
    """Add what reads pages in a part that is given rows to attend to, by its names in the model."""
    if inner is None or inner.given is None:
        return fused
    own = {site.module for site in fused.sites}
    added = with_pages(inner.given, config, fused, inner.form).sites
    sites = [
        site if site.module in own else replace(site, name=inner.name + site.name.removeprefix("decoder"))
        for site in added
    ]
    return replace(fused, sites=tuple(sites))


def with_readers(model: PreTrainedModel, linears: Iterable[WeightPlan], fused: FusedPlan, *, ours: bool) -> FusedPlan:
    """Add what asks for the dtype of a weight that is quantized, which would be made in floating point for it.

    ours: whether the model's attention, and with it its masks, are ours; then what reads masks is added too.
    """
    quantized = {linear.site.module for linear in linears if linear.choice is not None}
    taken = {site.module for site in fused.sites}  # a module has one mixin
    eager = ours and stock_implementation(model, model) == EAGER
    found = (*dtype_readers(model, quantized), *(mask_readers(model) if eager else ()))
    readers = tuple(site for site in found if site.module not in taken)
    return replace(fused, sites=(*fused.sites, *readers)) if readers else fused
