"""Vision models whose generate() calls that of an encoder-decoder: it computes the tokens over pages."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel
from hf_accel import Engine

from ..families.models import enliven

KINDS = ("Blip2", "InstructBlip")
IMAGE, QUERIES, NEW_TOKENS, WAIT = 120, 4, 8, 60
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    "model_type": "t5", "vocab_size": 131, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "num_decoder_layers": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def model_of(kind: str) -> Any:
    made = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = made.config_class(
        vision_config=SIZES | {"image_size": 32, "patch_size": 16}, text_config=TEXT,
        qformer_config=SIZES | {"vocab_size": 131, "encoder_hidden_size": 64, "cross_attention_frequency": 1},
        num_query_tokens=QUERIES, image_token_index=IMAGE,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = made(config).eval()
        enliven(model, 2.0)  # with more, rounding alone moves logits by thousandths
    return model


@cache
def batch(kind: str) -> dict[str, Tensor]:
    """Two rows, of which the first has padding in front."""
    words = [[5, 6, 7], [9, 8, 3, 4, 5]]
    ids = torch.tensor([[0] * (5 - len(each)) + [IMAGE] * QUERIES + each for each in words])
    given = {"input_ids": ids, "attention_mask": ids.ne(0).long()}
    if kind == "InstructBlip":
        asked = torch.tensor([[11, 12, 0], [13, 14, 15]])
        given |= {"qformer_input_ids": asked, "qformer_attention_mask": asked.ne(0).long()}
    return given | {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))}


def row(kind: str, number: int) -> dict[str, Tensor]:
    given = {name: value[number : number + 1] for name, value in batch(kind).items()}
    shown = given.pop("attention_mask")[0].bool()
    return given | {"input_ids": given["input_ids"][:, shown]}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=str)
def test_a_padded_batch(kind: str, settings: dict[str, Any]) -> None:
    plain, model = model_of(kind), hf_accel.patch(model_of(kind), weights=None)
    results = []
    for each in (plain, model):
        torch.manual_seed(0)
        results.append(each.generate(**batch(kind), **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **settings}))
    assert torch.equal(*results) and not torch.equal(results[0][0], results[0][1])
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_and_a_forward(kind: str) -> None:
    """A call of the model itself has no pages."""
    model = model_of(kind)
    asked = batch(kind) | {"decoder_input_ids": torch.tensor([[0, 5, 6], [0, 9, 8]])}
    logits, kinds = model(**asked).logits, [type(each) for each in model.modules()]
    expected = [model.generate(**row(kind, i), max_new_tokens=NEW_TOKENS, do_sample=False)[0, 1:] for i in (0, 1)]
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model(**asked).logits, logits, rtol=1e-4, atol=1e-3)
    with Engine(model) as engine:
        jobs = [engine.submit(row(kind, i), max_new_tokens=NEW_TOKENS, temperature=0) for i in (0, 1)]
        assert [job.result(WAIT).tokens for job in jobs] == [each.tolist() for each in expected]
    found = model.generate_batch([row(kind, i) for i in (0, 1)], max_new_tokens=NEW_TOKENS, do_sample=False)
    assert [each.generated_tokens for each in found.values()] == [each.tolist() for each in expected]
    assert [type(each) for each in hf_accel.unpatch(model).modules()] == kinds
    assert torch.equal(model(**asked).logits, logits)
