"""repr() of a plan, certificate, estimate or report is its table, and a notebook shows the same words."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hf_accel
from hf_accel.checkpoints.writers.savable import Saved
from hf_accel.distill.drafts.report import AcceptanceReport
from hf_accel.patching.printed import Line, Printed
from hf_accel.verify import Certificate, Cost, Verdict
from hf_accel.verify.certificate import Agreement, EncoderCost
from hf_accel.verify.quantization_report import LayerReport, QuantizationReport

from ...parity.families import build
from ..estimate.shapes import llama_70b


def estimate() -> Any:
    return hf_accel.estimate(llama_70b(), context=4096, bandwidth=1e12, compute=1e14, price_per_hour=2.0)


def cost() -> Cost:
    return Cost("the <float> model", "some & text", 2048, 2.5, 2.6, 0.01, 0.02, 0.99)


def certificate() -> Certificate:
    return Certificate("a <b>reference</b> & more", (Verdict(True, 8), Verdict(False, 3)), cost())


def quantization_report() -> QuantizationReport:
    layers = (LayerReport("model.layers.0", 4.25, 100, 0.1, 0.1), LayerReport("model.layers.1", 8.03, 200, 0.3, 0.2))
    return QuantizationReport(100, 4.2, 10**6, 10**7, 12.3, 12.4, 0.8, 0.1, 0.01, 0.001, 0.98, layers)


def acceptance_report() -> AcceptanceReport:
    return AcceptanceReport(
        1.0,
        1,
        0.8,
        0.01,
        0.7,
        1000,
        (0.8,) * 2,
        (50, 40),
        8,
        1000,
        0.02,
        (0.0, 0.6, 0.7),
        (1.0,) * 3,
        "both <patched>",
    )


MADE: dict[str, Callable[[], Any]] = {
    "Plan": lambda: hf_accel.plan(build("llama")),
    "Estimate": estimate,
    "ServingEstimate": lambda: estimate().serving(requests_per_second=1, prompt_tokens=100, output_tokens=10),
    "Certificate": certificate,
    "Cost": cost,
    "EncoderCost": lambda: EncoderCost("the <float> model", (Agreement("last_hidden_state", 12, 0.9, 0.99, 0.1),)),
    "QuantizationReport": quantization_report,
    "AcceptanceReport": acceptance_report,
    "Saved": lambda: Saved(Path("out"), 10**6, (Line("<linears>", "3 & 4", "int4", "so <they> are"),)),
}


class Reader(HTMLParser):
    """The words of a table, and its shape: the cells of each row, colspan counted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.rows: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append(0)
        if tag == "td":
            self.rows[-1] += int(dict(attrs).get("colspan") or 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert self.open == ["table", "tr", "td"]
        self.words += data.split()


@pytest.mark.parametrize("kind", MADE)
def test_repr_is_the_table_and_html_has_its_words(kind: str) -> None:
    made = MADE[kind]()
    assert repr(made) == str(made) and f"{made}" == str(made)
    assert len(repr(made)) < 8000 and "object at 0x" not in repr(made)
    reader = Reader()
    reader.feed(made._repr_html_())
    assert reader.open == [] and len(set(reader.rows)) == 1, "a table, of rows that are equally wide"
    assert set(reader.words) == set(str(made).split())


def test_all_that_print_so_are_here() -> None:
    assert {kind.__name__ for kind in Printed.__subclasses__()} == MADE.keys()
