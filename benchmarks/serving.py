"""A workload computed at once, by each of the ways there are: one padded batch, stock's continuous batching, ours."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import hf_accel

from .checks import WrongResultError
from .workload import Workload

PAGE = 16  # tokens of a page, as ours has; stock's speed on a CPU hardly depends on it


@dataclass(frozen=True)
class Served:
    """seconds: of the whole workload. tokens: generated for each request, in order. statistics: the engine's own.
    times: when each token was there, if that was asked for.
    """

    seconds: float
    tokens: list[list[int]]
    statistics: dict[str, Any] = field(default_factory=dict)
    times: list[list[float]] = field(default_factory=list)

    @property
    def decode_seconds(self) -> float:
        """From the moment at which every request has its first token to the last token of all."""
        return max(times[-1] for times in self.times) - max(times[0] for times in self.times)

    def checked(self, workload: Workload) -> Served:
        """Itself, if every request got what it asked for."""
        got = [len(tokens) for tokens in self.tokens]
        if got != workload.lengths:
            raise WrongResultError(f"{workload.name}: asked for {workload.lengths} tokens and got {got}")
        return self


Serve = Callable[[PreTrainedModel, Workload], Served]


def padded(model: PreTrainedModel, workload: Workload) -> Served:
    """One generate() over all prompts, padded on the left, until the longest has ended.

    What comes after a row's own end is dropped, which costs nothing: only stopping rows singly would be faster, and
    generate() cannot.
    """
    width = max(map(len, workload.prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in workload.prompts]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
    ids, mask = (torch.tensor(numbers, device=model.device) for numbers in (rows, seen))
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=mask, generation_config=greedy(max(workload.lengths)))
    seconds = time.perf_counter() - start
    found = output[:, width:].tolist()
    return Served(seconds, [row[:length] for row, length in zip(found, workload.lengths, strict=True)])


def one_by_one(model: PreTrainedModel, workload: Workload) -> Served:
    """A generate() for each prompt."""
    start = time.perf_counter()
    tokens = []
    for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy(length))
        tokens.append(output[0, len(prompt) :].tolist())
    return Served(time.perf_counter() - start, tokens)


def accelerated(model: PreTrainedModel, workload: Workload, **keywords: Any) -> Served:
    """hf_accel's generate_batch with a GenerationConfig for each prompt."""
    configs = [greedy(length) for length in workload.lengths]
    start = time.perf_counter()
    outputs = model.generate_batch(workload.prompts, generation_config=configs, **keywords)
    seconds = time.perf_counter() - start
    times = [output.timestamps or [] for output in outputs.values()]
    return Served(seconds, [output.generated_tokens for output in outputs.values()], hf_accel.stats(model), times)


def greedy(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)


# -- stock's continuous batching -----------------------------------------------------------------------


def continuous(model: PreTrainedModel, workload: Workload, settings: ContinuousBatchingConfig) -> Served:
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
def manager_of(model: PreTrainedModel, workload: Workload, settings: ContinuousBatchingConfig) -> Iterator[Any]:
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


def stock_settings(workload: Workload, *, batch_tokens: int, running: int | None = None) -> ContinuousBatchingConfig:
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
    model: PreTrainedModel, workload: Workload, choices: Sequence[tuple[int, int | None]]
) -> tuple[int, int | None]:
    """The choice of (batch_tokens, running) that serves the workload fastest. Few tokens of each request tell."""
    seconds = {}
    for batch_tokens, running in choices:
        settings = stock_settings(workload, batch_tokens=batch_tokens, running=running)
        seconds[batch_tokens, running] = continuous(model, workload, settings).checked(workload).seconds
        print(f"    stock generate_batch, {batch_tokens} tokens a pass, {running or 'all'} requests at once: "
              f"{seconds[batch_tokens, running]:.2f} s", flush=True)  # fmt: skip
    return min(seconds, key=lambda choice: seconds[choice])


def agree(name: str, model: PreTrainedModel, workload: Workload) -> None:
    """Raise WrongResultError unless generate_batch gives the tokens that generate() gives prompt by prompt.

    On a GPU, torch's products round a row by what stands beside it, and near-ties fall otherwise: most first tokens.
    """
    alone, together = one_by_one(model, workload).tokens, accelerated(model, workload).checked(workload).tokens
    same = sum(a[0] == b[0] for a, b in zip(alone, together, strict=True))
    if alone != together and (model.device.type == "cpu" or 2 * same <= len(alone)):
        raise WrongResultError(f"{name}: generate_batch gives {together} where generate() gives {alone}")
