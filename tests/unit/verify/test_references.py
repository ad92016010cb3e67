from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.cache.hf import PagedCache
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear, choose
from hf_accel.linear.backends.onednn import is_exact
from hf_accel.patching.patch import stock_twin
from hf_accel.patching.twin import twin
from hf_accel.undo.state import BACKEND_ATTRIBUTE, state_of
from hf_accel.verify.passes import new_cache
from hf_accel.verify.references import quantized_reference, widened

from ...parity.families import DECODER, FAMILIES, build, inputs
from ...parity.snapshot import snapshot

INT8_KV = hf_accel.CacheConfig(dtype="int8")


def layers(model: PreTrainedModel) -> list[QuantLinear]:
    return [m for m in model.modules() if isinstance(m, QuantLinear)]


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(**inputs("single")).logits


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_shares_every_number(family: str, weights: str | None) -> None:
    model = hf_accel.patch(build(family), weights=weights)
    before = snapshot(model)
    other = twin(model)
    assert torch.equal(logits(other), logits(model))
    pairs = list(zip(other.parameters(), model.parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert all(a._packed is b._packed for a, b in zip(layers(other), layers(model), strict=True))
    assert snapshot(model) == before


def test_originals_are_shared_too() -> None:
    stock = build("llama")
    addresses = {name: p.data_ptr() for name, p in stock.named_parameters()}
    model = hf_accel.patch(stock, weights="int8", keep_original=True)
    restored = stock_twin(model)
    assert {name: p.data_ptr() for name, p in restored.named_parameters()} == addresses
    assert hf_accel.is_patched(model) and not hf_accel.is_patched(restored)
    assert torch.equal(logits(restored), logits(build("llama")))


def test_what_is_done_to_a_twin_stays_there() -> None:
    model = hf_accel.patch(build("llama"), weights="int8")
    before = snapshot(model)
    other = twin(model)
    torch.nn.Module.to(other, torch.bfloat16)
    other.train()
    other.register_forward_hook(lambda *_: None)
    layers(other)[0].register_forward_hook(lambda *_: None)
    hf_accel.unpatch(other)
    assert snapshot(model) == before
    assert hf_accel.is_patched(model)


def test_hooks_go_along() -> None:
    model, calls = hf_accel.patch(build("llama"), weights="int8"), []
    layers(model)[0].register_forward_hook(lambda *_: calls.append(1))
    for other in (twin(model), stock_twin(model), quantized_reference(model)):
        calls.clear()
        logits(other)
        assert calls == [1]


def test_tied_weights_stay_tied() -> None:
    stock = build("llama")
    stock.lm_head.weight = stock.model.embed_tokens.weight
    other = twin(stock)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_freed_originals_are_read_into_the_twin_alone(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path), weights="int8")
    before = snapshot(model)
    assert torch.equal(logits(stock_twin(model)), logits(build("llama")))
    assert snapshot(model) == before
    freed = [parameter for parameter, _ in state_of(model).originals.dropped]
    assert freed and not any(parameter.numel() for parameter in freed)
    assert torch.equal(logits(hf_accel.unpatch(model)), logits(build("llama")))


SETTINGS: list[dict[str, Any]] = [
    {"weights": "int8"},
    {"weights": hf_accel.WeightConfig(bits=4, group_size=32)},
    {"weights": hf_accel.WeightConfig(bits=4, group_size=32, symmetric=False)},
    {"weights": hf_accel.WeightConfig(activations=None)},
    {"weights": None, "cache": INT8_KV},
    {"weights": "int8", "cache": INT8_KV},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_quantized_reference_computes_the_same(family: str, settings: dict[str, Any]) -> None:
    stock = build(family)
    model = hf_accel.patch(copy.deepcopy(stock), **settings)
    before = snapshot(model)
    reference = quantized_reference(model)
    assert snapshot(model) == before
    with torch.no_grad():
        ours, theirs = (
            m(**inputs("single"), past_key_values=new_cache(m), use_cache=True).logits for m in (model, reference)
        )
    scale = float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) < 0.05 * scale  # a rounded activation may fall on the other side
    assert float((theirs - logits(stock)).abs().max()) > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_quantized_reference_is_plain(settings: dict[str, Any]) -> None:
    model = hf_accel.patch(build("llama"), **settings)
    reference = quantized_reference(model)
    assert len(layers(reference)) == len(layers(model))
    for ours, plain in zip(layers(model), layers(reference), strict=True):
        assert plain.choice is not None and ours.choice is not None
        assert plain.choice.backend.name.startswith("reference")
        assert plain.choice.backend.activations == ours.choice.backend.activations
        assert torch.equal(plain.weight, ours.weight)
    stock = build("llama")
    for name, module in reference.named_modules():
        if not isinstance(module, QuantLinear | type(reference)):
            assert type(module) is type(stock.get_submodule(name))
    attention = [vars(m)[BACKEND_ATTRIBUTE] for m in reference.modules() if "Attention" in type(m).__name__]
    assert {planned.backend.name for planned in attention} == {"reference"}
    paged = "cache" in settings
    assert isinstance(new_cache(reference), PagedCache) is paged


def test_a_model_loaded_quantized_has_a_quantized_reference(tmp_path: Path) -> None:
    hf_accel.patch(build("llama"), weights="int8").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    reference = quantized_reference(model)
    assert all(layer.requested_backend.startswith("reference") for layer in layers(reference))
    assert hf_accel.is_patched(model)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kernels, "refusal", lambda: "cpu kernels: not built (no compiler)")
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.skipif(not is_exact(), reason="this build of torch has no INT8 matmul")
@torch.no_grad()
def test_rows_that_are_rounded_as_a_whole_have_a_reference_of_their_own(no_kernels: None) -> None:
    config = LlamaConfig(**DECODER | {"intermediate_size": 384})  # three groups of 128
    model = hf_accel.patch(LlamaForCausalLM(config).eval(), weights="int8")
    ours = layers(model)[-2]
    plain = layers(quantized_reference(model))[-2]
    assert ours.choice is not None and plain.choice is not None
    assert (ours.choice.backend.name, plain.choice.backend.name) == ("onednn", "reference by row")
    x = torch.randn(5, ours.in_features) * torch.logspace(-2, 2, ours.in_features)
    torch.testing.assert_close(plain(x), ours(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"weights": None}], ids=str)
def test_wider(settings: dict[str, Any]) -> None:
    """The same weights in float32: what a bfloat16 model rounds."""
    model = hf_accel.patch(build("llama", dtype=torch.bfloat16), **settings)
    reference = quantized_reference(model) if settings["weights"] else stock_twin(model)
    wide = widened(reference)
    assert (reference.dtype, wide.dtype, logits(wide).dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for ours, theirs in zip(layers(reference), layers(wide), strict=True):
        stored, same = ours.quantized, theirs.quantized
        assert same.weight.data_ptr() == stored.weight.data_ptr()  # type: ignore[union-attr]
        assert torch.equal(same.weight_scale, stored.weight_scale.float())
    error = float((logits(wide) - logits(reference).float()).abs().max())
    assert 0 < error < 0.5


def test_stock_makes_its_own_cache() -> None:
    assert new_cache(build("llama")) is None
    assert isinstance(build("llama")(**inputs("single")).past_key_values, DynamicCache)
