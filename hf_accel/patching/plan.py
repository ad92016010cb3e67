"""A Plan: every choice about a model with its reason. `patch` applies it, so the two agree by construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention import AttentionBackend
from ..config import PatchConfig, WeightConfig
from ..fused.hf.encoder_sites import LAYER, STACK
from ..fused.hf.sites import ACTIVATION, JOINED, JOINS, KIND, Dropped, FusedSite
from ..fused.projections import UNLIMITED
from ..generation import graphs
from ..generation.agreement import ALONE, ProcessAgreement
from ..kernels import cpu as cpu_kernels
from ..linear import BackendChoice, ExpertWeights, QuantLinear, QuantModule
from ..parallel.context import ContextParallel
from ..parallel.tensor import TensorParallel
from ..tensors import model_device
from .offloaded import is_offloaded
from .originals import Stored, whereabouts
from .printed import Line, Printed, Row, row_of, table
from .survey import AttentionSite, ExpertsSite, LinearSite


@dataclass(frozen=True)
class LinearPlan:
    """The plan of one Linear. choice None: it stays, because of `reason`.

    embedding: the name of the embedding that looks its rows up in this weight from now on; None: there is none.
    """

    site: LinearSite
    config: WeightConfig
    reason: str
    choice: BackendChoice | None = None
    embedding: str | None = None

    @property
    def replaces(self) -> bool:
        """True if nothing in the model needs the float weight any more."""
        return self.choice is not None and (not self.site.is_tied or self.embedding is not None)

    @property
    def stored_name(self) -> str:
        """The name of the float weight in a checkpoint: of a tied one that of the embedding."""
        return self.site.tensor_name if self.embedding is None else f"{self.embedding}.weight"

    @property
    def bytes_read(self) -> int:
        """Change of the weight bytes that a decode step reads."""
        return 0 if self.choice is None else self.site.count * self.choice.spec.weight_bytes - self.site.weight.nbytes

    @property
    def bytes_held(self) -> int:
        """Change of the weight bytes in memory: where the embedding keeps the original, a tied head is a copy."""
        return self.bytes_read + (0 if self.choice is None or self.replaces else self.site.weight.nbytes)


@dataclass(frozen=True)
class Fold:
    """A module that computes inputs, with all Linears that read them.

    offset: None for a Linear, else the offset of a norm.
    """

    producer: str
    consumers: tuple[str, ...]
    offset: float | None

    def within(self, layer: str) -> Fold:
        return Fold(f"{layer}.{self.producer}", tuple(f"{layer}.{name}" for name in self.consumers), self.offset)


FindOriginals = Callable[[PreTrainedModel, Sequence[LinearPlan]], dict[str, Stored] | None]


@dataclass(frozen=True)
class AttentionPlan:
    site: AttentionSite
    backend: AttentionBackend
    reason: str


@dataclass(frozen=True)
class FusedPlan:
    """Modules that get a native forward, and float Linears that are read in place.

    float_rows: the most rows that float weights are multiplied by natively. reason: why there are none.
    """

    sites: tuple[FusedSite, ...] = ()
    linears: tuple[FusedSite, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    float_rows: int = 0
    reason: str | None = None


@dataclass(frozen=True, repr=False)
class Plan(Printed):
    """The actions of patch() on a model, and their reasons. print() it, or read to_dict().

    stock_attention, stock_cache, stock_loop: why that stays stock, as one clause; None where it does not. stock_parts:
        the same for parts of the model, by name.
    bytes_before, bytes_after: of all weights in memory. bandwidth: bytes per second, as measured.
    seconds_before, seconds_after: the least that a decode step of batch 1 takes at this bandwidth.
    on_disk: where the checkpoint has each weight that is replaced, by the tensor's name; None unless all can be read
        back.
    folds: where AWQ's scales go.
    split: how the model is split over ranks; None if this process has the whole model. context: the ranks that share
    out the KV
        cache; None if this process has the whole cache.
    """

    model: PreTrainedModel
    title: str
    config: PatchConfig
    linears: tuple[LinearPlan, ...]
    attention: tuple[AttentionPlan, ...]
    fused: FusedPlan
    stock_attention: str | None
    stock_parts: dict[str, str]
    stock_cache: str | None
    stock_loop: str | None
    lines: tuple[Line, ...]
    bytes_before: int
    bytes_after: int
    bandwidth: float
    seconds_before: float
    seconds_after: float
    on_disk: dict[str, Stored] | None
    folds: tuple[Fold, ...] = ()
    split: TensorParallel | None = None
    context: ContextParallel | None = None

    @property
    def agreement(self) -> ProcessAgreement:
        """The agreement by which the model's processes decide."""
        shared = self.split or self.context
        return ALONE if shared is None else shared.ranks

    @property
    def quantized(self) -> tuple[LinearPlan, ...]:
        return tuple(p for p in self.linears if p.choice is not None)

    @property
    def calibrated(self) -> tuple[LinearPlan, ...]:
        """The linears that are rounded by what calibration data says of their inputs."""
        return tuple(p for p in self.quantized if p.config.is_calibrated)

    @property
    def variant(self) -> list[str]:
        """The parts that may round a token's numbers differently among other tokens, as clauses."""
        chosen = {(p.choice.backend, p.config.label.split()[0]) for p in self.quantized if p.choice is not None}
        stored = [module for module in self.model.modules() if isinstance(module, QuantModule)]
        chosen |= {(module.chosen.backend, module.spec.layout.label) for module in stored}
        clauses = {f"{b.name}'s {k.upper()} linear rounds by batch size" for b, k in chosen if not b.row_invariant}
        if self.stock_attention or self.stock_parts:
            clauses.add("stock attention rounds by batch size")
        clauses |= {
            f"{p.backend.name}'s attention rounds by batch size" for p in self.attention if not p.backend.row_invariant
        }
        if any(p.site.spec.window is not None for p in self.attention):
            clauses.add("attention within a window rounds by what the cache has dropped")
        if self.split is not None and self.agreement.size > 2:
            clauses.add("sums over more than two ranks round by their place in a pass")
        if self.context is not None:
            clauses.add("attention over several ranks rounds by where blocks are")
        replaced = {p.site.module for p in self.quantized} | {site.module for site in self.fused.linears}
        if any(_is_float_linear(module) and module not in replaced for module in self.model.modules()):
            clauses.add("torch's float linear rounds by batch size")
        elif self.invariant_rows is not None:
            clauses.add(f"float linears of more than {self.invariant_rows} rows go to torch, which rounds otherwise")
        own = {type(m).__name__ for m in self.model.modules() if m not in replaced and _has_matrix_of_its_own(m)}
        clauses |= {f"the products of {name} are torch's, which rounds by batch size" for name in own}
        return sorted(clauses)

    @property
    def invariant_rows(self) -> int | None:
        """The most rows that float linears round as they round one; None where that is any number, or not even two."""
        bounded = bool(self.fused.linears) and self.fused.float_rows < UNLIMITED
        return self.fused.float_rows if bounded else None

    def to_dict(self) -> dict[str, Any]:
        """Return the choices, the bytes, and the least seconds per token at the measured bandwidth, JSON-able."""
        return {
            "model": self.title,
            "config": self.config.to_dict(),
            "choices": [vars(line) for line in self.lines],
            "weight_bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "bandwidth_bytes_per_second": self.bandwidth,
            "least_seconds_per_token": {"before": self.seconds_before, "after": self.seconds_after},
        }

    def __str__(self) -> str:
        return "\n".join([f"hf_accel plan: {self.title}", *table(self.lines)])

    def _table_rows(self) -> Iterable[Row]:
        return [(f"hf_accel plan: {self.title}",), *map(row_of, self.lines)]


