"""Train one draft, and keep it, in a process of its own: python -m benchmarks.topics.train_draft '{"seed": 0, ...}'

Left out are fields that have a value here. The drafts topic takes a head that was trained so with --head FOLDER.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

from ..harness.corpus import held_out_text, training_windows

TRAINING_FACTS = "training.json"  # beside a draft: how it was trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraining:
    """One run: seed draws the text and its order. target, text, out: paths. kind: "model" of one layer, or "eagle", a
    head. alpha=1 and regenerate=0 is training on text alone. epochs: how often each row is read."""

    target: str
    text: str | None
    out: str
    steps: int
    seed: int = 0
    batch: int = 8
    length: int = 128
    learning_rate: float | None = None
    alpha: float = 0.0
    regenerate: float = 1.0
    kind: str = "model"
    epochs: int = 1


def main(*argv: str) -> None:
    training = DraftTraining(**json.loads((argv or sys.argv[1:])[0]))
    tokenizer = AutoTokenizer.from_pretrained(training.target)
    target = AutoModelForCausalLM.from_pretrained(training.target).eval()
    count, length = training.steps * training.batch // training.epochs, training.length
    held_out = held_out_text(training.text)
    rows = training_windows(tokenizer, held_out, count=count, length=length, seed=training.seed).tolist()
    start, cpu_start = time.perf_counter(), time.process_time()
    made = hf_accel.distill_draft(
        target,
        rows,
        kind=training.kind,
        alpha=training.alpha,
        regenerate=training.regenerate,
        max_length=length,
        max_steps=training.steps,
        batch_size=training.batch,
        learning_rate=training.learning_rate,
        seed=training.seed,
        measure=False,
        progress_bar=False,
    )
    made.draft.save_pretrained(training.out)
    seconds = {
        "training_seconds": time.perf_counter() - start,
        "training_cpu_seconds": time.process_time() - cpu_start,
    }
    facts = {name: value for name, value in vars(training).items() if name not in ("target", "text", "out")}
    Path(training.out, TRAINING_FACTS).write_text(json.dumps({**facts, **seconds}, indent=2), encoding="utf-8")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
