"""Curves as a PNG file, for the examples that train."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[float, float]]


def plot(path: str | Path, title: str, panels: Mapping[str, Mapping[str, Curve]], x: str = "step") -> None:
    """A panel for each name on the y axis, with a curve of (x, y) for each label."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, (y, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=label)
        axes.set(xlabel=x, ylabel=y)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    print(f"plotted to {path}")
