"""QLoRA: adapters trained over INT4 weights, merged into the float model, saved for other engines, and served.

python examples/qlora.py            needs peft; minutes on a laptop
python examples/qlora.py --quick    a few steps
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
LENGTH = 128  # tokens of a row


def main() -> None:
    steps = 4 if "--quick" in sys.argv else 60
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    rows, held_out = windows(tokenizer, texts[:-2]), windows(tokenizer, texts[-2:])

    hf_accel.patch(model, weights="int4")  # the weights stay INT4 while adapters are trained on top of them
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    before = loss(adapted, held_out)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, learning_rate=2e-3, per_device_train_batch_size=4, logging_steps=steps,
            report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(adapted, args, train_dataset=data).train()
    adapted.eval()
    print(f"loss on other files: {before:.3f} before, {loss(adapted, held_out):.3f} after {steps} steps")

    hf_accel.unpatch(model)  # the float weights are back, under the adapters
    merged = adapted.merge_and_unload()  # merged into INT4, they would be rounded twice
    print(f"merged into the float weights: {loss(merged, held_out):.3f}")
    hf_accel.patch(merged, weights="int4")
    print(f"quantized again: {loss(merged, held_out):.3f}")
    with tempfile.TemporaryDirectory() as folder:
        print(hf_accel.save_compressed(merged, f"{folder}/w4a16", tokenizer=tokenizer))
        serve(f"{folder}/w4a16", ["import re\n\ndef ", "class Reader:\n    def "])


def serve(folder: str, prompts: list[str]) -> None:
    """Answer several users at once from the checkpoint; `hf-accel serve FOLDER` does it over HTTP."""
    model, tokenizer = hf_accel.load(folder), AutoTokenizer.from_pretrained(folder)
    with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
        for request in [engine.submit(prompt, max_new_tokens=16) for prompt in prompts]:
            print(f"served: {request.result().text!r}")


def windows(tokenizer: Any, texts: list[str]) -> Tensor:
    """int64 [n, LENGTH] of token ids."""
    ids = torch.tensor(tokenizer("\n\n".join(texts)).input_ids)
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def loss(model: Any, rows: Tensor) -> float:
    """Nats a token."""
    with torch.no_grad():
        return float(model(input_ids=rows[:16], labels=rows[:16]).loss)


if __name__ == "__main__":
    main()
