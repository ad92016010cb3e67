"""from_pretrained() with an AccelConfig: a checkpoint is checked, and packed while it is read.

The float model never exists. A weight that was taken leaves a Parameter of its shape over a single number, so that the
plan made afterwards is the one that patch() would make of the float model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..config import PatchConfig
from ..errors import HfAccelError, UnsupportedError
from ..hardware import release, trim
from ..hardware.collecting import collecting_later
from ..hardware.file_pages import MappedFiles, staying
from ..linear import QuantModule, Workers
from ..linear.backends.cpu import maps_weights
from ..linear.hf import METHOD, AccelConfig, AccelQuantizer
from ..parallel.tensor import split_sizes
from ..patching.originals import Source, Stored, stored_tensors
from ..patching.pack import Packed, pack_weight
from ..patching.patch import apply_plan
from ..patching.planning import find_on_disk, make_plan, plan_linears, planned
from ..patching.printed import Line
from ..patching.weight_plan import WeightPlan
from ..tensors import torchs_defaults
from ..undo.state import state_of
from .checkpoint import is_ours, prepare, reader_of
from .contents import check_float_model
from .fitting import Fitted, fit_into, parameters_in
from .readers.own import check_loaded, check_numbers
from .readers.reader import ForeignReader, headers_of


def finish_loading(
    model: PreTrainedModel, settings: AccelConfig, packer: Packer | None, fitted: Fitted | None = None
) -> None:
    """Patch a model that from_pretrained has just loaded with an AccelConfig."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)  # set again through the journal
    del model.config.quantization_config
    model.config._is_quantized = False
    if settings.modules or settings.stored_as:
        _finish_quantized(model, settings, fitted)
        return
    packed = packer.finish() if packer is not None else {}
    todo = planned(model, settings.patch, find_originals=partial(_originals, packed) if packed else None)
    unplanned = packed.keys() - {linear.site.name for linear in todo.quantized}
    if unplanned:
        raise HfAccelError(f"{min(unplanned)!r} was packed while loading, but is not to be quantized; load without it")
    apply_plan(todo if fitted is None else fitted.explained(todo), packed)


def _originals(
    packed: Mapping[str, Packed], model: PreTrainedModel, linears: Sequence[WeightPlan]
) -> dict[str, Stored] | None:
    """Return where the originals are stored; None unless all are stored."""
    wanted = [linear for linear in linears if linear.replaces]
    sources = {p.site.tensor_name: packed[p.site.name].source for p in wanted if p.site.name in packed}
    found = {name: source.stored for name, source in sources.items() if source is not None}
    # Experts are joined while they are read, so that they are packed later.
    rest = find_on_disk(model, [p for p in wanted if p.site.name not in packed]) or {}
    found |= {name: rest[name] for name in (p.site.stored_name for p in wanted) if name in rest}
    return found if all(p.site.stored_name in found for p in wanted if not p.site.embeddings) else None


def _finish_quantized(model: PreTrainedModel, settings: AccelConfig, fitted: Fitted | None) -> None:
    """Patch a model that was saved quantized: it has its quantized layers already, and no originals."""
    check_loaded(model)
    reader = None if settings.stored_as is None else reader_of(settings.stored_as)
    settings.stored_as = None
    files = MappedFiles() if maps_weights() else None
    token = staying.set(files)
    try:
        _pack_loaded(model, settings, files)
    finally:
        staying.reset(token)
    trim()
    # Where a file holds nothing but experts quantized, weights= says how the rest is held.
    rest = settings.patch.weights if isinstance(reader, ForeignReader) and reader.of_experts else None
    todo = make_plan(model, replace(settings.patch, weights=rest if "weights" in settings.patch.explicit else None))
    note = () if reader is None or reader.note is None else (Line("linear", "activations", "8 bits", reader.note),)
    todo = replace(todo, config=settings.patch, lines=(*todo.lines, *note))
    apply_plan(todo if fitted is None else fitted.explained(todo))
    state = state_of(model)
    state.originals.never_there, state.generation.watch.files = True, files


def _pack_loaded(model: PreTrainedModel, settings: AccelConfig, files: MappedFiles | None) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, QuantModule):
            check_numbers(name, layer)
            stored = list(layer.buffers())
            layer.row_invariant = settings.patch.deterministic
            layer.pack()
            for tensor in stored:
                if files is None or not files.keeps(tensor):  # what was copied
                    release(tensor)


# -- transformers' part --------------------------------------------------------------------------------


