"""The experts of a mixture in one call, against the same in float64, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.float_linear import FloatExperts, FloatLinear
from hf_accel.kernels.cpu.mixture import Gate, mixture

EXPERTS, HIDDEN, INNER, CHOSEN = 7, 75, 51, 3
GATES = [Gate(0, "relu"), Gate(1, "silu"), Gate(1, "gelu_tanh"), Gate(2, alpha=1.702, limit=1.5)]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make(gate, dtype, *, by_inputs, tokens):
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    shapes = [(INNER * gate.width, HIDDEN), (HIDDEN, INNER)]
    floats = [numbers(EXPERTS, *shape) * shape[1] ** -0.5 for shape in shapes]
    biases = [numbers(EXPERTS, shape[0]) for shape in shapes]
    stored = [each.transpose(1, 2).contiguous() if by_inputs else each for each in floats]
    weights = tuple(FloatExperts(w, b, by_inputs=by_inputs) for w, b in zip(stored, biases, strict=True))
    chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN).indices
    scores = torch.rand(tokens, CHOSEN, generator=generator)
    return floats, biases, weights, (numbers(tokens, HIDDEN), chosen, scores)


def between(gate, x):
    if gate.number == 0:
        return F.relu(x)
    if gate.number == 2:
        open_, up = x[::2].clamp(max=gate.limit), x[1::2].clamp(-gate.limit, gate.limit)
        return (up + 1) * open_ * torch.sigmoid(gate.alpha * open_)
    first, second = x.chunk(2)
    return (F.silu(first) if gate.activation == "silu" else F.gelu(first, approximate="tanh")) * second


def expected(gate, floats, biases, given):
    x, chosen, scores = given
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, slot in [(t, k) for t in range(len(x)) for k in range(CHOSEN)]:
        e = chosen[token, slot]
        hidden = between(gate, floats[0][e].double() @ x[token].double() + biases[0][e])
        out[token] += (floats[1][e].double() @ hidden + biases[1][e]) * scores[token, slot]
    return out


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@torch.no_grad()
def test_results_are_those_of_float64_and_depend_on_no_other_token(isa, dtype, gate, by_inputs):
    for tokens in (1, 6, 33):
        floats, biases, weights, given = make(gate, dtype, by_inputs=by_inputs, tokens=tokens)
        got, wanted = mixture(weights, gate, given[0], given[1:]), expected(gate, floats, biases, given)
        assert got.dtype is dtype
        assert float((got - wanted).abs().max() / wanted.abs().max()) < TOLERANCES[dtype]
        rows = [
            mixture(weights, gate, given[0][i : i + 1], tuple(each[i : i + 1] for each in given[1:]))
            for i in range(tokens)
        ]
        assert torch.equal(got, torch.cat(rows))


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits():
    _, _, weights, given = make(GATES[1], torch.bfloat16, by_inputs=False, tokens=33)
    before, results = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(mixture(weights, GATES[1], given[0], given[1:]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@torch.no_grad()
def test_weights_are_read_where_they_are_now():
    _, _, weights, given = make(GATES[1], torch.float32, by_inputs=False, tokens=4)
    before = mixture(weights, GATES[1], given[0], given[1:])
    weights[1].weights.data = weights[1].weights.data * 2
    weights[1].biases.data = weights[1].biases.data * 2
    torch.testing.assert_close(mixture(weights, GATES[1], given[0], given[1:]), before * 2)


@torch.no_grad()
def test_an_expert_that_is_not_there_is_an_error():
    _, _, weights, (x, chosen, scores) = make(GATES[1], torch.float32, by_inputs=False, tokens=4)
    for wrong in (chosen + EXPERTS, chosen - EXPERTS):
        with pytest.raises(UnsupportedError, match=f"there are {EXPERTS}"):
            mixture(weights, GATES[1], x, (wrong, scores))


@torch.no_grad()
def test_products_of_many_rows_have_the_bits_of_each_expert_alone():
    floats, biases, (weights, _), _ = make(GATES[1], torch.bfloat16, by_inputs=False, tokens=1)
    counts = [0, 500, 1, 37, 0, 90, 2]  # more than are packed at once
    x, starts = torch.randn(sum(counts), HIDDEN).bfloat16(), F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    parts = [FloatLinear([w], [b])(p) for w, b, p in zip(floats[0], biases[0], x.split(counts), strict=True) if len(p)]
    assert torch.equal(weights.grouped(x, starts), torch.cat(parts))
