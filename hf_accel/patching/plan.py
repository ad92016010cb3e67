"""A Plan: every choice about a model with its reason. `patch` applies it, so the two agree by construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention import AttentionBackend
from ..config import PatchConfig
from ..fused.hf.sites import FEW_EXPERTS
from ..fused.site import Dropped, FusedSite
from ..generation.agreement import ALONE, ProcessAgreement
from ..generation.hf.generation_state import STOCK_FORM, DecoderForm
from ..hardware import UNLIMITED
from ..linear import QuantLinear, QuantModule
from ..models import experts_per_token
from ..parallel.context import ContextParallel
from ..parallel.tensor import TensorParallel
from .attention_survey import AttentionSite
from .originals import Stored
from .place_rounding import placed_functions
from .printed import Line, Printed, Row, row_of, table
from .weight_plan import WeightPlan


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


FindOriginals = Callable[[PreTrainedModel, Sequence[WeightPlan]], dict[str, Stored] | None]


@dataclass(frozen=True)
class AttentionPlan:
    site: AttentionSite
    backend: AttentionBackend
    reason: str


@dataclass(frozen=True)
class FusedPlan:
    """Modules that get a native forward, and float Linears that are read in place. reason: why there are none."""

    sites: tuple[FusedSite, ...] = ()
    linears: tuple[FusedSite, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    reason: str | None = None

    @property
    def float_rows(self) -> int | None:
        """The most rows that all float Linears multiply natively; None where that is any number, or there are none."""
        return min((site.state.float_rows for site in self.linears if site.state.float_rows < UNLIMITED), default=None)


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
        out the KV cache; None if this process has the whole cache.
    form: how ragged passes call the decoder. inner: the InnerGenerator whose generate() the model's own one calls;
        None if it has no generate() of its own.
    """

    model: PreTrainedModel
    title: str
    config: PatchConfig
    linears: tuple[WeightPlan, ...]
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
    form: DecoderForm = STOCK_FORM
    inner: Any = None

    @property
    def agreement(self) -> ProcessAgreement:
        """The agreement by which the model's processes decide."""
        shared = self.split or self.context
        return ALONE if shared is None else shared.ranks

    @property
    def quantized(self) -> tuple[WeightPlan, ...]:
        return tuple(p for p in self.linears if p.choice is not None)

    @property
    def calibrated(self) -> tuple[WeightPlan, ...]:
        """The linears that are rounded by what calibration data says of their inputs."""
        return tuple(p for p in self.quantized if p.config.is_calibrated)

    @property
    def variant(self) -> list[str]:
        """The parts that may round a token's numbers differently among other tokens, as clauses."""
        read = (p for p in self.quantized if p.site.is_read_whole)
        chosen = {(p.choice.backend, p.config.label.split()[0]) for p in read if p.choice is not None}
        stored = [m for m in self.model.modules() if isinstance(m, QuantModule) and m.multiplies]
        chosen |= {(module.chosen.backend, module.spec.layout.label) for module in stored}
        clauses = {f"{b.name}'s {k.upper()} linear rounds by batch size" for b, k in chosen if not b.row_invariant}
        if (self.stock_attention and self.form.operators is None) or self.stock_parts:
            clauses.add("stock attention rounds by batch size")
        clauses |= {
            f"{p.backend.name}'s attention rounds by batch size" for p in self.attention if not p.backend.row_invariant
        }
        if any(p.site.spec.window is not None for p in self.attention):
            clauses.add("attention within a window rounds by what the cache has dropped")
        clauses |= {site.kind.varies for site in self.fused.sites if site.kind.varies is not None}
        if self.split is not None and self.agreement.size > 2:
            clauses.add("sums over more than two ranks round by their place in a pass")
        if self.context is not None:
            clauses.add("attention over several ranks rounds by where blocks are")
        replaced = {p.site.module for p in self.quantized} | {site.module for site in self.fused.linears}
        if any(_is_float_linear(module) and module not in replaced for module in self.model.modules()):
            clauses.add("torch's float linear rounds by batch size")
        elif self.fused.float_rows is not None:
            clauses.add(f"float linears of more than {self.fused.float_rows} rows go to torch, which rounds otherwise")
        # Over pages, we compute these and their parts, of which we call the linears.
        kept = (site.module for site in self.fused.sites if site.kind.multiplies)
        replaced |= {part for module in kept for part in (module, *module.children())}
        own = {type(m).__name__ for m in self.model.modules() if m not in replaced and _has_matrix_of_its_own(m)}
        clauses |= {f"the products of {name} are torch's, which rounds by batch size" for name in own}
        whole = (site.module for site in self.fused.sites if site.kind.computes_all)
        clauses |= set(placed_functions(self.model, {part for module in whole for part in module.modules()}))
        return sorted(clauses)

    @property
    def invariant_rows(self) -> int | None:
        """The most rows that float linears and experts round as they round one; None where that is any number, or not
        even two.
        """
        rows = [self.fused.float_rows or UNLIMITED]
        chosen = experts_per_token(self.model.config) or math.inf
        for site in self.fused.sites:
            if site.kind == FEW_EXPERTS:  # its rows are those of an expert, on average; a token takes no expert twice
                experts = next((len(weight) for weight in site.module.parameters()), 1)
                rows.append(site.state.rows * experts // int(min(chosen, experts)))
        return min((number for number in rows if number < UNLIMITED), default=None)

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
