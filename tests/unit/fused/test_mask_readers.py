"""Modules that read masks of attention without attending: they get those of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

import hf_accel
from hf_accel.attention.hf.mask import CausalMask, Meaning, as_known
from hf_accel.fused.hf.mask_readers import EagerMasks, mask_readers


def model_of() -> Any:
    torch.manual_seed(0)
    config = NllbMoeConfig(
        vocab_size=101, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, num_experts=4,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_sparse_step=2,
        decoder_sparse_step=2, decoder_start_token_id=2,
    )  # fmt: skip
    model = NllbMoeForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


class Reader(nn.Module):
    def forward(self, hidden_states: Tensor, padding_mask: Any = None, flags: Any = None) -> Any:
        return padding_mask, flags


class Mixed(EagerMasks, Reader):
    pass


@pytest.mark.parametrize("named", [True, False])
def test_a_mask_becomes_numbers_and_keeps_its_meaning(named: bool) -> None:
    columns = torch.tensor([[False, True, True, True], [True] * 4])
    mask, flags = CausalMask(columns, (2, 4), Meaning(None, padded=True, left_out=False)), torch.ones(2, 2) > 0
    x = torch.zeros(2, 2, 8, dtype=torch.bfloat16)
    made, kept = Mixed()(x, padding_mask=mask, flags=flags) if named else Mixed()(x, mask, flags)
    lowest = torch.finfo(torch.bfloat16).min
    shown = torch.tensor([[[0, 1, 1, 0], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]])[:, None] > 0
    assert made.dtype is torch.bfloat16 and torch.equal(made == 0, shown) and bool((made[~shown] == lowest).all())
    assert kept is flags and as_known(mask) is mask


def test_routers_of_eager_models_alone_are_found() -> None:
    model = model_of()
    assert [site.name.rpartition("model.")[2] for site in mask_readers(model)] == [
        "encoder.layers.1.ffn", "decoder.layers.1.ffn",
    ]  # fmt: skip
    model.config._attn_implementation = "sdpa"
    assert not list(mask_readers(model))


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=str)
def test_padded_prompts_and_requests_together(settings: dict[str, Any]) -> None:
    """Of a batch, routers leave out what its last query does not see; requests have no padding."""
    model = model_of()
    ids = torch.randint(3, 101, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = mask[2, 4:] = 0
    settings = {"max_new_tokens": 8, "do_sample": False} | settings
    expected = model.generate(ids, attention_mask=mask, **settings)
    prompts = [row[: int(own.sum())].tolist() for row, own in zip(ids, mask, strict=True)]
    alone = [model.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"
    if not settings.get("num_beams"):
        found = model.generate_batch(prompts, max_new_tokens=8, do_sample=False).values()
        assert [each.generated_tokens for each in found] == [tokens[1:] for tokens in alone]
