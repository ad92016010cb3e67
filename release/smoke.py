"""Patches a small model and generates with it, where hf_accel is installed; prints what the kernels are.

Fails unless INT8 layers run in native kernels, and unless tokens without quantization are those of transformers.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
ids = torch.tensor([[1, 2, 3, 4, 5]])
asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
model = LlamaForCausalLM(config).eval()
expected = model.generate(ids, **asked)
with hf_accel.patched(model, weights=None):
    tokens = model.generate(ids, **asked)
line = next(line for line in str(hf_accel.plan(model)).splitlines() if line.startswith("cpu kernels"))
hf_accel.patch(model, weights="int8")
model.generate(ids, **asked)
backends = {each.choice.backend.name for each in model.modules() if isinstance(each, hf_accel.linear.QuantLinear)}
print(f"hf_accel {hf_accel.__version__} on {sys.platform}: {' '.join(line.split())}; INT8 by {', '.join(backends)}")
if backends != {"cpu"} or not torch.equal(tokens, expected):
    sys.exit(f"the kernels are not used, or tokens differ: {tokens.tolist()} and {expected.tolist()}")