def _has_matrix_of_its_own(module: nn.Module) -> bool:
    """Return whether a module that is no Linear may multiply by a parameter, as the router of a mixture does."""
    if isinstance(module, nn.Linear | Conv1D | nn.Embedding | QuantModule):
        return False
    return any(p is not None and p.dim() > 1 and p.is_floating_point() for p in module._parameters.values())


def _is_float_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D) and not isinstance(module, QuantLinear)


# -- the choices as lines -----------------------------------------------------------------------------------


def explain(plan: Plan) -> Iterator[Line]:
    """Return each choice of a plan, with its reason, as the line that is printed of it."""
    if model_device(plan.model).type == "cpu":
        yield _kernels_line()
    if plan.split is not None:
        yield _split_line(plan.split)
    yield from _attention_lines(plan)
    yield from _weight_lines(plan)
    yield from _fused_lines(plan)
    yield from _cache_lines(plan)
    if model_device(plan.model).type != "cpu":
        yield _graphs_line(plan)
    yield _undo_line(plan)
    variant = plan.variant
    reason = "; ".join(variant) or "a request's tokens do not depend on other requests"
    yield Line("exactness", "row-invariant", "no" if variant else "yes", reason)
    yield from _size_lines(plan)


def _kernels_line() -> Line:
    refusal = cpu_kernels.refusal()
    if refusal is not None:
        return Line("cpu kernels", "C++", "not used", refusal.removeprefix("cpu kernels: "))
    threads = cpu_kernels.threads()
    return Line("cpu kernels", "C++", cpu_kernels.isa(), f"{threads} thread{'s' if threads > 1 else ''}")


