"""A chat on a laptop: INT8 weights, and what was said before is computed once, as one cache goes along.

python examples/laptop_chat.py                     what you type, until an empty line
python examples/laptop_chat.py --model PATH        any chat model; the small one that is shipped only goes on with code
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
# For a model without a template of its own.
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--max-new-tokens", default=256, type=int)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(arguments.model))
    cache = hf_accel.PagedCache(model.config)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = torch.zeros(1, 0, dtype=torch.long)
    while said := input("you: "):
        message = [{"role": "user", "content": said}]
        new = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        ids = torch.cat([ids, new], dim=1)  # the tokens that were written, not their text encoded once more
        known = cache.get_seq_length()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=streamer, do_sample=False,
            max_new_tokens=arguments.max_new_tokens,
        )  # fmt: skip
        speed = hf_accel.stats(model)["tokens_per_second"]
        print(f"({ids.shape[1]} tokens, {known} of them known; {speed:.0f} tokens/s)")
        ids = output


if __name__ == "__main__":
    main()
