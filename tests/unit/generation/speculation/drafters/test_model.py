"""What a draft model computes for a draft, counted at its door."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel
from hf_accel import SpeculativeConfig


def test_a_whole_accepted_draft_costs_no_step_of_its_own() -> None:
    """The draft model has not seen its own last token; it takes that in together with the bonus token."""
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    target: Any = LlamaForCausalLM(config).eval()
    draft = hf_accel.patch(copy.deepcopy(target), weights=None)
    hf_accel.patch(target, weights=None)
    widths: list[int] = []
    handle = draft.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = torch.randint(1, 40, (1, 9))
    target.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=13,
        speculative=SpeculativeConfig(drafter=draft, num_draft=3),
    )  # fmt: skip
    handle.remove()
    counts = hf_accel.stats(target)
    assert counts["accepted"] == counts["drafted"] == 9
    # the prompt; the first draft; two more, each after one that was accepted whole
    assert widths == [9, 1, 1, 1, 2, 1, 1, 2, 1, 1]
