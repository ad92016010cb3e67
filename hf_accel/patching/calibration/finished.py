"""The layers that a calibration has finished, stored so that a run that was killed goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...config import WeightConfig
from ...errors import UnsupportedError
from ...hardware.atomic import replaced_file
from ...linear.formats import QuantizedWeight, from_state, kind_of, state
from ..originals import fingerprint
from ..weight_plan import WeightPlan

SCALES = "input_scales"  # stored next to the tensors of the weight
RECORD = "calibration.json"  # what the layers in the folder were made from


@dataclass(frozen=True)
class Rounded:
    """A quantized weight. scales: float32 [in], what its columns were multiplied by before rounding; None: nothing."""

    weight: QuantizedWeight
    scales: Tensor | None


@dataclass(frozen=True)
class Finished:
    """A folder of quantized weights, one file each; folder None: nothing is stored."""

    folder: Path | None
    kinds: Mapping[str, type[Any]]
    files: Mapping[str, str]

    @classmethod
    def of(cls, config: WeightConfig, windows: Tensor, linears: Mapping[str, WeightPlan]) -> Finished:
        """Raises UnsupportedError if config.resume holds layers of another model, of other data or settings."""
        folder = None if config.resume is None else Path(config.resume)
        files = {name: f"{number:05d}.safetensors" for number, name in enumerate(linears)}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _check(folder, _record(config, windows, linears))
        return cls(folder, {name: kind_of(linear.config.layout) for name, linear in linears.items()}, files)

    def read(self, name: str) -> Rounded | None:
        """Return the weight of a layer; None if it is still to be made."""
        if self.folder is None or not (self.folder / self.files[name]).exists():
            return None
        path = self.folder / self.files[name]
        try:
            tensors = load_file(path)
            return Rounded(from_state(self.kinds[name], tensors), tensors.get(SCALES))
        except Exception as error:
            raise UnsupportedError(f"resume: {path} cannot be read: {error}; delete it") from error

    def write(self, name: str, rounded: Rounded) -> None:
        """Store a layer; a process that is killed meanwhile leaves the whole file or none."""
        if self.folder is not None:
            scales = {} if rounded.scales is None else {SCALES: rounded.scales}
            tensors = {key: tensor.contiguous() for key, tensor in (state(rounded.weight) | scales).items()}
            with replaced_file(self.folder / self.files[name], errors=(SafetensorError,)) as unfinished:
                save_file(tensors, unfinished)


def _record(config: WeightConfig, windows: Tensor, linears: Mapping[str, WeightPlan]) -> dict[str, str]:
    """Return the settings that the numbers depend on, by the words that an error names."""
    weights = [f"{name} {fingerprint(linear.site.parameter)}" for name, linear in linears.items()]
    formats = [f"{p.config.method} {p.config.label} {p.config.group_size}" for p in linears.values()]
    return {
        "the model": _digest(weights),
        "the calibration data": _digest([fingerprint(windows)]),
        "the settings of the weights": _digest(formats),
    }


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _check(folder: Path, record: dict[str, str]) -> None:
    """Compare the record with the one in the folder, or write it into a new one."""
    path = folder / RECORD
    if not path.exists():
        with replaced_file(path) as unfinished:
            unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UnsupportedError(f"resume: {path} cannot be read: {error}; choose another folder") from error
    for what, value in record.items():
        if before.get(what) != value:
            raise UnsupportedError(
                f"resume={str(folder)!r} holds layers of another run: {what} differs; choose another folder, or "
                "delete this one"
            )
