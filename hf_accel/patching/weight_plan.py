"""The one answer to what a weight gets: bits, format, groups, bytes, the backend that reads it, or why it stays float.

The plan and packing, estimate() and fit=, budgets of bits and the loader read it. `weight_plans` gives it for a model
on any device, also on meta. Without `Backends` it is the form alone: nothing is asked of kernels that another machine
may have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..config import WeightConfig
from ..linear import BackendChoice, LinearSpec
from ..linear.backends.measured_tiles import Measuring
from .survey import sites_for
from .weight_groups import cut_refusal, fitted
from .weight_sites import LinearSite

NF4_HEAD = "a checkpoint of bitsandbytes holds no INT8 head"


@dataclass(frozen=True)
class WeightPlan:
    """The form that one weight gets, or the reason why it stays as it is.

    config: what is asked of it, with groups that fit. spec: that of one matrix; None: the weight stays in floating
    point, because of `reason`. choice: the backend; None where it stays, or where no backend was asked.
    """

    site: LinearSite
    config: WeightConfig
    reason: str
    spec: LinearSpec | None = None
    choice: BackendChoice | None = None

    # -- how it is held ---------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The format, its groups and the method, such as int4 group 64 gptq."""
        if self.spec is None:
            return "as is"
        size = None if self.config.is_nf4 else self.config.layout.group_size
        group = f" group {size}" if size else ""
        return f"{self.config.label}{group}" + (f" {self.config.method}" if self.config.is_calibrated else "")

    @property
    def whole(self) -> LinearSpec | None:
        """The spec of all its matrices, one after the other."""
        return None if self.spec is None else self.site.whole(self.spec)

    @property
    def replaces(self) -> bool:
        """True if nothing in the model needs the float weight any more."""
        return self.spec is not None and not self.site.keeps_original

    @property
    def frees(self) -> bool:
        """True if the float weight is in memory, where only unpatch() may need it from now on."""
        return self.replaces and not self.site.is_offloaded

    # -- bytes ------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        return self.site.weight.numel()

    @property
    def stored_bytes(self) -> int:
        """The bytes that the weight takes as planned, without the original that an embedding may keep."""
        return self.site.weight.nbytes if self.spec is None else self.site.count * self.spec.weight_bytes

    @property
    def bytes_held(self) -> int:
        """Change of the weight bytes in memory: where the embedding keeps the original, a tied head is a copy."""
        freed = self.site.weight.nbytes if self.replaces else 0
        return 0 if self.spec is None else self.stored_bytes - freed

    @property
    def bytes_read(self) -> int:
        """Change of the weight bytes that a decode step reads."""
        kept = 0 if self.replaces else self.site.weight.nbytes
        return 0 if self.spec is None or not self.site.is_read_whole else self.bytes_held - kept

    # -- other answers ----------------------------------------------------------------------------------

    def stays(self, reason: str) -> WeightPlan:
        """Return the plan of the weight if it is left in floating point."""
        return replace(self, reason=reason, spec=None, choice=None)

    def with_eight_bits(self) -> WeightPlan:
        """Return the form that it would have with 8 bits."""
        config = self.config.with_eight_bits()
        return replace(self, config=config, spec=self.site.spec(config), choice=None)

    def choice_for(self, tensor: Tensor) -> BackendChoice:
        """Return the backend for the weight's numbers as they were read, which may have another dtype."""
        assert self.choice is not None
        spec = LinearSpec.of(self.site.matrices(tensor)[0], self.config)
        return self.site.choose(spec, self.config, row_invariant=self.choice.row_invariant)


class WeightPlans(NamedTuple):
    """The plans of all weights, in the order of the model, and why the embedding stays although it was asked for."""

    weights: list[WeightPlan]
    embedding_stays: str | None


class Backends(NamedTuple):
    """The choice of the backend of each weight.

    row_invariant: whether backends that are row-invariant come before the others. measuring: of tiles, on a GPU.
    """

    row_invariant: bool = False
    measuring: Measuring | None = None

    def choose(self, planned: WeightPlan, asked: WeightConfig) -> WeightPlan:
        """Return the plan with its backend and the reasons for it. asked: the config of the model."""
        site, config, spec = planned.site, planned.config, planned.spec
        if spec is None:
            return planned
        choice = site.choose(spec, config, row_invariant=self.row_invariant)
        measured = None if self.measuring is None else self.measuring.measure(choice, of_experts=site.of_experts)
        if config.only_if_faster and choice.seconds > choice.stock_seconds:
            return planned.stays(f"{config.label} was measured to be slower than stock")
        refusals = [f"{name} refused: {why}" for name, why in choice.refusals]
        notes = [note for note in (choice.note, measured, site.note) if note]
        reason = site.reason or "; ".join([*refusals, *notes]) or "first choice"
        others = [*filter(None, [planned.reason]), *site.remarks(asked)]
        return replace(planned, reason="; ".join([reason, *others]), choice=choice)


def weight_plan(
    site: LinearSite, config: WeightConfig, *, eight_bits: Collection[str] = (), device_type: str | None = None
) -> WeightPlan:
    """Return what `config`, that of the model, gives a weight; its reason is empty where nothing was changed.

    eight_bits: names of weights that get 8 bits besides those that `config` names. device_type: where the weight will
    be, if it is on meta still.
    """
    asked = site.config_in(config, eight_bits)
    if asked is None:
        return WeightPlan(site, config, NF4_HEAD if config.is_nf4 else "head=None")
    kept, why = fitted(asked, site.inputs)
    refusal = site.skip or site.refusal(kept) or cut_refusal(kept, site)
    if refusal is not None:
        return WeightPlan(site, kept, refusal)
    spec = site.spec(kept, device_type=device_type)
    refusal = site.layer_refusal(spec, kept)
    return WeightPlan(site, kept, refusal or why or "", None if refusal else spec)


def weight_plans(
    model: PreTrainedModel, config: WeightConfig, *, device_type: str | None = None, eight_bits: Collection[str] = (),
    backends: Backends | None = None,
) -> WeightPlans:  # fmt: skip
    """Return what each weight of a model gets. backends: None leaves the backends out, as for another machine.

    Raises UnsupportedError for names in skip= that are of no Linear, and for groups that do not fit.
    """
    sites, embedding_stays = sites_for(model, config, device_type=device_type)
    planned = []
    for site in sites:
        form = weight_plan(site, config, eight_bits=eight_bits, device_type=device_type)
        planned.append(form if backends is None else backends.choose(form, config))
        if planned[-1].spec is None and (site.embeddings or not site.is_read_whole):
            stays = planned[-1].reason
            embedding_stays = f"its head stays as it is: {stays}" if site.embeddings else stays
    return WeightPlans(_put_in_together(planned), embedding_stays)


def _put_in_together(planned: Sequence[WeightPlan]) -> list[WeightPlan]:
    """Let all weights that are put in together stay if one of them stays."""
    kept = {name: p.reason for p in planned if p.spec is None for name in p.site.together}
    return [p.stays(kept[p.site.name]) if p.site.name in kept else p for p in planned]
