"""Writing a teacher's cache: rows are gathered, sorted by length, asked, and stored a shard at a time."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from ...errors import HfAccelError, UnsupportedError
from ...models import unwrapped
from ..losses.logit_rows import DenseRows
from ..losses.positions import IGNORED
from .cache_files import INDEX, LOCK, PARTIAL, SHARD, CacheSettings, Index, Shard, StoredRow, write_shard
from .identity import task_of
from .live import output_at
from .teacher import PACKING
from .texts import READ, Text, batch_texts
from .top_logits import TopLogits, top_logits

SEED = 0
# This many batches are sorted by length together.
SORTED_BATCHES = 64


@dataclass(frozen=True)
class Question:
    """A text and the positions to answer for, int32 [n]."""

    text: Text
    positions: Tensor

    @property
    def name(self) -> tuple[bytes, int]:
        return self.text.key, zlib.crc32(self.positions.numpy().data)


class CacheWriter:
    """Adds shards to a folder; `finish` makes them a cache."""

    def __init__(self, folder: Path, index: Index, shard_bytes: int) -> None:
        self._folder, self._index, self._shard_bytes = folder, index, shard_bytes
        self._waiting: list[StoredRow] = []
        self._bytes = 0
        numbers = [int(found[1]) for file in folder.iterdir() if (found := SHARD.fullmatch(file.name))]
        self._number = max(numbers, default=-1) + 1

    def add(self, row: StoredRow) -> None:
        self._waiting.append(row)
        self._bytes += sum(t.nbytes for t in (row.positions, *row.answers.tensors()))
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        file = self._folder / f"shard-{self._number:05d}.safetensors"
        self._index.shards.append(write_shard(file, self._waiting, self._index.settings))
        self._number, self._waiting, self._bytes = self._number + 1, [], 0
        self._index.write(self._folder / PARTIAL)

    def finish(self) -> None:
        self.flush()
        self._index.write(self._folder / INDEX)
        (self._folder / PARTIAL).unlink(missing_ok=True)
        listed = {entry.file for entry in self._index.shards}
        for file in self._folder.iterdir():
            if SHARD.fullmatch(file.name) and file.name not in listed:
                file.unlink()


@dataclass(frozen=True)
class BuildOptions:
    """The settings with which a cache is made; see TeacherCache.build."""

    batch_size: int
    collator: Callable[[list[Any]], Mapping[str, Any]] | None
    shard_bytes: int
    overwrite: bool
    progress: bool


def write_cache(teacher: Any, dataset: Any, folder: Path, settings: CacheSettings, *, options: BuildOptions) -> None:
    """Ask the teacher for every row of the dataset that the folder does not have yet. See TeacherCache.build."""
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        index = _start(folder, settings, options.overwrite)
        writer = CacheWriter(folder, index, options.shard_bytes)
        seen = Seen(index, folder)
        size = options.batch_size
        # A build that goes on draws other ids than the one that was interrupted.
        generator = torch.Generator(teacher.device).manual_seed(SEED + len(index.shards))
        total = len(dataset) if hasattr(dataset, "__len__") else None
        bar = logging.tqdm(total=total, desc="Asking the teacher", unit=" rows", disable=not options.progress)
        with bar:
            for window in _windows(dataset, size * SORTED_BATCHES):
                new, shown = seen.new(_questions(window, teacher, settings, options.collator)), 0
                for done, batch in enumerate(_batches(new, size), 1):
                    for row in _ask(teacher, batch, settings, generator):
                        writer.add(row)
                    reached = round(min(1.0, done * size / len(new)) * len(window))
                    bar.update(reached - shown)
                    shown = reached
                bar.update(len(window) - shown)
        if not seen.any:
            raise UnsupportedError("the dataset has no row to learn from; nothing was written")
        writer.finish()


def survey(teacher: Any, vocab_size: int | None) -> tuple[str, int]:
    """The teacher's task, and how many of its ids or classes count: all, or the first `vocab_size`."""
    config: Any = getattr(teacher, "config", None)
    task = task_of(teacher) if config is not None else None
    if task is None or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(teacher).__name__} cannot be stored; a teacher is a transformers model for causal or masked "
            "language modelling or for classification, of ids alone"
        )
    if task == "sequence" and getattr(config, "problem_type", None) not in (None, "single_label_classification"):
        raise UnsupportedError(f"problem_type={config.problem_type!r}: only one label of several can be distilled")
    ids = torch.zeros(1, 2, dtype=torch.int64)
    select = torch.ones(1, dtype=torch.bool) if task == "sequence" else torch.ones_like(ids, dtype=torch.bool)
    classes: int = logits_of(teacher, {"input_ids": ids}, select).shape[-1]
    if vocab_size is not None and not 0 < vocab_size <= classes:
        raise UnsupportedError(f"vocab_size={vocab_size}: the teacher has {classes} ids")
    return task, vocab_size or classes


def _start(folder: Path, settings: CacheSettings, overwrite: bool) -> Index:
    """The index to go on from: of a build that was interrupted, of the complete cache, or an empty one."""
    if overwrite:
        (folder / PARTIAL).unlink(missing_ok=True)
        return Index(settings)
    for name in (PARTIAL, INDEX):
        if not (folder / name).exists():
            continue
        found = Index.read(folder / name)
        if different := found.settings.differences(settings):
            what = "a teacher's cache" if name == INDEX else "an interrupted build"
            raise UnsupportedError(
                f"{folder} holds {what} of something else ({different}); pass overwrite=True, or another path"
            )
        return found
    return Index(settings)


