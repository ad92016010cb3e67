"""Modules whose code asks for the dtype of a weight that is quantized: T5 converts the input of `wo` to it, and Mamba
that of its head.

A quantized layer makes its weight in floating point when it is asked for it, which takes longer than the product. Here
the module's own code runs with a stand-in for the layer, whose weight has a dtype and no numbers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel

from ...models import modules_by_name
from ...recognition.generation_code import reads_dtype_of
from ...recognition.source import without_renaming
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..site import FusedSite, SiteKind

DTYPE_READER = SiteKind(
    "dtype reader", "modules that read the dtype of a weight", "without its numbers",
    "their code asks for nothing else of it",
)  # fmt: skip


class ReadsDtypes(Mixin):
    """A mixin for a module that reads the dtypes of the weights of some of its layers, and no numbers of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        own = super().forward  # type: ignore[misc]
        if is_compiling():  # a compiler could not follow into the stand-ins
            return own(*args, **kwargs)
        return own.__func__(_Shown(self, self.__dict__[FUSED]), *args, **kwargs)


class _ForwardOfModel:
    """The forward of a model that reads dtypes. Its signature is that of the model's own, also on the class."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        own: Any = super(ReadsDtypes, owner if instance is None else instance).forward  # type: ignore[misc]
        if instance is None:
            return own

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return own(*args, **kwargs)
            return own.__func__(_Shown(instance, vars(instance)[FUSED]), *args, **kwargs)

        return forward


class ModelReadsDtypes(ReadsDtypes):
    """The mixin for a whole model, of whose forward transformers asks the signature."""

    forward: Any = _ForwardOfModel()


class _Shown:
    """Stands for a module, with stand-ins for layers of these names."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _WithoutNumbers(value) if name in self._names else value


class _WithoutNumbers:
    """Stands for a linear layer whose weight has a dtype alone."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer(*args, **kwargs)

    @property
    def weight(self) -> Tensor:
        dtype = getattr(self._layer, "compute_dtype", None) or self._layer.weight.dtype
        return torch.empty(0, dtype=dtype, device="meta")


def dtype_readers(model: nn.Module, quantized: Container[nn.Module]) -> Iterator[FusedSite]:
    """Find the modules that read the dtype of the weight of a layer that is quantized, except for models around whose
    code transformers has put some of its own: that asks more of them than a stand-in has.
    """
    for name, module in modules_by_name(model):
        forward = original_class(module).forward
        is_model = isinstance(module, PreTrainedModel)
        if is_model and hasattr(without_renaming(forward), "__wrapped__"):
            continue
        layers = {key: child for key, child in module.named_children() if child in quantized}
        names = tuple(key for key in layers if reads_dtype_of(forward, key))
        if names:
            yield FusedSite(name, module, DTYPE_READER, ModelReadsDtypes if is_model else ReadsDtypes, names)
