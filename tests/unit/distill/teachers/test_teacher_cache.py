"""A teacher on disk against the same teacher in memory, whatever becomes of the batches, and of the files."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

import hf_accel
from hf_accel.distill.losses.logit_rows import DenseRows, TopRows
from hf_accel.distill.losses.objective import Objective
from hf_accel.distill.teachers import cache_files
from hf_accel.distill.teachers.teacher_cache import TeacherCache
from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.errors import HfAccelError, UnsupportedError

VOCABULARY = 48
ONE = Objective(temperature=1.0)
WHOLE: dict[str, Any] = {"top_k": VOCABULARY, "dtype": "float32", "progress": False}


def llama(seed: int = 0, vocab_size: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=vocab_size, num_hidden_layers=1, pad_token_id=0, initializer_range=0.3, **sizes)
    return LlamaForCausalLM(config)


def bert(kind: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, initializer_range=0.5, **sizes, **more))


def texts(count: int = 12, seed: int = 0) -> list[list[int]]:
    made = random.Random(seed)
    return [[made.randrange(VOCABULARY) for _ in range(made.randrange(2, 20))] for _ in range(count)]


def batch(rows: list[list[int]], *, left: bool = False, extra: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs, and every position that has a next token. Padding is an ordinary id: only the mask tells."""
    longest = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), longest), 3), torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        at = longest - len(row) if left else 0
        ids[i, at : at + len(row)], mask[i, at : at + len(row)] = torch.tensor(row), 1
    select = torch.zeros_like(mask, dtype=torch.bool)
    select[:, :-1] = (mask[:, :-1] & mask[:, 1:]).bool()
    return {"input_ids": ids, "attention_mask": mask}, select


def said(teacher: Any, row: list[int]) -> Tensor:
    """Log-probabilities of one text, on its own [T, V]."""
    with torch.no_grad():
        return teacher.eval()(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)


def read(cache: TeacherCache, inputs: dict[str, Tensor], select: Tensor) -> Tensor:
    rows = cache.rows(inputs, select)
    assert isinstance(rows, DenseRows)
    return rows.logits.log_softmax(-1)


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    return llama()


@pytest.fixture
def cache(teacher: LlamaForCausalLM, tmp_path: Path) -> TeacherCache:
    made = TeacherCache.build(teacher, texts(), tmp_path / "answers", **WHOLE, shard_bytes=10_000, batch_size=3)
    made.check(teacher, ONE)
    return made


def test_any_batch_of_the_texts_is_answered(teacher: LlamaForCausalLM, cache: TeacherCache) -> None:
    assert len(cache._shards) > 2
    made, rows = random.Random(1), texts()
    for _ in range(40):
        chosen = made.sample(rows, made.randrange(1, 6))
        inputs, select = batch(chosen, left=made.random() < 0.5, extra=made.randrange(4))
        select &= torch.rand(select.shape) < made.random()
        found = read(cache, inputs, select)
        own = [
            said(teacher, row)[select[i][inputs["attention_mask"][i].bool()].nonzero().flatten()]
            for i, row in enumerate(chosen)
        ]
        torch.testing.assert_close(found, torch.cat(own), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("loss", ["fkl", "rkl"])
def test_the_best_ids_are_those_of_the_teacher(teacher: LlamaForCausalLM, tmp_path: Path, loss: str) -> None:
    rows = texts(3)
    cache = TeacherCache.build(teacher, rows, tmp_path, top_k=16, samples=6, temperatures=(2.0, 1.0), progress=False)
    cache.check(teacher, Objective(temperature=2.0, loss=loss))
    found = cache.rows(*batch(rows))
    assert isinstance(found, TopRows)
    true = torch.cat([(said(teacher, row)[:-1] / 2).log_softmax(-1) for row in rows])
    best, ids = true.topk(10)
    assert torch.equal(found.ids[:, :10].sort()[0], ids.sort()[0])
    torch.testing.assert_close(found.log_probs[:, :10], best, atol=5e-3, rtol=0)
    assert found.ids.shape[1] == 16
    drawn = true.gather(-1, found.ids)[:, 10:]
    if loss == "fkl":  # they stand for the rest
        torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.ones(len(true)))
    else:
        torch.testing.assert_close(found.log_probs[:, 10:], drawn, atol=5e-3, rtol=0)


