"""Prometheus metrics: times of requests, measured here, and the Engine's own counts, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

COUNTERS = {  # of Engine.stats
    "new_tokens": ("generated_tokens", "Tokens that were generated."),
    "computed_tokens": ("computed_tokens", "Tokens of passes, prompts and rejected drafts included."),
    "passes": ("passes", "Passes of the model."),
    "busy_seconds": ("busy_seconds", "Seconds spent in passes."),
    "preemptions": ("preemptions", "Choices that lost their blocks and were computed again."),
    "prefix_lookups": ("prefix_lookups", "Full blocks of prompts that were looked for."),
    "prefix_hits": ("prefix_hits", "Full blocks of prompts that were found, and not computed again."),
    "kept_blocks_read": ("kept_blocks_read", "Blocks of prompts that were read from --cache-dir."),
    "kept_blocks_written": ("kept_blocks_written", "Blocks of prompts that were written there."),
    "kept_blocks_refused": ("kept_blocks_refused", "Files there that were refused because of their content."),
    "finished": ("choices_finished", "Choices that ended by themselves."),
    "cancelled": ("choices_cancelled", "Choices whose client went away."),
    "failed": ("choices_failed", "Choices that ended with an error."),
}
LABEL = "model"
GAUGES = {
    "running": ("choices_running", "Choices that are computed now."),
    "waiting": ("choices_waiting", "Choices in the queue."),
    "blocks_used": ("blocks_used", "Blocks of the KV cache in use."),
    "blocks_allocated": ("blocks_allocated", "Blocks of the KV cache in all."),
    "tokens_per_second": ("tokens_per_second", "Generated tokens for each second spent in passes."),
}
SPECULATION = {
    "drafted": ("drafted_tokens", "Tokens that were drafted."),
    "accepted": ("accepted_tokens", "Drafted tokens that were accepted."),
}


class HasStats(Protocol):
    @property
    def stats(self) -> Mapping[str, Any]: ...

    @property
    def is_live(self) -> bool: ...


class EngineCollector(Collector):
    """Reads the Engine of a model when Prometheus asks, so that a pass does not wait for metrics."""

    def __init__(self, engine: HasStats, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._sample(GaugeMetricFamily, "model_live", "1 while the model's engine lives.", self._engine.is_live)
        for key, (name, words) in COUNTERS.items():
            if key in stats:  # an encoder's queue has fewer than an Engine
                yield self._sample(CounterMetricFamily, name, words, stats[key])
        for key, (name, words) in GAUGES.items():
            if key in stats:
                yield self._sample(GaugeMetricFamily, name, words, stats[key])
        for key, (name, words) in SPECULATION.items() if "speculation" in stats else ():
            yield self._sample(CounterMetricFamily, name, words, stats["speculation"].get(key, 0))

    def _sample(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, words: str, value: Any
    ) -> Metric:
        family = kind(f"hf_accel_{name}", words, labels=[LABEL])
        family.add_metric([self._model], value)
        return family


class Metrics:
    """The metrics of one model, in a registry of their own, with its name as their label."""

    def __init__(self, engine: HasStats, model: str) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model))
        self.prompt_tokens = Counter(
            "hf_accel_prompt_tokens", "Tokens of prompts that were admitted.", [LABEL], registry=self.registry
        ).labels(model)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From admission to a choice's first token.", FIRST_TOKEN_SECONDS
        )
        self.between_tokens = self._histogram(
            "time_between_tokens_seconds", "From one token of a choice to the next.", TOKEN_SECONDS
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From admission to the end of a request.", REQUEST_SECONDS
        )

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"hf_accel_{name}", words, [LABEL], buckets=buckets, registry=self.registry).labels(
            self._model
        )

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Record `count` tokens of a choice that came together, `seconds` after those before, or after admission."""
        if first:
            self.first_token.observe(seconds)
            count, seconds = count - 1, 0.0
        for _ in range(count):
            self.between_tokens.observe(seconds / count)


class ServerMetrics(CollectorRegistry):
    """The metrics of a server: its answers, and those of its models, each kind of numbers once for all models."""

    def __init__(self, models: Iterable[Metrics]) -> None:
        super().__init__()
        self._models = list(models)
        self.requests = Counter(
            "hf_accel_http_requests", "Answers, by path and status.", ("path", "status"), registry=self
        )

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        families: dict[str, Metric] = {}
        for family in (family for one in self._models for family in one.registry.collect()):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
        yield from families.values()

    def page(self) -> tuple[bytes, str]:
        """Return the text for Prometheus, and its content type."""
        return generate_latest(self), CONTENT_TYPE_LATEST
