"""The float weights that quantized layers replace: kept in memory, or read back from the checkpoint on undo.

A dropped weight keeps its module and its Parameter object; only the storage goes, so that undoing gives
back the very same objects with the very same bits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PureWindowsPath

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import HfAccelError, UnsupportedError
from ..hardware import release
from ..linear import Workers
from ..linear.hf import Pieces
from ..models import layers_config
from ..parallel.tensor import Part, let_go, part_of, put_back
from ..tensors import local_tensor, plain_tensors
from ..undo.journal import Journal

CHUNK_SIZE = 3 * 2**13  # words: few enough for the cache, and for torch not to divide them among threads
CHAIN = 0x9E3779B97F4A7C15  # odd
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Where a checkpoint has a tensor: its file, or, of each expert, the files and names of tensors to lay end to end.
Stored = Path | Pieces


def checkpoint_files(folder: str | None) -> dict[str, Path]:
    """Return tensor name -> safetensors file of a local checkpoint folder; empty where there is none."""
    if not folder:
        return {}
    root = Path(folder)
    if (root / INDEX).is_file():
        return indexed(root / INDEX)
    return stored_tensors([root / SINGLE]) if (root / SINGLE).is_file() else {}


def indexed(index: Path) -> dict[str, Path]:
    """Return tensor name -> file, as an index of shards has them. Raises HfAccelError if it names files elsewhere."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in names.items():
            check_inside(file, f"{index}, weight_map[{name!r}]")
        return {name: index.parent / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HfAccelError(f"{index} is no index of shards: {error!r}; copy it again") from error


def check_inside(file: object, said: str) -> None:
    """Raise HfAccelError unless `file`, which `said` names, is a path within the checkpoint's folder."""
    path = PureWindowsPath(file) if isinstance(file, str) else None  # it takes / and \\ for separators
    if path is None or path.anchor or ".." in path.parts:
        raise HfAccelError(f"{said} is {file!r}, which is no file in the checkpoint's folder; copy it again")


def stored_tensors(files: Iterable[str | Path]) -> dict[str, Path]:
    """Return tensor name -> file, of the safetensors files among `files`."""
    stored = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                stored.update(dict.fromkeys(tensors.keys(), file))
    return stored


def read_tensor(stored: Stored, name: str, part: Part | None = None) -> Tensor:
    """Read the tensor `name` of a file, or join one, [experts, ...], of pieces. part: None is the whole."""
    if isinstance(stored, Path):
        with safe_open(stored, framework="pt") as tensors:
            return tensors.get_tensor(name) if part is None else part.read(tensors.get_slice(name))
    with ExitStack() as files:
        opened = {file: files.enter_context(safe_open(file, framework="pt")) for file in files_of(stored)}
        # One expert at a time, so that no more than the result and one expert are in memory.
        result: Tensor | None = None
        for index, pieces in enumerate(stored):
            whole = torch.cat([opened[file].get_tensor(piece) for file, piece in pieces])
            result = whole.new_empty(len(stored), *whole.shape) if result is None else result
            result[index] = whole
    assert result is not None
    return result


def files_of(stored: Stored) -> list[Path]:
    return [stored] if isinstance(stored, Path) else list(dict.fromkeys(file for one in stored for file, _ in one))


def fingerprint(tensor: Tensor) -> str:
    """Return a tensor's dtype, shape and a 64-bit hash of its bytes, at the speed of memory.

    Sums of words times odd numbers drawn once, chained over chunks (Lemire and Kaser, Strongly universal string
    hashing is fast, 2014): one changed word always shows, more go unseen once in 2**64 times. Against accidents, not
    against an adversary.
    """
    total = 0
    for chunk in _words(tensor.detach().cpu()).split(CHUNK_SIZE):
        total = (total * CHAIN + int((chunk * _multipliers()[: len(chunk)]).sum())) % 2**64
    return f"{tensor.dtype} {tuple(tensor.shape)} {total:016x}"


@functools.cache
def _multipliers() -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(-(2**62), 2**62, (CHUNK_SIZE,), generator=generator, dtype=torch.int64, device="cpu") * 2 + 1


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes as int64, the last word filled up with zeros: NaN equals NaN, and 0 differs from -0."""
    size = tensor.dtype.itemsize
    flat = tensor.contiguous().flatten()
    if flat.nbytes % 8 or flat.storage_offset() * size % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -flat.nbytes % 8)).clone()
    return flat.view(torch.int64)


@dataclass(frozen=True)
class Source:
    """The place where a tensor can be read again, and the tensor's properties.

    dtype: the one that it was converted to when loaded. part: the part that this rank holds; None for all.
    """

    stored: Stored
    name: str
    dtype: torch.dtype
    fingerprint: str
    part: Part | None = None

    @classmethod
    def of(cls, tensor: Tensor, stored: Stored, name: str) -> Source:
        """Describe a `tensor` that a file holds under `name`, or in pieces; `name` then is the one in the model."""
        return cls(stored, name, tensor.dtype, fingerprint(local_tensor(tensor)), part_of(tensor))

    def read(self) -> Tensor:
        """Raises HfAccelError if the tensor is gone or not what it was."""
        try:
            tensor = read_tensor(self.stored, self.name, self.part)
        except Exception as error:
            raise HfAccelError(f"{self.name!r} cannot be read from {files_of(self.stored)[0]}: {error}") from error
        tensor = tensor.to(self.dtype)
        if fingerprint(tensor) != self.fingerprint:
            raise HfAccelError(f"{self.name!r} in {files_of(self.stored)[0]} has changed since patch()")
        release(tensor)
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
        let_go(parameter)

    def lose(self, parameter: nn.Parameter) -> None:
        """Free a weight for good."""
        self.lost.append(parameter)
        let_go(parameter)

    def check(self) -> None:
        """Raise UnsupportedError if there is no way back."""
        if self.never_there:
            raise UnsupportedError(
                "cannot unpatch: the checkpoint is quantized and has no original weights; load a float one"
            )
        if self.lost:
            raise UnsupportedError(
                f"cannot unpatch: {len(self.lost)} original weights were dropped by keep_original=False; "
                "load the model again, or patch with keep_original='auto'"
            )

    def restore(self) -> None:
        """Read every dropped weight back; raises, with nothing changed, if one is gone or not what it was."""
        self.check()
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
            self.dropped.clear()
        if self.lost:
            interrupted.add_note(
                f"hf_accel: patch() had freed {len(self.lost)} original weights, as keep_original=False asks for, and "
                "they are gone; load the model again"
            )
            self.lost.clear()

    def _read_back(self) -> None:
        """Read all dropped weights back, or none if one cannot be read."""
        read: list[tuple[nn.Parameter, Tensor]] = []
        with Workers[tuple[nn.Parameter, Tensor]]() as workers:
            for parameter, source in self.dropped:
                read += workers.put(partial(_with_tensor, parameter, source))
            read += workers.finish()
        for parameter, tensor in read:
            put_back(parameter, tensor.to(parameter.device))
        self.dropped.clear()


def _with_tensor(parameter: nn.Parameter, source: Source) -> tuple[nn.Parameter, Tensor]:
    return parameter, source.read()


def whereabouts(size: int, on_disk: Mapping[str, Stored] | None, *, kept: bool) -> str:
    """Say where replaced weights of `size` bytes are after patch(), for its plan. kept: by keep_original=True."""
    if kept or not on_disk:
        why = "keep_original=True" if kept else "no safetensors checkpoint holds the same weights"
        return f"stay in memory, {size / 1e6:,.1f} MB: {why}"
    return f"are read back from {files_of(next(iter(on_disk.values())))[0].parent}, checked by fingerprint"


def readable(name: str, parameter: Tensor, files: Mapping[str, Stored]) -> bool:
    """Return whether the checkpoint holds exactly this tensor, or this rank's part of it, bit for bit."""
    if name not in files:
        return False
    tensor = local_tensor(parameter)
    try:
        stored = read_tensor(files[name], name, part_of(parameter))
    except Exception:  # an unreadable checkpoint only means that the weight stays in memory
        return False
    if stored.dtype != tensor.dtype or stored.shape != tensor.shape:
        return False
    same = torch.equal(_words(stored), _words(tensor.detach().cpu()))
    release(tensor)
    return same


def parameter_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors, each storage once."""
    parts = (part for tensor in tensors for part in plain_tensors(tensor))
    # what is on the meta device has no address
    unique = {t.untyped_storage().data_ptr() or id(t) if t.numel() else id(t): t.nbytes for t in parts}
    return sum(unique.values())


def remaining_ties(ties: Mapping[str, str], quantized: Collection[str]) -> dict[str, str]:
    """Return `ties` (parameter -> the one that it is) without the weights of the modules `quantized`.

    Where a quantized weight was what others are tied to, the first of these takes its place.
    """
    gone = {f"{name}.weight" for name in quantized}
    substitutes: dict[str, str] = {}
    remaining = {}
    for target, source in ties.items():
        if target in gone:
            continue
        if source not in gone:
            remaining[target] = source
        elif source not in substitutes:
            substitutes[source] = target
        else:
            remaining[target] = substitutes[source]
    return remaining


def broken_ties(
    model: PreTrainedModel, quantized: Collection[str]
) -> Iterator[tuple[PreTrainedModel, str, dict[str, str]]]:
    """Yield (submodel, attribute, value) to be set once the modules `quantized` of `model` are replaced.

    transformers keeps the ties twice: those of the whole, used while it loads, and each class's own, read again by
    tie_weights(). The latter are shadowed in the instance.
    """
    for prefix, submodel in list(model.named_modules()):
        if not isinstance(submodel, PreTrainedModel):
            continue
        start = f"{prefix}." if prefix else ""
        names = {name.removeprefix(start) for name in quantized if name.startswith(start)}
        every = dict(submodel.all_tied_weights_keys)
        own = submodel.get_expanded_tied_weights_keys(all_submodels=False)
        for attribute, ties in (("all_tied_weights_keys", every), ("_tied_weights_keys", own)):
            if (remaining := remaining_ties(ties, names)) != ties:
                yield submodel, attribute, remaining


def break_ties(model: PreTrainedModel, quantized: Collection[str], journal: Journal) -> None:
    """Write `broken_ties` through the journal, and into the config, which must be the model's own, if none is left."""
    for submodel, attribute, ties in list(broken_ties(model, quantized)):
        journal.attribute(submodel, attribute, ties)
        if submodel is model and not model.all_tied_weights_keys:
            # what others, such as PEFT, look up
            model.config.tie_word_embeddings = False
            layers_config(model.config).tie_word_embeddings = False
