"""The weights of a model that is being loaded, packed as they are read, so that the float model never exists.

A weight that was taken leaves a Parameter of its shape over a single number, so that the plan made afterwards is the
one that patch() would make of the float model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import PatchConfig
from ..hardware import release
from ..linear import LinearSpec, Workers, choose
from ..patching.originals import Source, stored_tensors
from ..patching.pack import Packed, pack_weight
from ..patching.plan import LinearPlan
from ..patching.planning import plan_linears
from ..tensors import torchs_defaults


class Packer:
    """Takes the weights that the plan quantizes, in a few threads, and gives them back packed."""

    def __init__(self, linears: Sequence[LinearPlan], *, device_type: str, files: Mapping[str, Path], lose: bool):
        """files: where tensors are stored, by their names there. lose: pack also what cannot be read back."""
        self._linears = {linear.site.tensor_name: linear for linear in linears}
        self._device_type, self._files, self._lose = device_type, files, lose
        self._workers = Workers[Packed]()
        self._packed: list[Packed] = []
        self._failure: Exception | None = None

    def wants(self, name: str) -> bool:
        return name in self._linears

    def take(self, name: str, tensor: Tensor, stored_as: str | None) -> Tensor:
        """Pack the parameter `name`, and return a stand-in over a single number.

        Returns `tensor` itself where it could not be read back, or is on another device than was planned.
        """
        file = self._files.get(stored_as) if stored_as is not None else None
        if tensor.device.type != self._device_type or (file is None and not self._lose):
            return tensor
        if self._failure is None:
            try:
                self._packed += self._workers.put(partial(self._pack, self._linears[name], tensor, file, stored_as))
            except Exception as error:  # transformers would make a report of it, and go on
                self._failure = error
        return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def finish(self) -> dict[str, Packed]:
        """By the names of modules. Raises UnsupportedError for a weight that cannot be quantized."""
        with self._workers as workers:
            if self._failure is not None:
                raise self._failure
            self._packed += workers.finish()
        return {packed.name: packed for packed in self._packed}

    def _pack(self, linear: LinearPlan, tensor: Tensor, file: Path | None, stored_as: str | None) -> Packed:
        source = None
        if file is not None and stored_as is not None:
            source = None if self._lose else Source.of(tensor, file, stored_as)
        assert linear.choice is not None
        spec = LinearSpec.of(linear.site.matrices(tensor)[0], linear.config)
        choice = choose(spec, row_invariant=linear.choice.row_invariant)
        packed = pack_weight(linear, tensor, choice, source=source)
        release(tensor)  # transformers holds its mapping until the whole model is loaded
        return packed


def make_packer(
    model: PreTrainedModel, settings: PatchConfig, *, device_map: Any, files: Sequence[str]
) -> Packer | None:
    """The Packer for a model on meta; None where the model has to be loaded whole and patched then."""
    device_type, keep = _device_type(device_map), settings.keep_original
    stored = stored_tensors(files)
    weights = settings.weights  # calibration needs the whole model; NF4 is not ours to pack from pieces
    whole = weights is not None and (weights.needs_data or weights.is_nf4)
    if device_type is None or whole or keep is True or (keep == "auto" and not stored):
        return None
    with torchs_defaults():
        linears = [
            linear
            for linear in plan_linears(
                model, settings.weights, device_type=device_type, row_invariant=settings.deterministic
            )
            if linear.choice is not None and not linear.site.is_tied
        ]
    return Packer(linears, device_type=device_type, files=stored, lose=keep is False) if linears else None


def _device_type(device_map: Any) -> str | None:
    """The kind of the one device that all weights go to; None if there may be several."""
    if device_map is None or (isinstance(device_map, str) and not torch.accelerator.is_available()):
        return "cpu"
    devices = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(devices) != 1 or devices & {"disk", "meta"} or isinstance(device_map, str):
        return None
    return torch.device(devices.pop()).type
