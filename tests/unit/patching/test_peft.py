"""LoRA on a patched model: trained, saved, loaded, merged and taken out again, in whichever order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.linear import QuantLinear, quantize
from hf_accel.patching.patch import stock_twin

from ...parity.families import build, inputs
from ...parity.snapshot import bits, logits, snapshot
from ..linear.layers import quantized_layer

peft = pytest.importorskip("peft")

INT4 = hf_accel.WeightConfig(bits=4, group_size=32)
ASYMMETRIC = hf_accel.WeightConfig(bits=4, group_size=32, symmetric=False)
WEIGHTS: dict[str, Any] = {"none": None, "int8": "int8", "int4": INT4, "asymmetric": ASYMMETRIC}
QUANTIZED = ["int8", "int4", "asymmetric"]
TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
ORDERS = ["patch first", "adapter first"]


def with_adapter(model: PreTrainedModel, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return peft.get_peft_model(
            model, peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "init_lora_weights": False} | settings)
        )


def patched_with_adapter(order: str, weights: Any, **settings: Any) -> Any:
    model = build("llama")
    if order == "patch first":
        return with_adapter(hf_accel.patch(model, weights=weights), **settings)
    return hf_accel.patch(with_adapter(model, **settings), weights=weights)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# -- merging -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize("order", ORDERS)
def test_merged_weights_are_dequantized_added_and_quantized_again(order: str, weights: str, safe: bool) -> None:
    model = patched_with_adapter(order, WEIGHTS[weights])
    expected = {
        name: quantize(m.base_layer.weight.data + m.get_delta_weight("default"), settings_of(m.base_layer))
        for name, m in lora_layers(model.get_base_model()).items()
    }
    merged = model.merge_and_unload(safe_merge=safe)
    assert len(expected) == 8
    for name, weight in expected.items():
        layer = merged.get_submodule(name)
        assert type(layer) is QuantLinear
        assert bits(layer.weight.data) == bits(weight.dequantize(torch.float32))
        assert bits(layer.quantized.weight_scale) == bits(weight.weight_scale)


def settings_of(layer: QuantLinear) -> hf_accel.WeightConfig:
    return (
        WEIGHTS["int8" if layer.layout.bits == 8 else "int4" if layer.layout.symmetric else "asymmetric"]
        if layer.layout.bits == 4
        else (hf_accel.WeightConfig())
    )


@pytest.mark.parametrize("order", ORDERS)
def test_the_merged_model_computes_what_the_adapter_did(order: str) -> None:
    model = patched_with_adapter(order, "int8")
    before, plain = logits(model), logits(hf_accel.patch(build("llama")))
    merged = model.merge_and_unload()
    assert (logits(merged) - before).norm() < 0.1 * (plain - before).norm()
    assert hf_accel.is_patched(merged)
    generated = merged.generate(**inputs("left"), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] == 13 + 4


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_float_weights_merge_as_stock_does(order: str, safe: bool) -> None:
    stock = with_adapter(build("llama")).merge_and_unload(safe_merge=safe)
    model = patched_with_adapter(order, None).merge_and_unload(safe_merge=safe)
    close(logits(model), logits(stock))
    generated = [m.generate(**inputs("left"), max_new_tokens=6, do_sample=False) for m in (model, stock)]
    assert torch.equal(*generated)
    hf_accel.unpatch(model)
    assert bits(logits(model)) == bits(logits(stock))


def test_a_merged_model_is_saved_and_loaded(tmp_path: Path) -> None:
    merged = patched_with_adapter("adapter first", "int8").merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert bits(logits(AutoModelForCausalLM.from_pretrained(tmp_path))) == bits(logits(merged))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["IA3", "LoHa", "OFT", "Vera", "dora", "bias"])
def test_other_adapters_are_not_dropped(kind: str, weights: str) -> None:
    """Each writes to the weight in its own way."""
    torch.manual_seed(0)
    base = hf_accel.patch(build("qwen2"), weights=WEIGHTS[weights])
    if kind == "dora":
        model = with_adapter(base, use_dora=True)
    elif kind == "bias":
        model = with_adapter(base, lora_bias=True, target_modules=["q_proj"])
    else:
        more = {"feedforward_modules": []} if kind == "IA3" else {}
        model = peft.get_peft_model(base, getattr(peft, f"{kind}Config")(target_modules=["q_proj", "v_proj"], **more))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.5)
    names = [name for name, m in base.named_modules() if hasattr(m, "base_layer") and isinstance(m, nn.Module)]
    x = torch.randn(40, 32)
    with torch.no_grad():
        before = {name: base.get_submodule(name)(x) for name in names if "down" not in name}
        plain = {name: base.get_submodule(name).base_layer(x) for name in before}
        merged = model.merge_and_unload()
        for name, expected in before.items():
            left = (merged.get_submodule(name)(x) - expected).norm()
            assert left < (0.3 if weights == "int8" else 0.6) * (plain[name] - expected).norm()


# -- the way back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("order", ORDERS)
def test_unpatched_before_merging(order: str, weights: str) -> None:
    """The adapter stays, over the float weights, and merges into these."""
    model = patched_with_adapter(order, WEIGHTS[weights])
    stock = with_adapter(build("llama"))
    hf_accel.unpatch(model)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert bits(logits(model)) == bits(logits(stock))
    assert bits(logits(model.merge_and_unload())) == bits(logits(stock.merge_and_unload()))


@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize("order", ORDERS)
def test_a_merged_model_is_not_unpatched(order: str, weights: str) -> None:
    """The adapter would be lost. The model works on."""
    model = patched_with_adapter(order, WEIGHTS[weights]).merge_and_unload()
    expected = logits(model)
    with pytest.raises(
        hf_accel.UnsupportedError, match=r"8 quantized layers, '.*q_proj' first.*before merge_and_unload"
    ):
        hf_accel.unpatch(model)
    assert hf_accel.is_patched(model)
    assert bits(logits(model)) == bits(expected)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("order", ORDERS)
def test_an_adapter_that_was_thrown_away(order: str, weights: str) -> None:
    """No quantized layer stays behind where PEFT has put it."""
    model = build("llama")
    before = snapshot(model)
    if order == "patch first":
        inner = with_adapter(hf_accel.patch(model, weights=WEIGHTS[weights])).unload()
    else:
        inner = hf_accel.patch(with_adapter(model), weights=WEIGHTS[weights]).unload()
    hf_accel.unpatch(inner)
    assert not any(isinstance(m, QuantLinear) for m in inner.modules())
    assert snapshot(inner)["logits"] == before["logits"]
    assert snapshot(inner)["tensors"].keys() == before["tensors"].keys()
    assert {n: t[0] for n, t in snapshot(inner)["tensors"].items()} == {n: t[0] for n, t in before["tensors"].items()}


@pytest.mark.filterwarnings("ignore:Already following adapters were merged:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", QUANTIZED)
def test_merged_and_taken_out_again(weights: str, dtype: torch.dtype) -> None:
    """The very weights are back, of two adapters too, and as often as that is done."""
    model = hf_accel.patch(with_adapter(build("llama").to(dtype)), weights=WEIGHTS[weights])
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    before, computed = {n: bits(t) for n, t in model.state_dict().items()}, bits(logits(model))
    for names in (["default"], ["other"], ["default", "other"]):
        model.merge_adapter(names)
        assert {n: bits(t) for n, t in model.state_dict().items()} != before
        with pytest.raises(hf_accel.UnsupportedError, match=r"unmerge_adapter\(\) before unpatch"):
            hf_accel.unpatch(model)
        model.unmerge_adapter()
        assert {n: bits(t) for n, t in model.state_dict().items()} == before
    assert bits(logits(model)) == computed
    hf_accel.unpatch(model)
    assert bits(logits(model)) == bits(logits(with_adapter(build("llama").to(dtype))))


def test_what_is_left_of_an_adapter_stays() -> None:
    """Merged with one strength and taken out with another: what is left is no rounding."""
    model = patched_with_adapter("patch first", "int8")
    layers = list(lora_layers(model.get_base_model()).values())
    before = [each.base_layer.weight.clone() for each in layers]
    model.merge_adapter()
    for each in layers:
        each.scaling["default"] *= 0.9
    with pytest.warns(hf_accel.HfAccelWarning, match="rounded twice"):
        model.unmerge_adapter()
    for each, weight in zip(layers, before, strict=True):
        left = each.base_layer.weight.clone() - weight
        expected = each.get_delta_weight("default") / 9
        assert (left - expected).abs().max() < 0.02 * weight.abs().max() and left.norm() > 0.5 * expected.norm()


def test_weights_of_before_are_let_go() -> None:
    """They are kept for as long as an adapter may be taken out, and not in copies."""
    model = patched_with_adapter("patch first", "int8")
    model.merge_adapter()
    first, second, *others = (each.base_layer for each in lora_layers(model.get_base_model()).values())
    assert copy.deepcopy(first).changes.kept == {} and first.changes.kept
    first.weight = first.weight  # as PEFT does where it takes out an adapter of another kind than LoRA
    second.to(torch.bfloat16)
    assert first.changes.kept == {} and second.changes.kept == {}
    with pytest.warns(hf_accel.HfAccelWarning, match="rounded twice"):
        model.unmerge_adapter()
    assert all(each.changes.kept == {} and not each.changes for each in others)


@pytest.mark.filterwarnings("ignore:Already following adapters were merged:UserWarning")
def test_two_adapters_merged_one_after_the_other() -> None:
    model = patched_with_adapter("patch first", "int8")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    model.merge_adapter(["default"])
    merged = model.merge_and_unload(adapter_names=["other"])
    with pytest.raises(hf_accel.UnsupportedError, match="8 quantized layers"):
        hf_accel.unpatch(merged)


def test_an_adapter_that_takes_its_start_out_of_the_weight() -> None:
    """PiSSA leaves the base layer what its factors do not hold: over the originals, they would count twice."""
    model = patched_with_adapter("patch first", "int8", init_lora_weights="pissa", target_modules=["q_proj"])
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    model.merge_adapter()
    model.unmerge_adapter()
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == before
    with pytest.raises(hf_accel.UnsupportedError, match="2 quantized layers"):
        hf_accel.unpatch(model)


def test_a_copy_of_a_quantized_layer_is_not_left_behind() -> None:
    model = patched_with_adapter("patch first", "int8", modules_to_save=["lm_head"])
    with pytest.raises(
        hf_accel.HfAccelError, match=r"'lm_head.modules_to_save.default' is a copy of a quantized layer"
    ):
        hf_accel.unpatch(model)


def test_copies_know_that_they_were_merged() -> None:
    merged = patched_with_adapter("patch first", "int8").merge_and_unload()
    with pytest.raises(hf_accel.UnsupportedError, match="8 quantized layers"):
        hf_accel.unpatch(copy.deepcopy(merged))
    with pytest.raises(hf_accel.UnsupportedError, match="8 quantized layers"):
        stock_twin(merged)


def test_a_prefix_from_before_the_merge_is_not_taken() -> None:
    model = hf_accel.patch(build("llama"))
    cache = hf_accel.PagedCache(model.config, block_size=4)
    settings: dict[str, Any] = {**inputs("single"), "max_new_tokens": 4, "do_sample": False}
    model.generate(**settings, past_key_values=cache)
    merged = with_adapter(model).merge_and_unload()
    expected = merged.generate(**settings)
    cache.reset()
    assert torch.equal(merged.generate(**settings, past_key_values=cache), expected)


# -- training ------------------------------------------------------------------------------------------


def train(model: Any, steps: int = 6) -> list[float]:
    ids = inputs("single")["input_ids"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("order", ORDERS)
def test_trained_saved_loaded_and_merged(order: str, weights: str, tmp_path: Path) -> None:
    model = patched_with_adapter(order, WEIGHTS[weights], init_lora_weights=True)
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    base = {n: bits(t) for n, t in model.state_dict().items() if "lora" not in n}
    losses = train(model)
    assert losses[-1] < losses[0] - 0.5
    assert {n: bits(t) for n, t in model.state_dict().items() if "lora" not in n} == base
    trained = logits(model)
    model.save_pretrained(tmp_path)
    fresh, settings = build("llama"), {"weights": WEIGHTS[weights]}
    if order == "patch first":
        loaded = peft.PeftModel.from_pretrained(hf_accel.patch(fresh, **settings), tmp_path)
    else:
        loaded = hf_accel.patch(peft.PeftModel.from_pretrained(fresh, tmp_path), **settings)
    close(logits(loaded), trained)
    merged = loaded.merge_and_unload()
    plain = logits(hf_accel.patch(build("llama"), weights=WEIGHTS[weights]))
    assert (logits(merged) - trained).norm() < (0.1 if weights in ("none", "int8") else 0.8) * (plain - trained).norm()
    hf_accel.unpatch(model)
    close(logits(model), logits(peft.PeftModel.from_pretrained(build("llama"), tmp_path)))


def test_a_quantized_checkpoint_is_trained(tmp_path: Path) -> None:
    hf_accel.patch(build("llama")).save_pretrained(tmp_path)
    model = with_adapter(AutoModelForCausalLM.from_pretrained(tmp_path), init_lora_weights=True)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.5
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).isfinite().all()


# -- the weight of a quantized layer -------------------------------------------------------------------

MERGED = torch.linspace(-1, 1, 32 * 32).view(32, 32)
WRITES: dict[str, Callable[[QuantLinear], object]] = {
    "data": lambda m: setattr(m.weight, "data", MERGED),
    "added": lambda m: m.weight.data.add_(MERGED - m.weight.data),
    "copied": lambda m: m.weight.data.copy_(MERGED),
    "part": lambda m: m.weight.data.view(-1)[:].copy_(MERGED.view(-1)),
    "item": lambda m: m.weight.__setitem__(slice(None), MERGED),
    "transposed": lambda m: m.weight.t().copy_(MERGED.t()),
    "attribute": lambda m: setattr(m, "weight", MERGED),
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(MERGED)),
    "init": lambda m: nn.init.uniform_(m.weight, -1, 1, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("how", WRITES)
def test_no_write_is_lost(how: str) -> None:
    layer = quantized_layer(torch.randn(32, 32), config=hf_accel.WeightConfig())
    WRITES[how](layer)
    expected = MERGED
    if how == "init":
        expected = nn.init.uniform_(torch.empty(32, 32), -1, 1, generator=torch.Generator().manual_seed(0))
    assert layer.writes == 1
    step = 2.0 / 127 if how != "added" else 2.001 / 127
    torch.testing.assert_close(layer.weight.data.clone(), expected, rtol=0, atol=step / 2)


def test_what_is_computed_from_it_is_a_plain_tensor() -> None:
    layer = quantized_layer(torch.randn(32, 32), config=hf_accel.WeightConfig())
    for made in (layer.weight + 1, layer.weight.clone(), layer.weight.float() * 2, copy.deepcopy(layer.weight)):
        assert type(made) is Tensor
        made.zero_()
    assert layer.writes == 0
    layer.weight = layer.weight
    layer.weight.data = layer.weight.data
    layer.weight.requires_grad_(False)
    assert layer.writes == 0


def test_a_parameter_made_of_it_is_one_of_its_own() -> None:
    layer = quantized_layer(torch.randn(32, 32), config=hf_accel.WeightConfig())
    other = nn.Linear(32, 32, bias=False)
    other.weight = nn.Parameter(layer.weight.contiguous())
    before = bits(layer.weight.data.clone())
    x = torch.randn(3, 32)
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert (layer.writes, bits(layer.weight.data.clone())) == (0, before)
    twin = copy.deepcopy(other)
    assert type(twin.weight) is nn.Parameter
    assert torch.equal(twin(x), other(x))
    other.to(torch.float64)
    assert other.weight.dtype == torch.float64
    assert other.weight.is_leaf
    other.weight.data = torch.zeros(32, 32, dtype=torch.float64)
    assert not other.weight.any()
    assert layer.writes == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(32, 16), r"a weight \[32, 16\] cannot be written to a layer \[32, 32\]"),
        (torch.full((32, 32), torch.nan), "NaN or infinity"),
    ],
)
def test_what_cannot_be_written(value: Tensor, text: str) -> None:
    layer = quantized_layer(torch.randn(32, 32), config=hf_accel.WeightConfig())
    before = bits(layer.weight.data.clone())
    with pytest.raises(hf_accel.UnsupportedError, match=text):
        layer.weight.data = value
    assert bits(layer.weight.data.clone()) == before
    assert layer.writes == 0 and not layer.changes
