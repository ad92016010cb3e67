"""torchao's INT8 weights as transformers loads them."""

from __future__ import annotations

from transformers import PreTrainedModel, TorchAoConfig

from ..models import reload
from .base import Setup, missing


class TorchAO(Setup):
    name = "torchao int8"
    tolerance = 0.15
    is_peer = True

    def refuses(self) -> str | None:
        return missing("torchao")

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        from torchao.quantization import Int8WeightOnlyConfig

        return reload(model, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map="cpu")


SETUPS = (TorchAO(),)
