"""One model over several processes: each holds a part of every layer, in INT8, and its own heads' keys and values.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

All processes make the same calls in the same order, and get the same tokens. The first one prints them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import hf_accel
from hf_accel.tensors import plain_tensors

PATH = Path(__file__).parent / "stdlib-tiny"


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    model = AutoModelForCausalLM.from_pretrained(
        PATH, distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto")
    )
    whole = sum(parameter.nbytes for parameter in model.parameters())
    mine = sum(part.nbytes for parameter in model.parameters() for part in plain_tensors(parameter))
    plan = hf_accel.plan(model)
    hf_accel.patch(model)

    prompts = [tokenizer(text)["input_ids"] for text in ("import re\n\ndef parse(", "class Reader:\n")]
    outputs = model.generate_batch(prompts, max_new_tokens=24, do_sample=False)
    with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
        request = engine.submit("def main(", max_new_tokens=24, temperature=0.8)
        sampled = request.result()

    if torch.distributed.get_rank() == 0:
        print(f"{whole:,} bytes in float, of which each of {ranks} ranks has loaded {mine:,}")
        print(plan)
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            print(tokenizer.decode([*prompt, *output.generated_tokens]), end="\n\n")
        print("def main(" + sampled.text)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
