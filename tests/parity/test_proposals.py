"""What an error proposes is tried here, as far as it is not tried where the error is tested."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import hf_accel
from hf_accel import UnsupportedError

from .families import DECODER, build, prompts

MAMBA = MambaConfig(vocab_size=DECODER["vocab_size"], hidden_size=32, num_hidden_layers=1)
# Nothing in it says how large the states of its layers are.
UNPAGED = LlamaConfig(
    vocab_size=DECODER["vocab_size"], hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    layer_types=["linear_attention", "linear_attention"],
)  # fmt: skip


def test_a_weight_that_is_not_finite_can_be_skipped() -> None:
    model = build("llama")
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UnsupportedError, match="repair the checkpoint or skip the layer") as error:
        hf_accel.patch(model)
    names = re.findall("'(model.*?)'", str(error.value))
    assert not {site.site.name for site in hf_accel.plan(model, weights={"skip": names}).quantized} & set(names)
    hf_accel.patch(model, weights={"skip": names})


@pytest.mark.parametrize("part", ["wrapped", "base"])
def test_a_teacher_with_an_adapter(part: str) -> None:
    peft = pytest.importorskip("peft")
    adapted: Any = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"give what merge_and_unload\(\) returns"):
        hf_accel.init_student(adapted if part == "wrapped" else adapted.get_base_model(), num_layers=1)
    assert hf_accel.init_student(adapted.merge_and_unload(), num_layers=1).config.num_hidden_layers == 1


def test_a_draft_model_that_cannot_run_on_pages() -> None:
    model, ids = hf_accel.patch(build("llama"), weights=None), prompts(1, 5)
    with pytest.raises(UnsupportedError, match="use another draft model, or 'suffix' or 'ngram'"):
        model.generate(ids, max_new_tokens=3, do_sample=False, speculative=LlamaForCausalLM(UNPAGED).eval())
    plain = model.generate(ids, max_new_tokens=3, do_sample=False)
    for drafter in ("suffix", "ngram"):
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, speculative=drafter), plain)


def test_attention_of_a_model_that_has_none() -> None:
    model = MambaForCausalLM(MAMBA)
    with pytest.raises(UnsupportedError, match="attention='cpu' was asked for, but MambaForCausalLM has no attention"):
        hf_accel.plan(model, attention="cpu")
    assert hf_accel.plan(model).stock_cache is None and hf_accel.plan(model, attention=None).attention == ()


def test_a_config_that_is_none_of_a_paged_cache() -> None:
    with pytest.raises(UnsupportedError, match=r"config is a LlamaForCausalLM; .* made from model\.config"):
        hf_accel.PagedCache(build("llama"))
    with pytest.raises(UnsupportedError, match="use transformers' own cache"):
        hf_accel.PagedCache(UNPAGED)
    assert DynamicCache(config=UNPAGED).layers
    with pytest.raises(UnsupportedError, match="leave cache= out, or pass cache=None") as error:
        hf_accel.plan(LlamaForCausalLM(UNPAGED), cache="paged")
    assert "own cache" not in str(error.value)
    assert hf_accel.plan(LlamaForCausalLM(UNPAGED), cache=None).stock_cache
    assert hf_accel.plan(LlamaForCausalLM(UNPAGED)).stock_cache