def test_progress_counts_rows_and_may_be_off(
    teacher: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar(contextlib.nullcontext[Any]):
        """All that there is of a bar where transformers' are switched off."""

        def __init__(self, **keywords: Any) -> None:
            super().__init__()
            assert keywords["total"] == len(rows)

        def update(self, more: int) -> None:
            counted.append(more)

    rows, counted = [*texts(20), *texts(20)], list[int]()
    monkeypatch.setattr(logging, "tqdm", Bar)
    TeacherCache.build(teacher, rows, tmp_path, **{**WHOLE, "progress": True}, batch_size=3)
    assert sum(counted) == len(rows) and min(counted) >= 0


def test_positions_with_labels_are_stored(teacher: LlamaForCausalLM, tmp_path: Path) -> None:
    row = texts(1)[0]
    labels = [-100] * 3 + row[3:]
    cache = TeacherCache.build(teacher, [{"input_ids": row, "labels": labels}], tmp_path, **WHOLE)
    cache.check(teacher, ONE)
    assert cache.num_tokens == len(row) - 3
    inputs, select = batch([row])
    select[:, :2] = False
    torch.testing.assert_close(read(cache, inputs, select), said(teacher, row)[2:-1], atol=1e-4, rtol=1e-4)
    select[:, 1] = True
    with pytest.raises(UnsupportedError, match=r"no answer for 1 positions .* position \[1\] on.*positions='all'"):
        cache.rows(inputs, select)
    everywhere = TeacherCache.build(
        teacher, [{"input_ids": row, "labels": labels}], tmp_path / "all", positions="all", **WHOLE
    )
    assert everywhere.num_tokens == len(row) - 1


def test_a_text_with_two_sets_of_labels_is_stored_whole(teacher: LlamaForCausalLM, tmp_path: Path) -> None:
    row = list(range(8))
    some = [{"input_ids": row, "labels": row[:start] + [-100] * (8 - start)} for start in (3, 5, 3)]
    cache = TeacherCache.build(teacher, some, tmp_path, batch_size=1, **WHOLE)
    assert len(cache) == 1
    cache.check(teacher, ONE)
    torch.testing.assert_close(read(cache, *batch([row])), said(teacher, row)[:-1], atol=1e-4, rtol=1e-4)


def test_packed_texts_are_found_one_by_one(teacher: LlamaForCausalLM, cache: TeacherCache) -> None:
    rows = texts()[2:5]
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[at for row in rows for at in range(len(row))]])
    select = torch.cat((positions[:, 1:] != 0, torch.tensor([[False]])), -1)
    found = read(cache, {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": ids}, select)
    torch.testing.assert_close(found, torch.cat([said(teacher, row)[:-1] for row in rows]), atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedError, match="packs 3 texts, and has an attention_mask"):
        read(cache, {"input_ids": ids, "position_ids": positions, "attention_mask": ids * 0 + 1}, select)


def test_nothing_selected_is_no_row(cache: TeacherCache) -> None:
    inputs, select = batch([[1, 2, 3]])
    assert len(cache.rows(inputs, select & False)) == 0


class Numbered(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        row = self.rows[at % len(self.rows)]  # knows no end
        return {"input_ids": torch.tensor([*row, 9]), "attention_mask": [1] * len(row) + [0], "text": "not read"}


def hugging_face(rows: list[list[int]]) -> Any:
    return datasets.Dataset(pyarrow.table({"input_ids": rows, "other": ["x"] * len(rows)}), fingerprint="texts")


@pytest.mark.parametrize("dataset", [Numbered, hugging_face, iter, lambda rows: [torch.tensor(row) for row in rows]])
def test_datasets_of_all_kinds(teacher: Any, tmp_path: Path, dataset: Callable[[Any], Any]) -> None:
    rows = texts(5)
    cache = TeacherCache.build(teacher, dataset(rows), tmp_path, **WHOLE)
    cache.check(teacher, ONE)
    assert len(cache) == 5
    assert len(cache.rows(*batch(rows))) == sum(map(len, rows)) - 5


@pytest.mark.parametrize(
    ("dataset", "cause"),
    [
        ([{"text": "hello"}], "no input_ids"),
        (["hello"], "tokenize"),
        ({"train": [[1, 2]]}, "mapping of train"),
        ([[5]], "no row to learn from"),
    ],
)
def test_datasets_without_ids_are_refused(teacher: Any, tmp_path: Path, dataset: Any, cause: str) -> None:
    with pytest.raises(UnsupportedError, match=cause):
        TeacherCache.build(teacher, dataset, tmp_path, **WHOLE)


def test_masked_language_models_speak_of_each_token(tmp_path: Path) -> None:
    teacher, row = bert(BertForMaskedLM), texts(1)[0]
    labels = [-100 if at % 3 else row[at] for at in range(len(row))]
    cache = TeacherCache.build(teacher, [{"input_ids": row, "labels": labels}], tmp_path, **WHOLE)
    cache.check(teacher, ONE)
    inputs, _ = batch([row], extra=2)
    select = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    select[0, 0 : len(row) : 3] = True
    torch.testing.assert_close(read(cache, inputs, select), said(teacher, row)[::3], atol=1e-4, rtol=1e-4)


def test_classifiers_speak_of_the_text(tmp_path: Path) -> None:
    teacher, rows = bert(BertForSequenceClassification, num_labels=3), texts(4)
    data = [{"input_ids": row, "token_type_ids": [0, *[1] * (len(row) - 1)], "labels": 1} for row in rows]
    cache = TeacherCache.build(teacher, data, tmp_path, progress=False)
    cache.check(teacher, Objective(temperature=7.0))  # three classes: all is stored
    inputs, _ = batch(rows)
    inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    inputs["token_type_ids"][:, 0] = 0
    with torch.no_grad():
        true = teacher.eval()(**inputs).logits.log_softmax(-1)
    found = read(cache, inputs, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(found, true, atol=5e-3, rtol=5e-3)
    with pytest.raises(UnsupportedError, match="is not among"):  # another kind of pair
        cache.rows({**inputs, "token_type_ids": inputs["token_type_ids"] * 0}, torch.ones(4, dtype=torch.bool))


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    for model in (t5, torch.nn.Linear(2, 2)):
        with pytest.raises(UnsupportedError, match="cannot be stored"):
            TeacherCache.build(model, texts(), tmp_path, progress=False)
    for bad in ({"top_k": 0}, {"temperatures": (0.0,)}, {"dtype": "int8"}, {"samples": 64}, {"vocab_size": 99}):
        with pytest.raises(UnsupportedError, match=next(iter(bad))):
            TeacherCache.build(llama(), texts(), tmp_path, progress=False, **bad)


def test_unknown_texts_are_refused(cache: TeacherCache) -> None:
    inputs, select = batch([[*texts()[0], 1]])
    with pytest.raises(UnsupportedError, match=rf"row 0 of the batch, {len(texts()[0]) + 1} ids \({texts()[0][0]}, "):
        cache.rows(inputs, select)
    inputs, select = batch(texts()[:2])
    del inputs["attention_mask"]
    with pytest.raises(UnsupportedError, match="no attention_mask"):
        cache.rows(inputs, select)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"inputs_embeds": torch.zeros(1, 4, 2)}, "inputs_embeds changes"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "plain padding"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "a gap"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "count each text from 0"),
        ({"input_ids": None}, "has none"),
    ],
)
def test_inputs_that_mean_something_else_are_refused(cache: TeacherCache, change: dict[str, Any], cause: str) -> None:
    inputs, select = batch([[1, 2, 3, 4]])
    with pytest.raises(UnsupportedError, match=cause):
        cache.rows({**inputs, **change}, select)


