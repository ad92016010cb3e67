"""A whole patched model on Triton's kernels, in the interpreter: the tokens are stock's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.kernels import triton
from hf_accel.kernels.triton.launch import Launch
from hf_accel.linear import QuantLinear
from hf_accel.linear.backends import measured_tiles, registry, tiles

from ....devices import without_native_kernels
from .processes import interpreted

pytestmark = interpreted


@pytest.fixture(autouse=True)
def triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU no backend of the CPU is for its tensors."""
    without_native_kernels(monkeypatch, "switched off by a test")
    monkeypatch.setattr(registry, "BACKENDS", tuple(b for b in registry.BACKENDS if b.device_types != ("cpu",)))


@pytest.fixture
def model() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=67, num_hidden_layers=2, pad_token_id=0, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval()


def generated(model: Any, new_tokens: int = 4, **options: Any) -> torch.Tensor:
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5], [0, 0, 9, 8, 9, 8, 9]])
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=(ids > 0).long(), max_new_tokens=new_tokens, do_sample=False, **options
    )
    return tokens


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was launched."""
    counts: Counter[str] = Counter()
    run = Launch.run

    def counting(launch: Launch) -> None:
        counts[launch.kernel.__name__] += 1
        run(launch)

    monkeypatch.setattr(Launch, "run", counting)
    return counts


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.long), {"prompt_lookup_num_tokens": 3}],
    ids=["plain", "speculative"],
)
def test_greedy_tokens_are_stocks(model: PreTrainedModel, launched: Counter[str], options: dict[str, Any]) -> None:
    expected = generated(model)
    with hf_accel.patched(model, weights=None):
        assert torch.equal(generated(model, **options), expected)
    assert launched["rotate_and_write"] and launched["attend"], "the kernels did not run"
    assert torch.equal(generated(model), expected)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kind",
    [{"bits": 4, "group_size": 32}, pytest.param({"format": "fp8"}, marks=pytest.mark.long)],
    ids=["int4", "fp8"],
)
def test_quantized_weights_give_the_tokens_of_the_reference(
    model: PreTrainedModel, launched: Counter[str], kind: dict[str, Any], deterministic: bool
) -> None:
    weights = {**kind, "activations": None}  # as floats: other backends would round them
    del model.model.layers[1]  # one is slow enough here
    model.config.num_hidden_layers = 1
    with hf_accel.patched(model, weights=weights, deterministic=deterministic):
        logits = model(torch.tensor([[5, 6, 7]])).logits
        plain, drafted = generated(model, 2), generated(model, 2, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, drafted)
    assert launched["multiply"] and launched["attend"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "refusal", lambda device: "switched off by a test")
        with hf_accel.patched(model, weights=weights):
            assert torch.allclose(model(torch.tensor([[5, 6, 7]])).logits, logits, atol=1e-5)


def test_tiles_are_measured_when_a_model_is_patched_and_shown_in_the_plan(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "MEASURED", {})
    monkeypatch.setattr(measured_tiles, "is_measured", lambda device_type: True)
    monkeypatch.setattr(measured_tiles, "place", lambda: "a GPU")
    monkeypatch.setattr(measured_tiles, "seconds_of", lambda rows, *_: timed.append(rows) or float(len(timed)))
    weights = {"bits": 4, "group_size": 32}
    assert "measured:" not in str(hf_accel.plan(model, weights=weights, deterministic=True)) and not timed
    with hf_accel.patched(model, weights=weights):
        measured = len(timed)
        shapes = {layer.choice.spec for layer in model.modules() if isinstance(layer, QuantLinear)}
        assert len(tiles.MEASURED) == len(shapes) == 5 and measured
        assert measured_tiles.file().exists()
        model(torch.tensor([[5, 6, 7]]))
    lines = hf_accel.plan(model, weights=weights).to_dict()["choices"]
    assert sum("measured: " in line["reason"] for line in lines if line["topic"] == "weights") >= 2
    assert len(timed) == measured


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantized_cache_gives_the_tokens_of_torch(
    model: PreTrainedModel, launched: Counter[str], dtype: str
) -> None:
    with hf_accel.patched(model, weights=None, attention="sdpa", cache={"dtype": dtype}):
        expected = generated(model)
    launched.clear()
    with hf_accel.patched(model, weights=None, cache={"dtype": dtype}):
        assert torch.equal(generated(model), expected)
    assert launched["attend"]
