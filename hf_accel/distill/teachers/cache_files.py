"""A teacher's answers on disk: safetensors shards, and an index that is written last.

`partial.json` lists the shards of a build that goes on; as its last act it becomes `index.json`. What an index does
not list does not exist. Every file is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import HfAccelError, UnsupportedError
from ...hardware.atomic import replaced_file
from ...keywords import one_of
from ...models import unwrapped
from ...undo.state import find_state
from .texts import DIGEST_BYTES
from .top_logits import KeptLogits, TopLogits

FORMAT = 2  # 1 had more about each shard in its index, and is read too
INDEX, PARTIAL, LOCK = "index.json", "partial.json", "build.lock"
COLUMNS = ("positions", "ids", "logits", "log_sums", "thresholds")
# So many numbers of each of a teacher's tensors tell it from others.
SAMPLES = 4096
# These entries of a config are described elsewhere, or change none of a teacher's answers.
VOLATILE = {"transformers_version", "use_cache", "dtype", "torch_dtype", "quantization_config"}


@dataclass(frozen=True, kw_only=True)
class CacheSettings(KeptLogits):
    """The settings that identify a cache. Two builds with the same settings may share a folder.

    teacher: see `describe`. tokenizer: a hash of its vocabulary. task: see `task_of`. positions: "all", or "labels"
    for those with a label.
    """

    teacher: dict[str, Any]
    tokenizer: str | None
    task: str
    positions: str

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("positions", self.positions, ("labels", "all"))

    @property
    def hash(self) -> str:
        """The same for two builds that may share a folder."""
        return hash_json(self._flat())

    def differences(self, other: CacheSettings) -> str:
        """A description of what differs from `other`; the teacher's name does not count."""
        mine, theirs = self._flat(), other._flat()
        return "; ".join(f"{k}: there {mine.get(k)!r}, here {v!r}" for k, v in theirs.items() if mine.get(k) != v)

    def _flat(self) -> dict[str, Any]:
        flat = asdict(self)
        teacher = {f"teacher's {name}": value for name, value in flat.pop("teacher").items() if name != "name"}
        return {**teacher, **flat}


@dataclass
class Index:
    """The settings of a cache, and the names of its shards."""

    settings: CacheSettings
    shards: list[str]

    @classmethod
    def read(cls, file: Path) -> Index:
        """Raise HfAccelError, with the file's name, for what is not an intact index of this format."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            version = content["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HfAccelError(f"{file} is not the index of a teacher's cache ({error!r}); build it again") from error
        if version not in (1, FORMAT):
            raise HfAccelError(
                f"{file} has format {version!r}, and this hf_accel reads 1 to {FORMAT}; build the cache again"
            )
        if content.pop("check", None) != hash_json(content):
            raise HfAccelError(f"{file} was changed after it was written; build the cache again")
        shards = [shard["file"] for shard in content["shards"]] if version == 1 else content["shards"]
        return cls(CacheSettings(**content["settings"]), shards)

    def write(self, file: Path) -> None:
        content = {"format": FORMAT, **asdict(self)}
        with replaced_file(file) as temporary:
            temporary.write_text(json.dumps({**content, "check": hash_json(content)}, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class Answers(TopLogits):
    """A teacher's answers at `positions` of a text, int32 [N], ascending."""

    positions: Tensor

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in COLUMNS)

    def checksum(self, key: bytes) -> int:
        """CRC-32 of all that is stored of a text."""
        total = zlib.crc32(key)
        for name in COLUMNS:
            total = zlib.crc32(getattr(self, name).contiguous().flatten().view(torch.uint8).numpy().data, total)
        return total


def write_shard(file: Path, settings: CacheSettings, keys: Sequence[bytes], rows: Sequence[Answers]) -> None:
    """Write the answers for one or more texts, with tensors on the CPU."""
    tensors = {
        **vars(Answers.joined(rows)),
        "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, DIGEST_BYTES),
        "starts": torch.tensor([0, *map(len, rows)]).cumsum(0),
        "checks": torch.tensor([row.checksum(key) for key, row in zip(keys, rows, strict=True)]),
    }
    with replaced_file(file, errors=(SafetensorError,)) as temporary:
        metadata = {"format": f"hf_accel teacher cache {FORMAT}", "settings": settings.hash}
        save_file(tensors, temporary, metadata=metadata)


class Shard:
    """One file, mapped into memory: a row is read from the disk when it is asked for, and checked then."""

    def __init__(self, file: Path, settings: CacheSettings) -> None:
        """Raise HfAccelError, with the file's name, if it is missing, cut short or of other settings."""
        self.file = file
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in (*COLUMNS, "keys", "starts", "checks")}
                written_for = opened.metadata().get("settings", settings.hash)  # format 1 does not say
        except FileNotFoundError as error:
            raise HfAccelError(f"{file} is missing; bring it back, or build the cache again") from error
        except (OSError, SafetensorError) as error:
            raise self._broken(str(error)) from error
        if written_for != settings.hash:
            raise self._broken("it belongs to another cache")
        stored = tensors.pop("keys").numpy().tobytes()
        self.keys = [stored[at : at + DIGEST_BYTES] for at in range(0, len(stored), DIGEST_BYTES)]
        self._starts: list[int] = tensors.pop("starts").tolist()
        self._checks = tensors.pop("checks")
        self._answers = Answers(**tensors)

    def __len__(self) -> int:
        """The number of positions that are answered for."""
        return len(self._answers)

    def positions(self, number: int) -> Tensor:
        return self._answers.positions[self._starts[number] : self._starts[number + 1]]

    def row(self, number: int) -> Answers:
        row = self._answers[self._starts[number] : self._starts[number + 1]]
        if row.checksum(self.keys[number]) != int(self._checks[number]):
            raise self._broken(f"row {number} has changed")
        return row

    def _broken(self, cause: str) -> HfAccelError:
        return HfAccelError(f"{self.file} is damaged: {cause}; delete it and build the cache again")


# -- what a cache belongs to ---------------------------------------------------------------------------


def describe(model: Any) -> dict[str, Any]:
    """Describe a teacher by what JSON can hold. weights: a hash of a sample of each tensor, those of adapters and
    quantized layers included."""
    base = unwrapped(model)
    state = find_state(base)
    config = {k: v for k, v in base.config.to_dict().items() if not k.startswith("_") and k not in VOLATILE}
    return {
        "name": base.config.name_or_path,
        "class": type(base).__name__,
        "config": hash_json(config),
        "weights": _hash_weights(model),
        "dtype": str(base.dtype).removeprefix("torch."),
        "patched": str(state.config) if state is not None else None,
    }


def hash_vocabulary(tokenizer: Any) -> str:
    """A hash of the pairs of token and id."""
    return hash_json(sorted(tokenizer.get_vocab().items()))


def hash_json(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _hash_weights(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for prefix, module in model.named_modules():
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, f"{prefix}.", False)  # a quantized layer unpacks here, one at a time
        for name, tensor in own.items():
            if not isinstance(tensor, Tensor):
                continue
            if tensor.is_meta:
                raise UnsupportedError(f"{name} of the teacher is on the meta device; load its weights first")
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().data)
    return digest.hexdigest()
