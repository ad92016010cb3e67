"""Requests computed at once by stock's continuous batching, and whether ours gives the tokens of each alone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_accel.cli.measurement import Requests, Served, WrongResultError, accelerated

from ..harness.requests import in_turn

PAGE = 16  # tokens of a page, as ours has; stock's speed on a CPU hardly depends on it


# -- stock's continuous batching -----------------------------------------------------------------------


def continuous(model: PreTrainedModel, workload: Requests, settings: ContinuousBatchingConfig) -> Served:
    """Stock's manager, each request with its own max_new_tokens; generate_batch knows only one for all.

    Its start and stop are not timed.
    """
    with manager_of(model, workload, settings) as manager:
        start = time.perf_counter()
        names = [
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
        ]
        outputs = {output.request_id: output.generated_tokens for output in results(manager, len(names))}
        seconds = time.perf_counter() - start
    return Served(seconds, [outputs[name] for name in names])


@contextmanager
def manager_of(model: PreTrainedModel, workload: Requests, settings: ContinuousBatchingConfig) -> Iterator[Any]:
    """Running, greedy, stopped by lengths alone."""
    config = GenerationConfig(max_new_tokens=max(workload.lengths), do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(config, continuous_batching_config=settings) as manager:
        yield manager


def results(manager: Any, count: int) -> Iterator[Any]:
    """What a manager finishes, until there are `count`."""
    while count:
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise WrongResultError("stock's continuous batching stopped before its requests were done")
            continue
        if output.is_finished():
            if output.error is not None:
                raise WrongResultError(f"stock's continuous batching failed: {output.error}")
            count -= 1
        yield output


def stock_settings(workload: Requests, *, batch_tokens: int, running: int | None = None) -> ContinuousBatchingConfig:
    """Pages for all requests at once, and no more: the number left to stock is made of the whole machine's memory.

    batch_tokens: of a pass; running: most requests at once.
    """
    ends = [len(p) + n for p, n in zip(workload.prompts, workload.lengths, strict=True)]
    pages = sum(-(-end // PAGE) + 1 for end in ends)
    named = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    size: Any = {"page_size" if "page_size" in named else "block_size": PAGE}  # older transformers call it block_size
    return ContinuousBatchingConfig(
        num_blocks=pages, max_batch_tokens=batch_tokens, max_requests_per_batch=running, **size
    )


def best_settings(
    model: PreTrainedModel, workload: Requests, choices: Sequence[tuple[int, int | None]]
) -> tuple[int, int | None]:
    """The choice of (batch_tokens, running) that serves the workload fastest. Few tokens of each request tell."""
    seconds = {}
    for batch_tokens, running in choices:
        settings = stock_settings(workload, batch_tokens=batch_tokens, running=running)
        seconds[batch_tokens, running] = continuous(model, workload, settings).checked(workload).seconds
        print(f"    stock generate_batch, {batch_tokens} tokens a pass, {running or 'all'} requests at once: "
              f"{seconds[batch_tokens, running]:.2f} s", flush=True)  # fmt: skip
    return min(seconds, key=lambda choice: seconds[choice])


def agree(name: str, model: PreTrainedModel, workload: Requests) -> None:
    """Raise WrongResultError unless generate_batch gives the tokens that generate() gives prompt by prompt.

    On a GPU, torch's products round a row by what stands beside it, and near-ties fall otherwise: most first tokens.
    """
    alone, together = in_turn(model, workload).tokens, accelerated(model, workload).checked(workload).tokens
    same = sum(a[0] == b[0] for a, b in zip(alone, together, strict=True))
    if alone != together and (model.device.type == "cpu" or 2 * same <= len(alone)):
        raise WrongResultError(f"{name}: generate_batch gives {together} where generate() gives {alone}")
