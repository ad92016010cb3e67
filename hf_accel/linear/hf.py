"""AccelConfig and the quantizer that transformers calls while it loads and saves.

A float checkpoint is loaded as it is and then patched; a checkpoint saved from a patched model lists its
quantized modules, which are built empty before the weights arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import PatchConfig, WeightConfig
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
        self.patch = PatchConfig.build(**keywords)
        self.modules = {name: dict(settings) for name, settings in (modules or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; AccelConfig(**config.to_dict()) is equal."""
        keywords = {name: value for name, value in self.patch.to_dict().items() if name in self.patch.explicit}
        modules = {"modules": self.modules} if self.modules else {}
        return {"quant_method": self.quant_method, **keywords, **modules}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


class AccelQuantizer(HfQuantizer):
    """What transformers asks about an hf_accel model. `finish` is patch.py's part, set where that is defined."""

    quantization_config: AccelConfig
    finish: Callable[[PreTrainedModel, AccelConfig], None]

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, settings in self.quantization_config.modules.items():
            replace_by_empty(model, name, settings)
        if self.quantization_config.modules:
            model.all_tied_weights_keys = {}  # a quantized head is a copy, not the embedding

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        type(self).finish(model, self.quantization_config)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top can be trained; the quantized weights themselves cannot."""
        return True


def replace_by_empty(model: PreTrainedModel, name: str, settings: Mapping[str, Any]) -> None:
    """Put an unpacked QuantLinear in the place of the Linear `name`, for a checkpoint to be loaded into."""
    try:
        original = model.get_submodule(name)
    except AttributeError as error:
        raise UnsupportedError(f"the checkpoint quantizes {name!r}, which {type(model).__name__} has not") from error
    if not isinstance(original, nn.Linear | Conv1D):
        raise UnsupportedError(f"the checkpoint quantizes {name!r}, which is a {type(original).__name__} here")
    rows, columns = original.weight.shape
    layer = QuantLinear.empty(
        (columns, rows) if isinstance(original, Conv1D) else (rows, columns),
        config=WeightConfig(**settings),
        dtype=original.weight.dtype,
        bias=original.bias is not None,
        device=original.weight.device,
    )
    model.set_submodule(name, layer)


def module_settings(layer: QuantLinear) -> dict[str, Any]:
    """What `replace_by_empty` needs to know of a layer."""
    settings = {"bits": layer.bits, "activations": layer.activations}
    return settings | ({"group_size": layer.group_size} if layer.bits == 4 else {})


def register() -> None:
    """Make "hf_accel" a quantization method; harmless when repeated."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(AccelConfig)
        register_quantizer(METHOD)(AccelQuantizer)
