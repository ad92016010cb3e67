"""A transformers model's last hidden states, and the head that makes its logits of them."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models import unwrapped
from ..losses.head import Head

# Names of the factor of logits in the configs of Cohere, Muse Glimmer and Falcon-H1.
MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def head_of(model: Any) -> Head | None:
    """The head of a model that can leave out logits: its weight if it is a plain linear layer, else (quantized,
    adapted) something to call. None for a model that cannot."""
    inner = unwrapped(model)
    layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if layer is None or "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        return None
    config = inner.config.get_text_config()
    finish: dict[str, Any] = {"softcap": getattr(config, "final_logit_softcapping", None), "scale": _scale(config)}
    if type(layer) is torch.nn.Linear:
        return Head(layer.weight, layer.bias, **finish)
    return Head(layer, num_classes=getattr(layer, "out_features", config.vocab_size), **finish)


def _scale(config: Any) -> float:
    for name in MULTIPLIERS:
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite divides by it.
    return float(scaling) if config.model_type == "hyperclovax" else 1 / scaling


class LastHidden:
    """Keeps what a model's backbone gave last, and the autocast that it ran under, until `remove`."""

    def __init__(self, model: Any) -> None:
        self._value: Tensor | None = None
        self._autocast = (False, torch.float32)
        self._handle = unwrapped(model).base_model.register_forward_hook(self._keep)

    def _keep(self, backbone: Any, args: Any, output: Any) -> None:
        value: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        device = value.device.type
        self._value = value
        self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @property
    def value(self) -> Tensor:
        """[B, T, H]."""
        if self._value is None:
            raise UnsupportedError("the model's forward did not call its base_model: distil it with fused=False")
        return self._value

    def autocast(self) -> AbstractContextManager[Any]:
        enabled, dtype = self._autocast
        return torch.autocast(self.value.device.type, dtype=dtype, enabled=enabled)

    def remove(self) -> None:
        self._handle.remove()


@torch.no_grad()
def check_head(model: Any, head: Head, hidden: Tensor, logits: Tensor) -> None:
    """Raises UnsupportedError if `head` does not make the model's own logits, [B, 1 or T, V], of its hidden states."""
    found = head.prepared(head.vocab_size).logits(hidden[:, -1]).float()
    own = logits[:, -1].float()
    close = 1e-4 if logits.dtype == hidden.dtype == torch.float32 else 5e-2
    if found.shape != own.shape or bool((found - own).abs().max() > close * own.abs().max()):
        raise UnsupportedError(
            f"{type(unwrapped(model)).__name__} does more to its hidden states than its output embeddings and config "
            "tell, so its logits cannot be made of them a few at a time: distil it with fused=False"
        )
