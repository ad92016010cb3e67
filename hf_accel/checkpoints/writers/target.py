"""The place that a checkpoint is written to: what may not be lost there, and what is kept."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from ...errors import HfAccelError, UnsupportedError
from ...hardware.atomic import check_replaceable
from ...patching.check import first_names
from ...patching.originals import files_of
from ...undo.state import state_of

# What a checkpoint's model consists of: these files of an older checkpoint go, all others are brought over.
MODEL_FILES = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\.json"
    r"|(generation_)?config\.json"
)


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
    """A second name for a file, or a copy where the file system has no such names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
