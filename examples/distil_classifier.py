"""Distil a BERT-like classifier (ModernBERT): which package of Python's standard library do these lines come from?

python examples/distil_classifier.py           a few minutes on a CPU

The student has half the layers and few labels. What it learns from the teacher's answers to lines without a label it
does not learn from labels alone.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plot import plot
from table import table
from transformers import (
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_accel

PACKAGES = ("asyncio", "email", "unittest", "tkinter", "json", "multiprocessing", "xml", "idlelib")
LENGTH = 48  # tokens of an example
Example = dict[str, Any]


def examples(tokenizer: Any, *, held_out: bool) -> Iterator[Example]:
    """Pieces of modules; every fifth module of a package is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for label, package in enumerate(PACKAGES):
        for number, path in enumerate(sorted((root / package).rglob("*.py"))):
            if (number % 5 == 0) == held_out:
                ids = tokenizer(path.read_text(encoding="utf-8", errors="ignore"), verbose=False)["input_ids"]
                for start in range(0, len(ids) - LENGTH, LENGTH):
                    yield {"input_ids": ids[start : start + LENGTH], "labels": label}


def shuffled(all_of_them: Iterator[Example], count: int) -> list[Example]:
    rows = list(all_of_them)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return [rows[index] for index in order[:count].tolist()]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def train(
    model: PreTrainedModel, rows: list[Example], held_out: list[Example], steps: int, **distillation: Any
) -> list[tuple[float, float]]:
    """Accuracy on what is held out, by step."""
    args = TrainingArguments(
        "classifier", max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=32, warmup_steps=steps // 10,
        per_device_eval_batch_size=64, eval_strategy="steps", eval_steps=-(-steps // 8), save_strategy="no",
        report_to=[], use_cpu=True,
    )  # fmt: skip
    callbacks = [hf_accel.DistillationCallback(**distillation)] if distillation else []
    trainer = Trainer(
        model, args, train_dataset=rows, eval_dataset=held_out, compute_metrics=accuracy, callbacks=callbacks
    )
    trainer.train()
    return [(log["step"], log["eval_accuracy"]) for log in trainer.state.log_history if "eval_accuracy" in log]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=240, type=int)
    parser.add_argument("--labelled", default=400, type=int, help="examples that the student has labels of")
    arguments = parser.parse_args()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent / "stdlib-tiny")
    rows, held_out = (
        shuffled(examples(tokenizer, held_out=which), count) for which, count in ((False, 10**9), (True, 320))
    )
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=LENGTH, classifier_pooling="mean", num_labels=len(PACKAGES),
        label2id={name: label for label, name in enumerate(PACKAGES)}, id2label=dict(enumerate(PACKAGES)),
        pad_token_id=0, bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0,
    )  # fmt: skip
    teacher = ModernBertForSequenceClassification(config)
    curves = {"teacher, 4 layers": train(teacher, rows, held_out, 3 * arguments.steps)}

    def student() -> PreTrainedModel:
        return hf_accel.init_student(teacher, num_layers=2)

    few = rows[: arguments.labelled]
    curves["few labels"] = train(student(), few, held_out, arguments.steps)
    curves["teacher's answers"] = train(student(), rows, held_out, arguments.steps, teacher_model=teacher, alpha=0.0)
    last = [[name, f"{100 * points[-1][1]:.1f} %"] for name, points in curves.items()]
    print(table(["", "held-out accuracy"], last))
    plot("distil_classifier.png", "lines of Python: which package?", {"held-out accuracy": curves})


if __name__ == "__main__":
    main()
