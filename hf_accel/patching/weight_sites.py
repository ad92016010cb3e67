"""One description of a module whose weight patch() may quantize: what it holds, and what takes its place.

Each kind of module is a class here. The survey finds them; the plan, packing, checkpoints, undo and estimate() ask
them, and know no kinds. A new kind is a class here, a finder in survey.py, and the layer in linear/ that it puts in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..config import GroupSize, WeightConfig
from ..linear import (
    BackendChoice,
    ExpertWeights,
    LinearSpec,
    QuantExperts,
    QuantLinear,
    QuantModule,
    Replacement,
    choose,
)
from ..linear.embedding import ROW_BACKEND, QuantEmbedding, QuantTable
from ..linear.experts import WEIGHT_MODULES
from ..linear.hf import with_outputs_first
from ..linear.nf4 import BitsAndBytes, choose_nf4, is_nf4, nf4_layer, nf4_refusal
from ..linear.replacement import empty_linear
from ..parallel.tensor import TensorParallel
from ..tensors import is_sharded, local_tensor
from .check import MOVED, NOTE, read_offloaded


@dataclass(frozen=True)
class LinearSite:
    """A Linear, or GPT-2's Conv1D. The other kinds of modules are subclasses, which say what differs.

    name: of the layer that will hold the weight. module: the one that holds it now, as its parameter `key`.
    is_tied: the weight is the input embedding's too. skip: one clause why the module stays, or None.
    embeddings: the names of those that look their rows up in the quantized weight from now on.
    remark: what the plan says of a weight that is quantized, as a clause. group_size: that of 8 bits where a config
    leaves it to the model.
    """

    name: str
    module: nn.Module
    is_head: bool = False
    is_tied: bool = False
    skip: str | None = None
    key: str = "weight"
    embeddings: tuple[str, ...] = ()
    remark: str | None = None
    group_size: GroupSize | None = None

    is_within: ClassVar[bool] = False  # whether the layer is a part of the module that takes the place
    is_read_whole: ClassVar[bool] = True  # by a decode step
    of_experts: ClassVar[bool] = False
    unreached: ClassVar[str | None] = None  # what it is called, if calibration data does not reach it
    takes_order: ClassVar[bool] = True  # whether a checkpoint may hold its inputs in an order of their own
    is_offloaded: ClassVar[bool] = False  # whether the weight is not in memory between calls
    reason: ClassVar[str | None] = None  # that the plan gives for the backend, if it is always the same
    note: ClassVar[str | None] = None  # what the plan says of how the weight is read, as a clause

    # -- names ------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The plural by which the plan counts such sites."""
        return "head" if self.is_head else "linears"

    @property
    def counted_as(self) -> str:
        """The kind of weight by which estimate() counts it."""
        return self.kind

    @property
    def replaced(self) -> str:
        """The name of the module whose place is taken."""
        return self.name.rpartition(".")[0] if self.is_within else self.name

    @property
    def together(self) -> tuple[str, ...]:
        """The names of the layers that are put in with this one or not at all; its own is one of them."""
        return (self.name,)

    @property
    def tensor_name(self) -> str:
        """The name of the weight in the model."""
        return f"{self.replaced}.{self.key}"

    @property
    def stored_name(self) -> str:
        """The name of the float weight in a checkpoint: of a tied one that of the embedding."""
        return f"{self.embeddings[0]}.weight" if self.embeddings else self.tensor_name

    # -- numbers ----------------------------------------------------------------------------------------

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def tensor(self) -> Tensor:
        """The parameter's numbers, or, of a model that is split over ranks, those that this rank holds."""
        return local_tensor(self.parameter)

    @property
    def weight(self) -> Tensor:
        """[out, in], whatever the module's own layout; of experts [experts, out, in]."""
        return self.tensor.t() if isinstance(self.module, Conv1D) else self.tensor

    @property
    def inputs(self) -> int:
        """Inputs of a matrix, on this rank."""
        return self.weight.shape[-1]

    @property
    def width(self) -> str:
        """The inputs of a matrix, as errors name them."""
        return f"the {self.inputs} inputs"

    @property
    def count(self) -> int:
        """Matrices in the parameter: one for each expert."""
        return 1

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Return the parameter, or another tensor of its shape, as weights [out, in]."""
        return [tensor.t() if isinstance(self.module, Conv1D) else tensor]

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters.get("bias")

    def read(self) -> Tensor:
        """Return the parameter's numbers, wherever they are."""
        return self.tensor.detach()

    def read_bias(self) -> nn.Parameter | None:
        """Return the bias that the layer gets: the very same Parameter, if it is in memory."""
        return self.bias

    # -- the plan ---------------------------------------------------------------------------------------

    def config_in(self, config: WeightConfig, eight_bits: Collection[str] = ()) -> WeightConfig | None:
        """Return what `config` asks of this weight; None: to leave it alone.

        eight_bits: names of weights that get 8 bits besides those that `config` names.
        """
        if self.is_head:
            return config.for_head
        kept = config.for_linear(self.name, also=eight_bits)
        if self.group_size and kept.bits == 8 and kept.leaves_groups:
            kept = replace(kept, group_size=self.group_size)
        if self.unreached is not None:
            kept = replace(kept, method="rtn", average_bits=None, calibration=None, resume=None)
        return kept

    def refusal(self, config: WeightConfig) -> str | None:
        """Return why such a weight cannot be held as its `config` says, as one clause; None if it can."""
        return None

    def spec(self, config: WeightConfig, *, device_type: str | None = None) -> LinearSpec:
        """Describe one matrix of the weight. device_type: where it will be, if the model is on meta still."""
        return LinearSpec.of(self.matrices(self.tensor)[0], config, device_type=device_type)

    def whole(self, spec: LinearSpec) -> LinearSpec:
        """Describe all matrices, one after the other. spec: that of one."""
        return replace(spec, out_features=self.count * spec.out_features)

    def layer_refusal(self, spec: LinearSpec, config: WeightConfig) -> str | None:
        """Return why no layer can hold this very weight, as one clause; None if one can."""
        return nf4_refusal(spec, self.bias) if config.is_nf4 else None

    def choose(self, spec: LinearSpec, config: WeightConfig, *, row_invariant: bool) -> BackendChoice:
        """Choose the backend of the layer. Raises UnsupportedError if there is none."""
        if config.is_nf4:
            return choose_nf4(spec)
        return choose(spec, row_invariant=row_invariant, finds_rows=bool(self.embeddings))

    def remarks(self, config: WeightConfig) -> list[str]:
        """Return what else the plan says if the weight is quantized by `config`, as clauses."""
        if self.unreached is not None and config.needs_data:
            return [f"rounded to nearest: calibration does not reach {self.unreached}"]
        return [] if self.remark is None else [self.remark]

    @property
    def keeps_original(self) -> bool:
        """True if the embedding needs the float weight still, so that a quantized head is a copy."""
        return self.is_tied and not self.embeddings

    # -- what takes its place ---------------------------------------------------------------------------

    def pack(self, tensor: Tensor, config: WeightConfig, choice: BackendChoice) -> Any:
        """Quantize the parameter's numbers in the form that `layer` takes, for the backend of `choice`."""
        return choice.backend.quantize(self.matrices(tensor)[0], config)

    def layer(
        self, weight: Any, choice: BackendChoice, *, bias: Tensor | None = None, split: TensorParallel | None = None
    ) -> nn.Module:
        """Make the layer that holds the packed weight.

        bias: takes the place of the module's own. split: how the model is split over ranks.
        """
        bias = self.read_bias() if bias is None else bias
        if isinstance(choice.backend, BitsAndBytes):
            return nf4_layer(weight, bias, choice.spec, source_class=type(self.module))
        if is_sharded(self.parameter):
            assert split is not None
            return split.part(self.name, weight, bias, choice)
        return QuantLinear.from_packed(weight, bias, choice=choice)

    def empty(self, spec: LinearSpec, *, ordered: bool, bias: bool, blocks: bool) -> QuantModule:
        """Make the layer that a checkpoint is loaded into, as `QuantLinear.empty` does."""
        return QuantLinear.empty(spec, bias=bias, ordered=ordered, blocks=blocks)

    def replacements(self, model: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
        """Yield each place in the model that is taken, and by which module.

        layers: those of `together`, by the parameters whose weights they hold.
        """
        layer = layers[self.key]
        yield self.replaced, layer
        for name in self.embeddings:
            embedding: Any = model.get_submodule(name)
            yield name, QuantEmbedding(embedding, layer)


@dataclass(frozen=True)
class OffloadedSite(LinearSite):
    """A Linear whose weight accelerate offloads to a disk or a dict, from where a hook brings it in for each call.

    It is quantized from the place that the hook reads. The layer holds the packed weight in memory and needs no hook.
    The Linear stays as it is, with its hook, for unpatch().
    """

    is_offloaded: ClassVar[bool] = True
    note: ClassVar[str | None] = NOTE

    def read(self) -> Tensor:
        return read_offloaded(self.module, self.tensor_name)

    def read_bias(self) -> nn.Parameter | None:
        if self.bias is None:
            return None
        return nn.Parameter(read_offloaded(self.module, f"{self.name}.bias").clone(), self.bias.requires_grad)

    def spec(self, config: WeightConfig, *, device_type: str | None = None) -> LinearSpec:
        return super().spec(config, device_type="cpu")

    def layer_refusal(self, spec: LinearSpec, config: WeightConfig) -> str | None:
        return MOVED if config.is_nf4 else None


@dataclass(frozen=True)
class ExpertsSite(LinearSite):
    """A parameter of fused experts. module: the experts, which are replaced with all of their weights."""

    kind: ClassVar[str] = "weights of experts"
    unreached: ClassVar[str | None] = "experts"
    counted_as: ClassVar[str] = "experts"
    is_within: ClassVar[bool] = True
    of_experts: ClassVar[bool] = True
    takes_order: ClassVar[bool] = False

    @property
    def together(self) -> tuple[str, ...]:
        keys = [key for key in WEIGHT_MODULES if key in self.module._parameters]
        return tuple(f"{self.replaced}.{WEIGHT_MODULES[key]}" for key in keys)

    @property
    def weight(self) -> Tensor:
        return with_outputs_first(self.module, self.tensor)

    @property
    def count(self) -> int:
        return int(self.parameter.shape[0])

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        return list(with_outputs_first(self.module, tensor))

    @property
    def bias(self) -> None:
        """Biases of experts stay where they are."""

    def refusal(self, config: WeightConfig) -> str | None:
        return "bitsandbytes has no experts" if config.is_nf4 else None

    def pack(self, tensor: Tensor, config: WeightConfig, choice: BackendChoice) -> Any:
        return [choice.backend.quantize(weight, config) for weight in self.matrices(tensor)]

    def layer(self, weight: Any, choice: BackendChoice, **others: Any) -> nn.Module:
        return ExpertWeights.from_packed(weight, choice=choice)

    def empty(self, spec: LinearSpec, *, ordered: bool, bias: bool, blocks: bool) -> QuantModule:
        return ExpertWeights.empty(spec, self.count, blocks=blocks)

    def replacements(self, model: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
        yield self.replaced, QuantExperts(self.module, {key: layers[key] for key in WEIGHT_MODULES if key in layers})


@dataclass(frozen=True)
class EmbeddingSite(LinearSite):
    """An embedding that shares its weight with nobody. name: of the table in it that will hold the weight."""

    kind: ClassVar[str] = "embedding"
    counted_as: ClassVar[str] = "embeddings"
    is_within: ClassVar[bool] = True
    is_read_whole: ClassVar[bool] = False
    takes_order: ClassVar[bool] = False
    reason: ClassVar[str | None] = "rows are looked up"

    @property
    def width(self) -> str:
        return f"its {self.inputs} numbers"

    def config_in(self, config: WeightConfig, eight_bits: Collection[str] = ()) -> WeightConfig | None:
        return config.for_embedding

    def choose(self, spec: LinearSpec, config: WeightConfig, *, row_invariant: bool) -> BackendChoice:
        return choose(spec, ROW_BACKEND, finds_rows=True)

    def layer(self, weight: Any, choice: BackendChoice, **others: Any) -> nn.Module:
        return QuantTable.from_packed(weight, choice=choice)

    def empty(self, spec: LinearSpec, *, ordered: bool, bias: bool, blocks: bool) -> QuantModule:
        return QuantTable.empty(spec)

    def replacements(self, model: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
        embedding: Any = self.module
        yield self.replaced, QuantEmbedding(embedding, layers[self.key])


# -- what has taken a place ----------------------------------------------------------------------------


def takes_a_place(module: object) -> bool:
    """Return whether a module is a quantized layer, ours or bitsandbytes', that takes the place of a float one."""
    return isinstance(module, Replacement) or is_nf4(module)


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that take the place of float ones, by name."""
    return {name: module for name, module in model.named_modules() if takes_a_place(module)}


def empty_original(layer: Any) -> nn.Module:
    """Make a float module on meta of the shapes of the one whose place a layer takes."""
    return layer.original(device="meta") if isinstance(layer, Replacement) else empty_linear(layer)
