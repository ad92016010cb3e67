"""Where the files lie that other runtimes read a model from: written once for all that read the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

# By address; the weights are kept, so that no others come to lie there.
_FOLDERS: dict[int, tuple[Tensor, tempfile.TemporaryDirectory[str]]] = {}


def folder_of(model: PreTrainedModel) -> Path:
    """One folder for all models over the same weights (twins), removed when the process ends."""
    embeddings: Any = model.get_input_embeddings()
    weight: Tensor = embeddings.weight.data
    if weight.data_ptr() not in _FOLDERS:
        _FOLDERS[weight.data_ptr()] = (weight, tempfile.TemporaryDirectory(prefix="hf_accel-"))
    return Path(_FOLDERS[weight.data_ptr()][1].name)


def model_file(
    model: PreTrainedModel, name: str, *,
    plain: str, write: Callable[[PreTrainedModel, Path], None], quantize: Callable[[Path, Path], None],
) -> Path:  # fmt: skip
    """The file `name` of the model's folder: the file `plain`, which `write` makes, or what `quantize` makes of it."""
    path, source = folder_of(model) / name, folder_of(model) / plain
    if not source.exists():
        write(model, source)
    if not path.exists():
        quantize(source, path)
    return path
