"""Train one draft, and keep it, in a process of its own: python -m benchmarks.topics.train_draft '{"seed": 0, ...}'"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

from ..harness.corpus import held_out_text, training_windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraining:
    """One run: seed draws the text and its order. target, text, out: paths. kind: "model" of one layer, or "eagle", a
    head. alpha=1 and regenerate=0 is training on text alone."""

    target: str
    text: str | None
    out: str
    seed: int
    steps: int
    batch: int
    length: int
    learning_rate: float
    alpha: float
    regenerate: float
    kind: str = "model"


def main(*argv: str) -> None:
    training = DraftTraining(**json.loads((argv or sys.argv[1:])[0]))
    tokenizer = AutoTokenizer.from_pretrained(training.target)
    target = AutoModelForCausalLM.from_pretrained(training.target).eval()
    count, length = training.steps * training.batch, training.length
    held_out = held_out_text(training.text)
    rows = training_windows(tokenizer, held_out, count=count, length=length, seed=training.seed).tolist()
    start = time.perf_counter()
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
    print(json.dumps({"training_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
