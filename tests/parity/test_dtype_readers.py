"""Modules that ask for the dtype of a weight: T5 converts the input of `wo` to it, and its `wo` is quantized."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, T5ForConditionalGeneration

import hf_accel
from hf_accel.linear import QuantLinear
from hf_accel.linear.writable import Lent

from .families import VOCABULARY
from .snapshot import snapshot

IDS = torch.arange(3, 33).view(3, 10)
GIVEN = {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]}


def t5(kind: str, dtype: torch.dtype = torch.float32, model_type: str = "T5") -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{model_type}Config")(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, feed_forward_proj=kind,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{model_type}ForConditionalGeneration")(config).eval().to(dtype)
    for name, module in model.named_modules():
        if name.endswith("wo"):
            module.float()  # as from_pretrained() keeps it
    return model


@torch.no_grad()
def test_mamba_makes_no_float_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model reads the dtype of the head; transformers still sees the signature of its code."""
    torch.manual_seed(3)
    sizes = {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1, "hidden_size": 64}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes)).eval()
    signature = inspect.signature(model.forward)
    hf_accel.patch(model, weights="int8")
    assert type(model.lm_head) is QuantLinear and inspect.signature(model.forward) == signature
    own_code = Mamba2ForCausalLM.forward(model, IDS).logits
    monkeypatch.setattr(Lent, "__init__", lambda *_: pytest.fail("the head was made in floating point"))
    assert torch.equal(model(IDS).logits, own_code)
    assert model.generate(IDS, max_new_tokens=2, min_new_tokens=2, do_sample=False).shape == (3, 12)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(**GIVEN).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["relu", "gated-gelu"])
@pytest.mark.parametrize("fuse", [True, False])
def test_wo_is_quantized_and_never_made_in_floating_point(
    kind: str, dtype: torch.dtype, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = t5(kind, dtype)
    expected = logits(model)
    hf_accel.patch(model, weights="int8", fuse=fuse)
    layers = [module for name, module in model.named_modules() if name.endswith("wo")]
    assert len(layers) == 4 and all(type(layer) is QuantLinear for layer in layers)
    own_code = logits(model)
    monkeypatch.setattr(Lent, "__init__", lambda *_: pytest.fail("the weight was made in floating point"))
    found = logits(model)
    assert found.dtype is expected.dtype and torch.equal(found, own_code)
    assert torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1).min() > 0.998


@pytest.mark.parametrize("model_type", ["T5", "MT5", "UMT5"])
def test_the_stand_in_gives_what_the_code_gives(model_type: str) -> None:
    model = t5("gated-gelu", model_type=model_type)
    hf_accel.patch(model, weights="int8", fuse=False)
    parents = [module for module in model.modules() if "wo" in dict(module.named_children())]
    for parent in parents:
        x = torch.randn(2, 3, 64)
        with torch.no_grad():
            assert torch.equal(parent(x), parent.original_class.forward(parent, x))


def test_unpatch_and_checkpoints(tmp_path: Any) -> None:
    model = t5("relu")
    before = snapshot(model, GIVEN)
    hf_accel.patch(model, weights="int8")
    model.save_pretrained(tmp_path)
    expected = logits(model)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(hf_accel.patch(loaded)), expected)
    hf_accel.unpatch(model)
    assert snapshot(model, GIVEN) == before


def test_exact_weights_stay_as_they_are() -> None:
    model = t5("relu")
    expected = logits(model)
    patched = hf_accel.patch(copy.deepcopy(model), weights=None)
    torch.testing.assert_close(logits(patched), expected)
    assert not any("ReadsDtypes" in kind.__name__ for module in patched.modules() for kind in type(module).__mro__)
