"""The float weights that quantized layers replace: kept in memory, or read back from the checkpoint on undo.

A dropped weight keeps its module and its Parameter object; only the storage goes, so that undoing gives
back the very same objects with the very same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .errors import HfAccelError, UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def checkpoint_files(folder: str | None) -> dict[str, Path]:
    """Tensor name -> safetensors file of a local checkpoint folder; empty where there is none."""
    root = Path(folder) if folder else None
    if root is None or not root.is_dir():
        return {}
    if (root / INDEX).is_file():
        names = json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: root / file for name, file in names.items()}
    if not (root / SINGLE).is_file():
        return {}
    with safe_open(root / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), root / SINGLE)


def read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def fingerprint(tensor: Tensor) -> str:
    """blake2b of a tensor's bytes, dtype and shape."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(_bits(tensor.detach().cpu()).numpy().data)
    return digest.hexdigest()


@dataclass
class Dropped:
    parameter: nn.Parameter
    name: str
    file: Path
    fingerprint: str


@dataclass
class Originals:
    """The weights that a patch drops, first noted and then freed together, so that a failure frees none.

    lost: weights dropped with no way back (keep_original=False). never_there: the model was loaded quantized.
    """

    dropped: list[Dropped] = field(default_factory=list)
    lost: list[nn.Parameter] = field(default_factory=list)
    never_there: bool = False

    def note(self, parameter: nn.Parameter, name: str, file: Path) -> None:
        """This weight can be freed: `file` holds it, unchanged, under `name`."""
        self.dropped.append(Dropped(parameter, name, file, fingerprint(parameter)))

    def free(self) -> None:
        for parameter in [*self.lost, *(d.parameter for d in self.dropped)]:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def restore(self) -> None:
        """Read every dropped weight back; raises, with nothing changed, if one is gone or not what it was."""
        if self.never_there:
            raise UnsupportedError(
                "cannot unpatch: the checkpoint is quantized and has no original weights; load a float one"
            )
        if self.lost:
            raise UnsupportedError(
                f"cannot unpatch: {len(self.lost)} original weights were dropped by keep_original=False; "
                "load the model again, or patch with keep_original='auto'"
            )
        tensors = [self._read(d) for d in self.dropped]
        for entry, tensor in zip(self.dropped, tensors, strict=True):
            entry.parameter.data = tensor.to(entry.parameter.device)
        self.dropped.clear()

    @staticmethod
    def _read(entry: Dropped) -> Tensor:
        try:
            tensor = read_tensor(entry.file, entry.name)
        except Exception as error:
            raise HfAccelError(f"cannot unpatch: {entry.name!r} cannot be read from {entry.file}: {error}") from error
        if fingerprint(tensor) != entry.fingerprint:
            raise HfAccelError(f"cannot unpatch: {entry.name!r} in {entry.file} has changed since patch()")
        return tensor


def readable(name: str, parameter: Tensor, files: dict[str, Path]) -> bool:
    """Whether the checkpoint holds exactly this tensor, bit for bit."""
    if name not in files:
        return False
    try:
        stored = read_tensor(files[name], name)
    except Exception:  # an unreadable checkpoint only means that the weight stays in memory
        return False
    same = stored.dtype == parameter.dtype and stored.shape == parameter.shape
    return same and torch.equal(_bits(stored), _bits(parameter.detach().cpu()))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().flatten().view(torch.uint8)


def parameter_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage counted once."""
    unique = {t.untyped_storage().data_ptr() if t.numel() else id(t): t.nbytes for t in tensors}
    return sum(unique.values())
