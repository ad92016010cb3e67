"""The interface of readers of quantized checkpoints: the tensors that stand for a weight, and their meaning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import str_to_torch_dtype

from ...config import Activations
from ...errors import HfAccelError, UnsupportedError
from ...linear import LinearSpec, QuantizedWeight
from ...linear.experts import WEIGHT_MODULES
from ...linear.formats import Layout

MOST_GROUP = 128  # inputs: a larger group is cut, so that activations have scales of their own for as many inputs


@dataclass(frozen=True)
class Found:
    """A tensor that a checkpoint holds. shape None: transformers will make another one of it."""

    dtype: torch.dtype | str  # safetensors' name where torch's is not known
    shape: tuple[int, ...] | None
    read: Callable[[], Tensor]


class Described(NamedTuple):
    """A tensor that a layer has to get, by what a checkpoint says of one before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def dtype_of(found: Found) -> torch.dtype:
    """Return the dtype of a tensor that `Parts.expect` has returned."""
    assert isinstance(found.dtype, torch.dtype)
    return found.dtype


@dataclass(frozen=True)
class Parts:
    """The tensors that stand for the weight of the Linear `name`, by the last part of their names."""

    name: str
    tensors: Mapping[str, Found]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.tensors

    def expect(self, suffix: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None) -> Found:
        """Return the tensor of this suffix. Raises HfAccelError unless it is there and fits."""
        if suffix not in self.tensors:
            raise HfAccelError(f"the checkpoint has no '{self.name}.{suffix}', without which the layer cannot be read")
        found = self.tensors[suffix]
        if found.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise HfAccelError(f"'{self.name}.{suffix}' is {found.dtype} in the checkpoint, but must be {wanted}")
        if shape is not None and found.shape != shape:
            has = None if found.shape is None else list(found.shape)
            raise HfAccelError(f"'{self.name}.{suffix}' is {has} in the checkpoint, but must be {list(shape)}")
        return found

    def order(self, suffix: str, in_features: int, group: int) -> Tensor | None:
        """Return the order that `order_of` finds; None also if there is no tensor of this suffix."""
        if suffix not in self.tensors:
            return None
        index = self.expect(suffix, (torch.int32, torch.int64), (in_features,)).read()
        return order_of(self.name, index, in_features, group)


class Description(NamedTuple):
    """The form in which a Linear will be held here. The layout gives the dtype of the stored scales."""

    layout: Layout
    activations: Activations = "auto"


