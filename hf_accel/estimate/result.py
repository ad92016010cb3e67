"""The answer of estimate(): numbers to compute with, and a table to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from ..hardware import Hardware, detect
from ..patching.printed import Printed, Row
from .devices import memory_of
from .roofline import Machine
from .serving_estimate import Load, ServingEstimate, service
from .workload import AttentionBytes, Workload


class Bound(NamedTuple):
    """The limit of a prefill of the whole context and of a decode step: "memory" or "compute"; None without such a
    pass.
    """

    prefill: str
    decode: str | None


class Counted(NamedTuple):
    """The assumptions and measurements that an estimate was made from."""

    workload: Workload
    machine: Machine


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(Printed):
    """The needs of a model at one context and batch: bytes, seconds, bytes and operations per second.

    weights, kv_dtype: how both are quantized, None if they are not.
    weights_by_kind: weights_bytes split into linears, experts, head (a tied one holds the embeddings too unless it is
        quantized), embeddings, scales (with zero points), and other (norms, biases, routers).
    kv_bytes: of the tokens themselves; the empty part of a sequence's last block is not counted.
    activation_bytes: hidden states of one layer in a prefill of the whole context at once, roughly.
    total_bytes: weights, KV cache, tiled attention and activations.
    read_bytes: read by a decode step, or by a pass of an encoder: the KV cache and all weights but embeddings and
        experts that are not chosen.
    seconds_per_token: a decode step, which gives each sequence of the batch a token. On a CPU that was measured, what
        its products and its reading of memory take; else a lower limit, set by the given bandwidth or compute
        (roofline, Williams et al., doi:10.1145/1498765.1498785).
    prefill_seconds: of the whole context of all sequences, in the same way.
    cost_per_million_tokens: generated tokens, in the currency of the price per hour; cost_per_million_input_tokens: of
        prompts, which are computed many tokens at a time.
    counted: for `serving`.

    An encoder has passes over the whole context (prefill_seconds), no KV cache, and None for a decode step. With a
    decoder behind it, kv_bytes counts what that keeps of the source, once, and of its own tokens; prefill_seconds are
    those of the source.
    """

    model: str
    dtype: str
    weights: str | None
    kv_dtype: str | None
    context: int
    batch: int
    parameters: int
    weights_bytes: int
    weights_by_kind: dict[str, int]
    kv_bytes: int
    attention_bytes: AttentionBytes
    activation_bytes: int
    total_bytes: int
    read_bytes: int
    bandwidth: float
    compute: float
    seconds_per_token: float | None
    prefill_seconds: float
    bound: Bound
    price_per_hour: float | None
    cost_per_million_tokens: float | None
    cost_per_million_input_tokens: float | None
    counted: Counted = dataclasses.field(repr=False, compare=False)

    def fits(self, where: float | torch.device | str | Hardware) -> bool:
        """Return whether total_bytes fit into `where`.

        where: a number of bytes, a device of this machine whose free memory is read now ("cpu", "cuda:1"), a size
        ("24GB"), or the name of a device, of which all memory counts ("L4", "A100 80GB"). A name that is sold with
        several sizes means the smallest. Raises UnsupportedError for an unknown name.
        """
        return self.total_bytes <= room_in(where)

    def serving(
        self,
        *,
        requests_per_second: float,
        prompt_tokens: int,
        output_tokens: int,
        memory: float | str | None = None,
        seconds_per_token: float | None = None,
    ) -> ServingEstimate:
        """Estimate replicas, latency, memory and cost of a load, with continuous batching on machines of this speed.

        prompt_tokens, output_tokens: means, of a request; together at most the context of this estimate.
        memory: of a machine, in bytes or as for `fits`; None: as much as it takes.
        seconds_per_token: the most that may pass between two tokens of a request.
        Raises UnsupportedError for what no number of machines can serve.
        """
        if self.seconds_per_token is None:
            raise UnsupportedError(f"{self.model} is an encoder and gives no tokens: serving() has nothing to count")
        if self.counted.workload.source_tokens is not None:
            raise UnsupportedError(
                f"{self.model} reads its prompts with an encoder, whose share of a load serving() does not know; "
                "prefill_seconds is what a source takes, and seconds_per_token each token after it"
            )
        if prompt_tokens + output_tokens > self.context:
            raise UnsupportedError(
                f"prompt_tokens={prompt_tokens} and output_tokens={output_tokens} are more than the context of "
                f"{self.context} that was estimated; estimate with context={prompt_tokens + output_tokens}"
            )
        load = Load(requests_per_second, prompt_tokens, output_tokens)
        room = None if memory is None else room_in(memory)
        return service(*self.counted, load, memory=room, longest=seconds_per_token, price_per_hour=self.price_per_hour)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        nested = {"attention_bytes": self.attention_bytes._asdict(), "bound": self.bound._asdict()}
        return {name: value for name, value in vars(self).items() if name != "counted"} | nested

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in _rows(self))

    def _table_rows(self) -> Iterable[Row]:
        return _rows(self)


def room_in(where: float | torch.device | str | Hardware) -> float:
    """Return the bytes of a size or a device, as `Estimate.fits` takes it."""
    if isinstance(where, str) and not where.startswith(("cpu", "cuda")):
        return memory_of(where)
    return where if isinstance(where, (int, float)) else _free_memory(where)


def _free_memory(where: torch.device | str | Hardware) -> int:
    hardware = where if isinstance(where, Hardware) else detect(where)
    if hardware.free_memory is None:
        raise UnsupportedError(f"the free memory of {hardware.device} is unknown; give fits() a number of bytes")
    return hardware.free_memory


def _rows(estimate: Estimate) -> Iterator[tuple[str, str]]:
    by_size = sorted(estimate.weights_by_kind.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {in_units(size)}" for kind, size in by_size)
    naive, per_head, tiled = map(in_units, estimate.attention_bytes)
    read, bandwidth = in_units(estimate.read_bytes), in_units(estimate.bandwidth)
    yield "model", f"{estimate.model}, {estimate.parameters / 1e9:.3g} billion parameters in {estimate.dtype}"
    each = "tokens of context" if estimate.bound.decode is not None else "tokens a pass"
    yield "request", f"{estimate.context:,} {each}, batch {estimate.batch}"
    yield "weights", f"{estimate.weights or estimate.dtype}, {in_units(estimate.weights_bytes)} ({kinds})"
    if estimate.bound.decode is not None:
        yield "KV cache", f"{estimate.kv_dtype or estimate.dtype}, {in_units(estimate.kv_bytes)}"
    yield "attention", f"{tiled} tiled; naive {naive}, {per_head} a head"
    yield "activations", in_units(estimate.activation_bytes)
    yield "total", in_units(estimate.total_bytes)
    least = "about" if estimate.counted.machine.is_measured else "at least"
    whole = "prefill" if estimate.bound.decode is not None else "a pass"
    yield whole, f"{estimate.bound.prefill} bound, {least} {estimate.prefill_seconds:.3g} s"
    if estimate.seconds_per_token is not None:
        yield "decode", f"{estimate.bound.decode} bound, {least} {estimate.seconds_per_token:.3g} s a token"
    yield "", f"reads {read} at {bandwidth}/s"
    tokens, prompts = estimate.cost_per_million_tokens, estimate.cost_per_million_input_tokens
    if tokens is not None:
        yield "cost", f"{tokens:.3g} a million output tokens"
        yield "", f"{prompts:.3g} a million input tokens"
    elif prompts is not None and estimate.seconds_per_token is None:
        yield "cost", f"{prompts:.3g} a million tokens"


def in_units(size: float) -> str:
    """Write bytes in decimal units, as memory vendors count: 83.9 GB is 83.9e9 bytes."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
