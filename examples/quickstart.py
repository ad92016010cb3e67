"""One line in, one line out: a transformers model before and after hf_accel.patch.

python examples/quickstart.py                        # the small model that ships with the repository
python examples/quickstart.py --model PATH_OR_ID     # any other causal language model
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from quality import SHIPPED, quality_table, read_windows
from speed import large_model, speed_table, ten_caches
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer
from transformers.utils import logging

import hf_accel

SMALL = 50_000_000  # parameters
PROMPTS = [
    "import re\n\ndef parse(",
    "class Reader:\n    def read(self, size",
    "def get(self, key, default",
    "import os\nimport sys\n\ndef read(path",
]


def show_plan(model: PreTrainedModel) -> None:
    """plan() reads the model and the machine and changes nothing."""
    print(hf_accel.plan(model))


def show_text(model: PreTrainedModel, tokenizer: Any, num_new: int) -> None:
    """The same prompt, first as transformers writes it, then patched; a patch ends with its `with` block."""
    write("stock transformers", model, tokenizer, num_new)
    with hf_accel.patched(model, weights=None):
        write("hf_accel.patch(model, weights=None)", model, tokenizer, num_new)
        print(hf_accel.verify(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=num_new // 2))
    with hf_accel.patched(model):
        write('hf_accel.patch(model), which is weights="int8"', model, tokenizer, num_new)
        print(hf_accel.verify(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=num_new // 2))


def write(title: str, model: PreTrainedModel, tokenizer: Any, num_new: int) -> None:
    """Stream a greedy continuation of the first prompt, token by token."""
    print(f"\n--- {title}")
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=num_new, do_sample=False, streamer=TextStreamer(tokenizer))
    print(f"--- {time.perf_counter() - start:.2f} s")


def show_undo(model: PreTrainedModel, tokenizer: Any) -> None:
    """patch and unpatch, and the logits are what they were, bit for bit."""
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    before = logits(model, inputs)
    hf_accel.patch(model)
    patched = logits(model, inputs)
    hf_accel.unpatch(model)
    after = logits(model, inputs)
    print(f"  patched to int8, logits differ by up to {float((patched - before).abs().max()):.3g}")
    print(f"  unpatched, they {'are what they were, bit for bit' if torch.equal(after, before) else 'DIFFER STILL'}")


@torch.no_grad()
def logits(model: PreTrainedModel, inputs: Any) -> Tensor:
    return model(**inputs).logits.float()


def show_quality(model: PreTrainedModel, tokenizer: Any, text: str, num_tokens: int) -> None:
    print(quality_table(model, read_windows(tokenizer, text, num_tokens)))


def show_speed(*, quick: bool) -> None:
    model = large_model(2 * 10**6 if quick else ten_caches())
    print(f"  {model.num_parameters() / 1e6:,.0f} M parameters, random, bfloat16, {torch.get_num_threads()} threads")
    print(speed_table(model, rounds=1, num_prompt=16, num_new=17) if quick else speed_table(model))


def load(name: str) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer; ValueError with one line if there are none."""
    folder = Path(name)
    if (folder.is_absolute() or folder.exists()) and not (folder / "config.json").is_file():
        raise ValueError(f"there is no config.json in {name!r}; give a model's folder or its name on the hub")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), tokenizer
    except (OSError, ValueError) as error:
        raise ValueError(f"no model can be loaded from {name!r}: {str(error).strip().splitlines()[0]}") from error


def run(args: argparse.Namespace) -> None:
    text = args.text.read_text(encoding="utf-8")
    model, tokenizer = load(args.model)
    threads = torch.get_num_threads()
    if model.num_parameters() < SMALL:
        torch.set_num_threads(1)  # too little work to share: on a busy machine threads would only wait for each other
    heading("1. The plan: every choice and its reason, before anything is changed")
    show_plan(model)
    heading("2. Text, and a certificate of what is the same")
    show_text(model, tokenizer, num_new=8 if args.quick else 64)
    heading("3. unpatch(model)")
    show_undo(model, tokenizer)
    heading(f"4. Quality: perplexity of {args.text.name}, lower is better")
    show_quality(model, tokenizer, text, num_tokens=256 if args.quick else 8192)
    torch.set_num_threads(threads)
    heading("5. Speed: a model of ten times the L3 cache, batch 1")
    show_speed(quick=args.quick)


def heading(title: str) -> None:
    print(f"\n{title}\n{'=' * len(title)}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED), help="a folder or a name on the Hugging Face hub")
    parser.add_argument("--text", type=Path, default=SHIPPED / "heldout.txt", help="for the quality table")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        run(args)
    except (OSError, ValueError) as error:  # hf_accel.UnsupportedError is a ValueError
        parser.exit(2, f"quickstart: {error}\n")


if __name__ == "__main__":
    main()
