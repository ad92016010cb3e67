from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.kernels.cpu import library
from hf_accel.linear import QuantLinear

from ...parity.families import build, inputs
from ...parity.snapshot import logits, snapshot


def generate(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    return model.generate(**inputs("left"), **{"max_new_tokens": 4, "do_sample": False} | settings)


# -- bad input -----------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight": "int8"}, r"unknown keyword 'weight'; did you mean 'weights'\?"),
    ({"weights": "int9"}, "weights='int9' is not known; choose one of None, 'int8', 'int4', 'fp8', 'nf4', 'auto'"),
    (
        {"weights": {"bits": 4, "group_size": 128}},
        r"group_size=128 does not divide the 32 inputs of '.*q_proj'; leave it out, and each layer gets groups",
    ),
    ({"weights": {"bits": 4, "group_size": 64}}, r"group_size=64 does not divide the 32 inputs of '.*q_proj'"),
    (
        {"attention": "flash"},
        "attention='flash' is not known; choose 'auto' or one of 'cpu', 'flash_attn', 'varlen'",
    ),
    ({"attention": None, "cache": "paged"}, "attention=None leaves attention stock; leave cache= out"),
    ({"cache": {"block_size": 0}}, "block_size=0 must be an integer of at least 1"),
    ({"keep_original": 2}, "keep_original=2 is not known"),
]


@pytest.mark.parametrize("function", [hf_accel.plan, hf_accel.patch])
@pytest.mark.parametrize(("keywords", "text"), BAD, ids=str)
def test_bad_keyword_leaves_the_model(keywords: dict[str, Any], text: str, function: Callable[..., Any]) -> None:
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(hf_accel.UnsupportedError, match=text):
        function(model, **keywords)
    assert snapshot(model) == before


def test_meta_device() -> None:
    with torch.device("meta"):
        model = type(build("llama"))(build("llama").config)
    with pytest.raises(hf_accel.UnsupportedError, match="meta device and has no values; load"):
        hf_accel.patch(model)
    assert not hf_accel.is_patched(model)


OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"weights": None}, r"with weights=WeightConfig\(\), not None"),
    ({}, {"weights": {"activations": None}}, "with activations='auto' in weights=, not None"),
    ({}, {"cache": {"dtype": "int8"}, "fuse": False}, "with dtype='auto' in cache=, not 'int8'; fuse=True, not False"),
    ({}, {"cache": "paged"}, "with cache= left out, so that it need not have been met"),
    ({}, {"weights": {"average_bits": 5, "calibration": ["a"]}}, ".*calibration data that was not kept"),
    (
        {"weights": None, "cache": {"block_size": 4}},
        {},
        r"with weights=None, not WeightConfig\(\); block_size=4 in cache",
    ),
    ({"keep_original": True}, {}, "with keep_original=True, not 'auto'"),
    ({"speculative": "ngram"}, {"speculative": {"num_draft": 2}}, "with drafter='ngram' in speculative=, not 'auto'"),
]


@pytest.mark.parametrize(("keywords", "others", "text"), OTHERS, ids=str)
def test_patch_twice(keywords: dict[str, Any], others: dict[str, Any], text: str) -> None:
    """The cell of a notebook can be run again; with other keywords the error says which, and the way out works."""
    model = hf_accel.patch(build("llama"), **keywords)
    before = snapshot(model)
    assert hf_accel.patch(model, **keywords) is model and snapshot(model) == before
    with pytest.raises(hf_accel.UnsupportedError, match=rf"patched already, {text}.*; call hf_accel.unpatch\(model\)"):
        hf_accel.patch(model, **others)
    assert snapshot(model) == before
    with hf_accel.patched(model, **keywords):
        assert hf_accel.is_patched(model)
    assert hf_accel.is_patched(model), "it was before the block"


def test_a_draft_model_is_compared_by_itself() -> None:
    draft, other = hf_accel.patch(build("llama"), weights=None), hf_accel.patch(build("llama"), weights=None)
    model = hf_accel.patch(build("llama"), speculative=draft)
    assert hf_accel.patch(model, speculative=draft) is model
    with pytest.raises(
        hf_accel.UnsupportedError, match="drafter=a LlamaForCausalLM in speculative=, not a Llama"
    ) as no:
        hf_accel.patch(model, speculative=other)
    assert len(str(no.value)) < 300