def _split_line(split: TensorParallel) -> Line:
    styles = Counter(split.styles.values())
    named = ", ".join(f"{count} {style}" for style, count in sorted(styles.items()))
    return Line("parallel", f"rank {split.ranks.rank} of {split.ranks.size}", "tensor parallel", f"as loaded: {named}")


def _attention_lines(plan: Plan) -> Iterator[Line]:
    if plan.stock_attention:
        yield Line("attention", "all layers", "stock", plan.stock_attention)
        return
    groups = Counter((planned.backend.name, planned.site.spec.window, planned.reason) for planned in plan.attention)
    for (backend, window, reason), count in groups.items():
        kind = "full" if window is None else f"window {window}"
        yield Line("attention", f"{count} layers, {kind}", backend, reason)
    for name, reason in plan.stock_parts.items():
        yield Line("attention", name, "stock", reason)


def _weight_lines(plan: Plan) -> Iterator[Line]:
    held = Counter(map(_held, (m for m in plan.model.modules() if isinstance(m, QuantModule))))
    for (what, choice), count in held.items():
        yield Line("weights", f"{count} {what}", choice, "as stored")
    if plan.config.weights is None:
        rest, why = ("the rest", "they are no quantized layers") if held else ("all", "weights=None: read in place")
        yield Line("weights", rest, "as they are", why)
        return
    groups: dict[tuple[str, str, str], list[LinearPlan]] = {}
    for linear in plan.linears:
        experts = isinstance(linear.site, ExpertsSite)
        what = "head" if linear.site.is_head else "weights of experts" if experts else "linears"
        groups.setdefault((what, _format(linear), linear.reason), []).append(linear)
    for (what, choice, reason), members in groups.items():
        yield Line("weights", f"{len(members)} {what}{_shapes(members)}", choice, reason)
    yield from _fold_lines(plan)
    if not plan.linears:
        yield Line("weights", "none", "as they are", "the model has no Linear modules")


def _held(layer: QuantModule) -> tuple[str, str]:
    """Return what a layer that a checkpoint holds quantized is, and its format with the backend."""
    group_size = layer.layout.group_size
    group = "" if group_size is None else f" group {group_size}"
    what = "weights of experts" if isinstance(layer, ExpertWeights) else "linears"
    return what, f"{layer.layout.label}{group} by {layer.chosen.backend.name}"


def _fold_lines(plan: Plan) -> Iterator[Line]:
    """Describe where AWQ's scales of the inputs go."""
    names = [p.site.name for p in plan.quantized if p.config.method == "awq"]
    scaled = {name for fold in plan.folds for name in fold.consumers}
    if scaled:
        producers = Counter(fold.producer.rpartition(".")[2] for fold in plan.folds)
        where = ", ".join(f"{count} {name}" for name, count in producers.items())
        yield Line("weights", f"{len(scaled)} linears, awq", "scales and clips", f"scales are folded into {where}")
    if left := [name for name in names if name not in scaled]:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in left}))
        yield Line("weights", f"{len(left)} linears, awq", "clips only", f"no exact place for scales is known: {ends}")


def _format(linear: LinearPlan) -> str:
    if linear.choice is None:
        return "as is"
    group_size = None if linear.config.is_nf4 else linear.config.layout.group_size
    group = "" if group_size is None else f" group {group_size}"
    method = f" {linear.config.method}" if linear.config.is_calibrated else ""
    return f"{linear.config.label}{group}{method} by {linear.choice.backend.name}"


def _shapes(members: list[LinearPlan]) -> str:
    shapes = {tuple(m.site.weight.shape) for m in members}
    return f" [{'x'.join(map(str, shapes.pop()))}]" if len(shapes) == 1 else ""


FUSED_KINDS = {
    KIND: ("decoder layers", "one native call each"),
    LAYER: ("encoder layers", "one native call each"),
    STACK: ("encoders", "padding is left out; zeros stand there"),
    "norm": ("RMSNorms", "one native call"),
    "rotary": ("rotary embeddings", "one native call"),
    "mlp": ("gated MLPs", "one call, then down"),
    "gate": ("gated MLPs", "activation and product in one call"),
    ACTIVATION: ("activations", "one native call"),
    "conv1d": ("float Conv1Ds", "torch, in float32"),
}


