"""Everything of a model that unpatch() must bring back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .families import inputs


def snapshot(model: PreTrainedModel, given: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """The class, vars() of every module (keys in order, identities, hooks and children), configs, and all bits.

    given: what to call it with; by default the padded batch of the small families.
    """
    modules = dict(model.named_modules())
    configs = {id(v): v for m in modules.values() for v in vars(m).values() if isinstance(v, PreTrainedConfig)}
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "modules": {name: id(module) for name, module in modules.items()},
        "vars": {name: [(key, id(value)) for key, value in vars(module).items()] for name, module in modules.items()},
        "dicts": {
            f"{name}.{key}": [(k, id(v)) for k, v in value.items()]
            for name, module in modules.items()
            for key, value in vars(module).items()
            if isinstance(value, dict)
        },
        "configs": {key: str(config) for key, config in configs.items()},
        "generation_config": str(getattr(model, "generation_config", None)),
        "tensors": {name: (id(t), t.dtype, t.requires_grad, bits(t)) for name, t in tensors.items()},
        "logits": bits(logits(model, given)),
        "keys": list(model.state_dict()),
    }


@torch.no_grad()
def logits(model: PreTrainedModel, given: dict[str, Tensor] | None = None) -> Tensor:
    output = model(**inputs("left") if given is None else given)
    return output.logits if "logits" in output else output[0]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
