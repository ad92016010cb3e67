"""The way in which transformers split a model over a tensor parallel group (DTensor, since transformers 5.17).

Reads what from_pretrained(distributed_config=...) has left: the plan on the model, and the placement of each weight.
It is the same in all versions of transformers that hf_accel takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..config import PatchConfig
from ..errors import UnsupportedError
from ..tensors import is_sharded
from .rank_agreement import RankAgreement

# The work of a rank around a sharded linear layer, by transformers' name of the style.
PLAIN, GATHERS, REDUCES, SPLITS = "plain", "gathers", "reduces", "splits"
STYLES = {
    "colwise": PLAIN,  # its own outputs, from whole inputs: no rank needs another
    "packed_colwise": PLAIN,
    "colwise_gather_output": GATHERS,  # and all ranks get all outputs
    "colwise_rep": GATHERS,
    "rowwise": REDUCES,  # partial sums from its own inputs, which are added over all ranks
    "rowwise_split_input": SPLITS,  # the same, from whole inputs, of which it takes its own
    "rowwise_rep": SPLITS,
}
SHARDED_DIM = {PLAIN: 0, GATHERS: 0, REDUCES: 1, SPLITS: 1}
SIZES = ("tp_size", "fsdp_size", "pp_size", "ep_size", "dp_replicate_size")


@dataclass(frozen=True)
class TensorParallel:
    """The split of a model. ranks: the processes that share it. styles: transformers' name of each module's split."""

    ranks: RankAgreement
    styles: dict[str, str]

    def role(self, name: str) -> str | None:
        """Return what a rank does around the linear layer `name`; None for an unknown style, and for a layer without
        one.
        """
        return STYLES.get(self.styles.get(name, ""))

    def joins(self, name: str) -> bool:
        """Return whether the ranks need each other's results of the linear layer `name`."""
        return self.role(name) in (GATHERS, REDUCES, SPLITS)

    def refusal(self, name: str, module: nn.Module) -> str | None:
        """Return why a linear layer with a sharded weight stays as transformers split it, as one clause, or None.

        Layers without a sharded weight are whole on each rank.
        """
        weight: Any = module._parameters["weight"]
        style = self.styles.get(name)
        role = self.role(name)
        if role is None:
            return f"is split over ranks in a way that is not known ({style or 'no style'})"
        if getattr(module.forward, "__name__", "") != "tp_forward":
            return "is split over ranks, but its forward is not transformers' own"
        if len(weight.placements) != 1 or getattr(weight.placements[0], "dim", None) not in _dims(role, weight.ndim):
            return f"is split over ranks in another way than its style {style!r} says"
        if weight.shape[SHARDED_DIM[role]] % (self.ranks.size * _split_factor(weight)):
            return f"its {weight.shape[SHARDED_DIM[role]]} numbers do not divide by tp_size={self.ranks.size}"
        return None

    def heads_divisor(self, attention: str) -> int:
        """Return the number by which the heads of this attention module are divided, so that one rank's remain."""
        own = {style for name, style in self.styles.items() if name.rpartition(".")[0] == attention}
        return self.ranks.size if own & {"colwise", "packed_colwise"} else 1


def _dims(role: str, ndim: int) -> tuple[int, int]:
    return SHARDED_DIM[role], SHARDED_DIM[role] - ndim


def _split_factor(weight: Any) -> int:
    return int(getattr(weight.placements[0], "split_factor", 1))


def tensor_parallel(model: PreTrainedModel) -> TensorParallel | None:
    """Return how a model is split over ranks; None if it is not.

    Raises UnsupportedError for a model that is split in other ways too (FSDP, pipeline, experts), or by others.
    """
    sizes = split_sizes(model)
    if sizes.keys() - {"tp_size"}:
        raise UnsupportedError(
            f"the model is split by {', '.join(f'{name}={size}' for name, size in sizes.items())}; hf_accel knows "
            "tp_size= alone: load it with DistributedConfig(tp_size=..., tp_plan='auto'), or whole"
        )
    sharded = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
    if not sharded:
        return None
    if not sizes:
        raise UnsupportedError(
            f"{next(iter(sharded))!r} is a DTensor, but not by tensor parallel of transformers; load the model with "
            "from_pretrained(..., distributed_config=DistributedConfig(tp_size=..., tp_plan='auto'))"
        )
    mesh: Any = next(iter(sharded.values())).device_mesh  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise UnsupportedError(f"the weights are split over {mesh.ndim} dimensions of ranks; load with tp_size= alone")
    return TensorParallel(RankAgreement(mesh.get_group(), model.device), dict(_styles(model)))


def split_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Return how a model is split over processes, or will be when it is loaded: what of its DistributedConfig is above
    1.
    """
    config: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    values = {name: getattr(config, name, None) for name in SIZES}
    found = {name: size for name, size in values.items() if isinstance(size, int) and size > 1}
    if "ep_size" not in found and getattr(config, "enable_expert_parallel", False):  # of older transformers
        found["enable_expert_parallel"] = True
    return found


def _styles(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Return the style of each module that the model's plan names; "*" in the plan is the number of a layer."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    for name, _ in model.named_modules():
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(name) or plan.get(general)
        if style is not None:
            yield name, style


def check_split(split: TensorParallel, model: PreTrainedModel, config: PatchConfig) -> None:
    """Raise UnsupportedError for what patch() cannot do with a model that is split over ranks."""
    weights, drafters = config.weights, [] if config.speculative is None else config.speculative.drafters
    refused = {
        "weights='nf4': bitsandbytes' layers do not know of ranks; use 'int8' or 'int4'": (
            weights is not None and weights.is_nf4
        ),
        "weights='fp8', whose parts nobody has compared with the whole: use 'int8' or 'int4'": (
            weights is not None and weights.layout.format == "fp8"
        ),
        "calibration, which needs all of a layer in one process: use method='rtn', without average_bits=": (
            weights is not None and weights.needs_data
        ),
        "weights='auto', which each rank would measure for itself: say 'int8', 'int4' or None": (
            weights is not None and weights.only_if_faster
        ),
        "speculative='self-int4', which needs a second model over the same weights: use 'ngram' or 'suffix'": (
            "self-int4" in drafters
        ),
        "adapters (PEFT): call merge_and_unload() first, or patch before they are added": any(
            "base_layer" in module._modules for module in model.modules()
        ),
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise UnsupportedError(f"the model is split over {split.ranks.size} ranks, which excludes {what}")
