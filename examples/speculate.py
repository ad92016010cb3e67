"""Speculative decoding of a whole batch: drafts looked up in the text, or written by the model's own INT4 weights.

python examples/speculate.py                       the small model that is shipped
python examples/speculate.py --model PATH --draft PATH
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from table import table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
FIELDS = ("host", "port", "name", "path", "size", "mode")


def prompts() -> list[str]:
    """Four texts that repeat themselves, as edited code, quotes and tables do."""
    body = "".join(f"        self.{field} = {field}\n" for field in FIELDS)
    head = f"class Reader:\n    def __init__(self, {', '.join(FIELDS)}):\n{body}\n"
    names = ("Writer", "Parser", "Client", "Server")
    return [f"{head}class {name}:\n    def __init__(self, {', '.join(FIELDS)}):\n" for name in names]


def run(
    model: PreTrainedModel, inputs: Any, speculative: hf_accel.SpeculativeConfig | None
) -> tuple[torch.Tensor, dict[str, Any], float]:
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=96, do_sample=False, speculative=speculative)
    return output, hf_accel.stats(model), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--draft", help="a smaller model with the same tokenizer")
    parser.add_argument("--num-draft", default=4, type=int, help="'auto' in SpeculativeConfig: what pays")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(prompts(), return_tensors="pt", padding=True)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(arguments.model), weights=None)
    drafters: dict[str, Any] = {"ngram": "ngram", "suffix": "suffix", "self-int4": "self-int4"}
    if arguments.draft:
        drafters["draft model"] = AutoModelForCausalLM.from_pretrained(arguments.draft)

    plain, _, seconds = run(model, inputs, None)
    rows = [["none", "1.00", "", "", f"{seconds:.2f} s", ""]]
    for name, drafter in drafters.items():
        config = hf_accel.SpeculativeConfig(drafter=drafter, num_draft=arguments.num_draft)
        run(model, inputs, config)  # the first call may build a draft model
        output, stats, seconds = run(model, inputs, config)
        same = "same" if torch.equal(output, plain) else "DIFFER (see hf_accel.verify)"
        acceptance = f"{stats['acceptance']:.0%}" if stats["acceptance"] is not None else "-"
        rows.append(
            [name, f"{stats['tokens_per_pass']:.2f}", str(stats["drafted"]), acceptance, f"{seconds:.2f} s", same]
        )
    print(table(["drafter", "tokens a pass", "drafted", "accepted", "time", "tokens"], rows))


if __name__ == "__main__":
    main()
