"""A patched model counts as what it was before, with what it was patched with."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_accel
from hf_accel.config import PatchConfig

from ...parity.families import build
from ...parity.snapshot import snapshot

FAST = {"context": 16, "bandwidth": 1e12, "compute": 1e14}
INT4 = {"bits": 4, "group_size": 32, "skip": ["lm_head"]}


@pytest.mark.parametrize(
    "keywords",
    [{}, {"weights": None, "cache": None}, {"keep_original": False}, {"weights": INT4, "cache": {"dtype": "int8"}}],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # one with a head of its own, one that is tied, of Conv1D
def test_a_patched_model_counts_as_before(family, keywords):
    model, config = build(family), PatchConfig.build(**keywords)
    kv_dtype = None if config.cache is None else config.cache.dtype
    as_patched = hf_accel.estimate(model, weights=config.weights, kv_dtype=kv_dtype, **FAST)
    as_it_is = hf_accel.estimate(model, **FAST)
    hf_accel.patch(model, **keywords)
    before = snapshot(model)
    assert hf_accel.estimate(model, **FAST) == as_patched
    assert hf_accel.estimate(model, weights=None, kv_dtype=None, **FAST) == as_it_is
    assert snapshot(model) == before


def test_one_whose_originals_are_on_disk(tmp_path):
    build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = hf_accel.estimate(model, weights="int8", **FAST)
    hf_accel.patch(model)
    assert hf_accel.estimate(model, **FAST) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_that_was_saved_quantized(family, tmp_path):
    model = hf_accel.patch(build(family), weights={"bits": 4, "group_size": 32})
    model.save_pretrained(tmp_path)
    loaded = hf_accel.estimate(AutoModelForCausalLM.from_pretrained(tmp_path), **FAST)
    expected = hf_accel.estimate(model, **FAST)
    assert dataclasses.replace(loaded, parameters=expected.parameters) == expected


def test_a_dtype_that_the_model_does_not_have():
    model = build("llama")
    with pytest.raises(hf_accel.UnsupportedError, match=r"dtype=torch.bfloat16 .* counted in its own torch.float32"):
        hf_accel.estimate(model, dtype=torch.bfloat16, **FAST)
    ours = hf_accel.estimate(model.config, dtype=torch.bfloat16, **FAST)
    assert ours == hf_accel.estimate(model.bfloat16(), dtype=torch.bfloat16, **FAST)
