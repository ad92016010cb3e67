"""Data-parallel generate: each process has a patched model and its share of the prompts; answers come back in order.

accelerate launch --num_processes 2 examples/data_parallel.py               a GPU for each process
accelerate launch --multi_gpu --num_processes 2 examples/data_parallel.py   on a CPU: without --multi_gpu it starts one
torchrun --nproc-per-node 2 examples/data_parallel.py prompts.json --out answers.json --model PATH

prompts.json is a list of texts; without one, there are a few of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

import hf_accel
from hf_accel.checkpoints.load import load_tokenizer

SHIPPED = Path(__file__).parent / "stdlib-tiny"
PROMPTS = ["import re\n\ndef ", "class Reader:\n    def ", "def main(", "import os\n", "try:\n    "]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="?", type=Path, help="a JSON file: a list of texts")
    parser.add_argument("--out", type=Path, help="write the answers there, as a list of texts")
    parser.add_argument("--model", default=str(SHIPPED), help="a folder, or a name on the Hub")
    parser.add_argument("--weights", help="int8, int4; left out: int8, or as the checkpoint has them")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a process waits for the others")
    arguments = parser.parse_args()
    prompts = PROMPTS if arguments.prompts is None else json.loads(arguments.prompts.read_text(encoding="utf-8"))
    torch.set_num_threads(arguments.threads)
    with others(arguments.timeout):
        wait = timedelta(seconds=arguments.timeout)
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=wait)
    with state.split_between_processes(prompts) as share:
        found = answer(arguments, share, state.device) if share else []
    with others(arguments.timeout):
        gathered = gather_object(found)  # each process gets all of them, in the order of the processes
        state.destroy_process_group()
    if state.is_main_process:
        report(arguments, gathered, state.num_processes)


@contextmanager
def others(timeout: float) -> Iterator[None]:
    """Wait for the other processes in here: one that is gone, or does not answer in time, ends this one with words."""
    try:
        yield
    except RuntimeError as error:  # the base of what torch.distributed raises
        reason = str(error).strip().splitlines()[0][:300]
        said = f"another process has died, or did not answer within {timeout:g} s: {reason}"
        sys.exit(f"data_parallel: {said}; start all of them again")


def answer(arguments: argparse.Namespace, prompts: list[str], device: torch.device) -> list[dict[str, Any]]:
    """One process's share: a dict for each prompt, with its text and when the work on the share began and ended."""
    weights = {"weights": arguments.weights} if arguments.weights else {}
    model = hf_accel.load(arguments.model, device_map=device, **weights).eval()
    tokenizer = load_tokenizer(arguments.model)
    began = time.time()
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    outputs = model.generate_batch(ids, max_new_tokens=arguments.max_new_tokens, do_sample=False).values()
    tokens = [output.generated_tokens for output in outputs]
    span = {"began": began, "ended": time.time()}
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [{"text": text, "tokens": len(one), **span} for text, one in zip(texts, tokens, strict=True)]


def report(arguments: argparse.Namespace, answers: list[dict[str, Any]], num_processes: int) -> None:
    if arguments.out is None:
        for number, one in enumerate(answers):
            print(f"{number}: {one['text']!r}")
    else:
        from hf_accel.hardware.atomic import replaced_file

        with replaced_file(arguments.out) as path:
            path.write_text(json.dumps([one["text"] for one in answers]), encoding="utf-8")
    # As the last line, for programs: seconds from the first process's start to the last one's end, without loading.
    seconds = max(one["ended"] for one in answers) - min(one["began"] for one in answers) if answers else 0.0
    tokens = sum(one["tokens"] for one in answers)
    print(json.dumps({"rows": len(answers), "tokens": tokens, "seconds": seconds, "workers": num_processes}))


if __name__ == "__main__":
    main()
