"""A model with quantized layers is saved with a card, and stays tied when it is resized."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch import nn

from ..models import layers_config
from ..undo.journal import Mixin
from .embedding import QuantEmbedding
from .layer import QuantLinear
from .model_card import write_model_card

TIES = ("_tied_weights_keys", "all_tied_weights_keys")  # of a class, in its instance where ties were broken; of all


class QuantizedModel(Mixin):
    """Is mixed into the class of a model with quantized layers, before the original class."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save as in transformers, and write a model card, if there is none, that says how to load it."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        if is_main_process:
            write_model_card(Path(save_directory))

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize as in transformers, with one weight for both the embedding and the head of a model that was tied.

        A quantized head of another number of rows is a float one again, of which transformers no longer knows that it
        was tied.
        """
        tie = _broken_tie(self)
        resized: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        if tie is not None:
            _tie_again(self, *tie)
        return resized


def _broken_tie(model: Any) -> tuple[str, str] | None:
    """Return the names of the weights of a quantized head and of the embedding that it was tied to; None without."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(head, QuantLinear):
        return None
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    target, source = names.get(id(head)), names.get(id(embedding))
    if target is None or source is None:
        return None
    shares = isinstance(embedding, QuantEmbedding) and embedding.head is head
    return (target, source) if shares or _was_tied(model, target, source) else None


def _was_tied(model: Any, target: str, source: str) -> bool:
    """Return whether quantizing broke this tie of a model's class, whose other ties its instance then has."""
    left, ties = vars(model).get(TIES[0]), getattr(type(model), TIES[0], None)
    if left is None or not isinstance(ties, dict) or target in left:
        return False
    return any(re.fullmatch(t, target) and re.fullmatch(s, source) for t, s in ties.items())


def _tie_again(model: Any, target: str, source: str) -> None:
    """Give a resized head the weight of the embedding, and tell transformers, which saves and loads one of them."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_float = not isinstance(head, QuantLinear) and not isinstance(embedding, QuantEmbedding)
    if not is_float or head.weight.shape != embedding.weight.shape:
        return  # there was nothing to resize
    head.register_parameter("weight", embedding.weight)
    for name in TIES:
        ties = getattr(model, name, None) or {}
        setattr(model, name, {**ties, target: source})
    for config in (model.config, layers_config(model.config)):
        config.tie_word_embeddings = True
