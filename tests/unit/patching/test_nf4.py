"""weights="nf4": bitsandbytes' own layers, put in and taken out by patch() and unpatch()."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.linear.nf4 import has_fused_kernel, is_nf4
from hf_accel.verify.references import quantized_reference, widened

from ...devices import without_fused_nf4
from ...parity.families import DECODER, FAMILIES, build, inputs
from ...parity.snapshot import bits, logits, snapshot
from ...selection import some_long

bnb: Any = pytest.importorskip("bitsandbytes")
HAS_FUSED_KERNEL = has_fused_kernel()


@pytest.fixture(autouse=True)
def _same_on_every_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fused" not in request.node.name:
        without_fused_nf4(monkeypatch)


def generate(model: Any, **keywords: Any) -> Tensor:
    return model.generate(**inputs("left"), **{"max_new_tokens": 8, "do_sample": False, **keywords})


def loaded_like(model: PreTrainedModel, path: Path, **keywords: Any) -> Any:
    """With the attention of `model`, which a checkpoint does not name: the sdpa of older transformers does not cap."""
    keywords["attn_implementation"] = model.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(path, **keywords)


def nf4_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_nf4(module)}


def by_hand(linear: nn.Linear) -> Any:
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=linear.weight.dtype,
        compress_statistics=False, quant_type="nf4",
    )  # fmt: skip
    layer.load_state_dict({name: value.clone() for name, value in linear.state_dict().items()})
    return layer.to(linear.weight.dtype).to("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_layers_are_those_made_by_hand(family: str, dtype: torch.dtype) -> None:
    model, stock = (build(family).to(dtype) for _ in range(2))
    hf_accel.patch(model, weights="nf4")
    layers = nf4_layers(model)
    assert layers.keys() == {n for n, m in stock.named_modules() if type(m) is nn.Linear} - {"lm_head"}
    x = torch.randn(3, 5, 64).to(dtype)
    for name, layer in layers.items():
        expected = by_hand(stock.get_submodule(name))
        assert type(layer) is bnb.nn.Linear4bit and layer.compute_dtype is dtype
        assert bits(layer.weight.data) == bits(expected.weight.data)
        assert bits(layer.weight.quant_state.absmax) == bits(expected.weight.quant_state.absmax)
        with torch.no_grad():
            given = x[..., : layer.in_features]
            assert bits(layer(given)) == bits(expected(given))


@pytest.mark.parametrize("family", some_long(FAMILIES, "qwen2", "mistral"))
def test_tokens_of_transformers_own_quantization(family: str, tmp_path: Path) -> None:
    stock = build(family)
    stock.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"],
    )  # fmt: skip
    expected = loaded_like(stock, tmp_path, quantization_config=settings)
    model = hf_accel.patch(loaded_like(stock, tmp_path), weights="nf4")
    assert len(nf4_layers(model)) == sum(isinstance(m, bnb.nn.Linear4bit) for m in expected.modules()) > 0
    last = (logits(m)[:, -1] for m in (model, expected))  # implementations differ in what they make of padding
    torch.testing.assert_close(*last, rtol=1e-4, atol=1e-4)
    tokens = generate(expected)
    assert torch.equal(generate(model), tokens)
    assert torch.equal(generate(model, prompt_lookup_num_tokens=3), tokens)
    loaded = loaded_like(stock, tmp_path, quantization_config=hf_accel.AccelConfig(weights="nf4"))
    assert hf_accel.is_patched(loaded)
    assert nf4_layers(loaded).keys() == nf4_layers(model).keys()
    assert torch.equal(generate(loaded), tokens)


@pytest.mark.covering(1)
@pytest.mark.parametrize("keep", ["auto", True])
@pytest.mark.parametrize("family", FAMILIES)
def test_undo(family: str, keep: Any, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before, originals = snapshot(model), [m for m in model.modules() if hasattr(m, "weight")]
    hf_accel.patch(model, weights="nf4", keep_original=keep)
    freed = sum(module.weight.numel() == 0 for module in originals)
    assert freed == (0 if keep is True else len(nf4_layers(model)))
    assert model.is_loaded_in_4bit and model.config.quantization_config.quant_method == "bitsandbytes"
    generate(model)
    hf_accel.unpatch(model)
    assert snapshot(model) == before
    assert not hasattr(model, "is_loaded_in_4bit")


def test_a_model_that_was_loaded_in_nf4_goes_back(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    config = hf_accel.AccelConfig(weights="nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    tokens = generate(model)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    hf_accel.unpatch(model)
    assert bits(logits(model)) == bits(logits(stock))
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(generate(hf_accel.patch(model, weights="nf4")), tokens)


def test_unpatch_frees_the_layers_at_once() -> None:
    model = hf_accel.patch(build("llama"), weights="nf4")
    generate(model)
    left = [weakref.ref(layer.weight) for layer in nf4_layers(model).values()]
    gc.collect()
    gc.disable()
    try:
        hf_accel.unpatch(model)
        assert not any(reference() is not None for reference in left)
    finally:
        gc.enable()


def test_originals_in_memory_are_kept_and_given_up() -> None:
    """A model that came from no checkpoint."""
    model, before = build("llama"), bits(logits(build("llama")))
    with hf_accel.patched(model, weights="nf4"):
        assert bits(logits(model)) != before
    assert bits(logits(model)) == before
    hf_accel.patch(model, weights="nf4", keep_original=False)
    with pytest.raises(hf_accel.UnsupportedError, match="dropped by keep_original=False"):
        hf_accel.unpatch(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_as_what_bitsandbytes_saves(family: str, tmp_path: Path) -> None:
    model = hf_accel.patch(build(family), weights="nf4", cache=None, attention=None, fuse=False)
    model.save_pretrained(tmp_path)
    loaded = loaded_like(model, tmp_path)
    assert not hf_accel.is_patched(loaded)
    names = {name for name, module in loaded.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert names == nf4_layers(model).keys()
    assert bits(logits(loaded)) == bits(logits(model))
    expected = bits(logits(loaded))
    hf_accel.patch(loaded)  # attention, cache and generation; its linears are left
    hf_accel.unpatch(loaded)
    assert bits(logits(loaded)) == expected


def test_copies() -> None:
    model, stock = hf_accel.patch(build("llama"), weights="nf4"), bits(logits(build("llama")))
    expected, tokens = bits(logits(model)), generate(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert bits(logits(other)) == expected
        assert torch.equal(generate(other), tokens)
        hf_accel.unpatch(other)
        assert bits(logits(other)) == stock
    assert bits(logits(model)) == expected


def test_speculation_gives_the_same_tokens() -> None:
    model = hf_accel.patch(build("llama"), weights="nf4")
    tokens = generate(model)
    for speculative in ("ngram", "suffix", "auto"):
        assert torch.equal(generate(model, speculative=speculative), tokens)
    assert torch.equal(generate(model, assistant_model=build("llama")), tokens)


def test_the_plan_says_so() -> None:
    plan = hf_accel.plan(build("llama"), weights="nf4")
    (linears, head) = [line for line in plan.lines if line.topic == "weights"]
    assert (linears.what, linears.choice) == ("14 linears", "nf4 by bitsandbytes")
    assert "AVX-512 BF16" in linears.reason
    assert (head.choice, head.reason) == ("as is", "a checkpoint of bitsandbytes holds no INT8 head")
    assert hf_accel.plan(build("llama"), config=plan.config.to_dict()).config == plan.config
    mlps = [(line.choice, line.reason) for line in plan.lines if "MLP" in line.what]
    without_kernels = kernels.refusal() is not None  # nothing is fused then
    assert mlps == [("stock", "the forward of a linear layer in it is not nn.Linear's")] * (not without_kernels)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"format": "nf4"}, "with format='nf4', bits=8 is not known; use 4"),
        ({"group_size": 128}, "with format='nf4', group_size=128 is not known; use 64"),
        ({"symmetric": False}, "with format='nf4', symmetric=False is not known; use True"),
        ({"activations": "int8"}, "with format='nf4', activations='int8' is not known; choose one of 'auto', None"),
        ({"method": "gptq", "calibration": ["a"]}, "with format='nf4', method='gptq' is not known; use 'rtn'"),
        ({"average_bits": 4.5, "calibration": ["a"]}, "with format='nf4', average_bits=4.5 is not known; use None"),
        ({"head": "int8"}, "with format='nf4', head='int8' is not known; use None"),
        ({"only_if_faster": True}, "with format='nf4', only_if_faster=True is not known; use False"),
        ({"format": "fp4"}, "format='fp4' is not known; choose one of 'int', 'fp8', 'nf4'"),
    ],
    ids=str,
)
def test_what_bitsandbytes_does_not_have_is_refused(weights: dict[str, Any], text: str) -> None:
    given = weights if "format" in weights and len(weights) == 1 and weights["format"] == "nf4" else None
    with pytest.raises(hf_accel.UnsupportedError, match=text):
        hf_accel.patch(build("llama"), weights=given or {"bits": 4, "format": "nf4", **weights})


def test_skipped_layers_stay(tmp_path: Path) -> None:
    weights = {"bits": 4, "format": "nf4", "skip": ["layers.1.mlp.up_proj", "q_proj"]}
    model = hf_accel.patch(build("llama"), weights=weights)
    assert len(nf4_layers(model)) == 14 - 3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.layers[1].mlp.up_proj) is nn.Linear
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in loaded.modules()) == 11


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(hf_accel.UnsupportedError, match=r"pip install bitsandbytes, or choose weights='int4'"):
        hf_accel.patch(build("llama"), weights="nf4")


def test_what_cannot_be_quantized_changes_nothing() -> None:
    model = build("llama")
    before = snapshot(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    value = weight[3, 4].item()
    with torch.no_grad():
        weight[3, 4] = float("nan")
    with pytest.raises(hf_accel.UnsupportedError, match=r"up_proj' cannot be quantized.*NaN or infinity"):
        hf_accel.patch(model, weights="nf4")
    with torch.no_grad():
        weight[3, 4] = value
    assert snapshot(model) == before


def test_other_formats_refuse_the_model(tmp_path: Path) -> None:
    model = hf_accel.patch(build("llama"), weights="nf4")
    for save in (hf_accel.save_compressed, hf_accel.save_gguf):
        with pytest.raises(hf_accel.UnsupportedError, match=r"by bitsandbytes; model\.save_pretrained writes it"):
            save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_verify_compares_with_the_same_weights() -> None:
    model = hf_accel.patch(build("llama"), weights="nf4")
    certificate = hf_accel.verify(model, [[5, 6, 7, 8], [9, 10, 11]], max_new_tokens=6)
    assert certificate.exact and certificate.reference == "the quantized reference"
    assert certificate.cost is not None  # against the float originals
    assert nf4_layers(model) and hf_accel.is_patched(model)


def test_the_report() -> None:
    report = hf_accel.quantization_report(
        hf_accel.patch(build("llama"), weights="nf4"), torch.randint(1, 100, (2, 20))
    )
    assert report.bits == 4.5  # a float32 for each 64 weights
    assert report.kl > 0
    assert [layer.bits for layer in report.layers] == [4.5, 4.5]


@pytest.mark.skipif(not HAS_FUSED_KERNEL, reason="this CPU lacks AVX-512 BF16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_gives_the_bits_of_transformers_own_quantization(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = LlamaConfig(**{**DECODER, "hidden_size": 64, "intermediate_size": 128})
    LlamaForCausalLM(wide).to(dtype).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = bits(logits(model))
    hf_accel.patch(model, weights="nf4", attention=None, cache=None, fuse=False)
    assert len(nf4_layers(model)) == 14
    assert bits(logits(model)) == bits(logits(stock))
    assert torch.equal(generate(model), generate(stock))
    hf_accel.unpatch(model)
    assert bits(logits(model)) == before


@pytest.mark.skipif(not HAS_FUSED_KERNEL, reason="this CPU lacks AVX-512 BF16")
def test_layers_that_the_fused_kernel_cuts_stay_and_the_plan_says_so() -> None:
    plan = hf_accel.plan(build("llama"), weights="nf4")
    (reason,) = {line.reason for line in plan.lines if line.topic == "weights" and "fused kernel takes" in line.reason}
    assert "multiples of 32 outputs and 64 inputs" in reason


def test_what_bitsandbytes_reorders_has_not_changed() -> None:
    model = build("llama")
    before = snapshot(model)
    layer = nf4_layers(hf_accel.patch(model, weights="nf4"))["model.layers.1.mlp.down_proj"]
    packed, weight = layer.weight.data.clone(), layer.weight
    weight.data, weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(packed, weight.quant_state)
    assert not torch.equal(weight.data.flatten(), packed.flatten())
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def test_the_wider_model_that_judges_near_ties() -> None:
    model = hf_accel.patch(build("llama").bfloat16(), weights="nf4")
    before = bits(logits(model))
    wide = widened(quantized_reference(model))
    assert {layer.compute_dtype for layer in nf4_layers(wide).values()} == {torch.float32}
    assert logits(wide).dtype is torch.float32
    torch.testing.assert_close(logits(wide)[:, -1], logits(model)[:, -1].float(), rtol=0.1, atol=0.5)
    assert bits(logits(model)) == before


# -- adapters ------------------------------------------------------------------------------------------

TARGETS = ["q_proj", "v_proj", "down_proj"]


def with_adapter(model: PreTrainedModel) -> Any:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
        return peft.get_peft_model(model, config)


def dequantized() -> PreTrainedModel:
    model, twin = build("llama"), hf_accel.patch(build("llama"), weights="nf4")
    for name, layer in nf4_layers(twin).items():
        weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        model.get_submodule(name).weight.data.copy_(weight)
    return model


def test_a_step_of_qlora() -> None:
    model, expected = with_adapter(hf_accel.patch(build("llama"), weights="nf4")), with_adapter(dequantized())
    kinds = {type(m).__name__ for m in model.modules() if hasattr(m, "base_layer")}
    assert kinds == {"Linear4bit"}  # PEFT's own for bitsandbytes
    batch = inputs("left") | {"labels": inputs("left")["input_ids"]}
    for one in (model, expected):
        one.train()
        one(**batch).loss.backward()
    theirs = {name: p for name, p in expected.named_parameters() if p.requires_grad}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == theirs.keys() and len(trained) == 12
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-5)
    before = {name: bits(p) for name, p in model.named_parameters()}
    torch.optim.SGD(trained.values(), lr=0.1).step()
    changed = {name for name, p in model.named_parameters() if bits(p) != before[name]}
    assert changed == trained.keys()


def test_adapters_and_unpatch() -> None:
    model = hf_accel.patch(build("llama"), weights="nf4")
    adapted = with_adapter(model)
    with pytest.raises(hf_accel.UnsupportedError, match=r"q_proj' has an adapter that is made for bitsandbytes"):
        hf_accel.unpatch(adapted)
    hf_accel.unpatch(adapted.unload())
    assert bits(logits(model)) == bits(logits(build("llama")))


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear")
def test_merged_weights_cannot_be_taken_back() -> None:
    merged = with_adapter(hf_accel.patch(build("llama"), weights="nf4")).merge_and_unload()
    before = bits(logits(merged))
    with pytest.raises(hf_accel.UnsupportedError, match=r"6 NF4 layers.*other weights since patch"):
        hf_accel.unpatch(merged)
    assert bits(logits(merged)) == before


def test_adapters_that_were_there_before() -> None:
    with pytest.raises(hf_accel.UnsupportedError, match=r"q_proj' has an adapter.*patch the model first"):
        hf_accel.patch(with_adapter(build("llama")), weights="nf4")


def test_estimate() -> None:
    model = build("llama")
    given = hf_accel.estimate(model, context=8, batch=1, weights="nf4")
    patched = hf_accel.estimate(hf_accel.patch(model, weights="nf4"), context=8, batch=1)
    assert given.weights_bytes == patched.weights_bytes
    assert given.weights_bytes < hf_accel.estimate(build("llama"), context=8, batch=1).weights_bytes
