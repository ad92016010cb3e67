"""Will it fit, and how fast can it be at best? From the shapes alone: no weight is loaded.

python examples/estimate.py
"""

from __future__ import annotations

from transformers import LlamaConfig

import hf_accel

# The shape of Llama-3-70B: 80 layers, 64 query heads that share 8 key and value heads.
SHAPE = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    dtype="bfloat16",
)
CARD = 80e9  # bytes of memory
BANDWIDTH = 3.35e12  # bytes a second
PRICE = 3.0  # an hour


def main() -> None:
    for title, keywords in {
        "as published, bfloat16": {},
        'weights="int8"': {"weights": "int8"},
        'weights="int4", int8 cache': {"weights": "int4", "kv_dtype": "int8"},
    }.items():
        estimate = hf_accel.estimate(
            SHAPE, context=32_768, batch=1, bandwidth=BANDWIDTH, price_per_hour=PRICE, **keywords
        )
        print(f"{title}\n{'-' * len(title)}\n{estimate}")
        print(f"fits {CARD / 1e9:.0f} GB      {'yes' if estimate.fits(CARD) else 'no'}\n")


if __name__ == "__main__":
    main()
