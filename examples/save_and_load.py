"""Quantize while loading, save the small checkpoint, load it again: the same bits.

python examples/save_and_load.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    inputs = tokenizer("import re\n\ndef parse(", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(
        SHIPPED, quantization_config=hf_accel.AccelConfig(weights="int4")
    )  # patched, whole
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        print(f"the checkpoint: {size(SHIPPED)} in bfloat16, {size(Path(folder))} in int4")
        # config.json names the quantized modules, so that nothing needs to be said again
        again = AutoModelForCausalLM.from_pretrained(folder)
    print(f"loaded patched: {hf_accel.is_patched(again)}")
    with torch.no_grad():
        same = torch.equal(model(**inputs).logits, again(**inputs).logits)
    print(f"the same logits, bit for bit: {same}")
    print(tokenizer.decode(again.generate(**inputs, max_new_tokens=32)[0]))


def size(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.glob('*.safetensors')) / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
