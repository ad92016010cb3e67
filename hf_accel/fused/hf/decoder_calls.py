"""Decoder layers that run by their trace: over pages, and in calls without them, as those of embedders are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel

from ...recognition.padding_readers import PaddingReaders
from .encoder_calls import EncoderLayerCalls
from .native_calls import NativeCalls


class DecoderCalls(NativeCalls):
    """The LayerCalls of a layer on the CPU, which is one native call over pages, and over the rows of a batch if it
    has no cache, or an empty one of transformers.

    readers: as those of EncoderCalls, for calls without pages.
    """

    def __init__(self, readers: PaddingReaders | None) -> None:
        super().__init__()
        self.over_rows = EncoderLayerCalls(readers)

    def __reduce__(self) -> Any:
        return DecoderCalls, (self.over_rows.readers,)

    def run_without_pages(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | tuple[Any, ...] | None:
        return None if is_compiling() else self.over_rows.run(layer, args, kwargs)


def has_no_head(model: nn.Module) -> bool:
    """Return whether no head of the model reads the hidden states of all tokens, those of padding too, as the head of
    a language model does for a loss.
    """
    return isinstance(model, PreTrainedModel) and model.get_output_embeddings() is None


def readers_without_head(model: nn.Module) -> PaddingReaders | None:
    """Return the readers of padding of a model, which is None where a head of its own is one."""
    return PaddingReaders(model) if has_no_head(model) else None
