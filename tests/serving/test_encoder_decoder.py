"""A model with an encoder is served by /v1/completions: the prompt is the source, and the text is the answer alone."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from .running import SHIPPED, serving

CONFIG = T5Config(
    vocab_size=2048, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
)  # fmt: skip


def test_a_text_is_answered_and_a_chat_is_refused(tmp_path: Path) -> None:
    model, tokenizer = T5ForConditionalGeneration(CONFIG).eval(), AutoTokenizer.from_pretrained(SHIPPED)
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    source = "import re, and what else?"
    expected = model.generate(tokenizer(source, return_tensors="pt")["input_ids"], max_new_tokens=6, do_sample=False)
    with serving(tmp_path, chat_template=None) as running:
        client = running.client()
        answer = client.completions.create(model="tiny", prompt=source, max_tokens=6, temperature=0)
        assert answer.choices[0].text == tokenizer.decode(expected[0, 1:], skip_special_tokens=True)
        with pytest.raises(openai.BadRequestError, match="reads its prompts with an encoder; use /v1/completions"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
