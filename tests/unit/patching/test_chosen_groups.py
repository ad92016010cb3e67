"""Models whose widths groups of 128 do not divide, in INT4: finer groups where they fit, 8 bits where none does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.linear import QuantModule
from hf_accel.linear.backends.reference import REFERENCES
from hf_accel.linear.methods import rtn
from hf_accel.patching.weight_groups import fitted

IDS = torch.randint(0, 90, (2, 7), generator=torch.Generator().manual_seed(1))
SHAPE: dict[str, Any] = {
    "vocab_size": 90, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "tie_word_embeddings": True, "initializer_range": 0.2, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
# The inputs of q, k, v, gate and up, those of down, and the groups of both; o has 32 inputs. None: 8 bits.
WIDTHS: list[tuple[int, int, int | None, int | None]] = [(192, 96, 64, 32), (128, 172, 128, None), (80, 64, None, 64)]
widths = pytest.mark.parametrize(("hidden", "inner", "first", "second"), WIDTHS)


def made(hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(hidden_size=hidden, intermediate_size=inner, **SHAPE)).to(dtype).eval()


def layouts(model: PreTrainedModel) -> dict[str, tuple[int, int | None]]:
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, QuantModule))
    return {name: (module.layout.bits, module.layout.group_size) for name, module in modules}


def generated(model: Any, **keywords: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(IDS, max_new_tokens=6, do_sample=False, **keywords)
    return tokens


@pytest.mark.parametrize(("inputs", "bits", "group_size"), [(384, 4, 128), (576, 4, 64), (96, 4, 32), (4304, 8, None)])
def test_groups_that_are_left_to_a_weight_divide_its_inputs(inputs: int, bits: int, group_size: int | None) -> None:
    asked = replace(hf_accel.WeightConfig(4, symmetric=False), skip=("lm_head",), head="int4")
    for config in (asked, asked.for_head, hf_accel.WeightConfig(8, head="int4").for_head):
        assert config is not None
        kept, why = fitted(config, inputs)
        assert (kept.bits, kept.group_size, kept.skip) == (bits, group_size, config.skip)
        assert (why is None) == (kept == config)
    for named in (
        hf_accel.WeightConfig(4, group_size=128),
        replace(asked, group_size=32),
        hf_accel.WeightConfig(),
        hf_accel.WeightConfig(4, format="nf4"),
    ):
        assert fitted(named, inputs) == (named, None)
    assert "group_size" not in hf_accel.PatchConfig.build(weights=asked).to_dict()["weights"]
    assert hf_accel.PatchConfig.build(weights=replace(asked, group_size=64)).to_dict()["weights"]["group_size"] == 64


@pytest.mark.covering(1)
@widths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_groups_that_fit(
    hidden: int, inner: int, first: int | None, second: int | None, dtype: torch.dtype
) -> None:
    model, stock = made(hidden, inner, dtype), made(hidden, inner, dtype)
    plan = hf_accel.plan(model, weights="int4")
    hf_accel.patch(model, weights="int4", keep_original=True)
    found = layouts(model)
    wanted = {"q_proj": first, "up_proj": first, "down_proj": second, "o_proj": 32}
    for name, group in wanted.items():
        of_name = {layout for layer, layout in found.items() if layer.endswith(name)}
        assert of_name == {(8 if group is None else 4, group)}
    said = " ".join(line.reason for line in plan.lines if line.topic == "weights")
    for group, width in ((first, hidden), (second, inner), (32, 32)):
        if group is None:
            assert f"8 bits, as no group of 32 or more divides {width} inputs" in said
        elif group < 128:
            assert f"groups of {group}, as 128 does not divide {width} inputs" in said
    for name, layer in model.named_modules():
        if isinstance(layer, QuantModule):  # the kernel against plain torch
            float_layer: Any = stock.get_submodule(name)
            bits, group_size = found[name]
            rounded = rtn.quantize(float_layer.weight.detach(), hf_accel.WeightConfig(bits, group_size=group_size))
            assert torch.equal(layer.quantized.dequantize(dtype), rounded.dequantize(dtype))
            x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
            expected = REFERENCES["int8"].run(x, rounded, None)
            torch.testing.assert_close(layer(x), expected)
    counted = hf_accel.estimate(stock, weights="int4", bandwidth=1e9).weights_bytes
    assert counted == hf_accel.estimate(model, bandwidth=1e9).weights_bytes
    hf_accel.unpatch(model)
    assert torch.equal(model(IDS).logits, stock(IDS).logits)


@widths
def test_they_are_the_same_through_each_door(
    hidden: int, inner: int, first: int | None, second: int | None, tmp_path: Path
) -> None:
    stock = made(hidden, inner)
    stock.save_pretrained(tmp_path / "float")
    model = hf_accel.patch(stock, weights="int4")
    expected = generated(model)
    model.save_pretrained(tmp_path / "saved")
    hf_accel.save_compressed(model, tmp_path / "compressed")
    config = hf_accel.AccelConfig("int4")
    others = {
        "streamed": hf_accel.load(tmp_path / "float", weights="int4"),
        "quantization_config=": AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config),
        "saved": AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
    }
    for name, other in others.items():
        assert layouts(other) == layouts(model) and torch.equal(generated(other), expected), name
    body = {name: layout for name, layout in layouts(model).items() if name != "lm_head"}
    compressed = layouts(hf_accel.load(tmp_path / "compressed", weights=None))
    assert {name: layout for name, layout in compressed.items() if name != "lm_head"} == body


@pytest.mark.parametrize("hidden", [96, 80])
def test_a_head_a_table_and_drafts(hidden: int) -> None:
    """A tied table looks its rows up in a head with groups of 32, or in one with 8 bits."""
    model = made(hidden, 64)
    exact = generated(hf_accel.patch(made(hidden, 64), weights=None), speculative="self-int4")
    assert torch.equal(exact, generated(made(hidden, 64)))
    hf_accel.patch(model, weights=hf_accel.WeightConfig(4, head="int4", embedding="int4"))
    assert layouts(model)["lm_head"] == ((4, 32) if hidden == 96 else (8, None))
    rows = model.get_input_embeddings()(IDS)
    assert torch.equal(rows, model.lm_head.quantized.dequantize(torch.float32)[IDS])


def test_what_has_8_bits_for_its_width_is_part_of_average_bits() -> None:
    """down has 172 inputs, and 8 bits with a scale for each of 128 outputs; the others have 4, with groups of 128."""
    model = made(128, 172)
    texts = [list(range(1, 65))]
    with pytest.raises(hf_accel.UnsupportedError, match="4 bits for all linears that can have them, and their scales"):
        hf_accel.plan(model, weights={"average_bits": 4.5, "calibration": texts})
    hf_accel.patch(model, weights={"average_bits": 7, "calibration": texts})
    numbers = {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}
    linears = [layer for name, layer in numbers.items() if name != "lm_head"]
    count = sum(layer.in_features * layer.out_features for layer in linears)
    assert {layer.layout.bits for layer in linears} == {4, 8}
    assert 8 * sum(layer.spec.weight_bytes for layer in linears) / count <= 7
