"""A model that another library quantized keeps its weights, its label and its way of being saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.generation.hf.model_runner import weights_salt
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.patching.originals import parameter_bytes
from hf_accel.tensors import is_plain_tensor, plain_tensors

from ...devices import without_fused_nf4
from ...parity.families import build, inputs
from ...parity.snapshot import bits, logits

ASKED = (
    r"weights= was asked for, but the model is quantized by {} already; leave weights= out, or load the float model"
)


def generate(model: PreTrainedModel) -> torch.Tensor:
    return model.generate(**inputs("left"), max_new_tokens=6, do_sample=False)


def reasons(model: PreTrainedModel) -> set[str]:
    return {line.reason for line in hf_accel.plan(model).lines if line.topic == "weights"}


def check_patched(model: PreTrainedModel, name: str, *, same_tokens: bool = True) -> None:
    """The default patch leaves the weights; a request for others is refused, one for "auto" is not.

    same_tokens: whether the library gives nearly the same results for nearly the same inputs.
    """
    before, tokens = logits(model), generate(model)
    assert reasons(model) == {f"the model is quantized by {name}"}
    for weights in ("int8", "nf4", {"bits": 4, "group_size": 32}):
        with pytest.raises(hf_accel.UnsupportedError, match=ASKED.format(name)):
            hf_accel.patch(model, weights=weights)
    for keywords in ({}, {"weights": None}, {"weights": "auto"}):
        with hf_accel.patched(model, **keywords):
            assert not any(isinstance(m, QuantLinear) for m in model.modules())
            assert torch.equal(generate(model), tokens) or not same_tokens
    assert bits(logits(model)) == bits(before)


def test_a_quantizer_of_transformers() -> None:
    model = build("llama")
    settings = SimpleNamespace(quant_method="theirs")
    quantizer = SimpleNamespace(quantization_config=settings, is_compileable=False)
    model.hf_quantizer, model.config.quantization_config = quantizer, {"quant_method": "theirs"}
    check_patched(model, "theirs")
    hf_accel.patch(model)
    assert model.hf_quantizer is quantizer
    assert model.config.quantization_config == {"quant_method": "theirs"}
    assert not hasattr(model, "quantization_method")


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_bitsandbytes_saves_what_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    without_fused_nf4(monkeypatch)
    from transformers import BitsAndBytesConfig

    build("llama").save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(**{f"load_in_{kind}": True})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float16)
    check_patched(model, "bitsandbytes", same_tokens=False)
    expected = logits(model)
    hf_accel.patch(model).save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.quantization_config.quant_method == "bitsandbytes"
    assert type(loaded.model.layers[0].mlp.up_proj) is type(model.model.layers[0].mlp.up_proj)
    assert bits(logits(loaded)) == bits(expected)


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization")


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("settings", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao(torchao: Any, settings: str) -> None:
    model = build("llama")
    torchao.quantize_(model, getattr(torchao, settings)())
    # Where it rounds activations, the last bit of another layer's result decides over a whole step; its own layers
    # compute what they did.
    check_patched(model, type(model.lm_head.weight).__name__, same_tokens="Activation" not in settings)
    linears, x = [m for m in model.modules() if isinstance(m, torch.nn.Linear)], torch.randn(5, 64)
    with torch.no_grad():
        expected = [linear(x[:, : linear.in_features]) for linear in linears]
        with hf_accel.patched(model):
            found = [linear(x[:, : linear.in_features]) for linear in linears]
    assert all(map(torch.equal, found, expected))


def test_torchao_after_patch(torchao: Any) -> None:
    """A native call does not read what has become another library's."""
    model = hf_accel.patch(build("llama"), weights=None)
    generate(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    expected = build("llama")
    torchao.quantize_(expected, torchao.Int8WeightOnlyConfig())
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-4)
    assert torch.equal(generate(model), generate(expected))


def test_the_bytes_of_torchao_weights(torchao: Any) -> None:
    layer = nn.Sequential(nn.Linear(64, 32, bias=False))
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    parts = list(plain_tensors(layer[0].weight))
    assert not is_plain_tensor(layer[0].weight)
    assert sum(part.nbytes for part in parts if part.dtype == torch.int8) == 64 * 32 + (0 if len(parts) == 2 else 32)
    assert parameter_bytes(layer.parameters()) == sum(part.nbytes for part in parts) < 64 * 32 * 4
    assert parameter_bytes([layer[0].weight, layer[0].weight]) == parameter_bytes(layer.parameters())


def test_a_prefix_from_before_a_write_to_torchao_weights(torchao: Any) -> None:
    model = build("llama")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    hf_accel.patch(model)
    first = weights_salt(model)
    assert weights_salt(model) == first
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        next(plain_tensors(weight)).zero_()
    second = weights_salt(model)
    assert second != first
    other = build("llama", seed=1)
    torchao.quantize_(other, torchao.Int8WeightOnlyConfig())
    model.model.layers[0].mlp.up_proj.weight = other.model.layers[0].mlp.up_proj.weight
    assert weights_salt(model) not in (first, second)


def test_plain_tensors() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))):
        assert is_plain_tensor(tensor)
        assert [part is tensor for part in plain_tensors(tensor)] == [True]
