"""Groups that fit a layer where group_size was left out: the largest that divide its inputs, or else 8 bits."""

from __future__ import annotations

from dataclasses import replace

from ..config import GROUP_SIZES, WeightConfig


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
