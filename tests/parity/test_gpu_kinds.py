"""Each kind of state that a model keeps, on an NVIDIA GPU: stock's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_accel

from .test_programmes import MODELS, NEW_TOKENS, answer, texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_of_state(kind: str) -> None:
    """Slots of fixed size, compressed keys, windows, chunks, an encoder: one by one, and together if that can be.

    stock computes on the GPU: on a CPU its sums are others in the last bits, which choose other tokens to attend to.
    """
    stock: Any = MODELS[kind]().to("cuda")
    prompts = texts()[:5]
    wanted = [answer(stock, prompt, NEW_TOKENS) for prompt in prompts]
    model = hf_accel.patch(MODELS[kind]().to("cuda"), weights=None)
    first = 1 if stock.config.is_encoder_decoder else None
    for prompt, tokens in zip(prompts, wanted, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert out[0, first or len(prompt) :].tolist() == tokens
    if "loop" in hf_accel.stats(model) and hf_accel.stats(model)["loop"] == "ragged":
        outputs = model.generate_batch(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert [output.generated_tokens for output in outputs.values()] == wanted
