"""A model with an encoder is served by /v1/completions: the prompt is the source, and the text is the answer alone."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import hf_accel
from hf_accel import HfAccelWarning, UnsupportedError

from .running import SHIPPED, serving

CONFIG = T5Config(
    vocab_size=2048, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
)  # fmt: skip


def test_a_text_is_answered_and_a_chat_is_refused(tmp_path: Path) -> None:
    model, tokenizer = T5ForConditionalGeneration(CONFIG).eval(), AutoTokenizer.from_pretrained(SHIPPED)
    model.generation_config.num_beams = 4  # as translators' say
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    source = "import re, and what else?"
    expected = model.generate(tokenizer(source, return_tensors="pt")["input_ids"], max_new_tokens=6, num_beams=1)
    with pytest.warns(HfAccelWarning, match="asks for num_beams=4"), serving(tmp_path, chat_template=None) as running:
        client = running.client()
        answer = client.completions.create(model="tiny", prompt=source, max_tokens=6, temperature=0)
        assert answer.choices[0].text == tokenizer.decode(expected[0, 1:], skip_special_tokens=True)
        with pytest.raises(openai.BadRequestError, match="reads its prompts with an encoder; use /v1/completions"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def test_the_ways_out_of_beams_that_a_model_asks_for_work() -> None:
    model = T5ForConditionalGeneration(CONFIG).eval()
    model.generation_config.num_beams = 4
    hf_accel.patch(model, weights=None)
    with hf_accel.Engine(model) as engine:
        with pytest.raises(UnsupportedError, match="num_beams=4; set it to 1, or use generate"):
            engine.submit([5, 6, 7], max_new_tokens=3)
        with pytest.raises(UnsupportedError, match="num_beams=0 must be an integer"):
            engine.submit([5, 6, 7], max_new_tokens=3, num_beams=0)
        found = engine.submit([5, 6, 7], max_new_tokens=3, num_beams=1).result()
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, num_beams=1)[0, 1:].tolist()
    [output] = model.generate_batch([[5, 6, 7]], max_new_tokens=3, num_beams=1).values()
    assert list(getattr(found, "tokens", found)) == output.generated_tokens == expected
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3).shape[0] == 1
