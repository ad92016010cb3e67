"""The reasons that keep a model from being written for other programs."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...linear.formats import FLOAT8
from ...linear.hf import is_split
from ...models import unwrapped
from ...patching.check import check_model
from ...patching.survey import other_quantizer


def savable(model: nn.Module) -> PreTrainedModel:
    """The transformers model to write. Raises UnsupportedError for one with adapters, or quantized by others."""
    inner = check_model(unwrapped(model))
    other = other_quantizer(inner)
    if other is not None:
        raise UnsupportedError(f"the model is quantized by {other}; model.save_pretrained writes it as what it is")
    if is_split(inner):
        raise UnsupportedError("the model is split over ranks; write it from one process that has the whole model")
    adapted = next((name for name, module in inner.named_modules() if hasattr(module, "base_layer")), None)
    if adapted is not None:
        raise UnsupportedError(
            f"{adapted!r} has an adapter, which this format cannot hold; call merge_and_unload() first, or save the "
            "adapter by itself"
        )
    return inner


def refuse_infinite(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedError for NaN and infinity."""
    if not tensor.is_floating_point():
        return
    wrong = tensor.isnan() if tensor.dtype is FLOAT8 else ~tensor.isfinite()  # FP8 has no infinity
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise UnsupportedError(f"{name!r} holds NaN or infinity at {place}; repair the model first")
