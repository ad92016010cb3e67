"""QLoRA: adapters trained over INT4 weights, merged into the float model, saved for other engines, and served.

python examples/qlora.py            needs peft, and pip install 'hf_accel[serve]'; minutes on a laptop
python examples/qlora.py --quick    a few steps
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
LENGTH = 128  # tokens of a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", help="keep the checkpoint there")
    arguments = parser.parse_args()
    steps = 4 if arguments.quick else 60
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
        out = arguments.out or f"{folder}/w4a16"
        print(hf_accel.save_compressed(merged, out, tokenizer=tokenizer))
        serve(out, ["import re\n\ndef ", "class Reader:\n    def "])


def serve(folder: str, prompts: list[str]) -> None:
    """`hf-accel serve FOLDER`, a process of its own, and a client of OpenAI's API that asks it."""
    command = [sys.executable, "-m", "hf_accel", "serve", folder, "--port", "0", "--name", "tuned", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        said = ""
        while not said.endswith("}\n"):
            line = server.stdout.readline()
            if not line:  # what is wrong, it has said
                raise SystemExit(f"the server ended with {server.wait()} before it was ready")
            said += line
        with OpenAI(base_url=json.loads(said)["url"], api_key="none") as client:
            for prompt in prompts:
                answer = client.completions.create(model="tuned", prompt=prompt, max_tokens=16, temperature=0)
                print(f"served: {answer.choices[0].text!r}")
    finally:
        server.terminate()  # those that run may end, then it does
        server.communicate()
    print(f"the server ended with {server.returncode}")


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
