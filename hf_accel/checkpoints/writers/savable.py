"""Checks of a model before it is written, and of the place; the report of what was written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import HfAccelError, UnsupportedError
from ...hardware.atomic import check_replaceable
from ...linear.formats import FLOAT8
from ...linear.hf import is_split
from ...models import model_of, unwrapped
from ...patching.check import check_model, first_names
from ...patching.originals import files_of
from ...patching.printed import Line, Printed, Row, row_of, table
from ...patching.survey import other_quantizer
from ...undo.state import state_of

# What a checkpoint's model consists of: these files of an older checkpoint go, all others are brought over.
MODEL_FILES = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\.json"
    r"|(generation_)?config\.json"
)


def savable(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model to write. Raises UnsupportedError for adapters and for others' quantization."""
    inner = check_model(model_of(unwrapped(model)))
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


@dataclass(frozen=True, repr=False)
class Saved(Printed):
    """The report of save_compressed or save_gguf.

    print() it: a line for each kind of tensor, and what is lost. path: the folder or the file. bytes: the size of all
    its tensors.
    """

    path: Path
    bytes: int
    lines: tuple[Line, ...]

    @property
    def _all_lines(self) -> list[Line]:
        return [*self.lines, Line("bytes", "tensors", f"{self.bytes / 1e6:,.1f} MB", "")]

    def __str__(self) -> str:
        return "\n".join([f"hf_accel saved: {self.path}", *table(self._all_lines)])

    def _table_rows(self) -> Iterable[Row]:
        return [(f"hf_accel saved: {self.path}",), *map(row_of, self._all_lines)]


# -- the place -----------------------------------------------------------------------------------------


def check_folder(folder: Path, model: PreTrainedModel) -> None:
    """Raise UnsupportedError for a folder whose replacement would lose what a user needs, or mislead who loads it."""
    check_replaceable(folder)
    if not folder.is_dir():
        return
    if (folder / "adapter_config.json").exists():
        raise UnsupportedError(f"{folder} holds an adapter, which from_pretrained would load; name another folder")
    others = [path.name for path in folder.glob("*.safetensors") if not MODEL_FILES.fullmatch(path.name)]
    if others:
        raise UnsupportedError(
            f"{folder} holds {first_names(sorted(others))}, which engines would take for a part of the model; move it "
            "away, or name another folder"
        )
    place = folder.resolve()
    read_back = {file for _, source in state_of(model).originals.dropped for file in files_of(source.stored)}
    if any(place in file.resolve().parents for file in read_back):
        raise UnsupportedError(
            f"{folder} holds the float weights that unpatch() reads back; name another folder, or patch with "
            "keep_original=True or False"
        )


def check_room(path: Path, size: int) -> None:
    """Raise HfAccelError if the disk has not `size` bytes for what will be at `path`."""
    above = next(parent for parent in path.resolve().parents if parent.exists())
    free = shutil.disk_usage(above).free
    if size > free:
        raise HfAccelError(
            f"{path} takes {size / 1e6:,.1f} MB, and {above} has {free / 1e6:,.1f} MB left; make room, or name a "
            "place on another disk"
        )


def bring_over(old: Path, new: Path) -> None:
    """Bring over the files of `old` that are no part of a model and that `new` has not."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(old)
        is_top = inside == Path()
        return [
            name
            for name in names
            if (is_top and MODEL_FILES.fullmatch(name))
            or ((new / inside / name).exists() and not (new / inside / name).is_dir())
        ]

    if old.is_dir():
        shutil.copytree(old, new, symlinks=True, ignore=left_out, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where the file system has no such names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # Windows has no os.link that leaves links as they are
        shutil.copy2(source, target, follow_symlinks=False)
