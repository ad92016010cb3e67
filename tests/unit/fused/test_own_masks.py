"""Decoders that make causal masks by a method of their own: known by the numbers of these masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accel.attention.hf import ATTENTION_NAME
from hf_accel.attention.hf.mask import as_known
from hf_accel.fused.hf.own_masks import OwnMasks, own_masks


class Config:
    _attn_implementation = ATTENTION_NAME


class Decoder(nn.Module):
    """Makes masks as Kosmos-2 does. window: of tokens that see each other; None for all before."""

    window: int | None = None
    config = Config()

    def _prepare_decoder_attention_mask(
        self, attention_mask: Any, input_shape: Any, inputs_embeds: Tensor, past_key_values_length: int
    ) -> Tensor | None:
        count, before = input_shape[-1], past_key_values_length
        seen = torch.ones(count, before + count, dtype=torch.bool).tril(before)
        if self.window is not None:
            seen &= torch.ones_like(seen).triu(before - self.window + 1)
        if count == 1 and attention_mask is None:
            return None
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        return mask if attention_mask is None else mask + (1 - attention_mask[:, None, None]) * -1e30


class NewerName(Decoder):
    """As transformers calls the last parameter from 5.24 on."""

    def _prepare_decoder_attention_mask(  # type: ignore[override]
        self, attention_mask: Any, input_shape: Any, inputs_embeds: Tensor, cache_length: int
    ) -> Tensor | None:
        return super()._prepare_decoder_attention_mask(attention_mask, input_shape, inputs_embeds, cache_length)


class Windowed(Decoder):
    window = 40


class OtherMethod(Decoder):
    def _prepare_decoder_attention_mask(self, input_shape: Any) -> Tensor:  # type: ignore[override]
        return torch.zeros(1, 1, input_shape[-1], input_shape[-1])


def test_masks_are_tried_with_many_tokens() -> None:
    model = nn.ModuleDict({"plain": Decoder(), "newer": NewerName(), "windowed": Windowed(), "other": OtherMethod()})
    assert [site.name for site in own_masks(model)] == ["plain", "newer"]


@pytest.mark.parametrize(("count", "before"), [(4, 0), (4, 3), (1, 3)])
def test_a_mask_has_its_meaning_and_the_numbers_that_the_decoder_makes(count: int, before: int) -> None:
    class Mixed(OwnMasks, Decoder):
        pass

    given: Any = ((2, count), torch.zeros(2, count, 8), before)
    made, own = Mixed()._prepare_decoder_attention_mask(None, *given), Decoder()._prepare_decoder_attention_mask
    if count == 1:
        assert made is None
        return
    assert as_known(made) is not None
    stock = own(None, *given)
    assert made is not None and stock is not None
    assert torch.equal(made & True, (stock == 0).expand(2, -1, -1, -1))
    columns = torch.ones(2, before + count)
    columns[0, 0] = 0
    padded = Mixed()._prepare_decoder_attention_mask(columns, *given)
    assert padded is not None and torch.equal(padded, own(columns, *given))  # type: ignore[arg-type]
