"""INT4 weights calibrated on text, what they cost, and a checkpoint that other engines read.

python examples/calibrate.py
python examples/calibrate.py --quick   less text
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
TEXTS = sorted(Path(__file__).parent.glob("*.py"))  # use text like what your model will read, some 10,000 tokens of it


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    held_out = tokenizer((SHIPPED / "heldout.txt").read_text(), return_tensors="pt").input_ids[:, :2048].view(-1, 256)
    texts = [path.read_text() for path in TEXTS[: 2 if "--quick" in sys.argv else None]]
    for method in ("rtn", "gptq"):
        config = hf_accel.WeightConfig(bits=4, method=method, calibration=texts if method == "gptq" else None)
        hf_accel.patch(model, weights=config)
        print(f"{method}:\n{hf_accel.quantization_report(model, held_out)}\n")
        if method == "rtn":
            hf_accel.unpatch(model)
    with tempfile.TemporaryDirectory() as folder:
        print(hf_accel.save_compressed(model, f"{folder}/w4a16", tokenizer=tokenizer))  # for vLLM and SGLang
        again = hf_accel.load(f"{folder}/w4a16")  # GPTQ, AWQ and .gguf files too
    ids = held_out[:1, :32]
    with torch.no_grad():
        off = (again(ids).logits - model(ids).logits).norm() / model(ids).logits.norm()
    print(f"loaded: the same integers; the head is in floating point there, so logits differ by {off:.1%}")


if __name__ == "__main__":
    main()
