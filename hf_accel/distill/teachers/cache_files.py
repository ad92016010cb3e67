"""A teacher's answers on disk: safetensors shards, and an index that is written last.

Every file is written under another name, brought to the disk and renamed. `partial.json` lists the shards of a build
that goes on; as its last act it becomes `index.json`. What an index does not list does not exist.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import HfAccelError, UnsupportedError
from ...hardware.atomic import replaced_file
from ...keywords import one_of
from .identity import hash_json
from .texts import DIGEST_BYTES
from .top_logits import KeptLogits, TopLogits

FORMAT = 1
INDEX, PARTIAL, LOCK = "index.json", "partial.json", "build.lock"
SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
ANSWERS = tuple(part.name for part in fields(TopLogits))
TABLE = ("keys", "starts", "checks")
STORED_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SMALL_VOCABULARY = 2**16


@dataclass(frozen=True)
class CacheSettings:
    """The settings that identify a cache. Two builds with the same settings may share a folder.

    task: "causal" (position i predicts token i + 1), "token" (itself) or "sequence" (one answer a text).
    positions: "all", or "labels" for those with a label. top_k: of the ids of each position the last `samples` are
    drawn from the rest, at the highest of the temperatures. tokenizer: a hash of its vocabulary.
    """

    teacher: dict[str, Any]
    tokenizer: str | None
    task: str
    positions: str
    vocab_size: int
    top_k: int
    samples: int
    temperatures: list[float]
    dtype: str

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < t < math.inf for t in self.temperatures):
            raise UnsupportedError(f"temperatures={self.temperatures}: one or more finite numbers above 0")
        one_of("positions", self.positions, ("labels", "all"))
        one_of("dtype", self.dtype, tuple(STORED_DTYPES))
        if not 0 <= self.samples < self.top_k or (self.samples and self.top_k == self.vocab_size):
            raise UnsupportedError(
                f"samples={self.samples}: at least one of the top_k={self.top_k} ids is the best one, and nothing can "
                "be drawn where top_k is all ids"
            )

    @property
    def choice(self) -> KeptLogits:
        return KeptLogits(self.top_k - self.samples, self.samples, self.temperatures, STORED_DTYPES[self.dtype])

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.uint16 if self.vocab_size <= SMALL_VOCABULARY else torch.int32

    def differences(self, other: CacheSettings) -> str:
        """A description of what differs from `other`; the teacher's name does not count."""
        mine, theirs = self._flat(), other._flat()
        return "; ".join(f"{k}: there {mine.get(k)!r}, here {v!r}" for k, v in theirs.items() if mine.get(k) != v)

    def _flat(self) -> dict[str, Any]:
        flat = asdict(self)
        teacher = {f"teacher's {name}": value for name, value in flat.pop("teacher").items() if name != "name"}
        return {**teacher, **flat}


@dataclass(frozen=True)
class ShardEntry:
    """bytes: of the file. table: a hash of the shard's table of rows."""

    file: str
    bytes: int
    rows: int
    positions: int
    table: str


@dataclass
class Index:
    """The index of a cache: its settings and its shards."""

    settings: CacheSettings
    shards: list[ShardEntry] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Index:
        """Raises HfAccelError, with the file's name, for what is not an intact index of this format."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            version = content["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HfAccelError(f"{file} is not the index of a teacher's cache ({error!r}); build it again") from error
        if version != FORMAT:
            raise HfAccelError(
                f"{file} has format {version!r}, and this hf_accel reads {FORMAT}; build the cache again"
            )
        if content.pop("check", None) != hash_json(content):
            raise HfAccelError(f"{file} was changed after it was written; build the cache again")
        return cls(CacheSettings(**content["settings"]), [ShardEntry(**entry) for entry in content["shards"]])

    def write(self, file: Path) -> None:
        content = {"format": FORMAT, "settings": asdict(self.settings), "shards": [asdict(s) for s in self.shards]}
        text = json.dumps({**content, "check": hash_json(content)}, indent=1)
        with replaced_file(file, errors=(SafetensorError,)) as temporary:
            temporary.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class StoredRow:
    """One text: its positions, int32 [n], ascending, and the teacher's answers there."""

    key: bytes
    positions: Tensor
    answers: TopLogits


