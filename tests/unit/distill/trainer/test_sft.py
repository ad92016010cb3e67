"""DistillationCallback in TRL's SFTTrainer, whose forward has neither logits nor a loss that it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.errors import UnsupportedError

from ..classroom import ALPHA, TEMPERATURE, VOCABULARY, arguments, distance, llama, reference, texts, update

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages


def words() -> PreTrainedTokenizerFast:
    model = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    named = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w0"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **named)


def sft(folder: Path, student: Any, callback: DistillationCallback, cut: tuple[int, int], **more: Any) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    plain = arguments(folder, *cut).to_dict()
    names = (
        "max_steps", "learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "logging_steps", "save_strategy",
        "report_to", "disable_tqdm", "use_cpu", "train_sampling_strategy", "dataloader_pin_memory",
        "per_device_train_batch_size", "gradient_accumulation_steps",
    )  # fmt: skip
    given = {"gradient_checkpointing": False, "bf16": False, **{name: plain[name] for name in names}, **more}
    ours = {"dataset_kwargs": {"skip_prepare_dataset": True}} if not more.get("packing") else {}
    args = SFTConfig(str(folder), **given, **ours)
    columns = {name: [row[name].tolist() for row in texts()] for name in ("input_ids", "labels")}
    data = Dataset(InMemoryTable.from_pydict(columns), fingerprint="texts")  # hashing it would pickle pyarrow
    return SFTTrainer(student, args, train_dataset=data, processing_class=words(), callbacks=[callback])


def distil(teacher: Any, **more: Any) -> DistillationCallback:
    return DistillationCallback(teacher, **{"alpha": ALPHA, "temperature": TEMPERATURE, **more})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cut", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_update_is_the_gradient_over_all_labels(tmp_path: Path, cut: tuple[int, int], fused: bool) -> None:
    student, teacher = llama(1), llama(2, layers=2)
    expected = reference(student, teacher, texts(), shift=True)
    trainer = sft(tmp_path, student, distil(teacher, fused=fused), cut)
    assert distance(update(trainer), expected) < 1e-5
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(ALPHA * line["ce_loss"] + (1 - ALPHA) * line["kd_loss"], rel=1e-4)
    assert not student._forward_hooks and not student.model._forward_hooks


def test_sequences_without_padding_between_them(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2, layers=2)
    expected = reference(student, teacher, texts(), shift=True)
    trainer = sft(tmp_path, student, distil(teacher), (4, 1), padding_free=True, max_length=None)
    assert distance(update(trainer), expected) < 1e-4


def test_evaluation_stays_the_cross_entropy(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2)
    trainer = sft(tmp_path, student, distil(teacher), (4, 1), learning_rate=0.0)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    with torch.no_grad():
        batch = {key: torch.stack([row[key] for row in texts()]) for key in texts()[0]}
        own = float(llama(1).eval()(**batch).loss)
    assert before == pytest.approx(own, rel=1e-5)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == before


def test_its_own_weighting_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="dft"):
        sft(tmp_path, llama(1), distil(llama(2)), (4, 1), loss_type="dft").train()
