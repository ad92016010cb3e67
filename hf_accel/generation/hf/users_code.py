"""Code of others in a model: hooks, forwards and classes of the user's, which may read rows and columns of a pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...models import modules_of
from ...recognition.unchanged import others_code


def code_in_passes(model: Any) -> str | None:
    """Return what code of others passes run, as words; None if they run none. It is that of the decoder, of what is
    around it, and of the head; and not that of a tower or an encoder.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = [*modules_of(decoder), *(modules_of(head) if isinstance(head, nn.Module) else ())]
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    around = [model.get_submodule(".".join(name.split(".")[:depth])) for depth in range(name.count(".") + 1)]
    return others_code([*around, *inside])
