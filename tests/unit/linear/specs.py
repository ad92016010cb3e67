"""LinearSpecs by the words of their layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_accel.config import Layout
from hf_accel.linear import LinearSpec

OF_LAYOUT = ("bits", "format", "group_size", "symmetric", "minima", "scale_dtype")


def linear_spec(*, by_group: bool = False, **words: Any) -> LinearSpec:
    """A LinearSpec of a layout and other fields, all by name.

    Groups have 128 inputs, if not said; 8 bits have them only if by_group.
    """
    layout = {name: words.pop(name) for name in OF_LAYOUT if name in words}
    layout["group_size"] = layout.get("group_size", 128) if by_group or layout["bits"] < 8 else None
    return LinearSpec(layout=Layout(**layout), **words)


def changed(spec: LinearSpec, words: dict[str, Any]) -> LinearSpec:
    """The same spec with other words, of its layout and of itself."""
    of_layout = {name: value for name, value in words.items() if name in OF_LAYOUT}
    others = {name: value for name, value in words.items() if name not in OF_LAYOUT}
    return replace(spec, layout=replace(spec.layout, **of_layout), **others)