def test_a_label_behind_padding_is_refused(cache: TeacherCache) -> None:
    inputs, select = batch([texts()[0]], left=True, extra=1)
    select[0, 0] = True
    with pytest.raises(UnsupportedError, match="predicted from padding"):
        cache.rows(inputs, select)


class Words:
    def __init__(self, size: int) -> None:
        self.words = {f"w{i}": i for i in range(size)}

    def get_vocab(self) -> dict[str, int]:
        return self.words


def test_students_that_do_not_fit_are_refused(teacher: Any, tmp_path: Path) -> None:
    cache = TeacherCache.build(teacher, texts(), tmp_path, top_k=8, tokenizer=Words(40), progress=False)
    with pytest.raises(UnsupportedError, match=r"T=\[1.0, 2.0\], and not for temperature=3.0"):
        cache.check(teacher, Objective(temperature=3.0))
    with pytest.raises(UnsupportedError, match="vocab_size=40"):
        cache.check(llama(vocab_size=40), ONE)
    with pytest.raises(UnsupportedError, match="something else"):
        cache.check(bert(BertForMaskedLM), ONE)
    cache.check(llama(vocab_size=64), ONE)
    with pytest.raises(UnsupportedError, match="another tokenizer"):
        cache.check(teacher, ONE, Words(41))
    cache.check(teacher, ONE, Words(40))


