"""Train one student and say what it has learnt, in a process of its own.

python -m benchmarks.topics.train_student '{"seed": 0, "alpha": 0.1, ...}'     the fields of Training
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_accel

from ..harness.corpus import held_out_text, training_windows

EVALUATED = 512  # tokens of a window that is measured on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One run: seed draws the text and its order. teacher, text: paths; layers: of the teacher, that the student
    begins with. alpha=1 without hidden_weight is training on text alone. measured: tokens of `text` at the end."""

    teacher: str
    text: str | None
    layers: tuple[int, ...]
    seed: int
    steps: int
    batch: int
    length: int
    learning_rate: float
    measured: int
    alpha: float
    temperature: float = 1.0
    loss: str = "fkl"
    hidden_weight: float = 0.0
    fused: bool = False


def main(*argv: str) -> None:
    training = Training(**json.loads((argv or sys.argv[1:])[0]))
    tokenizer = AutoTokenizer.from_pretrained(training.teacher)
    held_out = held_out_text(training.text)
    teacher = AutoModelForCausalLM.from_pretrained(training.teacher, dtype=torch.bfloat16).eval()
    student = hf_accel.init_student(teacher, layers=list(training.layers), dtype=torch.float32)
    count, length = training.steps * training.batch, training.length
    rows = training_windows(tokenizer, held_out, count=count, length=length, seed=training.seed)
    start = time.perf_counter()
    train(training, student, teacher, rows)
    seconds = time.perf_counter() - start
    measured = measured_windows(tokenizer(held_out, verbose=False)["input_ids"], training.measured)
    print(json.dumps({"training_seconds": seconds, **evaluate(student, teacher, measured)}))


def train(training: Training, student: PreTrainedModel, teacher: PreTrainedModel, rows: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layer_map = [f"{number}:{end}" for number, end in enumerate(ends(training, teacher), 1)]
        config = hf_accel.DistillationConfig(
            folder,
            alpha=training.alpha,
            temperature=training.temperature,
            loss=training.loss,
            hidden_weight=training.hidden_weight,
            hidden_layer_map=layer_map if training.hidden_weight else None,
            max_steps=training.steps,
            per_device_train_batch_size=training.batch,
            learning_rate=training.learning_rate,
            adam_beta2=0.95,
            warmup_steps=max(1, training.steps // 20),
            seed=training.seed,
            bf16=True,
            fused=training.fused,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        trainer = hf_accel.DistillationTrainer(student, teacher_model=teacher, args=config, train_dataset=dataset)
        trainer.train()


def ends(training: Training, teacher: PreTrainedModel) -> list[int]:
    """For each student layer the teacher's, counted from 1, that stands before the next kept one, or last."""
    return [*training.layers[1:], teacher.config.num_hidden_layers]


def measured_windows(ids: list[int], tokens: int) -> Tensor:
    """int64 [windows, EVALUATED], or one window of a text that is shorter."""
    length = min(EVALUATED, tokens, len(ids))
    count = min(tokens, len(ids)) // length
    return torch.tensor(ids[: count * length]).view(count, length)


@torch.no_grad()
def evaluate(student: Any, teacher: Any, windows: Tensor) -> dict[str, float]:
    """Of both on the next token: accuracy, loss in nats; and of the student against the teacher: how often both have
    the same first choice, and the chance sum(min(p, q)) that a token it draws is accepted."""
    student.eval()
    found = torch.zeros(6, dtype=torch.float64)
    for window in windows:
        z, t = (model(window[None], use_cache=False).logits[0, :-1].float() for model in (student, teacher))
        labels = window[1:]
        best, choice = z.argmax(-1), t.argmax(-1)
        losses = [torch.nn.functional.cross_entropy(logits, labels, reduction="sum") for logits in (z, t)]
        shared = torch.minimum(z.softmax(-1), t.softmax(-1)).sum()
        hits = [(best == labels).sum(), (choice == labels).sum(), (best == choice).sum()]
        found += torch.tensor([*hits, shared, *losses], dtype=torch.float64)
    names = ("accuracy", "teacher_accuracy", "same_choice", "acceptance", "nats", "teacher_nats")
    return dict(zip(names, (found / windows[:, 1:].numel()).tolist(), strict=True))


if __name__ == "__main__":
    main()
