"""Writing a teacher's cache: rows are gathered, sorted by length, asked, and stored a shard at a time."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from ...errors import HfAccelError, UnsupportedError
from ...hardware.atomic import locked
from ...models import unwrapped
from ..losses.logit_rows import DenseRows
from ..losses.positions import IGNORED
from .cache_files import INDEX, LOCK, PARTIAL, Answers, CacheSettings, Index, Shard, write_shard
from .labels import task_of
from .live import output_at
from .teacher import PACKING
from .texts import READ, Text, batch_texts
from .top_logits import top_logits

SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
SEED = 0
# This many batches are sorted by length together.
SORTED_BATCHES = 64


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
    classes = _logits(teacher, {"input_ids": ids}, ids[:, 0] == 0 if task == "sequence" else ids == 0).shape[-1]
    if vocab_size is not None and not 0 < vocab_size <= classes:
        raise UnsupportedError(f"vocab_size={vocab_size}: the teacher has {classes} ids")
    return task, vocab_size or classes


class CacheBuilder:
    """Asks a teacher for every text of a dataset that a folder does not have yet. See TeacherCache.build.

    Each text is stored once. One that comes again with other labels is stored again, with all its positions, and then
    that answer counts.
    """

    def __init__(
        self,
        teacher: Any,
        folder: Path,
        settings: CacheSettings,
        *,
        batch_size: int,
        collator: Callable[[list[Any]], Mapping[str, Any]] | None,
        shard_bytes: int,
    ) -> None:
        self.teacher, self.folder, self.settings = teacher, folder, settings
        self.batch_size, self.collator, self.shard_bytes = batch_size, collator, shard_bytes
        self._accepted = inspect.signature(unwrapped(teacher).forward).parameters
        self._waiting: list[tuple[bytes, Answers]] = []
        self._bytes = 0
        # The positions that are stored of each text, by their checksum.
        self._known: dict[bytes, int] = {}

    def run(self, dataset: Any, *, overwrite: bool, progress: bool) -> None:
        if isinstance(dataset, Mapping):
            raise UnsupportedError(f"the dataset is a mapping of {', '.join(map(str, dataset))}; give one of them")
        self.folder.mkdir(parents=True, exist_ok=True)
        # The processes of a training find what the first of them has built.
        with locked(self.folder / LOCK):
            self._begin(overwrite)
            self._ask_for(dataset, progress)
            if not self._known:
                raise UnsupportedError("the dataset has no row to learn from; nothing was written")
            self._finish()

    def _begin(self, overwrite: bool) -> None:
        """Go on from an interrupted build, from the complete cache, or from nothing.

        Shards that are missing or damaged are left out, so that their texts are asked for again.
        """
        if overwrite:
            (self.folder / PARTIAL).unlink(missing_ok=True)
        name = next((name for name in (PARTIAL, INDEX) if not overwrite and (self.folder / name).exists()), None)
        self._index, names = Index(self.settings, []), [file.name for file in self.folder.iterdir()]
        if name is not None:
            found = Index.read(self.folder / name)
            names += found.shards
            if different := found.settings.differences(self.settings):
                what = "a teacher's cache" if name == INDEX else "an interrupted build"
                raise UnsupportedError(
                    f"{self.folder} holds {what} of something else ({different}); pass overwrite=True, or another path"
                )
            for file in found.shards:
                with suppress(HfAccelError):
                    shard = Shard(self.folder / file, self.settings)
                    self._known |= {key: _sum(shard.positions(at)) for at, key in enumerate(shard.keys)}
                    self._index.shards.append(file)
        numbers = [int(match[1]) for name in names if (match := SHARD.fullmatch(name))]
        self._number = max(numbers, default=-1) + 1
        # A build that goes on draws other ids than the one that was interrupted.
        self._generator = torch.Generator(self.teacher.device).manual_seed(SEED + len(self._index.shards))

    def _ask_for(self, dataset: Any, progress: bool) -> None:
        total = len(dataset) if hasattr(dataset, "__len__") else None
        # iter() over numbers need not know the end of a dataset that has only these two.
        by_number = total is not None and hasattr(dataset, "__getitem__")
        items = (dataset[i] for i in range(len(dataset))) if by_number else iter(dataset)
        bar = logging.tqdm(total=total, desc="Asking the teacher", unit=" rows", disable=not progress)
        with bar:
            while window := list(islice(items, self.batch_size * SORTED_BATCHES)):
                # Texts of similar length together, the longest first: what does not fit in memory fails at once.
                new, left = sorted(self._new(window), key=len, reverse=True), len(window)
                for at in range(0, len(new), self.batch_size):
                    self._ask(new[at : at + self.batch_size])
                    shown = min(left, self.batch_size)
                    bar.update(shown)
                    left -= shown
                bar.update(left)

    # -- what to ask -----------------------------------------------------------------------------------

    def _new(self, items: Iterable[Any]) -> list[Text]:
        """The texts to ask for. One that comes later replaces the same before it."""
        found: dict[bytes, Text] = {}
        for text in (text for item in items for text in self._texts(item)):
            known = self._known.get(text.key)
            if known not in (None, _sum(text.positions)):
                text = self._everywhere(text)
            if known != _sum(text.positions):
                self._known[text.key] = _sum(text.positions)
                found[text.key] = text
        return list(found.values())

    def _texts(self, item: Any) -> Iterator[Text]:
        """The texts of a row of the dataset, each with the positions that are to be answered for."""
        inputs = self._inputs(self.collator([item]) if self.collator is not None else item)
        labels, task = inputs.get("labels"), self.settings.task
        for text in batch_texts(inputs):
            if self.settings.positions == "all" or labels is None or task == "sequence":
                text = self._everywhere(text)
            elif labels.shape != inputs["input_ids"].shape:
                raise UnsupportedError(f"labels of shape {tuple(labels.shape)} for {text}: one is needed for each")
            else:
                has_label = labels[text.row, text.start : text.start + len(text)] != IGNORED
                text = text.at(has_label[1:] if task == "causal" else has_label)
            if len(text.positions):
                yield text

    def _everywhere(self, text: Text) -> Text:
        """A causal model predicts nothing at the last position, a classifier one class of all."""
        return text.at(torch.ones({"causal": len(text) - 1, "token": len(text), "sequence": 1}[self.settings.task]))

    def _inputs(self, item: Any) -> dict[str, Tensor]:
        """The columns of a dataset's item that a model reads, as tensors [1, T]."""
        given = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
        if "input_ids" not in given:
            raise UnsupportedError(
                f"a row of the dataset has {', '.join(map(str, given)) or 'nothing'}, and no input_ids; tokenize it "
                "first, or pass the collator that does"
            )
        read = {*self._accepted, *READ, *PACKING, "labels"}
        try:
            tensors = {k: torch.as_tensor(v) for k, v in given.items() if v is not None and k in read}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedError(f"a row of the dataset is not made of ids: {error}; tokenize it first") from error
        return {name: tensor[None] if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}

    # -- the answers -----------------------------------------------------------------------------------

    def _ask(self, texts: list[Text]) -> None:
        inputs, select = _padded(texts, getattr(self.teacher.config, "pad_token_id", None) or 0)
        if self.settings.task == "sequence":
            select = select[:, 0]
        logits = _logits(self.teacher, inputs, select)[:, : self.settings.vocab_size]
        found = vars(top_logits(logits, self.settings, self._generator).with_each(Tensor.cpu))
        answers = Answers(**found, positions=torch.cat([text.positions for text in texts]))
        ends = accumulate((len(text.positions) for text in texts), initial=0)
        for text, (start, stop) in zip(texts, pairwise(ends), strict=True):
            self._waiting.append((text.key, answers[start:stop]))
            self._bytes += self._waiting[-1][1].nbytes
            if self._bytes >= self.shard_bytes:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        file = self.folder / f"shard-{self._number:05d}.safetensors"
        keys, rows = zip(*self._waiting, strict=True)
        write_shard(file, self.settings, keys, rows)
        self._number, self._waiting, self._bytes = self._number + 1, [], 0
        self._index.shards.append(file.name)
        self._index.write(self.folder / PARTIAL)

    def _finish(self) -> None:
        self._flush()
        self._index.write(self.folder / INDEX)
        (self.folder / PARTIAL).unlink(missing_ok=True)
        listed = set(self._index.shards)
        for file in self.folder.iterdir():
            if SHARD.fullmatch(file.name) and file.name not in listed:
                file.unlink()


def _sum(positions: Tensor) -> int:
    return zlib.crc32(positions.numpy().data)


def _logits(teacher: Any, inputs: Mapping[str, Tensor], select: Tensor) -> Tensor:
    rows = output_at(teacher, inputs, select.to(teacher.device))
    assert isinstance(rows, DenseRows)
    return rows.logits


def _padded(texts: list[Text], pad: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the teacher's inputs, padded to the right, and the positions [B, T] to answer for."""
    ids = pad_sequence([text.ids for text in texts], batch_first=True, padding_value=pad)
    inputs = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    if any(text.types is not None for text in texts):
        types = [torch.zeros_like(text.ids) if text.types is None else text.types for text in texts]
        inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
    select = torch.zeros_like(ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        inputs["attention_mask"][row, : len(text)] = 1
        select[row, text.positions.long()] = True
    return inputs, select
