"""from_pretrained with an AccelConfig, and load(): a checkpoint is checked, and packed while it is read."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..errors import HfAccelError, UnsupportedError
from ..estimate.shapes import class_of
from ..hardware import release, trim
from ..linear import QuantModule
from ..linear.hf import METHOD, AccelConfig, AccelQuantizer
from ..models import layers_config
from ..parallel.tensor_plan import split_sizes
from ..patching.calibration import planned
from ..patching.model_config import read_config
from ..patching.originals import Stored
from ..patching.pack import Packed
from ..patching.patch import apply_plan, patch
from ..patching.plan import Line, LinearPlan
from ..patching.planning import find_on_disk, make_plan
from ..tensors import torchs_defaults
from ..undo.state import state_of
from .checkpoint import is_ours, prepare, reader_of
from .contents import COPY, check_float_model, check_report
from .packer import Packer, make_packer
from .readers.gguf_reader import Gguf, LazyTensor, forget_files
from .readers.own import check_loaded, check_numbers
from .readers.reader import headers_of

HUB_KEYWORDS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip


def finish_loading(model: PreTrainedModel, settings: AccelConfig, packer: Packer | None) -> None:
    """Patch a model that from_pretrained has just loaded with an AccelConfig."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)  # set again through the journal
    del model.config.quantization_config
    model.config._is_quantized = False
    if settings.modules or settings.stored_as:
        _finish_quantized(model, settings)
        return
    packed = packer.finish() if packer is not None else {}
    todo = planned(model, settings.patch, find_originals=partial(_originals, packed) if packed else None)
    unplanned = packed.keys() - {linear.site.name for linear in todo.quantized}
    if unplanned:
        raise HfAccelError(f"{min(unplanned)!r} was packed while loading, but is not to be quantized; load without it")
    apply_plan(todo, packed)


def _originals(
    packed: Mapping[str, Packed], model: PreTrainedModel, linears: Sequence[LinearPlan]
) -> dict[str, Stored] | None:
    """Return where the originals are stored; None unless all are stored."""
    wanted = [linear for linear in linears if linear.choice is not None and not linear.site.is_tied]
    sources = {p.site.tensor_name: packed[p.site.name].source for p in wanted if p.site.name in packed}
    found = {name: source.stored for name, source in sources.items() if source is not None}
    # Experts are joined while they are read, so that they are packed later.
    rest = find_on_disk(model, [p for p in wanted if p.site.name not in packed]) or {}
    found |= {p.site.tensor_name: rest[p.site.tensor_name] for p in wanted if p.site.tensor_name in rest}
    return found if len(found) == len(wanted) else None


def _finish_quantized(model: PreTrainedModel, settings: AccelConfig) -> None:
    """Patch a model that was saved quantized: it has its quantized layers already, and no originals."""
    check_loaded(model)
    reader = None if settings.stored_as is None else reader_of(settings.stored_as)
    settings.stored_as = None
    for name, layer in model.named_modules():
        if isinstance(layer, QuantModule):
            check_numbers(name, layer)
            stored = list(layer.buffers())
            layer.row_invariant = settings.patch.deterministic
            layer.pack()
            for tensor in stored:
                release(tensor)
    trim()
    todo = make_plan(model, replace(settings.patch, weights=None))
    note = () if reader is None or reader.note is None else (Line("linear", "activations", "8 bits", reader.note),)
    apply_plan(replace(todo, config=settings.patch, lines=(*todo.lines, *note)))
    state_of(model).originals.never_there = True


# -- load_checkpoint() ----------------------------------------------------------------------------------------


