"""Plots of those topics whose tables are read best as curves: PNG files beside the JSON, if matplotlib is there.

python -m benchmarks.plots FOLDER   draws those of a folder of results, which another machine may have measured
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .harness.results_folder import file_stem, readme, replace

SIZE = (9.0, 3.6)  # inches
DPI = 110
Rows = Sequence[dict[str, Any]]


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.name}: {draw(folder, result, path.stem.removeprefix(result['topic']).removeprefix('_'))}")
    replace(folder / "README.md", readme(folder))


def draw(folder: Path, result: dict[str, Any], label: str = "") -> str:
    """Draw one topic's result; says in a line what became of it. Last time's plot does not stay beside new numbers.

    label: of the file's name, as that of the numbers has it.
    """
    topic = result["topic"]
    path = folder / f"{file_stem(topic, label)}.png"
    path.unlink(missing_ok=True)
    if topic not in PLOTS:
        return "no plot: the table says it all"
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install hf_accel[benchmarks])"
    from matplotlib.figure import Figure  # not pyplot: it would keep figures, and might look for a screen

    figure = Figure(figsize=SIZE, layout="constrained")
    PLOTS[topic](figure, result["tables"])
    figure.suptitle(result["model"])
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return f"plotted to {path}"


# -- topics --------------------------------------------------------------------------------------------


def batching(figure: Any, tables: list[dict[str, Any]]) -> None:
    """Throughput of each system, and the ratios by the law of the lengths."""
    systems, laws = figure.subplots(1, 2)
    main, by_law = tables[0]["rows"], tables[1]["rows"]
    bars(systems, [row["system"] for row in main], [row["useful_tokens_per_second"] for row in main])
    systems.set(xlabel="useful tokens per second", title=tables[0]["title"].split(" (")[0])
    names = [f"{row['output_lengths'].replace(', mean', '')}\n(cv {row['variation']:.2f})" for row in by_law]
    dots(
        laws,
        names,
        {
            "over generate_batch": [row["generate_batch_ratio"] for row in by_law],
            "over padded batch": [row["ratio"] for row in by_law],
        },
    )
    laws.set(xlim=(0, None), xlabel="times as fast as stock", title="hf_accel int8, by output lengths")


def latency(figure: Any, tables: list[dict[str, Any]]) -> None:
    rows = tables[0]["rows"]
    names = [f"{row['system']}, {row['budget']}, {row['load']}" for row in rows]
    first, between = figure.subplots(1, 2, sharey=True)
    for axes, name, title in ((first, "first", "to the first token"), (between, "between", "between tokens")):
        dots(axes, names, {share: [row[f"{name}_{share}_seconds"] for row in rows] for share in ("p50", "p99")})
        axes.set(xlabel="seconds", xscale="log", title=f"time {title}")


def speculation(figure: Any, tables: list[dict[str, Any]]) -> None:
    """One panel for each batch, a curve for each model and number of drafted tokens."""
    panels = [table for table in tables if "acceptance" in table["rows"][0]]
    for axes, table in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        curves = dict.fromkeys((row["setup"], str(row["num_draft"])) for row in table["rows"])
        for setup, count in curves:
            own = [row for row in table["rows"] if (row["setup"], str(row["num_draft"])) == (setup, count)]
            style = "o-" if count == "auto" else "x--"
            points = [row["acceptance"] for row in own], [row["ratio"] for row in own]
            axes.plot(*points, style, label=f"{setup}, {count}")
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set(xlabel="acceptance", ylabel="over no speculation", title=table["title"], ylim=(0, None))
        axes.legend(fontsize=7)


def drafters(figure: Any, tables: list[dict[str, Any]]) -> None:
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        rows = [row for row in table["rows"] if row["accepted_share"] is not None]
        bars(axes, [row["drafter"] for row in rows], [row["speedup_ratio"] for row in rows])
        axes.axvline(1, color="gray", linewidth=0.8)
        axes.set(xlabel="over no speculation", title=table["title"].split(": ")[-1].split(",")[0])
        axes.tick_params(axis="y", labelsize=6)


def students(figure: Any, tables: list[dict[str, Any]]) -> None:
    """What each training kept."""
    rows = tables[1]["rows"]
    names = list(dict.fromkeys(row["student"] for row in rows))
    panels = {
        "kept_share": "% of the teacher's accuracy",
        "acceptance_share": "acceptance, %",
        "perplexity": "perplexity",
    }
    for axes, (column, label) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        factor = 100 if column.endswith("share") else 1
        axes.plot([factor * row[column] for row in rows], [names.index(row["student"]) for row in rows], "o")
        axes.set(xlabel=label, ylim=(len(names) - 0.5, -0.5))
        axes.set_yticks(range(len(names)), names)


def ablation(figure: Any, tables: list[dict[str, Any]]) -> None:
    rows = tables[0]["rows"]
    names = [
        "text alone" if row["loss"] == "-" else f"{row['loss']}, T {row['T']:g}, alpha {row['alpha']:g}"
        for row in rows
    ]
    right, accepted = figure.subplots(1, 2, sharey=True)
    for axes, column in ((right, "accuracy"), (accepted, "acceptance")):
        shares = [100 * row[f"{column}_share"] for row in rows]
        axes.errorbar(shares, names, xerr=[float(row[f"{column} +-"]) for row in rows], fmt="o")
        axes.set(xlabel=f"{column}, %")
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=7)


def drafts(figure: Any, tables: list[dict[str, Any]]) -> None:
    """Acceptance by temperature, and generate() by drafter."""
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, table in zip(panels, tables, strict=True):
        rows = table["rows"]
        is_speed = "drafter" in rows[0]
        bars(axes, [row["drafter" if is_speed else "draft"] for row in rows],
             [row["ratio" if is_speed else "text_share"] for row in rows])  # fmt: skip
        if is_speed:
            axes.axvline(1, color="gray", linewidth=0.8)
        axes.set(xlabel="over no draft" if is_speed else "acceptance on text")
        axes.set_title(next(part for part in table["title"].split(", ") if "temperature" in part), fontsize=8)


def ladder(figure: Any, tables: list[dict[str, Any]]) -> None:
    """What the measures so far come to together, and the pairs on top of them."""
    steps, pairs = figure.subplots(1, 2)
    rows, engine = tables[0]["rows"], tables[1]["rows"]
    bars(steps, [row["measure"] for row in rows], [row["product"] for row in rows])
    steps.set(xlabel="times as fast as the first", xscale="log", xlim=(0.9, None))
    steps.set_title(tables[0]["title"].partition(", ")[2])
    bars(pairs, [row["measure"] for row in engine], [1 / row["token_seconds"] for row in engine])
    pairs.set(xlabel="tokens per second", title=tables[1]["title"])


def bars(axes: Any, names: Sequence[str], values: Sequence[float]) -> None:
    """Lying, the first on top."""
    axes.barh(names, values)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()


def dots(axes: Any, names: Sequence[str], values: dict[str, Sequence[float]]) -> None:
    """A row for each name, the first on top, with a dot for each kind of value and a line between them."""
    rows = range(len(names))
    axes.hlines(rows, list(map(min, *values.values())), list(map(max, *values.values())), color="lightgray")
    for kind, places in values.items():
        axes.plot(places, rows, "o", label=kind)
    axes.set_yticks(rows, names)
    axes.tick_params(axis="y", labelsize=7)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.legend(fontsize=8)


PLOTS: dict[str, Callable[[Any, list[dict[str, Any]]], None]] = {
    "batching": batching,
    "latency": latency,
    "ladder": ladder,
    "speculation": speculation,
    "drafters": drafters,
    "students": students,
    "ablation": ablation,
    "drafts": drafts,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
