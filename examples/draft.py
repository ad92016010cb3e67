"""Make a draft for a model from its own layers, ask what it is worth here, speculate with it, and serve with it.

python examples/draft.py                       the small model that is shipped, a few minutes on a CPU
python examples/draft.py --model PATH --text FILE --steps 500
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from plot import plot
from train_tiny_model import read_modules
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
PROMPT = "import re\n\nclass Reader:\n    def __init__(self, "


def read_text(path: str | None) -> str:
    return Path(path).read_text(encoding="utf-8") if path else "\n".join(read_modules()[0][:100])


def served(target: Any, tokenizer: Any, rows: list[list[int]], speculative: hf_accel.SpeculativeConfig) -> None:
    """Whether an Engine with 8 users is faster with the draft: in turns."""
    prompts = [row[:32] for row in rows[:8]]
    runs: dict[str, list[float]] = {"none": [], "draft": []}
    for _ in range(3):
        for name, drafting in (("none", None), ("draft", speculative)):
            with hf_accel.Engine(target, tokenizer=tokenizer, speculative=drafting) as engine:
                start = time.perf_counter()
                requests = [engine.submit(prompt, max_new_tokens=24) for prompt in prompts]
                tokens = sum(len(request.result().tokens) for request in requests)
                runs[name].append(tokens / (time.perf_counter() - start))
    without, with_draft = (statistics.median(speeds[1:]) for speeds in runs.values())  # the first round warms up
    verdict = "faster with it" if with_draft > without else "slower with it: serve without this draft"
    print(f"served: {without:.0f} tokens/s without the draft, {with_draft:.0f} with it, {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--text", help="a file of what the model is used for; else Python's standard library")
    parser.add_argument("--steps", default=200, type=int)
    parser.add_argument("--measured", default=2048, type=int, help="tokens that the draft is measured on")
    parser.add_argument("--out", default="draft")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    target = hf_accel.patch(AutoModelForCausalLM.from_pretrained(arguments.model), weights=None)
    ids = tokenizer(read_text(arguments.text), verbose=False)["input_ids"]
    rows = [ids[start : start + 128] for start in range(0, len(ids) - 128, 128)]

    made = hf_accel.distill_draft(
        target,
        rows,
        num_layers=1,
        max_length=128,
        max_steps=arguments.steps,
        measure={"max_tokens": arguments.measured},
    )
    made.draft.save_pretrained(arguments.out)
    print(f"\nbefore\n{made.before}\n\nafter {arguments.steps} steps\n{made.after}\n")

    inputs = tokenizer(PROMPT, return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    speculative = hf_accel.SpeculativeConfig(drafter=made.draft, num_draft=made.after.num_draft)
    drafted = target.generate(**inputs, max_new_tokens=64, do_sample=False, speculative=speculative)
    stats = hf_accel.stats(target)
    print(tokenizer.decode(drafted[0]))
    print(f"same tokens as without a draft: {torch.equal(plain, drafted)}; {stats['tokens_per_pass']:.2f} a pass")
    served(target, tokenizer, rows, speculative)
    reports = {"before": made.before, "after": made.after}
    acceptances = {name: list(enumerate(report.acceptances, 1)) for name, report in reports.items()}
    speeds = {name: [(k, report.speed_up(k)) for k in range(report.max_draft + 1)] for name, report in reports.items()}
    panels = {"accepted, if all before were": acceptances, "predicted speed-up": speeds}
    plot("draft.png", "a draft of one layer", panels, x="drafted tokens")


if __name__ == "__main__":
    main()
