"""A model under a load: how many machines, how long a request takes, and what a token costs.

Continuous batching as the Engine does it: each pass computes one token of every running request, and the prompts that
have come meanwhile. Of R requests a second, each with a prompt that takes p seconds to compute and with O tokens that
take k + c each (their keys and values are read, the rest is computed), where reading the weights takes w:

    a pass takes   T = w + n (k + c) + R T p        running are   n = R O T        (Little 1961)
    and so         T = w / (1 - busy)               with          busy = R (O (k + c) + p)

c depends on n, as products of few rows and of many differ, and w too, where there are experts: n is searched for.
Reading and computing follow each other (Machine.seconds_in_turn). Requests come at random (Poisson).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..keywords import positive_int, positive_number
from ..patching.printed import Printed, Row
from .roofline import Machine
from .workload import Workload

MOST_BUSY = 0.8  # of the time that is not spent on weights; nearer to 1, what arrives at random waits long
DEVIATIONS = 3.0  # of the number of running requests, that memory has room for beyond their mean
MOST_REPLICAS = 100_000
ROUNDING = 1e-9  # rounding


class Load(NamedTuple):
    """prompt_tokens, output_tokens: means, of a request."""

    requests_per_second: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingEstimate(Printed):
    """The needs of a load. Seconds and bytes are of one machine; costs are in the currency of the price per hour.

    replicas: machines, each with the whole model. busy: the share of their time that grows with the load.
    running: requests at a time on one machine, the mean; peak_running: the number that memory is counted for.
    seconds_per_token: between two tokens of a request. seconds_to_first_token: the mean, waiting included.
    seconds_per_request: from its arrival to its last token. requests_per_second: that one machine can take.
    is_measured: whether the machine's speeds were measured; else they were given, and programs reach a part of them.
    cost_per_million_input_tokens, cost_per_million_output_tokens: the prompts' share of the machines' time, and the
        rest of it, so that both bills together pay for the machines.
    """

    replicas: int
    busy: float
    running: float
    peak_running: int
    memory_bytes: int
    seconds_per_token: float
    seconds_to_first_token: float
    seconds_per_request: float
    requests_per_second: float
    is_measured: bool
    cost_per_hour: float | None
    cost_per_million_input_tokens: float | None
    cost_per_million_output_tokens: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in _rows(self))

    def _table_rows(self) -> Iterable[Row]:
        return _rows(self)


class _Costs:
    """Seconds on one machine: of a prompt, of a token of a running request, of a pass over the weights by itself."""

    def __init__(self, workload: Workload, machine: Machine, load: Load) -> None:
        self.workload, self.machine, self.load = workload, machine, load
        whole = load.prompt_tokens + load.output_tokens
        prompt, half, request = (
            workload.at(context=tokens, batch=1)
            for tokens in (load.prompt_tokens, load.prompt_tokens + load.output_tokens // 2, whole)
        )
        self.prompt = machine.computing(prompt.prefill)
        self._decode, self._kv_seconds = half.decode, half.kv_bytes / machine.bandwidth
        self._request_bytes, self._fixed_bytes = request.kv_bytes, prompt.total_bytes - prompt.kv_bytes

    def token(self, running: float) -> float:
        """Return the seconds of a pass for each running request, if `running` requests run together."""
        return self.machine.computing(self._decode._replace(rows=max(1.0, running))) + self._kv_seconds

    def weights(self, tokens: float) -> float:
        """Return the seconds of a pass without its tokens. Only experts that so many tokens choose are read."""
        read = self.workload.weight_bytes_read(max(1.0, tokens))
        return read / self.machine.bandwidth + self.machine.around(self._decode)

    def request(self, running: float) -> float:
        return self.load.output_tokens * self.token(running) + self.prompt

    def running(self, rate: float) -> float | None:
        """Return how many requests run together; None where more come than MOST_BUSY lets one machine take."""
        arriving = rate * self.load.output_tokens

        def is_enough(running: float) -> bool:
            """Return whether at least as many requests run as arrive during the passes that compute them."""
            idle = 1 - rate * self.request(running)
            return idle > 0 and arriving * self.weights(running) <= running * idle

        low, high = 0.0, arriving * self.weights(math.inf) / (1 - MOST_BUSY) * (1 + ROUNDING)
        if not is_enough(high):
            return None
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high if rate * self.request(high) <= MOST_BUSY * (1 + ROUNDING) else None

    def bytes(self, running: int) -> int:
        """Return the bytes with room for keys and values of so many whole requests, and for one prompt in prefill."""
        return self._fixed_bytes + running * self._request_bytes


def service(
    workload: Workload,
    machine: Machine,
    load: Load,
    *,
    memory: float | None,
    longest: float | None,
    price_per_hour: float | None,
) -> ServingEstimate:
    """Find the fewest machines that take the load: each at most MOST_BUSY, within its memory, and no token late.

    Raises UnsupportedError where no number of them does.
    """
    positive_int("prompt_tokens", load.prompt_tokens)
    positive_int("output_tokens", load.output_tokens)
    positive_number("requests_per_second", load.requests_per_second)
    positive_number("seconds_per_token", longest)
    costs = _Costs(workload, machine, load)
    if memory is not None and costs.bytes(1) > memory:
        raise UnsupportedError(
            f"one request takes {costs.bytes(1) / 1e9:.3g} GB, and a machine has {memory / 1e9:.3g} GB; quantize the "
            "weights or the cache, or take another machine"
        )
    least = costs.weights(1)
    if longest is not None and least > longest:
        raise UnsupportedError(
            f"seconds_per_token={longest:g}: reading the weights once takes {least:.3g} s; quantize them"
        )
    most = _most(costs, memory, longest)
    if load.requests_per_second > MOST_REPLICAS * most:
        raise UnsupportedError(f"more than {MOST_REPLICAS:,} machines would be needed; take faster ones")
    return _described(costs, most, price_per_hour)


def _fits(costs: _Costs, rate: float, memory: float | None, longest: float | None) -> bool:
    running = costs.running(rate)
    if running is None:
        return False
    seconds = running / (rate * costs.load.output_tokens)
    return (longest is None or seconds <= longest) and (memory is None or costs.bytes(_peak(running)) <= memory)


def _peak(running: float) -> int:
    return max(1, math.ceil(running + DEVIATIONS * math.sqrt(running)))


def _described(costs: _Costs, most: float, price_per_hour: float | None) -> ServingEstimate:
    """Describe as many machines as the load needs. most: requests a second that one takes."""
    load = costs.load
    replicas = max(1, math.ceil(load.requests_per_second / most * (1 - ROUNDING)))
    rate = min(most, load.requests_per_second / replicas)
    running = costs.running(rate) or 0.0
    seconds = running / (rate * load.output_tokens)
    first = _first_token(costs, rate, seconds)
    of_prompts = rate * costs.prompt
    hourly = None if price_per_hour is None else replicas * price_per_hour
    each = None if hourly is None else hourly / 3600 / load.requests_per_second  # what a request pays
    return ServingEstimate(
        replicas=replicas,
        busy=rate * costs.request(running),
        running=running,
        peak_running=_peak(running),
        memory_bytes=costs.bytes(_peak(running)),
        seconds_per_token=seconds,
        seconds_to_first_token=first,
        seconds_per_request=first + (load.output_tokens - 1) * seconds,
        requests_per_second=most,
        is_measured=costs.machine.is_measured,
        cost_per_hour=hourly,
        cost_per_million_input_tokens=each and 1e6 * each * of_prompts / load.prompt_tokens,
        cost_per_million_output_tokens=each and 1e6 * each * (1 - of_prompts) / load.output_tokens,
    )


def _first_token(costs: _Costs, rate: float, seconds: float) -> float:
    """Estimate the seconds to the first token: the rest of the pass in which the request arrives, and the next pass,
    with all prompts that arrived meanwhile.

    A pass of K prompts takes what it takes without them and K p, where K is Poisson with the mean rate * (the pass
    before). So its variance is p^2 rate T / (1 - (rate p)^2). A request that arrives at random meets a pass that is
    longer than the mean, E[T^2] / E[T], and half of it is over.
    """
    share = rate * costs.prompt  # of the time, that prompts take
    variance = costs.prompt * share * seconds / (1 - share**2)
    found = seconds + variance / seconds
    without = seconds * (1 - share)
    return found / 2 + without + costs.prompt * (1 + rate * found)


def _most(costs: _Costs, memory: float | None, longest: float | None) -> float:
    """Return the requests a second that one machine can take."""
    low, high = 0.0, MOST_BUSY / costs.prompt
    if _fits(costs, high, memory, longest):
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _fits(costs, middle, memory, longest) else (low, middle)
    return low


def _rows(found: ServingEstimate) -> Iterator[tuple[str, str]]:
    yield "replicas", f"{found.replicas}, {found.busy:.0%} busy; one takes {found.requests_per_second:.3g} requests/s"
    yield "running", f"{found.running:.3g} requests a replica, {found.peak_running} at the peak"
    yield "memory", f"{found.memory_bytes / 1e9:.3g} GB a replica"
    first, between = found.seconds_to_first_token, found.seconds_per_token
    yield "latency", f"{first:.3g} s to the first token, {between:.3g} s a token"
    yield "", f"{found.seconds_per_request:.3g} s a request"
    if not found.is_measured:
        yield "speeds", "as given, of which programs reach a part: it will be slower"
    if found.cost_per_hour is not None:
        yield "cost", f"{found.cost_per_hour:.3g} an hour"
        yield "", f"{found.cost_per_million_input_tokens:.3g} a million input tokens"
        yield "", f"{found.cost_per_million_output_tokens:.3g} a million output tokens"