class Reader(ABC):
    """One way in which weights are stored quantized.

    method: quant_method in config.json. suffixes: the last part of the names of the tensors that stand for a weight.
    note: what the plan says of a checkpoint that is used otherwise than its writer does; None: nothing.
    listed: the settings of each quantized module, where config.json lists them; None: the files tell which they are.
    """

    method: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    note: str | None = None
    listed: Mapping[str, Mapping[str, Any]] | None = None

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: quantization_config of config.json. Raises UnsupportedError for what this reader does not know."""

    @abstractmethod
    def headers(self, model: PreTrainedModel, files: Sequence[str]) -> Iterable[tuple[str, Found]] | None:
        """Return the tensors of a checkpoint, by the names that transformers' loader gets; None if they are not known
        yet.
        """

    def place(self, stored_as: str) -> tuple[str, str]:
        """Return the name of the weight that a tensor would be a part of, and the suffix that says which part."""
        module, _, suffix = stored_as.rpartition(".")
        return f"{module}.weight", suffix

    def is_part(self, suffix: str, found: Found) -> bool:
        """Return whether a tensor of this name may stand for a quantized weight, or for a part of it."""
        return suffix in self.suffixes

    @abstractmethod
    def spec(self, stored: Parts, weight: Tensor) -> tuple[LinearSpec, bool]:
        """Return the spec of the layer that stands for `weight` [out, in], and whether its inputs have an order."""


class ForeignReader(Reader):
    """Another program's way, whose tensors become ours while they are read.

    of_experts: the parameters of fused experts that it has quantized, with a tensor `{parameter}_{suffix}` for each
    suffix; where there are none, Linears are quantized.
    """

    of_experts: ClassVar[tuple[str, ...]] = ()

    def place(self, stored_as: str) -> tuple[str, str]:
        weight, _, suffix = stored_as.rpartition("_")
        return (weight, suffix) if weight.rpartition(".")[2] in self.of_experts else super().place(stored_as)

    def headers(self, model: PreTrainedModel, files: Sequence[str]) -> Iterable[tuple[str, Found]]:
        """Raises UnsupportedError for files that can hold programs."""
        if not are_safe(files):
            raise refuse(self.method, "is not in safetensors files, and other files can hold programs")
        return headers_of([Path(file) for file in files])

    def spec(self, stored: Parts, weight: Tensor) -> tuple[LinearSpec, bool]:
        rows, columns = weight.shape
        layout, activations = self.describe(stored, (rows, columns))
        spec = LinearSpec(
            in_features=columns, out_features=rows, layout=layout, dtype=weight.dtype,
            device_type=weight.device.type, activations=activations,
        )  # fmt: skip
        return spec, layout.ordered

    def patterns(self) -> dict[str, str]:
        """Return regular expressions of the ends of collected names, each with its suffix; after `describe`."""
        return {rf"\.{suffix}$": suffix for suffix in self.suffixes}

    def collected(self) -> dict[str, dict[str, str]]:
        """Return the `patterns` of each kind of weight, by the part of a module's name that stands for the kind."""
        if not self.of_experts:
            return {"": self.patterns()}
        return {
            f".{WEIGHT_MODULES[key]}": {rf"\.{key}_{suffix}$": suffix for suffix in self.suffixes}
            for key in self.of_experts
        }

    def own_tensors(self, name: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """Return our tensors for a layer [out, in] whose integers are loaded under their own name; else None."""
        return None

    @abstractmethod
    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        """Return how a Linear [out, in] is to be held.

        Reads small tensors only. Raises UnsupportedError for a layout that this reader does not know, and HfAccelError
        for tensors that no such layout has.
        """

    @abstractmethod
    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """Return the weight [out, in] that the tensors of a Linear stand for, exactly, in the layout of `describe`."""


# -- files ---------------------------------------------------------------------------------------------


def are_safe(files: Sequence[str]) -> bool:
    """Return whether there are files, and all are safetensors, whose headers can be read by themselves."""
    return bool(files) and all(str(file).endswith(".safetensors") for file in files)


def headers_of(files: Sequence[Path], *, way_out: str = "") -> Iterator[tuple[str, Found]]:
    """Yield the tensors of files, by their names there. way_out: what else to do where one cannot be read."""
    for file in files:
        try:
            yield from _safe_headers(file) if file.suffix == ".safetensors" else _pickled(file)
        except Exception as error:
            raise HfAccelError(f"{file} cannot be read: {error}; copy or download it again{way_out}") from error


def _safe_headers(file: Path) -> Iterator[tuple[str, Found]]:
    # It stays open as long as a tensor may be read: opening a file takes longer than reading most of them.
    tensors = safe_open(file, framework="pt")
    for name in tensors.keys():  # noqa: SIM118  # it is no dict
        header = tensors.get_slice(name)
        dtype = str_to_torch_dtype.get(header.get_dtype(), header.get_dtype())
        yield name, Found(dtype, tuple(header.get_shape()), partial(tensors.get_tensor, name))


def _pickled(file: Path) -> Iterator[tuple[str, Found]]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # of a version of torch that wrote no zip files
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            yield name, Found(tensor.dtype, tuple(tensor.shape), tensor.detach)


# -- numbers -------------------------------------------------------------------------------------------


def group_of(name: str, in_features: int, groups: int, *, stated: Any = None) -> int:
    """Return the inputs of a group. stated: group_size in config.json, -1 for all inputs; None if it is not there."""
    if groups < 1 or in_features % groups:
        raise HfAccelError(
            f"'{name}' has {groups} groups in the checkpoint, which do not divide its {in_features} inputs"
        )
    group = in_features // groups
    is_part = isinstance(stated, int) and 0 < stated < in_features
    if stated is not None and group != (stated if is_part else in_features):
        raise contradiction(f"group_size={stated}", f"{name!r} has groups of {group} inputs")
    return group


def contradiction(said: str, there: str) -> HfAccelError:
    """Make an error for tensors that are not what quantization_config in config.json says."""
    return HfAccelError(f"config.json says {said}, but in the checkpoint {there}; copy both again, or save them again")


def cut_group(group: int) -> int:
    """Return the group size that the layer gets here: a large group is cut into pieces of the same scale."""
    return MOST_GROUP if group > MOST_GROUP and group % MOST_GROUP == 0 else group


def order_of(name: str, index: Tensor, in_features: int, group: int) -> Tensor | None:
    """Return the order that makes the inputs of each group lie together, int32 [in]; None if they do.

    index: the group of each input, integers [in]. Raises HfAccelError unless each group has `group` inputs.
    """
    index = index.long().cpu()
    whole = torch.arange(in_features) // group
    if torch.equal(index, whole):
        return None
    order = torch.argsort(index, stable=True)
    if not torch.equal(index[order], whole):
        raise HfAccelError(f"'{name}' has groups of unequal size in the checkpoint; each must have {group} inputs")
    return order.to(torch.int32)


STOCK = "load it as transformers does, with from_pretrained(), and patch the model with weights=None, or "
PASSED_OVER = "transformers would load it as if that were not there; "


def refuse(method: str, what: str, *, way_out: str = STOCK) -> UnsupportedError:
    """Make an error for a checkpoint that only other programs can read."""
    return UnsupportedError(
        f"this {method} checkpoint {what}; {way_out}load the float checkpoint that it was made from"
    )
