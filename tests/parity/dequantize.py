"""The oracle of quantized models: stock's own modules, with the values that the quantized weights stand for."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_accel.linear import QuantExperts, QuantLinear
from hf_accel.linear.quant_convolution import QuantConvolution


def dequantized(stock: PreTrainedModel, patched: PreTrainedModel) -> PreTrainedModel:
    """Stock modules with the values that the quantized layers stand for."""
    model = copy.deepcopy(stock)
    for name, layer in patched.named_modules():
        if isinstance(layer, QuantLinear) and not isinstance(_around(patched, name), QuantConvolution):
            module = model.get_submodule(name)
            weight = layer.weight.t() if isinstance(module, Conv1D) else layer.weight
            module.weight = nn.Parameter(weight.contiguous())  # a new Parameter: a tied head leaves its embedding
        elif isinstance(layer, QuantExperts | QuantConvolution):
            model.set_submodule(name, layer.original())
    return model


def _around(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
