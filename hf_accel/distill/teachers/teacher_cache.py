"""A teacher on disk: its best logits for every text of a dataset, found by the text itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import HfAccelError, UnsupportedError
from ...keywords import checked_keywords, positive_int
from ..losses.logit_rows import Rows
from ..losses.objective import Objective
from .cache_building import CacheBuilder, survey
from .cache_files import INDEX, PARTIAL, Answers, CacheSettings, Index, Shard, describe, hash_vocabulary
from .labels import task_of
from .teacher import Teacher, takes_teacher_model
from .texts import SHOWN, Text, batch_texts, texts_at

SHARD_BYTES = 2**28


class TeacherCache(Teacher):
    """A teacher's answers for a dataset, asked once and stored, for training without the teacher in memory.

        hf_accel.TeacherCache.build(teacher, dataset, "answers")
        Trainer(..., callbacks=[hf_accel.DistillationCallback(hf_accel.TeacherCache("answers"))])

    A text is found by a hash of its ids without padding, so batches, their order, padding and its side are free, and
    no column or collator is needed. Of each position the top_k best logits are stored and the log-sum-exp over the
    whole vocabulary at each temperature, hence the log-probabilities exact up to rounding, and the mass of the rest,
    which is large at temperatures above 1. A few ids drawn from the rest stand for it, such that the gradient of
    loss="fkl" is on average that of the whole vocabulary (Anshumann et al., Sparse logit sampling, 2025); the other
    losses compare these ids and one bucket. Where k is the whole vocabulary all is exact, at every temperature.

    Shards are mapped into memory: only the rows of a batch are read, and each is checked against its CRC-32.
    """

    def __init__(self, path: str | Path) -> None:
        """Open what `build` made. Raises HfAccelError, with the file's name, if something is missing or damaged."""
        self.path = Path(path)
        if not (self.path / INDEX).exists():
            cause = "its build was interrupted" if (self.path / PARTIAL).exists() else f"there is no {INDEX}"
            raise HfAccelError(f"{self.path} is not a complete teacher's cache: {cause}; call TeacherCache.build")
        self._index = Index.read(self.path / INDEX)
        self._shards = [Shard(self.path / file, self.settings) for file in self._index.shards]
        self._places = {key: (s, number) for s in self._shards for number, key in enumerate(s.keys)}
        self._objective: Objective | None = None

    @classmethod
    @takes_teacher_model
    @checked_keywords(k="top_k=", temperature="temperatures=[...]")
    def build(
        cls,
        teacher_model: Any,
        dataset: Iterable[Any],
        path: str | Path,
        *,
        top_k: int = 64,
        samples: int | None = None,
        temperatures: Sequence[float] = (1.0, 2.0),
        batch_size: int = 8,
        collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        tokenizer: Any = None,
        positions: str = "labels",
        vocab_size: int | None = None,
        dtype: str = "float16",
        shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
        progress: bool = True,
    ) -> TeacherCache:
        """Ask a teacher, a causal or masked language model or a classifier, for every text of `dataset`, and open it.

        The teacher may be patched or quantized; it is asked in eval mode, and left as it was.
        dataset: what a Trainer takes: rows with input_ids, and attention_mask, labels, token_type_ids,
            position_ids where the student gets them too; or bare lists of ids. collator: makes the model's inputs of
            a list of one row, for datasets that need one; no random one, such as one that masks differently each time.
        top_k, samples: of top_k ids at each position `samples`, by default half of them, are drawn from all but the
            best; 0 is better for other losses than "fkl", to which a drawn id is only one more that is known.
        temperatures: those that can be trained at. The highest is drawn at.
        tokenizer: stored as a hash, for `check` to compare with the student's; taken from the collator if it has one.
        positions: "labels" answers where a row's labels are not -100, and everywhere in rows without labels; "all"
            everywhere, for other labels later.
        vocab_size: ids from there on are cut off: the teacher's padding, if the student has less of it.
        dtype: "float16", "bfloat16" or "float32", of the logits, stored less the best of each position.
        shard_bytes: of one file, about; a build that is interrupted goes on after the last complete one if it is
            started again. Rows that a complete cache of the same settings lacks are added to it.
        overwrite: replace a cache of something else, which stays until the new one is complete.

        Raises UnsupportedError for what cannot be stored, or if the path holds something else, and HfAccelError if
        a file cannot be written; a cache that was complete stays so.
        """
        for name, value in {"top_k": top_k, "batch_size": batch_size, "shard_bytes": shard_bytes}.items():
            positive_int(name, value)
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise UnsupportedError(f"{path} is a file; a cache is a folder")
        task, size = survey(teacher_model, vocab_size)
        top_k = min(top_k, size)
        tokenizer = tokenizer if tokenizer is not None else getattr(collator, "tokenizer", None)
        settings = CacheSettings(
            teacher=describe(teacher_model),
            tokenizer=hash_vocabulary(tokenizer) if tokenizer is not None else None,
            task=task,
            positions=positions,
            vocab_size=size,
            top_k=top_k,
            samples=(top_k // 2 if top_k < size else 0) if samples is None else samples,
            temperatures=sorted({float(t) for t in temperatures}),
            dtype=dtype,
        )
        builder = CacheBuilder(
            teacher_model, path, settings, batch_size=batch_size, collator=collator, shard_bytes=shard_bytes
        )
        builder.run(dataset, overwrite=overwrite, progress=progress)
        return cls(path)

    @property
    def settings(self) -> CacheSettings:
        return self._index.settings

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._places)

    @property
    def num_tokens(self) -> int:
        """The number of positions that are answered for."""
        return sum(map(len, self._shards))

    @property
    def bytes_per_token(self) -> float:
        """The size of the shards on disk, per position."""
        return sum(shard.file.stat().st_size for shard in self._shards) / self.num_tokens

    def __repr__(self) -> str:
        s = self.settings
        return (
            f"TeacherCache({str(self.path)!r}: {s.teacher['class']} {s.teacher['name']!r}, {len(self):,} texts, "
            f"{self.num_tokens:,} tokens, top {s.best} + {s.samples} drawn of {s.vocab_size:,}, "
            f"T={s.temperatures}, {self.bytes_per_token:.0f} bytes per token)"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.path,)

    def check_files(self) -> None:
        """Read everything once. Raises HfAccelError for the first shard with a row that has changed."""
        for shard in self._shards:
            for number in range(len(shard.keys)):
                shard.row(number)

    def check(self, student: Any, objective: Objective, tokenizer: Any = None) -> None:
        """Check as Teacher does. The rows that are asked for from now on are for this objective."""
        known = self.settings.tokenizer
        if known is not None and tokenizer is not None and hash_vocabulary(tokenizer) != known:
            raise UnsupportedError(f"{self.path} was built with another tokenizer; use that one, or build it again")
        s, temperature = self.settings, objective.temperature
        if s.column(temperature) is None and not s.is_whole:
            raise UnsupportedError(
                f"{self.path} holds the sums for T={s.temperatures}, and not for temperature={temperature}; train at "
                f"one of those, or build it with temperatures={(*s.temperatures, temperature)}"
            )
        self._objective = objective
        task = task_of(student)
        if task is not None and task != self.settings.task:
            raise UnsupportedError(
                f"{self.path} is of a {self.settings.teacher['class']}, and {type(student).__name__} predicts "
                "something else; build it from a teacher of the student's kind"
            )
        config = getattr(student, "config", None)
        size = getattr(config, "num_labels" if task == "sequence" else "vocab_size", None)
        if size is not None and size < self.settings.vocab_size:
            raise UnsupportedError(
                f"{self.path} has answers of {self.settings.vocab_size} ids, and the student has {size}; if the rest "
                f"is padding, build it with vocab_size={size}"
            )

    def rows(self, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
        """Answer as Teacher does. Raises UnsupportedError for a text that is not stored, or a position without an
        answer."""
        if self._objective is None:
            raise HfAccelError("TeacherCache.check(student, objective) comes before rows(): it says for which loss")
        found = [self._answers(text) for text in texts_at(select, batch_texts(inputs))]
        answers = Answers.joined(found or [self._shards[0].row(0)[:0]]).with_each(lambda part: part.to(select.device))
        return answers.rows(self.settings, self._objective)

    def _answers(self, text: Text) -> Answers:
        if text.key not in self._places:
            raise UnsupportedError(
                f"row {text.row} of the batch, {text}, is not among the {len(self)} texts of {self.path}: packing, "
                "truncation, the chat template or the tokenizer differ from when it was built, or the batch has "
                "padding and no attention_mask; build it from the very dataset that is trained on"
            )
        shard, number = self._places[text.key]
        stored, wanted = shard.row(number), text.positions
        if torch.equal(stored.positions, wanted):
            return stored
        at = torch.searchsorted(stored.positions, wanted).clamp_max(len(stored) - 1)
        missing = wanted[stored.positions[at] != wanted]
        if len(missing):
            raise UnsupportedError(
                f"{self.path} has no answer for {len(missing)} positions of row {text.row} of the batch, {text}, from "
                f"position {missing[:SHOWN].tolist()} on: other labels are trained on than it was built with; build "
                "it with positions='all'"
            )
        return stored[at]
