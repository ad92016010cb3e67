"""The modules that get a forward of ours whatever fuse= says: they read pages, or a weight that is quantized."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transformers import PreTrainedModel

from ..config import PatchConfig
from ..fused.hf.dtype_readers import dtype_readers
from ..fused.hf.operator_models import operator_sites
from ..fused.hf.part_activations import part_activations
from ..fused.hf.recurrences import state_sites
from .attention_survey import known_operators
from .plan import FusedPlan, LinearPlan


def with_pages(model: PreTrainedModel, config: PatchConfig, fused: FusedPlan) -> FusedPlan:
    """Add what reads pages by a forward of ours, and what rounds a token by others, whatever fuse= says."""
    operators = known_operators(model)
    sites = (*state_sites(model), *operator_sites(model, operators, config))
    called = {part for site in fused.sites for part in site.module.modules()}  # by a call of ours
    sites += tuple(site for site in part_activations(model) if site.module not in called)
    taken = {site.module for site in sites}  # a module has one mixin
    kept = (site for site in fused.sites if site.module not in taken)
    return replace(fused, sites=(*kept, *sites), operators=operators)


def with_dtype_readers(model: PreTrainedModel, linears: Iterable[LinearPlan], fused: FusedPlan) -> FusedPlan:
    """Add what asks for the dtype of a weight that is quantized, which would be made in floating point for it."""
    quantized = {linear.site.module for linear in linears if linear.choice is not None}
    taken = {site.module for site in fused.sites}  # a module has one mixin
    readers = tuple(site for site in dtype_readers(model, quantized) if site.module not in taken)
    return replace(fused, sites=(*fused.sites, *readers)) if readers else fused
