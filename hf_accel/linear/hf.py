"""AccelConfig and the quantizer that transformers calls while it loads and saves.

The weights of a float checkpoint are packed one by one as transformers reads them, and the model is then patched.
A checkpoint saved from a patched model lists its quantized modules, which are built empty before the weights arrive
(checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import PatchConfig, WeightConfig, check_patch_keywords
from ..errors import UnsupportedError
from .layer import QuantLinear

METHOD = "hf_accel"


class AccelConfig(QuantizationConfigMixin):
    """`from_pretrained(path, quantization_config=hf_accel.AccelConfig(weights="int4"))` loads patched, whole.

    Takes the keywords of hf_accel.patch. Written into config.json by save_pretrained, together with the
    modules that are quantized, so that from_pretrained(folder) needs nothing but `import hf_accel`.
    """

    def __init__(self, modules: Mapping[str, Mapping[str, Any]] | None = None, **keywords: Any) -> None:
        keywords.pop("quant_method", None)
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers takes any registered name
        check_patch_keywords("AccelConfig", (name for name in keywords if name != "config"))
        self.patch = PatchConfig.build(**keywords)
        self.modules = _parse_modules(modules)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; AccelConfig(**config.to_dict()) is equal."""
        keywords = {name: value for name, value in self.patch.to_dict().items() if name in self.patch.explicit}
        modules = {"modules": self.modules} if self.modules else {}
        return {"quant_method": self.quant_method, **keywords, **modules}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


def _parse_modules(modules: object) -> dict[str, dict[str, Any]]:
    if modules is None:
        return {}
    if not isinstance(modules, Mapping):
        raise UnsupportedError(f"modules={modules!r} must give the settings of each quantized module by its name")
    for name, settings in modules.items():
        if not (isinstance(name, str) and isinstance(settings, Mapping)):
            raise UnsupportedError(f"modules: {name!r} has the settings {settings!r}, which must be a dict")
    return {name: dict(settings) for name, settings in modules.items()}


class Loader(Protocol):
    """Takes float weights while transformers reads a checkpoint."""

    def wants(self, name: str) -> bool:
        """Whether the parameter `name` of the model is to be handed to `take`."""

    def take(self, name: str, tensor: Tensor, stored_as: str | None) -> Tensor:
        """What stands for the tensor in the model from now on; stored_as: its name in the checkpoint, if any."""


class AccelQuantizer(HfQuantizer):
    """What transformers asks about an hf_accel model. `begin` and `finish` are loading.py's part, set there."""

    quantization_config: AccelConfig
    loader: Loader | None = None
    begin: Callable[..., Loader | None]
    finish: Callable[..., None]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: Any = None, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        settings = self.quantization_config
        self.loader = type(self).begin(
            model, settings, pre_quantized=self.pre_quantized, device_map=device_map, files=checkpoint_files or ()
        )

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return self.loader is not None and self.loader.wants(param_name)

    def get_quantize_ops(self) -> ConversionOps:
        assert self.loader is not None
        return HandOver(self.loader)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        loader, self.loader = self.loader, None
        type(self).finish(model, self.quantization_config, loader)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, Any]]:
        """Called by save_pretrained before it writes the config: which modules are quantized now."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
        self.quantization_config.modules = {name: module_settings(layer) for name, layer in layers.items()}
        return None, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top can be trained; the quantized weights themselves cannot."""
        return True


class HandOver(ConversionOps):
    """The last step of reading a parameter: a loader takes those that it wants."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        # one whole name on both sides is a tensor that was renamed at most
        stored_as = source_patterns[0] if len(source_patterns) == 1 and target_patterns == list(input_dict) else None
        return {name: self._hand_over(name, values, stored_as) for name, values in input_dict.items()}

    def _hand_over(self, name: str, values: Any, stored_as: str | None) -> Any:
        if not self.loader.wants(name):
            return values
        return self.loader.take(name, values[0] if isinstance(values, list) else values, stored_as)


def module_settings(layer: QuantLinear | WeightConfig) -> dict[str, Any]:
    """What a checkpoint says of a layer, or of how it will be made."""
    settings = {"bits": layer.bits, "activations": layer.activations}
    return settings | ({"group_size": layer.group_size, "symmetric": layer.symmetric} if layer.bits == 4 else {})


def lost_on_saving(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether transformers, which renames and joins tensors while it saves, would not find a module's own again."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions:
        return lambda name: False
    there = [entry.reverse_transform() for entry in reversed(conversions)]

    def is_lost(name: str) -> bool:
        for tensor in (f"{name}.weight", f"{name}.weight_scale"):
            stored, converter = rename_source_key(tensor, *_kinds(there), reverse=True)
            if converter is not None or rename_source_key(stored, *_kinds(conversions))[0] != tensor:
                return True
        return False

    return is_lost


def _kinds(conversions: Sequence[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in conversions if isinstance(entry, WeightConverter)]


def register() -> None:
    """Make "hf_accel" a quantization method; harmless when repeated."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(AccelConfig)
        register_quantizer(METHOD)(AccelQuantizer)