def write_shard(file: Path, rows: list[StoredRow], settings: CacheSettings) -> ShardEntry:
    """rows: at least one; tensors on the CPU."""
    counts = torch.tensor([0, *(len(row.positions) for row in rows)])
    keys = bytearray(b"".join(row.key for row in rows))
    tensors = {
        "positions": torch.cat([row.positions for row in rows]),
        **dict(zip(ANSWERS, map(torch.cat, zip(*(row.answers.tensors() for row in rows), strict=True)), strict=True)),
        "keys": torch.frombuffer(keys, dtype=torch.uint8).view(-1, DIGEST_BYTES),
        "starts": counts.cumsum(0),
        "checks": torch.tensor([row_checksum(row) for row in rows]),
    }
    with replaced_file(file, errors=(SafetensorError,)) as temporary:
        save_file(tensors, temporary, metadata={"format": f"hf_accel teacher cache {FORMAT}"})
        size = temporary.stat().st_size
    return ShardEntry(file.name, size, len(rows), len(tensors["positions"]), _hash_table(tensors))


def row_checksum(row: StoredRow) -> int:
    """CRC-32 of all that is stored of a row."""
    total = zlib.crc32(row.key)
    for tensor in (row.positions, *row.answers.tensors()):
        total = zlib.crc32(_buffer(tensor), total)
    return total


def _hash_table(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in TABLE:
        digest.update(_buffer(tensors[name]))
    return digest.hexdigest()


def _buffer(tensor: Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class Shard:
    """One file, mapped into memory: a row is read from the disk when it is asked for, and checked then."""

    def __init__(self, folder: Path, entry: ShardEntry, settings: CacheSettings) -> None:
        """Raises HfAccelError, with the file's name, if it is missing, cut short or not what the index says."""
        self.file = folder / entry.file
        try:
            size = self.file.stat().st_size
        except OSError as error:
            raise HfAccelError(f"{self.file} is missing ({error}); bring it back, or build the cache again") from error
        if size != entry.bytes:
            raise self._broken(f"it has {size} bytes instead of {entry.bytes}")
        try:
            with safe_open(self.file, framework="pt") as tensors:
                self._tensors = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._broken(str(error)) from error
        if {name: (t.dtype, tuple(t.shape)) for name, t in self._tensors.items()} != _layout(entry, settings):
            raise self._broken("its tensors have other names, dtypes or shapes")
        if _hash_table(self._tensors) != entry.table:
            raise self._broken("its table of rows has changed")
        self._starts: list[int] = self._tensors["starts"].tolist()

    def keys(self) -> list[bytes]:
        stored = self._tensors["keys"].numpy().tobytes()
        return [stored[at : at + DIGEST_BYTES] for at in range(0, len(stored), DIGEST_BYTES)]

    def positions(self, row: int) -> Tensor:
        return self._tensors["positions"][self._starts[row] : self._starts[row + 1]]

    def row(self, number: int) -> StoredRow:
        part = slice(self._starts[number], self._starts[number + 1])
        answers = TopLogits(*(self._tensors[name][part] for name in ANSWERS))
        row = StoredRow(self._tensors["keys"][number].numpy().tobytes(), self._tensors["positions"][part], answers)
        if row_checksum(row) != int(self._tensors["checks"][number]):
            raise self._broken(f"row {number} has changed")
        return row

    def _broken(self, cause: str) -> HfAccelError:
        return HfAccelError(f"{self.file} is damaged: {cause}; delete it and build the cache again")


def _layout(entry: ShardEntry, settings: CacheSettings) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        "positions": (torch.int32, (entry.positions,)),
        "ids": (settings.id_dtype, (entry.positions, settings.top_k)),
        "logits": (STORED_DTYPES[settings.dtype], (entry.positions, settings.top_k)),
        "log_sums": (torch.float32, (entry.positions, len(settings.temperatures))),
        "thresholds": (torch.float32, (entry.positions,)),
        "keys": (torch.uint8, (entry.rows, DIGEST_BYTES)),
        "starts": (torch.int64, (entry.rows + 1,)),
        "checks": (torch.int64, (entry.rows,)),
    }