def test_one_warning_where_the_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason and the way out, at the line that calls patch(); once a process."""
    monkeypatch.setattr(library, "refusal", lambda: "cpu kernels: not built (no compiler)")
    library.warn_of_refusal.cache_clear()
    with pytest.warns(hf_accel.HfAccelWarning) as found:
        hf_accel.patch(build("llama"), weights=None)
        hf_accel.patch(build("llama"), weights=None)
    assert [warning.filename for warning in found] == [__file__]
    assert re.search(r"not built \(no compiler\): .*run python -m hf_accel.kernels.cpu.build", str(found[0].message))
    library.warn_of_refusal.cache_clear()


def test_unpatch_twice() -> None:
    model = hf_accel.unpatch(hf_accel.patch(build("llama")))
    for function in (hf_accel.unpatch, hf_accel.stats):
        with pytest.raises(hf_accel.UnsupportedError, match="the model is not patched"):
            function(model)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_part_of_a_patched_model(weights: str | None) -> None:
    model = hf_accel.patch(build("llama"), weights=weights)
    expected = logits(model)
    text = "this LlamaModel is a part of a patched LlamaForCausalLM and is patched with it; use it as it is, or call"
    with pytest.raises(hf_accel.UnsupportedError, match=text):
        hf_accel.patch(model.model)
    with pytest.raises(hf_accel.UnsupportedError, match=r"part of a patched LlamaForCausalLM; .* on the whole"):
        hf_accel.unpatch(model.model)
    assert torch.equal(logits(model), expected)
    hf_accel.unpatch(model)
    hf_accel.unpatch(hf_accel.patch(model.model))


def test_a_model_with_a_patched_part() -> None:
    model = build("llama")
    before = snapshot(model)
    hf_accel.patch(model.model)
    patched = snapshot(model)
    with pytest.raises(hf_accel.UnsupportedError, match=r"'model' .*, a LlamaModel, .*unpatch\(model.model\) first"):
        hf_accel.patch(model)
    assert snapshot(model) == patched
    hf_accel.unpatch(model.model)
    assert snapshot(model) == before


@pytest.mark.parametrize("shape", [(0, 5), (1, 0)])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_empty_input(weights: str | None, shape: tuple[int, int]) -> None:
    model = hf_accel.patch(build("llama"), weights=weights)
    expected = generate(model)
    ids = torch.empty(shape, dtype=torch.int64)
    message = f"has {shape[0]} rows of {shape[1]} tokens; give at least one token in one row"
    with pytest.raises(hf_accel.UnsupportedError, match=message):
        model(ids)
    with pytest.raises(hf_accel.UnsupportedError, match=message):
        model(inputs_embeds=torch.empty(*shape, 32))
    with pytest.raises(hf_accel.UnsupportedError, match=message):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(generate(model), expected)


# -- original weights ----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build("qwen2").save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def original_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    return [m.weight for m in model.modules() if type(m) is nn.Linear]


def test_auto_frees_what_the_checkpoint_holds(checkpoint: Path) -> None:
    model = load(checkpoint)
    before = snapshot(model)
    weights = original_weights(model)
    hf_accel.patch(model)
    assert len(weights) == 2 * 7 + 1
    assert all(weight.numel() == 0 for weight in weights)
    generate(model)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_auto_keeps_what_no_checkpoint_holds() -> None:
    model = build("qwen2")
    weights = original_weights(model)
    hf_accel.patch(model)
    assert all(weight.numel() for weight in weights)


def test_auto_keeps_everything_if_one_weight_is_changed(checkpoint: Path) -> None:
    model = load(checkpoint)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    before, weights = snapshot(model), original_weights(model)
    hf_accel.patch(model)
    assert all(weight.numel() for weight in weights)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_tied_embedding_is_never_freed(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    model = load(tmp_path)
    before = snapshot(model)
    hf_accel.patch(model)
    assert model.get_input_embeddings().weight.numel()
    assert model.transformer.h[0].attn.c_attn.bias.numel()
    hf_accel.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("change", ["other weights", "gone"])
def test_checkpoint_that_changed(checkpoint: Path, change: str) -> None:
    """unpatch refuses, and the patched model works on; with the file back, it can be unpatched."""
    model = load(checkpoint)
    stock = logits(model)
    hf_accel.patch(model)
    expected = generate(model)
    file = checkpoint / "model.safetensors"
    aside = file.rename(checkpoint / "aside")
    if change == "other weights":
        build("qwen2", seed=1).save_pretrained(checkpoint)
    with pytest.raises(hf_accel.HfAccelError, match=r"cannot unpatch: 'model.layers.0.*' (in|cannot be read from)"):
        hf_accel.unpatch(model)
    assert hf_accel.is_patched(model)
    assert torch.equal(generate(model), expected)
    aside.replace(file)
    assert torch.equal(logits(hf_accel.unpatch(model)), stock)


def test_keep_original_true(checkpoint: Path) -> None:
    model = load(checkpoint)
    before, weights = snapshot(model), original_weights(model)
    hf_accel.patch(model, keep_original=True)
    assert all(weight.numel() for weight in weights)
    (checkpoint / "model.safetensors").unlink()
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_keep_original_false() -> None:
    model = build("gpt2")
    lost = model.transformer.h[0].attn.c_attn.weight
    hf_accel.patch(model, keep_original=False)
    assert lost.numel() == 0
    expected = generate(model)
    with pytest.raises(hf_accel.UnsupportedError, match="8 original weights were dropped by keep_original=False"):
        hf_accel.unpatch(model)
    assert hf_accel.is_patched(model)
    assert torch.equal(generate(model), expected)


def test_keep_original_false_loses_nothing_where_nothing_is_replaced() -> None:
    model = build("llama")
    before = snapshot(model)
    with hf_accel.patched(model, weights=None, keep_original=False):
        generate(model)
    assert snapshot(model) == before


def test_copy_of_a_model_with_freed_weights(checkpoint: Path) -> None:
    model = load(checkpoint)
    stock = logits(model)
    other = copy.deepcopy(hf_accel.patch(model))
    hf_accel.unpatch(other)
    assert torch.equal(logits(other), stock)
    assert hf_accel.is_patched(model)


# -- the context manager, and what a run reports --------------------------------------------------------


def test_patched() -> None:
    model = build("llama")
    before = snapshot(model)
    with hf_accel.patched(model, weights="int8") as inside:
        assert inside is model
        assert isinstance(model.lm_head, QuantLinear)
    assert snapshot(model) == before


def test_patched_with_an_exception() -> None:
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(KeyError), hf_accel.patched(model):
        raise KeyError
    assert snapshot(model) == before


def test_patched_and_unpatched_inside() -> None:
    model = build("llama")
    before = snapshot(model)
    with hf_accel.patched(model):
        hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_patched_and_patched_otherwise_inside() -> None:
    """What is there at the end is not the block's to take out."""
    model = build("llama")
    with hf_accel.patched(model):
        hf_accel.unpatch(model)
        hf_accel.patch(model, weights=None)
    assert hf_accel.is_patched(model)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_patched_with_bad_input() -> None:
    model = build("llama")
    with pytest.raises(hf_accel.UnsupportedError), hf_accel.patched(model, weights="int3"):
        pytest.fail("the block must not run")
    assert not hf_accel.is_patched(model)


