"""Requests that arrive at random: how long until the first token, and from each token to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import hf_accel
from hf_accel.cli.measurement import Requests, WrongResultError, accelerated, draw

from ..harness.bench import Bench
from ..harness.requests import poisson
from ..harness.tables import Row, Table
from ..setups import accel, stock
from .batching import agreeing
from .serving import continuous, manager_of, results, stock_settings

Times = list[list[float]]  # of each request: seconds from its arrival to each of its tokens
STOCK, OURS = "stock generate_batch", accel.INT8.name
NOTE = (
    "Poisson arrivals, the same for all systems of a load; tokens are timed where the caller gets them. Loads: shares "
    "of the requests per second that a system serves when all come at once: {stock:.2f} for stock's continuous "
    "batching, {ours:.2f} for {name}. Budget: most tokens of a pass, prompts included. Each row ran once."
)


def measure(bench: Bench) -> list[Table]:
    workload = make_workload(bench)
    systems = Systems(bench, workload)
    print("  capacities", flush=True)
    rates = systems.capacities()
    budgets = bench.settings.latency.budgets
    rows: list[Row] = []
    for load in bench.settings.latency.loads:
        arriving = poisson(workload, per_second=load * rates[STOCK], seed=bench.settings.seed)
        rows.append(row(f"{load:.0%} of stock's", STOCK, systems.stock_budget, systems.stock_times, arriving=arriving))
        middle = budgets[len(budgets) // 2]
        rows.append(row(f"{load:.0%} of stock's", OURS, middle, partial(systems.our_times, middle), arriving=arriving))
    for load in bench.settings.latency.loads:
        arriving = poisson(workload, per_second=load * rates[OURS], seed=bench.settings.seed)
        for budget in budgets:
            rows.append(
                row(f"{load:.0%} of ours", OURS, budget, partial(systems.our_times, budget), arriving=arriving)
            )
    title = f"{len(workload.prompts)} requests, {workload.name} tokens each, prompts of {span(workload)} tokens"
    return [Table(title, rows, NOTE.format(stock=rates[STOCK], ours=rates[OURS], name=OURS))]


class Systems:
    """Both sides, ready to serve."""

    def __init__(self, bench: Bench, workload: Requests) -> None:
        self.workload = workload
        self.stock_budget = bench.settings.serving.choices[0][0]
        self.plain = bench.entrant(stock.Stock()).model
        self.settings = stock_settings(workload, batch_tokens=self.stock_budget)
        self.model = agreeing(bench, bench.entrant(accel.INT8)).model

    def capacities(self) -> dict[str, float]:
        """Requests per second when all come at once."""
        stock_run = continuous(self.plain, self.workload, self.settings)
        runs = {STOCK: stock_run, OURS: accelerated(self.model, self.workload)}
        count = len(self.workload.prompts)
        return {name: count / served.checked(self.workload).seconds for name, served in runs.items()}

    def our_times(self, budget: int, workload: Requests) -> Times:
        return our_times(self.model, budget, workload)

    def stock_times(self, workload: Requests) -> Times:
        return stock_times(self.plain, self.settings, workload)


def make_workload(bench: Bench) -> Requests:
    settings = bench.settings
    return draw(
        "exponential",
        requests=settings.latency.requests,
        mean=min(settings.serving.means),
        prompt_lengths=settings.serving.prompts,
        vocabulary=bench.model.config.vocab_size,
        seed=settings.seed,
    )


def span(workload: Requests) -> str:
    sizes = [len(prompt) for prompt in workload.prompts]
    return f"{min(sizes)} to {max(sizes)}"


def row(load: str, system: str, budget: int, serve: Callable[[Requests], Times], *, arriving: Requests) -> Row:
    print(f"    {load}, {system}, budget {budget}", flush=True)
    times = serve(arriving)
    if [len(one) for one in times] != arriving.lengths:
        raise WrongResultError(f"{system}: asked for {arriving.lengths} tokens and got {[*map(len, times)]}")
    first = [one[0] for one in times]
    between = [after - before for one in times for before, after in pairwise(one)]
    assert arriving.arrivals is not None
    end = max(arrival + one[-1] for arrival, one in zip(arriving.arrivals, times, strict=True))
    return {
        "load": load,
        "system": system,
        "budget": budget,
        "first_p50_seconds": quantile(first, 0.5),
        "first_p99_seconds": quantile(first, 0.99),
        "between_p50_seconds": quantile(between, 0.5),
        "between_p99_seconds": quantile(between, 0.99),
        "useful_tokens_per_second": arriving.useful / end,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


# -- systems -------------------------------------------------------------------------------------------


def our_times(model: Any, budget: int, workload: Requests) -> Times:
    """hf_accel.Engine; a thread reads each request's stream."""
    times: Times = [[] for _ in workload.prompts]
    readers = []
    with hf_accel.Engine(model, token_budget=budget) as engine:
        for number, arrived in arrivals(workload):
            request = engine.submit(
                workload.prompts[number], max_new_tokens=workload.lengths[number], temperature=0.0, stop_token_ids=()
            )
            reader = threading.Thread(target=read, args=(request, arrived, times[number]))
            reader.start()
            readers.append(reader)
        for reader in readers:
            reader.join()
    return times


def read(request: Any, arrived: float, times: list[float]) -> None:
    for _ in request:
        times.append(time.perf_counter() - arrived)


def stock_times(model: Any, settings: Any, workload: Requests) -> Times:
    """Stock's manager with streaming requests; one thread reads all, as its queue is one."""
    times: Times = [[] for _ in workload.prompts]
    arrived: dict[str, float] = {}
    with manager_of(model, workload, settings) as manager:
        reader = threading.Thread(target=read_all, args=(manager, workload, arrived, times))
        reader.start()
        for number, moment in arrivals(workload):
            arrived[str(number)] = moment
            manager.add_request(
                workload.prompts[number],
                request_id=str(number),
                max_new_tokens=workload.lengths[number],
                streaming=True,
                eos_token_id=-1,
            )
        reader.join()
    return times


def read_all(manager: Any, workload: Requests, arrived: dict[str, float], times: Times) -> None:
    """An output says how many tokens there are by now."""
    for output in results(manager, len(workload.prompts)):
        mine = times[int(output.request_id)]
        moment = time.perf_counter() - arrived[output.request_id]
        mine += [moment] * (len(output.generated_tokens) - len(mine))


def arrivals(workload: Requests) -> Iterator[tuple[int, float]]:
    """The number of each request when it arrives, with the time at which it should have."""
    assert workload.arrivals is not None
    start = time.perf_counter()
    for number, arrival in enumerate(workload.arrivals):
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        yield number, start + arrival
