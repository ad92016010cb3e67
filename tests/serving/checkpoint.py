"""A tiny Qwen3 that has learnt one conversation by heart: it thinks, says something and calls a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

SHIPPED = Path(__file__).parents[2] / "examples" / "stdlib-tiny"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION: list[Any] = [{"role": "user", "content": "weather?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
THOUGHT, SAID = "a city", "one moment"
CALLED = (
    f"<think>{THOUGHT}</think>{SAID}"
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>'
)
PLAIN = "no tools<|im_end|>"


def save_talker(path: Path) -> None:
    """Train until it answers the question with CALLED if it has tools, and with PLAIN if not; then save it."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=end,
        bos_token_id=None, pad_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    rows = []
    for tools, answer in ((TOOLS, CALLED), (None, PLAIN)):
        prompt = tokenizer.apply_chat_template(QUESTION, tools=tools, add_generation_prompt=True, return_dict=False)
        rows.append((torch.tensor([prompt + tokenizer(answer)["input_ids"]]), len(prompt)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        known = True
        for ids, start in rows:
            logits = model(ids).logits[:, start - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits[0], ids[0, start:])
            loss.backward()
            known &= bool((logits.softmax(-1).gather(-1, ids[:, start:, None]) > 0.9).all())
        optimizer.step()
        optimizer.zero_grad()
        if known:
            break
    assert known, "it did not learn its answers"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
