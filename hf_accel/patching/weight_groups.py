"""The groups of inputs that share a scale: those that fit a weight, those that a deep encoder gets, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from transformers import PreTrainedModel

from ..config import GROUP_SIZES, GroupSize, WeightConfig
from ..errors import UnsupportedError
from ..fused.hf.normed_stacks import normed_stacks
from ..models import is_within
from .weight_sites import LinearSite

# Where the rounding of many layers adds up, INT8 has scales of small groups too. With random weights and one scale for
# each output, the cosine of the states to those in float is 0.99975 after 12 layers (BERT base) and 0.99916 after 24
# wider ones (XLM-R large); there it is 0.99952 with groups of 64, whose products take 8 % longer.
LAYERS = 12
GROUP: GroupSize = 64


def fitted(config: WeightConfig, inputs: int) -> tuple[WeightConfig, str | None]:
    """Return the config that a weight with so many inputs gets, and as a clause why it is not `config`.

    8 bits have a scale for each output, which any number of inputs can have: half of the bytes of a weight in half
    precision are saved still, and less is lost than with 4.
    """
    usual = config.group_size
    if config.bits == 8 or not config.leaves_groups or usual is None or inputs % usual == 0:
        return config, None
    size = max((size for size in GROUP_SIZES if inputs % size == 0), default=None)
    if size is None:
        return config.with_eight_bits(), f"8 bits, as no group of {min(GROUP_SIZES)} or more divides {inputs} inputs"
    return replace(config, group_size=size), f"groups of {size}, as {usual} does not divide {inputs} inputs"


def cut_refusal(config: WeightConfig, site: LinearSite) -> str | None:
    """Return why a weight cannot have the groups that `config` names, as one clause; None if it can."""
    size = None if config.is_nf4 else config.layout.group_size  # NF4's blocks go over the ends of rows
    return f"group_size={size} does not divide {site.width}" if size and site.inputs % size else None


def with_groups(
    model: PreTrainedModel, sites: list[LinearSite], config: WeightConfig, *, on_cpu: bool
) -> list[LinearSite]:
    """Return the sites of all linear layers, those of a deep encoder with finer groups where INT8 leaves them to it.

    Raises UnsupportedError for groups that were asked for and do not fit.
    """
    if config.bits == 8 and config.leaves_groups and on_cpu and not model.can_generate():
        sites = _with_finer(model, sites)
    if not config.leaves_groups:
        _check(sites, config, _way_out_of_linears, is_head=False)
    head = config.for_head
    if head is not None and not head.leaves_groups:
        _check(sites, head, lambda *_: "leave group_size= or head= out", is_head=True)
    return sites


def _check(
    sites: Iterable[LinearSite], config: WeightConfig, way_out: Callable[[list[LinearSite], WeightConfig], str], *,
    is_head: bool,
) -> None:  # fmt: skip
    """Raise UnsupportedError unless groups of `config` divide the inputs of all that would be quantized by it."""
    cut = [site for site in sites if site.is_head is is_head and site.skip is None and cut_refusal(config, site)]
    if cut:
        raise UnsupportedError(f"{cut_refusal(config, cut[0])} of {cut[0].name!r}; {way_out(cut, config)}")


def _way_out_of_linears(cut: list[LinearSite], config: WeightConfig) -> str:
    ends = sorted({site.name.rpartition(".")[2] for site in cut})
    return (
        f"leave it out, and each layer gets groups that fit: weights={{'bits': {config.bits}}}, or leave such layers "
        f"as they are: weights={{'bits': {config.bits}, 'group_size': {config.group_size}, 'skip': {ends}}}"
    )


def _with_finer(model: PreTrainedModel, sites: list[LinearSite]) -> list[LinearSite]:
    """Return the sites of an encoder, those in more than 12 layers that end in a norm with groups of 64 inputs.

    A layer whose inputs cannot be divided so keeps its scales.
    """
    if len(sites) <= LAYERS:
        return sites
    stacks = normed_stacks(model, longer_than=LAYERS)
    return [_finer(site) if any(is_within(site.name, stack) for stack in stacks) else site for site in sites]


def _finer(site: LinearSite) -> LinearSite:
    if site.is_head or site.skip is not None or site.group_size is not None or site.inputs % GROUP:
        return site
    remark = f"groups of {GROUP}, since the rounding of more than {LAYERS} layers that end in a norm adds up"
    return replace(site, group_size=GROUP, remark=remark)
