"""Attention that a layer's code computes by torch's operators: what is known of it, and what ends a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_accel.recognition.call_form import usual_form
from hf_accel.recognition.operation import Operation, UntraceableError
from hf_accel.recognition.trace import Trace


def usual(scores: Any, mask: Any, bias: Any) -> Any:
    return F.softmax(scores / math.sqrt(6) + bias + mask, dim=-1)


WEIGH: dict[str, Callable[..., Any]] = {"by": usual}  # what computes the weights


class Layer(nn.Module):
    """Attention, and a norm of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, attention_mask: Any, position_bias: Any) -> Tensor:
        shape = (*hidden_states.shape[:-1], 4, 6)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2))
        weights = WEIGH["by"](scores, attention_mask, position_bias)
        out = torch.matmul(self.drop(weights), v).permute(0, 2, 1, 3).contiguous()
        return self.norm(out.view((*hidden_states.size()[:-1], 24)) + hidden_states)


def attention_of(weigh: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Operation:
    trace, layer = Trace(dtype), Layer().to(dtype).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WEIGH, "by", weigh)
        trace.layer(layer, 24, usual_form(Layer, dtype))
    return next(operation for operation in trace.operations if operation.kind == "attend")


def in_place(scores: Any, mask: Any, bias: Any) -> Any:
    scores = scores * 0.5
    scores += bias
    scores += mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(torch.bfloat16)


def test_scores_with_a_bias_and_a_mask() -> None:
    values = attention_of(usual).values
    assert values["options"]["scaling"] == pytest.approx(6**-0.5) and not values["options"]["is_causal"]
    assert values["masked"] and values["biased"] and values["adds_mask"] and values["own_bias"] is None
    values = attention_of(in_place, torch.bfloat16).values
    assert values["options"]["scaling"] == 0.5 and values["masked"] and values["biased"]
    assert attention_of(scaled_in_place).values["options"]["scaling"] == 2
    values = attention_of(lambda scores, mask, bias: F.softmax(scores, -1)).values
    assert values["options"]["scaling"] == 1 and not values["masked"] and not values["biased"]


def scaled_in_place(scores: Any, mask: Any, bias: Any) -> Any:
    scores *= 2
    return F.softmax(scores, dim=-1)


OTHERS: dict[str, Callable[..., Any]] = {
    "scaled behind the bias": lambda scores, mask, bias: F.softmax((scores + bias) / 2, dim=-1),
    "scaled behind the mask": lambda scores, mask, bias: F.softmax((scores + mask) * 2, dim=-1),
    "scaled weights": lambda scores, mask, bias: F.softmax(scores, dim=-1) * 2,
    "the mask twice": lambda scores, mask, bias: F.softmax(scores + mask + mask, dim=-1),
    "the bias twice": lambda scores, mask, bias: F.softmax(scores + bias + bias, dim=-1),
    "a number": lambda scores, mask, bias: F.softmax(scores + 1, dim=-1),
    "a mask on weights": lambda scores, mask, bias: F.softmax(scores, dim=-1) + mask,
    "another dimension": lambda scores, mask, bias: F.softmax(scores, dim=-2),
    "another softmax": lambda scores, mask, bias: F.softmax(scores.to(torch.float64), dim=-1),
    "weights of another dtype": lambda scores, mask, bias: F.softmax(scores, dim=-1, dtype=torch.float64),
    "no softmax": lambda scores, mask, bias: scores,
    "two softmaxes": lambda scores, mask, bias: F.softmax(F.softmax(scores, dim=-1), dim=-1),
    "dropout": lambda scores, mask, bias: F.dropout(F.softmax(scores, dim=-1), 0.1),
    "a part": lambda scores, mask, bias: F.softmax(scores[..., :3], dim=-1),
    "a function": lambda scores, mask, bias: F.softmax(torch.tanh(scores), dim=-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_done_with_scores_ends_a_trace(name: str) -> None:
    with pytest.raises(UntraceableError):
        attention_of(OTHERS[name])


def test_weights_that_stay_in_float32_end_a_trace() -> None:
    with pytest.raises(UntraceableError):
        attention_of(lambda scores, mask, bias: F.softmax(scores, dim=-1, dtype=torch.float32), torch.bfloat16)
