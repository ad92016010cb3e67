"""Projections in a checkpoint, beside the optimizer's state: they are of the training and not of the student."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from ....errors import UnsupportedError
from ...transfer import Projections

NAME = "distillation_projections.safetensors"


def save_projections(projections: Projections, folder: str) -> None:
    """Written whole or not at all."""
    path, unfinished = Path(folder) / NAME, Path(folder) / f"{NAME}.unfinished"
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in projections.state_dict().items()}, unfinished
    )
    os.replace(unfinished, path)


def load_projections(projections: Projections, folder: str) -> None:
    """Raises UnsupportedError, with nothing changed, where the checkpoint has none or has others."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UnsupportedError(
            f"{folder} has no {NAME}: it was not made by a training that learned projections; start anew, or set "
            f"hidden_weight=0"
        )
    found = load_file(path)
    shapes, wanted = ({name: tuple(x.shape) for name, x in of.items()} for of in (found, projections.state_dict()))
    if shapes != wanted:
        raise UnsupportedError(
            f"{path} holds {shapes}, and this training needs {wanted}: resume with the same teacher and the same "
            f"hidden_layer_map"
        )
    projections.load_state_dict(found)