def _fused_lines(plan: Plan) -> Iterator[Line]:
    fused = plan.fused
    if fused.reason is not None:
        yield Line("fused", "nothing", "stock", fused.reason)
        return
    for kind, (what, choice) in FUSED_KINDS.items():
        count = sum(site.kind == kind for site in fused.sites)
        if count:
            yield Line("fused", f"{count} {what}", choice, "checked on random input")
    shared = Counter(site.state.joined for site in fused.sites if site.kind == JOINED)
    for joined, count in shared.items():
        named = "; ".join(what for kind, what in JOINS.items() if kind in joined)
        yield Line("fused", f"{count} decoder layers", "one launch for two steps", named)
    if fused.linears:
        yield Line("fused", f"{len(fused.linears)} float linears", "native for few rows", "weights are read in place")
    for (kind, reason), count in Counter((d.kind, d.reason) for d in fused.dropped).items():
        choice = "module by module" if kind in (KIND, LAYER) else "stock"
        yield Line("fused", f"{count} {FUSED_KINDS[kind][0]}", choice, reason)


def _cache_lines(plan: Plan) -> Iterator[Line]:
    cache = plan.config.cache
    if plan.stock_cache or cache is None:
        yield Line("cache", "keys and values", "stock", plan.stock_cache or "cache=None")
        yield Line("generate", "all modes", "stock", "no paged cache")
        return
    dtype = str(plan.model.dtype).removeprefix("torch.") if cache.dtype == "auto" else cache.dtype
    capacity = "grows as needed" if cache.max_tokens is None else f"{cache.max_tokens} tokens"
    sharing = "prefixes shared" if cache.prefix_sharing else "prefixes not shared"
    yield Line("cache", "keys and values", f"paged, block {cache.block_size}, {dtype}", f"{capacity}; {sharing}")
    if plan.context is not None:
        ranks = plan.context.ranks
        held = f"each holds 1/{ranks.size} of the blocks"
        yield Line("parallel", f"rank {ranks.rank} of {ranks.size}", "context parallel", held)
    if plan.stock_loop is not None:
        yield Line("generate", "all modes", "stock's loops", f"over the paged cache: {plan.stock_loop}")
        return
    yield Line("generate", "greedy, sampling", "ragged", "no padding; a sequence that has ended costs nothing")
    yield Line("generate", "beams", "stock's loop", "over the paged cache; prompts stored once")
    yield Line("generate", "init_continuous_batching()", "ragged", "by the loop that an Engine runs")
    yield _speculation_line(plan)


def _speculation_line(plan: Plan) -> Line:
    config = plan.config.speculative
    if config is None:
        return Line("generate", "speculation", "off", "unless a call asks for it")
    names = ", ".join(drafter if isinstance(drafter, str) else type(drafter).__name__ for drafter in config.drafters)
    length = f"up to {config.max_draft} tokens" if config.num_draft == "auto" else f"{config.num_draft} tokens"
    return Line("generate", "speculation", names, f"{length} a pass, verified by {config.verify}")


def _undo_line(plan: Plan) -> Line:
    kept = plan.config.keep_original
    if not plan.quantized:
        return Line("undo", "unpatch()", "exact", "no weight is replaced")
    in_memory = [p for p in plan.quantized if not is_offloaded(p.site.module)]
    if in_memory and kept is False:
        return Line("undo", "unpatch()", "impossible", "keep_original=False drops the original weights")
    size = sum(p.site.weight.nbytes for p in in_memory if p.replaces)
    stay = whereabouts(size, plan.on_disk, kept=kept is True) if in_memory else "stay where accelerate offloads them"
    return Line("undo", "unpatch()", "exact", f"originals {stay}")


def _graphs_line(plan: Plan) -> Line:
    """Return whether passes of the ragged loop can be replayed as graphs; other obstacles are in stats()."""
    host = sorted({p.backend.name for p in plan.attention if not p.backend.capturable})
    device = model_device(plan.model)
    refusal = graphs.refusal(device) or plan.stock_loop or (graphs.SPLIT if plan.agreement.size > 1 else None)
    if refusal is None and host:
        refusal = f"the attention backend {host[0]!r} reads the lengths of sequences on the host"
    if refusal is not None:
        return Line("graphs", "decode, verification", "none", refusal)
    reason = "captured when a shape of a pass is first met; stats() counts the passes without one"
    return Line("graphs", "decode, verification", "CUDA graphs", reason)


def _size_lines(plan: Plan) -> Iterator[Line]:
    before, after = plan.bytes_before / 1e6, plan.bytes_after / 1e6
    yield Line(
        "bytes", "weights", f"{before:,.1f} -> {after:,.1f} MB", "while patched; originals that are kept come on top"
    )
    what, unit = ("decode, batch 1", "ms a token") if plan.model.can_generate() else ("a pass, few tokens", "ms")
    yield Line(
        "speed",
        what,
        f"{plan.seconds_before * 1e3:,.2f} -> {plan.seconds_after * 1e3:,.2f} {unit}",
        f"at least, since memory is read at {plan.bandwidth / 1e9:,.0f} GB/s here",
    )
