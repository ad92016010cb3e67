"""A load on machines: the closed form against a simulation of passes, and what limits the number of machines."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.estimate import estimate
from hf_accel.estimate.roofline import ByRows
from hf_accel.estimate.serving_estimate import MOST_BUSY, Load, ServingEstimate, _Costs

from .shapes import MIXTRAL_8X7B, llama_70b

ESTIMATE = estimate(
    llama_70b(), context=1200, weights="int4", bandwidth=2e12, compute=300e12, price_per_hour=7.2
)  # fmt: skip
LOAD: dict[str, Any] = {"requests_per_second": 2.0, "prompt_tokens": 1000, "output_tokens": 200}


def costs(rate: float = 1.0) -> _Costs:
    return _Costs(*ESTIMATE.counted, Load(rate, 1000, 200))


def simulated(one: _Costs, rate: float, seconds: float) -> tuple[float, float]:
    """Pass after pass over Poisson arrivals: the mean time of a token after the first, and to the first token."""
    generator = random.Random(0)
    waiting: list[float] = []
    running: list[int] = []
    now, arrival, firsts, gaps = 0.0, generator.expovariate(rate), [], []
    weights, prompt = one.weights(1), one.prompt
    while now < seconds:
        while arrival <= now:
            waiting.append(arrival)
            arrival += generator.expovariate(rate)
        if not waiting and not running:
            now = arrival
            continue
        start, now = now, now + weights + len(running) * one.token(len(running)) + len(waiting) * prompt
        gaps += [now - start] * len(running)
        running = [left - 1 for left in running if left > 1] + [one.load.output_tokens - 1] * len(waiting)
        firsts += [now - came for came in waiting]
        waiting = []
    return sum(gaps) / len(gaps), sum(firsts) / len(firsts)


@pytest.mark.parametrize("busy", [0.3, 0.6])
def test_latency_is_that_of_a_simulation(busy: float) -> None:
    rate = busy / costs().request(1)
    found = ESTIMATE.serving(**{**LOAD, "requests_per_second": rate})
    between, first = simulated(costs(), rate, seconds=600 / rate)
    assert found.replicas == 1 and found.busy == pytest.approx(busy)
    assert found.seconds_per_token == pytest.approx(between, rel=0.1)
    assert found.seconds_to_first_token == pytest.approx(first, rel=0.15)
    assert found.seconds_per_request == found.seconds_to_first_token + 199 * found.seconds_per_token


def test_little_s_law() -> None:
    found = ESTIMATE.serving(**LOAD)
    assert found.running == pytest.approx(2.0 / found.replicas * 200 * found.seconds_per_token, rel=1e-6)
    assert found.peak_running > found.running


def test_both_bills_pay_for_the_machines() -> None:
    found = ESTIMATE.serving(**LOAD)
    assert found.cost_per_hour == found.replicas * 7.2
    assert found.cost_per_million_input_tokens and found.cost_per_million_output_tokens
    assert found.cost_per_million_input_tokens < found.cost_per_million_output_tokens / 3
    an_hour = 2.0 * 3600 / 1e6
    bill = an_hour * (1000 * found.cost_per_million_input_tokens + 200 * found.cost_per_million_output_tokens)
    assert bill == pytest.approx(found.cost_per_hour)
    free = dataclasses.replace(ESTIMATE, price_per_hour=None).serving(**LOAD)
    assert free.cost_per_hour is free.cost_per_million_input_tokens is free.cost_per_million_output_tokens is None


def limits(found: ServingEstimate, rate: float, **more: Any) -> None:
    """One machine less could not take it, and as many as there are can."""
    assert found.replicas > 1
    assert found.requests_per_second * found.replicas >= rate * (1 - 1e-9)
    assert found.requests_per_second * (found.replicas - 1) < rate


def test_arithmetic_limits_the_load() -> None:
    found = ESTIMATE.serving(**{**LOAD, "requests_per_second": 50.0})
    limits(found, 50.0)
    assert found.busy <= MOST_BUSY


def test_memory_limits_the_load() -> None:
    plenty = ESTIMATE.serving(**LOAD)
    room = ESTIMATE.weights_bytes + 4e9  # a request's keys and values take 0.4 GB
    found = ESTIMATE.serving(**LOAD, memory=room)
    limits(found, 2.0)
    assert found.memory_bytes <= room < plenty.memory_bytes
    assert found.replicas > plenty.replicas
    assert ESTIMATE.serving(**LOAD, memory="H200") == plenty


def test_latency_limits_the_load() -> None:
    weights = costs().weights(1)
    found = ESTIMATE.serving(**{**LOAD, "requests_per_second": 20.0}, seconds_per_token=1.3 * weights)
    limits(found, 20.0)
    assert weights < found.seconds_per_token <= 1.3 * weights


def test_more_running_requests_read_more_experts() -> None:
    mixture = estimate(MIXTRAL_8X7B, context=300, bandwidth=2e12, compute=300e12)
    one, many = (
        mixture.serving(requests_per_second=rate, prompt_tokens=200, output_tokens=100) for rate in (0.01, 5.0)
    )
    assert many.seconds_per_token > 2 * one.seconds_per_token


def test_what_a_token_costs_depends_on_how_many_run() -> None:
    """Sixteen rows take ten times as long as one, and so do sixteen hundred for each sixteen of them."""
    workload, machine = ESTIMATE.counted
    uneven = machine._replace(quantized=ByRows((1, 16), (1e-15, 1e-14)))
    one = _Costs(workload, uneven, Load(1.0, 1000, 200))
    alone, few = one.token(1), one.token(16)
    assert alone - few == pytest.approx((1e-15 - 1e-14 / 16) * workload.decode.quantized / 2)
    for rate in (0.5, 5.0):
        running = one.running(rate)
        assert running is not None
        seconds = one.weights(running) + running * one.token(running) + rate * running / (rate * 200) * one.prompt
        assert running == pytest.approx(rate * 200 * seconds, rel=1e-6)
    busiest = MOST_BUSY / one.request(1e9)
    assert one.running(0.99 * busiest) is not None and one.running(1.01 * busiest) is None


def test_to_dict_and_the_table() -> None:
    found = ESTIMATE.serving(**LOAD)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert [line.split()[0] for line in str(found).splitlines() if line[0] != " "] == [
        "replicas", "running", "memory", "latency", "speeds", "cost",
    ]  # fmt: skip
    assert "million input tokens" in str(found)
    measured = dataclasses.replace(found, is_measured=True)
    assert "speeds" in str(found) and "speeds" not in str(measured)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": 201}, "more than the context of 1200.*estimate with context=1201"),
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"requests_per_second": 0.0}, "requests_per_second=0.0 must be a finite number above 0"),
        ({"requests_per_second": float("inf")}, "finite"),
        ({"memory": "16GB"}, "one request takes .* and a machine has 16 GB"),
        ({"seconds_per_token": 1e-3}, "reading the weights once takes 0.018"),
        ({"requests_per_second": 1e9}, "more than 100,000 machines"),
    ],
)
def test_what_no_number_of_machines_serves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ESTIMATE.serving(**{**LOAD, **changes})
