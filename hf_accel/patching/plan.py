"""A Plan: every choice about a model with its reason. `patch` applies it, so the two agree by construction."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from html import escape
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention import AttentionBackend
from ..config import PatchConfig, WeightConfig
from ..fused.projections import UNLIMITED
from ..fused.sites import Dropped, FusedSite, ProjectionSite
from ..generation.agreement import ALONE, ProcessAgreement
from ..linear import BackendChoice, QuantLinear, QuantModule
from ..linear.backends.cpu import Cpu
from ..parallel.context import ContextParallel
from ..parallel.tensor_plan import TensorParallel
from ..recognition.unchanged import has_own_forward
from .originals import Stored
from .survey import AttentionSite
from .weight_sites import LinearSite


class Printed:
    """Base of plans, certificates, estimates and reports, which have a __str__: repr() is that, in a notebook HTML."""

    def _table_rows(self) -> Iterable[Row]:
        """The rows in a notebook: lines of text, unless a class knows its columns."""
        return ((line,) for line in str(self).splitlines())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = list(self._table_rows())
        columns = max(map(len, rows), default=1)
        return f"<table>{''.join(_html_row(row, columns) for row in rows)}</table>"


@dataclass(frozen=True)
class Line:
    """One choice: about what, what was chosen, and why."""

    topic: str
    what: str
    choice: str
    reason: str


def row_of(line: Line) -> Row:
    return line.topic, line.what, line.choice, line.reason


WIDTH = 100  # columns of a table
NARROWEST = 24  # columns for a reason, however long the rest is


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Columns that fit in WIDTH: long reasons go on below, and a topic is named once."""
    cells = [(line.topic, line.what, line.choice) for line in lines]
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*cells, strict=True)]
    indent = sum(widths) + 2 * len(widths)
    last = None
    for line, (topic, *others) in zip(lines, cells, strict=True):
        shown = ["" if topic == last else topic, *others]
        head = "".join(cell.ljust(width) + "  " for cell, width in zip(shown, widths, strict=True))
        reason = textwrap.wrap(line.reason, max(NARROWEST, WIDTH - indent), break_on_hyphens=False) or [""]
        yield (head + reason[0]).rstrip()
        yield from (" " * indent + more for more in reason[1:])
        last = topic


@dataclass(frozen=True)
class LinearPlan:
    """The plan of one Linear. choice None: it stays, because of `reason`."""

    site: LinearSite
    config: WeightConfig
    reason: str
    choice: BackendChoice | None = None

    @property
    def bytes_read(self) -> int:
        """Change of the weight bytes that a decode step reads."""
        return 0 if self.choice is None else self.site.count * self.choice.spec.weight_bytes - self.site.weight.nbytes

    @property
    def bytes_held(self) -> int:
        """Change of the weight bytes in memory: a tied head gets a copy, the embedding keeps the original."""
        return self.bytes_read + (self.site.weight.nbytes if self.choice is not None and self.site.is_tied else 0)


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


class Server(Enum):
    """Who multiplies by the weight of a linear layer when the model is patched."""

    KERNELS = auto()  # the native library, alone or as a step of a whole layer
    BACKEND = auto()  # another backend of ours
    RANKS = auto()  # several processes, for which no call can wait in its middle
    FOREIGN = auto()  # bitsandbytes, or a forward that was put on the module
    TORCH = auto()


CALLED_TOGETHER = (Server.KERNELS, Server.BACKEND)


def servers_of(
    model: nn.Module, planned: Mapping[nn.Module, LinearPlan], floats: Container[nn.Module],
    split: TensorParallel | None,
) -> dict[nn.Module, Server]:  # fmt: skip
    """The Server of each linear layer. planned: those that are replaced. floats: those that get a native forward."""

    def server(name: str, module: nn.Module) -> Server:
        plan = planned.get(module)
        if has_own_forward(module) if plan is None else plan.config.is_nf4:
            return Server.FOREIGN
        if split is not None and split.joins(name):
            return Server.RANKS
        choice = plan.choice if plan is not None else module.choice if isinstance(module, QuantLinear) else None
        if choice is None:
            return Server.KERNELS if module in floats else Server.TORCH
        return Server.KERNELS if isinstance(choice.backend, Cpu) else Server.BACKEND

    named = model.named_modules()
    return {each: server(name, each) for name, each in named if each in planned or isinstance(each, nn.Linear)}


FindOriginals = Callable[[PreTrainedModel, Sequence[LinearPlan]], dict[str, Stored] | None]


@dataclass(frozen=True)
class AttentionPlan:
    site: AttentionSite
    backend: AttentionBackend
    reason: str


@dataclass(frozen=True)
class FusedPlan:
    """Modules that get a native forward, float Linears read in place, and layers that are called on one tensor.

    float_rows: the most rows that float weights are multiplied by natively. reason: why there are none.
    """

    sites: tuple[FusedSite, ...] = ()
    linears: tuple[FusedSite, ...] = ()
    projections: tuple[ProjectionSite, ...] = ()
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
    out the
        KV cache; None if this process has the whole cache.
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
        """JSON-able: the choices, bytes, and the least seconds per token the measured bandwidth allows."""
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


Row = tuple[str, ...]  # its cells; a single one is a line of text across all columns
STYLE = "text-align: left; white-space: pre-wrap"


def _html_row(row: Row, columns: int) -> str:
    if len(row) == 1:
        return f'<tr><td colspan="{columns}" style="{STYLE}; font-family: monospace">{escape(row[0])}</td></tr>'
    cells = (f'<td style="{STYLE}">{escape(cell)}</td>' for cell in row)
    return f"<tr>{''.join(cells)}</tr>"
