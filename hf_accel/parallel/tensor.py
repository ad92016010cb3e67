"""Tensor parallel: the way in which transformers has split a model (DTensor), and quantized layers of the parts.

Reads what from_pretrained(distributed_config=...) has left: the plan on the model, and the placement of each weight.
It is the same in all versions of transformers that hf_accel takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from ..config import PatchConfig
from ..errors import UnsupportedError
from ..linear import BackendChoice, QuantLinear
from ..linear.layer_state import RankPart
from ..tensors import is_sharded, local_tensor
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

    def part(self, name: str, packed: Any, bias: Any, choice: BackendChoice) -> QuantLinear:
        """Make the layer of the linear layer `name` of whose weight this rank has packed its part."""
        layer = CLASSES[self.role(name) or ""].from_packed(packed, part_bias(bias), choice=choice)
        layer.part = RankPart(self.ranks.rank, self.ranks.size)
        if isinstance(layer, JoinedLinear):
            layer.ranks = self.ranks
        return layer

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
    asked = [part for part in (config.weights, config.speculative) if part is not None]
    refusals = [part.split_refusal for part in asked]
    if any("base_layer" in module._modules for module in model.modules()):
        refusals.append("adapters (PEFT): call merge_and_unload() first, or patch before they are added")
    for refusal in filter(None, refusals):
        raise UnsupportedError(f"the model is split over {split.ranks.size} ranks, which excludes {refusal}")


# -- quantized linear layers of which each rank holds a part -------------------------------------------


class JoinedLinear(QuantLinear):
    """A part of a layer whose ranks need each other's results. Inference only: no gradient crosses ranks here."""

    ranks: RankAgreement

    def part_forward(self, x: Tensor) -> Tensor:
        """Compute this rank's part, without a gradient. Raises UnsupportedError if a gradient is asked for."""
        out = QuantLinear.forward(self, x)
        if out.requires_grad:
            raise UnsupportedError(
                "quantized weights that are split over ranks compute no gradient; call the model under "
                "torch.no_grad(), or patch it with weights=None to train it"
            )
        return out


class ReducedLinear(JoinedLinear):
    """A layer with a part of the inputs: x [..., in / ranks] -> [..., out], summed over all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.part_forward(x).contiguous()
        distributed.all_reduce(out, group=self.ranks.group)
        return out

    @property
    def added_bias(self) -> nn.Parameter | None:
        """Add the bias on one rank only: each rank holds the whole of it."""
        return self.bias if self.ranks.leads else None


class SplitLinear(ReducedLinear):
    """A ReducedLinear for whole inputs: x [..., in] -> [..., out]. A rank takes its part of x."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.ranks.rank * self.in_features
        return super().forward(x[..., start : start + self.in_features])


class GatheredLinear(JoinedLinear):
    """A layer with a part of the outputs: x [..., in] -> [..., out], joined from all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.part_forward(x).contiguous()
        parts = [torch.empty_like(out) for _ in range(self.ranks.size)]
        distributed.all_gather(parts, out, group=self.ranks.group)
        return torch.cat(parts, -1)


CLASSES: dict[str, type[QuantLinear]] = {
    PLAIN: QuantLinear,  # whose part needs no other
    GATHERS: GatheredLinear,
    REDUCES: ReducedLinear,
    SPLITS: SplitLinear,
}


def part_bias(bias: nn.Parameter | None) -> nn.Parameter | None:
    """Return the bias of a rank's part: that of its outputs, or the whole bias where the inputs are split."""
    return nn.Parameter(local_tensor(bias), requires_grad=bias.requires_grad) if is_sharded(bias) else bias  # type: ignore[union-attr]


# -- the part of a tensor that a rank holds ------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Spans of a whole tensor along one dimension; a rank's tensor holds them one after the other."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    def read(self, stored: Any) -> Tensor:
        """Read the part of a tensor, or of a slice that safetensors has not read yet, without reading the rest."""
        before = (slice(None),) * self.dim
        pieces = [stored[(*before, slice(*span))] for span in self.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def part_of(tensor: Any) -> Part | None:
    """Return the part that this rank holds of an evenly split DTensor; None for a tensor that is whole here."""
    if not is_sharded(tensor) or not hasattr(tensor.placements[0], "dim"):
        return None
    placement, mesh = tensor.placements[0], tensor.device_mesh
    dim = placement.dim % tensor.ndim
    blocks = int(getattr(placement, "split_factor", 1))  # of a weight that several are packed in, each split by itself
    block = tensor.shape[dim] // blocks
    size, rank = block // mesh.size(), mesh.get_local_rank()
    starts = [number * block + rank * size for number in range(blocks)]
    return Part(dim, tuple((start, start + size) for start in starts))


def let_go(parameter: Any) -> None:
    """Free a parameter's memory. The object stays, and so does every reference to it."""
    put_back(parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))


def put_back(parameter: Any, tensor: Tensor) -> None:
    """Fill a parameter again with its numbers, or with this rank's part of them."""
    if is_sharded(parameter):
        parameter._local_tensor = tensor  # what __tensor_flatten__ names
    else:
        parameter.data = tensor