def test_config_as_one_keyword() -> None:
    settings = hf_accel.PatchConfig.build(weights=None, cache={"block_size": 4}, attention="reference")
    for config in (settings, settings.to_dict()):
        model = hf_accel.patch(build("llama"), config=config)
        assert not any(isinstance(module, QuantLinear) for module in model.modules())
        generate(model)
        assert hf_accel.stats(model)["block_size"] == 4


def test_stats() -> None:
    model = hf_accel.patch(build("llama"), weights=None, cache={"block_size": 4})
    assert hf_accel.stats(model) == {}
    generate(model, max_new_tokens=4)
    found = hf_accel.stats(model)
    assert (found["sequences"], found["new_tokens"]) == (3, 12)
    assert found["tokens_per_second"] == pytest.approx(12 / found["seconds"])
    # 8, 13 and 11 tokens and three more each: the last one is not fed back
    assert found["blocks_used"] == 3 + 4 + 4
    assert found["waste"] == pytest.approx(1 - (11 + 16 + 14) / (11 * 4))
    found["seconds"] = None
    assert hf_accel.stats(model)["seconds"] is not None  # a copy


def test_stats_of_a_stock_cache() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    generate(model, cache_implementation="static")
    stats = hf_accel.stats(model)
    assert stats.keys() == {"seconds", "sequences", "new_tokens", "tokens_per_second", "loop"}
    assert stats["loop"] == "stock: it has no paged cache"
