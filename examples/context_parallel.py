"""A context that one process may not hold, in two: each holds half of the blocks of keys and values.

python examples/context_parallel.py
torchrun --nproc-per-node 2 examples/context_parallel.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
TOKENS = 256  # whose keys and values one process may hold
RANKS = 2


def page_bytes(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> str:
    """Generate, and say what the pages take here; or why they cannot hold the context."""
    group = distributed.group.WORLD if tokens > TOKENS else None
    hf_accel.patch(model, weights=None, cache={"max_tokens": tokens}, context_parallel=group)
    try:
        output = model.generate(ids, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
        nbytes = sum(group.nbytes for group in output.past_key_values.pages.groups)
        return f"{nbytes:,} bytes; {output.sequences[0, ids.shape[1] :].tolist()}"
    except hf_accel.OutOfBlocksError as error:
        return str(error)
    finally:
        hf_accel.unpatch(model)


def main() -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    text = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : TOKENS + 100]
    short = page_bytes(model, ids[:, :100], TOKENS)
    alone = page_bytes(model, ids, TOKENS)
    together = page_bytes(model, ids, size * TOKENS)
    stock = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    print(
        f"rank {rank}, 100 tokens alone: {short}\n"
        f"rank {rank}, {ids.shape[1]} tokens alone: {alone}\n"
        f"rank {rank}, {ids.shape[1]} tokens over {size} ranks: {together}\n"
        f"rank {rank}, stock: {stock}"
    )


def started(rank: int, port: int) -> None:
    """A process of our own, in the place of torchrun's."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    join()


def join() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    main()
    distributed.destroy_process_group()


if __name__ == "__main__":
    if distributed.is_initialized():
        main()
    elif "RANK" in os.environ:
        join()
    else:
        multiprocessing.spawn(started, (29500 + os.getpid() % 1000,), RANKS)
