"""Finer INT8 for deep encoders: where the rounding of many layers adds up, scales belong to small groups of inputs."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from ..config import GroupSize
from ..fused.hf.normed_stacks import normed_stacks
from ..models import is_within
from .weight_sites import LinearSite

# With random weights and one scale for each output, the cosine of the states to those in float is 0.99975 after 12
# layers (BERT base) and 0.99916 after 24 wider ones (XLM-R large); there it is 0.99952 with groups of 64, whose
# products take 8 % longer.
LAYERS = 12
GROUP: GroupSize = 64


def with_finer_groups(model: PreTrainedModel, sites: list[LinearSite]) -> list[LinearSite]:
    """Return the sites of an encoder, those in more than 12 layers that end in a norm with groups of 64 inputs.

    A layer whose inputs cannot be divided so keeps its scales.
    """
    if len(sites) <= LAYERS:
        return sites
    stacks = normed_stacks(model, longer_than=LAYERS)
    return [_finer(site) if any(is_within(site.name, stack) for stack in stacks) else site for site in sites]


def _finer(site: LinearSite) -> LinearSite:
    if site.is_head or site.skip is not None or site.group_size is not None or site.weight.shape[1] % GROUP:
        return site
    remark = f"groups of {GROUP}, since the rounding of more than {LAYERS} layers that end in a norm adds up"
    return replace(site, group_size=GROUP, remark=remark)