class LoadingQuantizer(AccelQuantizer):
    """The one that from_pretrained makes: it quantizes while transformers loads."""

    packer: Packer | None = None
    fitted: Fitted | None = None
    conversions: list[Any] = []  # noqa: RUF012  # the steps that read a checkpoint of another program

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: Any = None, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        settings, files = self.quantization_config, checkpoint_files or ()
        if split_sizes(model):
            raise UnsupportedError(
                "weights that are split over ranks (distributed_config=) are not packed while they are loaded, nor "
                "read quantized; load the float model without quantization_config=, and call hf_accel.patch(model)"
            )
        if settings.stored_as is not None or self.pre_quantized:
            reader = reader_of(settings.stored_as or {"quant_method": METHOD, "modules": settings.modules})
            assert reader is not None
            with torchs_defaults(), collecting_later():
                self.conversions = prepare(model, reader, files, settings.tables)
            self._fit(model, device_map, ())
        else:
            if settings.check_files is not None and files:
                with torchs_defaults():
                    check_float_model(model, headers_of([Path(file) for file in files]), **settings.check_files)
            self._fit(model, device_map, files)
            settings = self.quantization_config
            self.packer = make_packer(model, settings.patch, device_map=device_map, files=files)

    def _fit(self, model: PreTrainedModel, device_map: Any, files: Sequence[str]) -> None:
        """Choose what was not said, so that the model fits into the memory that was asked for."""
        settings = self.quantization_config
        if settings.fit is None:
            return
        with torchs_defaults():
            read, device_type = parameters_in(model, files), _device_type(device_map) or "cpu"
            self.fitted = fit_into(model, settings.patch, settings.fit, device_type=device_type, read=read)
        found = self.fitted.settings
        if found.keep_original == "auto" and read is None:  # nothing could read originals back: they would stay
            found = replace(found, keep_original=False)
        self.quantization_config = copy.copy(settings)  # which is the caller's
        self.quantization_config.patch = found

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return self.packer is not None and self.packer.wants(param_name)

    def get_weight_conversions(self) -> list[Any]:
        return self.conversions

    def get_quantize_ops(self) -> ConversionOps:
        assert self.packer is not None
        return HandOver(self.packer)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        packer, self.packer = self.packer, None
        if self.conversions:  # what is saved later has the layers' own names
            used = getattr(model, "_weight_conversions", None) or []
            vars(model)["_weight_conversions"] = [one for one in used if not is_ours(one)]
        with collecting_later():
            finish_loading(model, self.quantization_config, packer, self.fitted)
        return model


class HandOver(ConversionOps):
    """The last step of reading a parameter: the packer takes those that it wants."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        # A tensor with one whole name on both sides was renamed, but not joined with others or cut.
        stored_as = source_patterns[0] if len(source_patterns) == 1 and target_patterns == list(input_dict) else None
        return {name: self._hand_over(name, values, stored_as) for name, values in input_dict.items()}

    def _hand_over(self, name: str, values: Any, stored_as: str | None) -> Any:
        if not self.packer.wants(name):
            return values
        return self.packer.take(name, values[0] if isinstance(values, list) else values, stored_as)


def register_quantization() -> None:
    """Make "hf_accel" a quantization method; harmless when repeated."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = AccelConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = LoadingQuantizer


# -- packing -------------------------------------------------------------------------------------------


class Packer:
    """Takes the weights that the plan quantizes, in a few threads, and gives them back packed."""

    def __init__(self, linears: Sequence[WeightPlan], *, device_type: str, files: Mapping[str, Path], lose: bool):
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
        """Return the packed weights by the names of modules. Raises UnsupportedError if one cannot be quantized."""
        with self._workers as workers:
            if self._failure is not None:
                raise self._failure
            self._packed += workers.finish()
        return {packed.name: packed for packed in self._packed}

    def _pack(self, linear: WeightPlan, tensor: Tensor, file: Path | None, stored_as: str | None) -> Packed:
        source = None
        if file is not None and stored_as is not None:
            source = None if self._lose else Source.of(tensor, file, stored_as)
        packed = pack_weight(linear, tensor, linear.choice_for(tensor), source=source)
        release(tensor)  # transformers holds its mapping until the whole model is loaded
        return packed


def make_packer(
    model: PreTrainedModel, settings: PatchConfig, *, device_map: Any, files: Sequence[str]
) -> Packer | None:
    """Make the Packer for a model on meta; None where the model has to be loaded whole and patched then."""
    device_type, keep = _device_type(device_map), settings.keep_original
    stored = stored_tensors(files)
    weights = settings.weights  # calibration needs the whole model; NF4 is not ours to pack from pieces
    whole = weights is not None and (weights.needs_data or weights.is_nf4)
    if device_type is None or whole or keep is True or (keep == "auto" and not stored):
        return None
    ties = dict(model.all_tied_weights_keys)  # which nothing on meta may follow yet
    tied = {*ties, *ties.values()}
    with torchs_defaults():
        linears = [
            linear
            for linear in plan_linears(
                model, settings.weights, device_type=device_type, row_invariant=settings.deterministic
            )
            if linear.choice is not None and not linear.site.is_tied and linear.site.tensor_name not in tied
        ]
    return Packer(linears, device_type=device_type, files=stored, lose=keep is False) if linears else None


def _device_type(device_map: Any) -> str | None:
    """Return the kind of the one device that all weights go to; None if there may be several."""
    if device_map is None or (isinstance(device_map, str) and not torch.accelerator.is_available()):
        return "cpu"
    devices = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(devices) != 1 or devices & {"disk", "meta"} or isinstance(device_map, str):
        return None
    return torch.device(devices.pop()).type
