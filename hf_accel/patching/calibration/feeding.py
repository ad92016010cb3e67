"""Token ids through the body of a model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...models import evaluating


def check_takes_ids(model: PreTrainedModel) -> None:
    """Raise UnsupportedError unless token ids alone are what the model takes."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} is an encoder-decoder, which calibration data cannot be fed to; use method='rtn'"
        )
    if "input_ids" not in inspect.signature(type(model).forward).parameters:
        raise UnsupportedError(f"{name} takes no token ids, which calibration data are; use method='rtn'")


def feed(model: PreTrainedModel, ids: Tensor) -> None:
    """Call the model on ids [n, length] without its head, on which nothing depends and whose logits would be large."""
    body: Any = model.base_model
    keywords = inspect.signature(body.forward).parameters
    options = {"use_cache": False} if "use_cache" in keywords else {}
    with evaluating(model):
        body(input_ids=ids.to(model.device), **options)