class Seen:
    """The texts that are stored, each once. A text that comes again with other labels is stored again, with all its
    positions, and then that answer counts."""

    def __init__(self, index: Index, folder: Path) -> None:
        """Shards that are missing or damaged are taken off the index, so that their texts are asked for again."""
        self._task = index.settings.task
        self._positions: dict[bytes, int] = {}
        intact = []
        for entry in index.shards:
            with suppress(HfAccelError):
                shard = Shard(folder, entry, index.settings)
                intact.append(entry)
                for number, key in enumerate(shard.keys()):
                    self._positions[key] = zlib.crc32(shard.positions(number).numpy().data)
        index.shards = intact

    @property
    def any(self) -> bool:
        return bool(self._positions)

    def new(self, questions: Iterable[Question]) -> list[Question]:
        """Returns the questions to ask. A later question about the same text replaces the one before."""
        found: dict[bytes, Question] = {}
        for question in questions:
            key, positions = question.name
            known = self._positions.get(key)
            if known == positions:
                continue
            if known is not None:
                question = Question(question.text, every_position(question.text, self._task))
                if known == question.name[1]:
                    continue
            self._positions[key] = question.name[1]
            found[key] = question
        return list(found.values())


def every_position(text: Text, task: str) -> Tensor:
    """The positions at which a model of this task predicts, int32: a causal one predicts nothing at the last."""
    return torch.arange({"causal": len(text) - 1, "token": len(text), "sequence": 1}[task], dtype=torch.int32)


def _windows(dataset: Any, size: int) -> Iterator[list[Any]]:
    if isinstance(dataset, Mapping):
        raise UnsupportedError(f"the dataset is a mapping of {', '.join(map(str, dataset))}; give one of them")
    # iter() over numbers need not know the end of a dataset that has only these two.
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    items = (dataset[i] for i in range(len(dataset))) if by_number else iter(dataset)
    while window := list(islice(items, size)):
        yield window


def _questions(
    items: list[Any], teacher: Any, settings: CacheSettings, collator: Callable[[list[Any]], Mapping[str, Any]] | None
) -> Iterator[Question]:
    accepted = inspect.signature(unwrapped(teacher).forward).parameters
    for item in items:
        inputs = _as_batch(collator([item]) if collator is not None else item, accepted)
        labels = inputs.get("labels")
        for text in batch_texts(inputs):
            positions = every_position(text, settings.task)
            if settings.positions == "labels" and labels is not None and settings.task != "sequence":
                if labels.shape != inputs["input_ids"].shape:
                    raise UnsupportedError(f"labels of shape {tuple(labels.shape)} for {text}: one is needed for each")
                has_label = labels[text.row, text.start : text.stop] != IGNORED
                positions = positions[has_label[1:] if settings.task == "causal" else has_label]
            if len(positions):
                yield Question(text, positions)


def _as_batch(item: Any, accepted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns of a dataset's item that a model reads, as tensors [1, T]."""
    given = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in given:
        raise UnsupportedError(
            f"a row of the dataset has {', '.join(map(str, given)) or 'nothing'}, and no input_ids; tokenize it "
            "first, or pass the collator that does"
        )
    kept = {k: v for k, v in given.items() if v is not None and (k in accepted or k in (*READ, *PACKING, "labels"))}
    try:
        tensors = {name: torch.as_tensor(value) for name, value in kept.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(f"a row of the dataset is not made of ids: {error}; tokenize it first") from error
    return {name: tensor[None] if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}


def _batches(questions: list[Question], size: int) -> Iterator[list[Question]]:
    """Texts of similar length together, the longest first, so that what does not fit in memory fails at once."""
    ordered = sorted(questions, key=lambda question: len(question.text), reverse=True)
    for at in range(0, len(ordered), size):
        yield ordered[at : at + size]


def _ask(
    teacher: Any, batch: list[Question], settings: CacheSettings, generator: torch.Generator
) -> Iterator[StoredRow]:
    inputs, select = _padded(batch, getattr(teacher.config, "pad_token_id", None) or 0)
    if settings.task == "sequence":
        select = select[:, 0]
    logits = logits_of(teacher, inputs, select.to(teacher.device))
    found = top_logits(logits[:, : settings.vocab_size], settings.choice, generator)
    counts = [len(question.positions) for question in batch]
    stored = (found.ids.to(settings.id_dtype), *found.tensors()[1:])
    parts = [tensor.cpu().split(counts) for tensor in stored]
    for question, *answers in zip(batch, *parts, strict=True):
        yield StoredRow(question.text.key, question.positions, TopLogits(*(part.clone() for part in answers)))


def logits_of(teacher: Any, inputs: Mapping[str, Tensor], select: Tensor) -> Tensor:
    rows = output_at(teacher, inputs, select)
    assert isinstance(rows, DenseRows)
    return rows.logits


def _padded(batch: list[Question], pad: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the teacher's inputs, padded to the right, and the positions [B, T] to answer for."""
    texts = [question.text for question in batch]
    ids = pad_sequence([text.ids for text in texts], batch_first=True, padding_value=pad)
    inputs = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    if any(text.types is not None for text in texts):
        types = [torch.zeros_like(text.ids) if text.types is None else text.types for text in texts]
        inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
    select = torch.zeros_like(ids, dtype=torch.bool)
    for row, question in enumerate(batch):
        inputs["attention_mask"][row, : len(question.text)] = 1
        select[row, question.positions.long()] = True
    return inputs, select


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process writes; others on this machine wait, and find its rows. A lock dies with its process."""
    try:
        import fcntl
    except ImportError:
        # Windows has no such lock.
        yield
        return
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