def test_the_padding_of_a_vocabulary_is_cut_off(teacher: Any, tmp_path: Path) -> None:
    rows = [[i % 40 for i in row] for row in texts(4)]
    cache = TeacherCache.build(teacher, rows, tmp_path, vocab_size=40, top_k=40, dtype="float32", progress=False)
    cache.check(llama(vocab_size=40), ONE)
    true = torch.cat([said(teacher, row)[:-1, :40].log_softmax(-1) for row in rows])
    torch.testing.assert_close(read(cache, *batch(rows)), true, atol=1e-4, rtol=1e-4)


def damage(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_damage_is_named(cache: TeacherCache) -> None:
    shard, index = cache.path / "shard-00001.safetensors", cache.path / "index.json"
    whole, listed = shard.read_bytes(), index.read_text()

    def opened(cause: str) -> None:
        with pytest.raises(HfAccelError, match=cause):
            TeacherCache(cache.path).check_files()
        shard.write_bytes(whole)
        index.write_text(listed)
        TeacherCache(cache.path).check_files()

    for at in range(0, len(whole), len(whole) // 60):
        damage(shard, at)
        opened(shard.name)
    shard.write_bytes(whole[:-10])
    opened(f"{shard.name} is damaged: .*not fully covered")
    shard.unlink()
    opened(f"{shard.name} is missing")
    other = TeacherCache.build(llama(seed=1), texts(), cache.path.parent / "other", **WHOLE, shard_bytes=10_000)
    shard.write_bytes((other.path / shard.name).read_bytes())
    opened(f"{shard.name} is damaged: it belongs to another cache")
    index.write_text(listed.replace('"temperatures": [\n   1.0', '"temperatures": [\n   1.5'))
    opened("index.json was changed")
    index.write_text(listed[:100])
    opened("index.json is not the index")
    index.write_text(json.dumps({**json.loads(listed), "format": 99}))
    opened("has format 99")


def test_a_damaged_shard_is_built_again(teacher: Any, cache: TeacherCache) -> None:
    (cache.path / "shard-00001.safetensors").write_bytes(b"")
    again = TeacherCache.build(teacher, texts(), cache.path, **WHOLE)
    again.check(teacher, ONE)
    again.check_files()
    assert len(again.rows(*batch(texts()))) == cache.num_tokens == again.num_tokens


def failing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The disk is full at the shard numbered `after`, half-way through it."""
    count = 0

    def save(tensors: Any, file: Path, **more: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            file.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        real(tensors, file, **more)

    real = cache_files.save_file
    monkeypatch.setattr(cache_files, "save_file", save)


def test_an_interrupted_build_goes_on(teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**WHOLE, "shard_bytes": 10_000, "batch_size": 1}
    with monkeypatch.context() as patched, pytest.raises(HfAccelError, match=r"could not be written.*No space"):
        failing(patched, after=3)
        TeacherCache.build(teacher, texts(), tmp_path, **settings)
    with pytest.raises(HfAccelError, match="interrupted"):
        TeacherCache(tmp_path)
    with pytest.raises(UnsupportedError, match=r"interrupted build of something else .*teacher's weights"):
        TeacherCache.build(llama(seed=1), texts(), tmp_path, **settings)
    asked: list[int] = []
    teacher.register_forward_pre_hook(lambda *given, **more: asked.append(1))
    cache = TeacherCache.build(teacher, texts(), tmp_path, **settings)
    assert len(asked) - 1 < len(texts())  # one to see the vocabulary
    cache.check(teacher, ONE)
    assert len(cache) == len(texts())
    true = torch.cat([said(teacher, row)[:-1] for row in texts()])
    torch.testing.assert_close(read(cache, *batch(texts())), true, atol=1e-4, rtol=1e-4)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_complete_cache_outlives_what_replaces_it(
    teacher: Any, cache: TeacherCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, before = llama(seed=1), sorted(file.name for file in cache.path.glob("shard*"))
    with pytest.raises(UnsupportedError, match=r"teacher's weights: there .*overwrite=True"):
        TeacherCache.build(other, texts(), cache.path, **WHOLE)
    with pytest.raises(UnsupportedError, match="top_k: there 48, here 5"):
        TeacherCache.build(teacher, texts(), cache.path, **{**WHOLE, "top_k": 5})
    for build in (lambda: [*texts(), [1, 2, 3]], lambda: texts(5, seed=9)):
        with monkeypatch.context() as patched, pytest.raises(HfAccelError, match="No space"):
            failing(patched, after=0)
            TeacherCache.build(teacher, build(), cache.path, **WHOLE)
        TeacherCache(cache.path).check_files()
    with monkeypatch.context() as patched, pytest.raises(HfAccelError, match="No space"):
        failing(patched, after=1)
        TeacherCache.build(other, texts(), cache.path, overwrite=True, shard_bytes=20_000, **WHOLE)
    kept = TeacherCache(cache.path)
    kept.check(teacher, ONE)
    assert torch.equal(read(kept, *batch(texts())), read(cache, *batch(texts())))
    replaced = TeacherCache.build(other, texts(), cache.path, overwrite=True, **WHOLE)
    replaced.check(teacher, ONE)
    true = torch.cat([said(other, row)[:-1] for row in texts()])
    torch.testing.assert_close(read(replaced, *batch(texts())), true, atol=1e-4, rtol=1e-4)
    assert not set(before) & {file.name for file in cache.path.iterdir()}


def test_a_cache_of_the_first_format_is_read_and_continued(teacher: Any, tmp_path: Path) -> None:
    """The answers for four texts: the top 4 of 48 ids, and 4 drawn. They were built by the release before."""
    path = Path(shutil.copytree(Path(__file__).parent / "cache_of_format_1", tmp_path / "old"))
    cache = TeacherCache(path)
    cache.check_files()
    cache.check(teacher, Objective(temperature=2.0))
    rows = cache.rows(*batch(texts(4)))
    assert isinstance(rows, TopRows)
    true = torch.cat([(said(teacher, row)[:-1] / 2).log_softmax(-1) for row in texts(4)])
    torch.testing.assert_close(rows.log_probs[:, :4], true.topk(4).values, atol=5e-3, rtol=0)
    # The machine that wrote it may have had other weights of this seed in their last bits.
    index = json.loads((path / "index.json").read_text())
    index["settings"]["teacher"] = cache_files.describe(teacher)
    del index["check"]
    (path / "index.json").write_text(json.dumps({**index, "check": cache_files.hash_json(index)}))
    more = TeacherCache.build(teacher, texts(5), path, top_k=8, progress=False)
    assert len(more) == 5 and json.loads((path / "index.json").read_text())["format"] == 2
    more.check(teacher, ONE)
    assert torch.equal(more.rows(*batch(texts(4))).ids, rows.ids)


def test_new_texts_are_added(teacher: Any, cache: TeacherCache) -> None:
    more = TeacherCache.build(teacher, [*texts(), [1, 2, 3]], cache.path, **WHOLE)
    assert len(more) == len(cache) + 1
    assert more.num_tokens == cache.num_tokens + 2


def test_the_teacher_is_left_as_it_was(teacher: Any, tmp_path: Path) -> None:
    teacher.train()
    teacher.model.layers[0].eval()
    before = {name: module.training for name, module in teacher.named_modules()}
    TeacherCache.build(teacher, texts(2), tmp_path, **WHOLE)
    assert before == {name: module.training for name, module in teacher.named_modules()}
    assert all(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize("weights", ["int8", None])
def test_a_patched_teacher_says_what_it_says(teacher: Any, tmp_path: Path, weights: str | None) -> None:
    stock = TeacherCache.build(teacher, texts(3), tmp_path / "stock", **WHOLE)
    hf_accel.patch(teacher, weights=weights)
    cache = TeacherCache.build(teacher, texts(3), tmp_path / "patched", **WHOLE)
    cache.check(teacher, ONE)
    true = torch.cat([said(teacher, row)[:-1] for row in texts(3)])
    torch.testing.assert_close(read(cache, *batch(texts(3))), true, atol=2e-2, rtol=1e-2)
    assert cache.settings.teacher["patched"] and not stock.settings.teacher["patched"]
    with pytest.raises(UnsupportedError, match="teacher's patched"):
        TeacherCache.build(teacher, texts(3), tmp_path / "stock", **WHOLE)


def test_what_it_weighs(cache: TeacherCache) -> None:
    on_disk = sum(file.stat().st_size for file in cache.path.glob("shard*"))
    assert cache.num_tokens == sum(len(row) - 1 for row in texts())
    assert cache.bytes_per_token == on_disk / cache.num_tokens
    assert "12 texts" in repr(cache) and "LlamaForCausalLM" in repr(cache)
    assert len(pickle.loads(pickle.dumps(cache))) == len(copy.deepcopy(cache)) == len(cache)


def test_a_trainer_learns_as_from_the_model(teacher: Any, tmp_path: Path) -> None:
    data = [{"input_ids": row[:8], "labels": row[:8], "attention_mask": [1] * 8} for row in texts(40) if len(row) > 7]
    cache = TeacherCache.build(teacher, data, tmp_path / "answers", **WHOLE)
    weights = []
    for source in (teacher, cache):
        student = llama(seed=5)
        args = TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=3, report_to=[], use_cpu=True, optim="sgd",
            learning_rate=0.1, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        callback = DistillationCallback(source, alpha=0.3, temperature=2.0)
        Trainer(student, args, train_dataset=data, callbacks=[callback]).train()
        weights.append(torch.cat([parameter.flatten() for parameter in student.parameters()]).detach())
    torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(weights[0], torch.cat([p.flatten() for p in llama(seed=5).parameters()]), atol=1e-3)