def load_checkpoint(path: str | os.PathLike[str], ours: dict[str, Any], keywords: dict[str, Any]) -> PreTrainedModel:
    """hf_accel.load(). ours: the keywords for patch() that were given. keywords: those for from_pretrained()."""
    if str(path).endswith(".gguf"):
        return _load_gguf(str(path), ours, keywords)
    hub = {name: keywords[name] for name in HUB_KEYWORDS if name in keywords}
    config = keywords.pop("config", None) or read_config(path, **hub)
    kind = class_of(config)
    config.architectures = [kind.__name__] if issubclass(kind, PreTrainedModel) else config.architectures
    load_model = partial(_load, kind, path, config=config, **keywords)
    stored = stored_config(config)
    if stored is None and keywords.get("distributed_config") is not None:
        return patch(_whole(load_model), **ours)  # parts of weights are packed when they are all there
    if stored is None:
        return load_model(quantization_config=_for_float_files(ours, keywords))
    method = stored.get("quant_method")
    _leave_weights_out(ours, method)
    if method == METHOD:
        config.quantization_config = {**stored, **ours}
    elif reader_of(stored) is not None:
        config.quantization_config = {"quant_method": METHOD, "stored_as": stored, **ours}
    elif method in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return patch(_whole(load_model), weights=None, **ours)
    else:  # transformers passes over it, with a warning, and reads floats
        return load_model(quantization_config=_for_float_files({"weights": None, **ours}, keywords))
    return load_model()


def _load(kind: Any, path: str | os.PathLike[str], /, **keywords: Any) -> Any:
    """from_pretrained(). Raises HfAccelError for what it reports only once it has read the tensors."""
    try:
        return kind.from_pretrained(path, **keywords)
    except RuntimeError as error:
        if "above report" not in str(error):
            raise
        raise HfAccelError(f"transformers cannot make {kind.__name__} of {path}: {error} {COPY}") from error


def _for_float_files(ours: Mapping[str, Any], keywords: Mapping[str, Any]) -> AccelConfig:
    """Have the files checked before they are read. keywords: those of from_pretrained()."""
    settings = AccelConfig(**ours)
    shapes = not keywords.get("ignore_mismatched_sizes", False)
    settings.check_files = {"key_mapping": keywords.get("key_mapping"), "shapes": shapes}
    return settings


def _whole(load_model: partial[Any]) -> PreTrainedModel:
    """Load with transformers alone. Raises HfAccelError if it had to fill in random numbers."""
    model, report = load_model(output_loading_info=True)
    check_report(model, report["missing_keys"], report["unexpected_keys"])
    return model


def _load_gguf(path: str, ours: dict[str, Any], keywords: dict[str, Any]) -> PreTrainedModel:
    stored = {"quant_method": "gguf", "path": path}
    reader = reader_of(stored)
    assert isinstance(reader, Gguf)
    config = keywords.pop("config", None) or reader.config()
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    config.architectures = [type(empty).__name__]
    keywords["dtype"] = reader.dtype if keywords.get("dtype", "auto") == "auto" else keywords["dtype"]
    if reader.is_quantized:
        _leave_weights_out(ours, "gguf")
        config.quantization_config = {"quant_method": METHOD, "stored_as": stored, **ours}
    else:
        keywords["quantization_config"] = AccelConfig(**ours)
        check_float_model(empty, reader.headers(empty))
    state_dict = {name: LazyTensor(found) for name, found in reader.headers(empty)}
    try:
        model: PreTrainedModel = type(empty).from_pretrained(None, config=config, state_dict=state_dict, **keywords)
    finally:
        forget_files()
    return model


def _leave_weights_out(ours: dict[str, Any], method: str | None) -> None:
    if ours.get("weights") is not None:
        raise UnsupportedError(
            f"weights={ours['weights']!r}: the weights of this {method} checkpoint are quantized already; leave "
            "weights= out, or load the float checkpoint"
        )
    ours.pop("weights", None)


def load_tokenizer(path: str, **hub: Any) -> Any:
    """The tokenizer of a checkpoint: of a .gguf file, that in its metadata. hub: keywords of from_pretrained."""
    if path.endswith(".gguf"):
        file = Path(path)
        return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, **hub)
    return transformers.AutoTokenizer.from_pretrained(path, **hub)


def stored_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """quantization_config of a checkpoint's config, also where only its text model has one."""
    for one in (config, layers_config(config)):
        found = getattr(one, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


# -- transformers' part --------------------------------------------------------------------------------


class LoadingQuantizer(AccelQuantizer):
    """The one that from_pretrained makes: it quantizes while transformers loads."""

    packer: Packer | None = None
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
            with torchs_defaults():
                self.conversions = prepare(model, reader, files)
        else:
            if settings.check_files is not None and files:
                with torchs_defaults():
                    check_float_model(model, headers_of([Path(file) for file in files]), **settings.check_files)
            self.packer = make_packer(model, settings.patch, device_map=device_map, files=files)

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
        finish_loading(model, self.quantization_config, packer)
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
