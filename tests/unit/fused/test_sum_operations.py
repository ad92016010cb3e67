"""Sums and roundings of tensors within a native call, where some are float32 and the layer is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_accel.cache.kinds.states import StateStep
from hf_accel.fused.layer_tail import kept_of, split
from hf_accel.fused.projections import NativeLinear, ProjectionCall
from hf_accel.hardware import UNLIMITED
from hf_accel.kernels import cpu
from hf_accel.kernels.layouts import KV
from hf_accel.recognition.operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from hf_accel.recognition.stand_ins import StandIn
from hf_accel.recognition.trace import Trace
from hf_accel.recurrent.recurrent_programme import RecurrentProgramme
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED

pytestmark = pytest.mark.skipif(cpu.refusal() is not None, reason=str(cpu.refusal()))
WIDTH = 32


def traced(dtype: torch.dtype) -> tuple[Trace, StandIn]:
    trace = Trace(dtype)
    trace.widths[INPUT] = WIDTH
    return trace, StandIn(trace, Span(INPUT, 0, WIDTH), WIDTH)


def native_linear(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=False).to(dtype)
    vars(layer)[FUSED] = ProjectionCall(UNLIMITED)
    layer.__class__ = mixed_class(NativeLinear, nn.Linear)
    return layer


def result_of(trace: Trace, out: StandIn, x: Tensor) -> Tensor:
    """Call the operations of a trace for rows x [N, WIDTH]; returns what `out` stands for."""
    none = torch.zeros(1)
    states = StateStep(*(torch.zeros(len(x), dtype=torch.int64) for _ in range(4)))
    return RecurrentProgramme(trace, out.span)(x[None], KV(none, none), states)[0].view(out.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_products_of_one_input_that_are_widened(dtype: torch.dtype) -> None:
    """They are not computed side by side, since what widens them reads whole rows."""
    trace, x = traced(dtype)
    first, second = (native_linear(dtype) for _ in range(2))
    wide, rounded = (trace.convert(trace.linear(each, x)) for each in (first, second))
    total = trace.add(trace.convert(rounded), wide)
    assert wide.wide and total.wide and total.dtype is torch.float32
    rows = torch.randn(5, WIDTH, dtype=dtype)
    expected = F.linear(rows, first.weight).float() + F.linear(rows, second.weight)
    torch.testing.assert_close(result_of(trace, total, rows), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_a_number_multiplies_as_in_torch(dtype: torch.dtype) -> None:
    trace, x = traced(dtype)
    rows = torch.randn(7, WIDTH, dtype=dtype)
    assert torch.equal(result_of(trace, trace.multiplied(x * 0.3), rows), rows * 0.3)


@pytest.mark.parametrize("use", ["linear", "norm", "gate", "multiply"])
def test_wide_numbers_are_read_by_nothing_else(use: str) -> None:
    trace, x = traced(torch.bfloat16)
    uses: dict[str, Any] = {
        "linear": lambda wide: trace.linear(nn.Linear(WIDTH, WIDTH), wide),
        "norm": lambda wide: trace.norm(nn.RMSNorm(WIDTH), wide),
        "gate": lambda wide: trace.gate(trace.activate("silu", x), wide),
        "multiply": lambda wide: trace.multiplied(wide * 2.0),
    }
    wide = trace.convert(x)
    with pytest.raises(UntraceableError):
        uses[use](wide)


def test_what_needs_no_module_comes_before_it() -> None:
    """A shared expert beside those that a token chooses, whose sum is all that is behind them."""
    first, normed, routed, shared, total = (Span(2 + place, 0, WIDTH) for place in range(5))
    head = [Operation("norm", [Span(INPUT, 0, WIDTH)], [first]), Operation("norm", [first], [normed])]
    called = Operation("module", [normed], [routed], (nn.Identity(),), {"results": None})
    beside = Operation("linear", [normed], [shared])
    tail = [Operation("add", [routed, shared], [total]), Operation("add", [first, total], [Span(OUTPUT, 0, WIDTH)])]
    assert split([*head, called, beside, *tail], [WIDTH] * 7) == ([*head, beside], [called, *tail])
    assert kept_of([called, *tail]) == [first.buffer, normed.buffer, shared.buffer]
    part = replace(shared, stride=2 * WIDTH)
    with pytest.raises(UntraceableError, match="in the middle"):
        split([*head, called, replace(beside, outputs=[part]), replace(tail[0], inputs=[routed, part])], [WIDTH] * 7)


def test_a_wide_sum_behind_a_module_is_refused() -> None:
    """Which is called between native calls, by functions that read one dtype."""
    span, out, wide = Span(2, 0, WIDTH), Span(3, 0, WIDTH), {"dim": WIDTH, "factor": 1.0}
    head = Operation("norm", [Span(INPUT, 0, WIDTH)], [span])
    called = Operation("module", [span], [out], (nn.Identity(),), {"results": None})
    tail = Operation("add", [span, out], [Span(1, 0, WIDTH)], values=wide)
    assert split([head, called, tail], [WIDTH] * 4)[1] == [called, tail]
    tail.values["wide"] = True
    with pytest.raises(UntraceableError, match="in the middle"):
        split([Operation("norm", [Span(INPUT, 0, WIDTH)], [span]), called, tail], [WIDTH] * 4)
