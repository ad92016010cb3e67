"""One cache over several calls: what two prompts begin with is computed and stored once.

python examples/cache_reuse.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"


def two_questions(model: PreTrainedModel, tokenizer: Any, document: str) -> None:
    """The second prompt shares the document with the first: its blocks are found by their hash."""
    cache = hf_accel.PagedCache(model.config)
    for question in ("\n\ndef main(", "\n\nclass Error("):
        inputs = tokenizer(document + question, return_tensors="pt")
        model.generate(**inputs, max_new_tokens=16, past_key_values=cache)
        run = hf_accel.stats(model)
        length = inputs["input_ids"].shape[1]
        known = run["prefix_hits"] * run["block_size"]
        print(f"  prompt of {length} tokens: {known} known, {length - known} computed, {run['seconds']:.2f} s")
        cache.reset()  # forgets the sequence; its full blocks stay until their room is needed


def many_answers(model: PreTrainedModel, tokenizer: Any, document: str, number: int = 8) -> None:
    """Samples of one prompt share its blocks, and copy one only when they write into it."""
    inputs = tokenizer(document, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=16, do_sample=True, num_return_sequences=number)
    run = hf_accel.stats(model)
    length = inputs["input_ids"].shape[1] + 16
    alone = number * -(-length // run["block_size"])
    print(f"  {number} samples: {run['blocks_used']} blocks, {alone} if each had its own, {run['waste']:.1%} waste")


def main() -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    document = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")[:4000]
    hf_accel.patch(model, weights=None)
    print("two prompts, one cache")
    two_questions(model, tokenizer, document)
    print("one prompt, many samples")
    many_answers(model, tokenizer, document)


if __name__ == "__main__":
    main()
