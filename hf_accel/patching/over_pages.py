"""The modules that get a forward of ours where a model reads pages, whatever fuse= says."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from ..config import PatchConfig
from ..fused.hf.operator_models import operator_sites
from ..fused.hf.part_activations import part_activations
from ..fused.hf.recurrences import state_sites
from .attention_survey import known_operators
from .plan import FusedPlan


def with_pages(model: PreTrainedModel, config: PatchConfig, fused: FusedPlan) -> FusedPlan:
    """Add what reads pages by a forward of ours, and what rounds a token by others, whatever fuse= says."""
    operators = known_operators(model)
    sites = (*state_sites(model), *operator_sites(model, operators, config))
    called = {part for site in fused.sites for part in site.module.modules()}  # by a call of ours
    sites += tuple(site for site in part_activations(model) if site.module not in called)
    taken = {site.module for site in sites}  # a module has one mixin
    kept = (site for site in fused.sites if site.module not in taken)
    return replace(fused, sites=(*kept, *sites), operators=operators)
