"""The plot on the README's first screen: decode speed of stock, hf_accel and llama.cpp, from the recorded results.

python -m benchmarks.overview           writes docs/decode.svg
python -m benchmarks.overview --check   exits with 1 if docs/decode.svg is not that of the recorded results

The SVG is written here, without matplotlib, so that it is small, the same wherever it is drawn, and readable on a
light and on a dark page: it has no background, and its colours stand out from both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PLOT = ROOT / "docs" / "decode.svg"
MACHINES = {"amd-epyc-zen-4-avx512_vnni_bf16": "AVX-512", "amd-epyc-zen-3-avx2": "AVX2 alone", "intel-xeon-amx": "AMX"}
BATCHES = (1, 16)
# Weights of the same width stand together: bits, and the setups of `benchmarks.run decode` that have them.
SETUPS = {
    "16 bits": ("stock", "hf_accel exact", "llama.cpp bf16"),
    "8 bits": ("hf_accel int8", "llama.cpp Q8_0"),
    "4 bits": ("hf_accel int4", "llama.cpp Q4_0"),
}
COLOURS = {"stock": "#8b949e", "hf_accel": "#e8750a", "llama.cpp": "#4f8fd6"}
TEXT = "#7d8690"  # a gray with enough contrast on white and on black
PANEL, ROW, HEAD, MARGIN = 450, 19, 46, 72  # pixels: a panel's width, a bar's row, a panel's title, the bars' left


@dataclass(frozen=True)
class Panel:
    """One batch size on one machine. ratios: times as fast as stock, by setup."""

    title: str
    ratios: dict[str, float]


def panels() -> Iterator[Panel]:
    for folder, machine in MACHINES.items():
        path = ROOT / "benchmarks" / "results" / folder / "decode.json"
        tables: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["tables"]
        for batch in BATCHES:
            table = next(each for each in tables if f"batch {batch}," in each["title"])
            ratios = {row["setup"]: row["ratio"] for row in table["rows"]}
            yield Panel(f"{machine}, {'one sequence' if batch == 1 else f'{batch} sequences'}", ratios)


def svg() -> str:
    """All panels, one machine a row, one batch size a column; the bars of all have one scale."""
    drawn = list(panels())
    longest = max(panel.ratios[setup] for panel in drawn for group in SETUPS.values() for setup in group)
    scale = (PANEL - MARGIN - 100) / longest  # pixels of 1x; the number behind the longest bar needs room
    height = HEAD + ROW * sum(map(len, SETUPS.values())) + 8 * len(SETUPS)
    width, whole = PANEL * len(BATCHES), height * len(MACHINES) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">',
        "<title>Decode speed, times stock transformers</title>",
    ]
    for number, panel in enumerate(drawn):
        row, column = divmod(number, len(BATCHES))
        lines += [f'<g transform="translate({column * PANEL}, {row * height})">', *bars(panel, scale), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def bars(panel: Panel, scale: float) -> Iterator[str]:
    yield f'<text x="{MARGIN}" y="26" font-size="14" font-weight="600">{escape(panel.title)}</text>'
    top = HEAD
    for bits, setups in SETUPS.items():
        yield f'<text x="8" y="{top + 13}" font-weight="600">{bits}</text>'
        for setup in setups:
            ratio = panel.ratios[setup]
            colour = COLOURS[setup.split()[0]]
            end = MARGIN + scale * ratio
            shape = f'x="{MARGIN}" y="{top + 2}" width="{scale * ratio:.1f}" height="{ROW - 4}" rx="2"'
            yield f'<rect {shape} fill="{colour}"/>'
            yield (
                f'<text x="{end + 6:.1f}" y="{top + 13}"><tspan font-weight="600">{ratio:.1f}x</tspan> '
                f"{escape(setup.split()[0])}</text>"
            )
            top += ROW
        top += 8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    drawn = svg()
    if parser.parse_args(argv).check:
        sys.exit(PLOT.read_text(encoding="utf-8") != drawn)
    PLOT.write_text(drawn, encoding="utf-8")
    print(f"written to {PLOT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
