"""Finer INT8 for deep encoders: where the rounding of many layers adds up, scales belong to small groups of inputs."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from ..config import GroupSize
from ..fused.hf.normed_stacks import normed_stacks
from ..models import is_within
from .weight_sites import LinearSite

# Of random weights with one scale for each output, 12 layers (BERT base) turn the states by a cosine of 0.00025, and 24
# of twice the width (XLM-R large) by 0.00084, in groups of 64 by 0.00048. Products of such groups take 8 % longer.
LAYERS = 12
GROUP: GroupSize = 64


def with_finer_groups(model: PreTrainedModel, sites: list[LinearSite]) -> list[LinearSite]:
    """Return the sites, those in encoders of more than 12 layers that end in a norm with groups of 64 inputs.

    A model that generates text has none of these, nor has a layer whose inputs cannot be divided so.
    """
    if len(sites) <= LAYERS or model.can_generate():
        return sites
    stacks = normed_stacks(model, longer_than=LAYERS)
    return [_finer(site) if any(is_within(site.name, stack) for stack in stacks) else site for site in sites]


def _finer(site: LinearSite) -> LinearSite:
    if site.is_head or site.skip is not None or site.weight.shape[1] % GROUP:
        return site
    remark = f"groups of {GROUP}, since the rounding of more than {LAYERS} layers that end in a norm adds up"
    return replace(site, group_size=GROUP, remark=remark)
