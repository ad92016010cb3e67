"""Decoders without an encoder that take no positions, and count the columns of their cache, padding included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, UnsupportedError

from .families import VOCABULARY
from .together import NEW_TOKENS, PROMPTS, alone, check_served, padded, together

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "encoder_layers": 3, "max_position_embeddings": 160, "max_target_positions": 160,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None,
    "decoder_start_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
KINDS = ("Bart", "MBart", "Marian", "Pegasus", "PLBart", "BlenderbotSmall", "Whisper")


def model_of(kind: str, **other: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES | other)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not (kind in ("Marian", "Pegasus") and "embed_positions" in name):
                parameter.normal_(0, 0.3)
    return model


def rows(model: Any, **settings: Any) -> Tensor:
    """The tokens that generate() writes behind PROMPTS, padded on the left."""
    ids, mask = padded("left")
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **{"do_sample": False} | settings)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_behind_padding_stand_at_their_columns(kind: str) -> None:
    model = model_of(kind)
    expected, each = rows(model), [alone(model, prompt) for prompt in PROMPTS]
    assert expected.tolist() != each
    hf_accel.patch(model, weights=None)
    assert torch.equal(rows(model), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert [alone(model, prompt) for prompt in PROMPTS] == each
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert together(model) == each


@pytest.mark.parametrize("kind", ["Bart", "Pegasus"])
def test_requests_of_an_engine_are_those_of_each_alone(kind: str) -> None:
    model = model_of(kind)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=4, max_tokens=120))
    check_served(model, PROMPTS, expected, token_budget=7)
    check_served(model, PROMPTS, expected, speculative="ngram")


def test_prefixes_behind_padding_are_not_shared_with_others() -> None:
    model = model_of("Bart")
    prompt = PROMPTS[1]
    ids = torch.tensor([prompt] + [[0] * count + prompt[:-count] for count in (1, 2)])
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**given)
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=1))
    assert torch.equal(model.generate(**given), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"prefill_chunk_size": 3}],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.filterwarnings("ignore:generate\\(\\) runs transformers' own loop")
def test_other_calls_give_stocks_tokens(settings: dict[str, Any]) -> None:
    model = model_of("Marian")
    torch.manual_seed(5)
    expected = rows(model, **settings)
    hf_accel.patch(model, weights=None)
    torch.manual_seed(5)
    assert torch.equal(rows(model, **settings), expected)


def test_a_second_turn_counts_the_padding_of_the_first() -> None:
    model, prompt = model_of("Bart"), PROMPTS[0][:9]
    ids = torch.tensor([[0, 0, 0, *prompt]])
    mask = (ids != 0).long()

    def turns(cache: Any) -> list[list[int]]:
        settings = {"max_new_tokens": 5, "do_sample": False, "past_key_values": cache}
        first = model.generate(ids, attention_mask=mask, **settings)
        longer = torch.nn.functional.pad(first, (0, 2), value=7)
        seen = torch.nn.functional.pad(mask, (0, longer.shape[1] - mask.shape[1]), value=1)
        return [first[0].tolist(), model.generate(longer, attention_mask=seen, **settings)[0].tolist()]

    expected = turns(transformers.DynamicCache(config=model.config))
    hf_accel.patch(model, weights=None)
    assert turns(PagedCache(model.config)) == expected
    assert hf_accel.stats(model)["loop"] == "ragged"


class LastPositions(BartLearnedPositionalEmbedding):
    """Positions that are the same for all tokens of a pass."""

    def forward(self, input_ids: Tensor, past_key_values_length: Any = 0, position_ids: Any = None) -> Tensor:
        return super().forward(input_ids, past_key_values_length, position_ids.max().expand_as(position_ids))


def test_a_decoder_that_counts_otherwise_stays_stock() -> None:
    model = model_of("Bart")
    model.model.decoder.embed_positions.__class__ = LastPositions
    expected = rows(model)
    hf_accel.patch(model, weights=None)
    assert torch.equal(rows(model), expected)
    assert "computes something else over pages" in hf_accel.stats(model)["loop"]
    with pytest.raises(UnsupportedError, match="takes no position_ids, and computes something else"):
        Engine(model)
