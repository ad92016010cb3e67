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


@dataclass(frozen=True)
class Source:
    """Where a tensor can be read again, and what it must be then: in `dtype`, if it was converted when loaded."""

    file: Path
    name: str
    dtype: torch.dtype
    fingerprint: str

    @classmethod
    def of(cls, tensor: Tensor, file: Path, name: str) -> Source:
        """`file` holds `tensor` under `name`."""
        return cls(file, name, tensor.dtype, fingerprint(tensor))

    def read(self) -> Tensor:
        """Raises HfAccelError if the tensor is gone or not what it was."""
        try:
            tensor = read_tensor(self.file, self.name)
        except Exception as error:
            raise HfAccelError(f"{self.name!r} cannot be read from {self.file}: {error}") from error
        tensor = tensor.to(self.dtype)
        if fingerprint(tensor) != self.fingerprint:
            raise HfAccelError(f"{self.name!r} in {self.file} has changed since patch()")
        return tensor


@dataclass
class Originals:
    """The weights that a patch freed.

    dropped: with the place to read them from. lost: with no way back (keep_original=False).
    never_there: the model was loaded from a quantized checkpoint.
    """

    dropped: list[tuple[nn.Parameter, Source]] = field(default_factory=list)
    lost: list[nn.Parameter] = field(default_factory=list)
    never_there: bool = False

    def drop(self, parameter: nn.Parameter, source: Source) -> None:
        """Free a weight that can be read back."""
        self.dropped.append((parameter, source))  # before, so that nothing is free and forgotten
        _free(parameter)

    def lose(self, parameter: nn.Parameter) -> None:
        """Free a weight for good."""
        self.lost.append(parameter)
        _free(parameter)

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
        try:
            self._read_back()
        except HfAccelError as error:
            raise HfAccelError(f"cannot unpatch: {error}") from error

    def recover(self, interrupted: BaseException) -> None:
        """Bring back what can be after an exception in patch(), and add to the exception what cannot."""
        try:
            self._read_back()
        except HfAccelError as error:
            interrupted.add_note(
                f"hf_accel: {len(self.dropped)} original weights that patch() had freed cannot be read back, because "
                f"{error}; load the model again"
            )
        if self.lost:
            interrupted.add_note(
                f"hf_accel: patch() had freed {len(self.lost)} original weights, as keep_original=False asks for, and "
                "they are gone; load the model again"
            )

    def _read_back(self) -> None:
        """All or nothing."""
        tensors = [source.read() for _, source in self.dropped]
        for (parameter, _), tensor in zip(self.dropped, tensors, strict=True):
            parameter.data = tensor.to(parameter.device)
        self.dropped.clear()


def _free(parameter: nn.Parameter) -> None:
    """The Parameter stays, as does every reference to it."""
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


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
