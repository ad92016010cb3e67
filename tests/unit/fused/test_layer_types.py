"""Decoder layers of several types in one model, of which each is one native call: the bits of their own code."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.fused.hf.layer_calls import LayerCalls
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.call_form import CallForm
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.rotations import rotation_of_one, rotation_of_two
from hf_accel.recognition.trace import Trace
from hf_accel.undo.state import FUSED
from tests.selection import seeds, some_long
from tests.unit.fused.test_decoder_layers import counted, layers_of, logits_of, same_bits

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

FULL, WINDOWED = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "initializer_range": 0.25, "sliding_window": 7, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "num_hidden_layers": 4, "layer_types": [WINDOWED, FULL, WINDOWED, FULL],
}  # fmt: skip
GEMMA: dict[str, Any] = SIZES | {
    "vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": False,
}  # fmt: skip


def gemma(dtype: torch.dtype = torch.float32, **other: Any) -> PreTrainedModel:
    kind = getattr(transformers, "Gemma4ForCausalLM", None)
    if kind is None:
        pytest.skip("this transformers has no Gemma 4")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = kind(transformers.Gemma4TextConfig(**GEMMA | other)).eval()
        for layer in model.model.layers:
            layer.layer_scalar.fill_(random.Random(5).uniform(0.4, 1.6))
    return model.to(dtype)


def gpt_oss(**other: Any) -> PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES | experts | other))
    return model.eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["float", "int8", "int4"])
@pytest.mark.parametrize("own", [0, 32])
def test_gemma_4(own: int, weights: Any, dtype: torch.dtype) -> None:
    """Other widths of heads, keys that are values, one number for all columns, and inputs of each layer."""
    model = hf_accel.patch(gemma(dtype, hidden_size_per_layer_input=own), weights=weights)
    assert len(layers_of(model)) == 4
    calls = same_bits(model)
    assert calls[True] > 10 * calls[False] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4, inputs of layers", "GptOss"])
def test_tokens_are_those_of_stock(kind: str, weights: Any) -> None:
    stock = gpt_oss() if kind == "GptOss" else gemma(hidden_size_per_layer_input=6 if "inputs" in kind else 0)
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    ids, options = torch.arange(3, 40)[None], {"max_new_tokens": 24, "do_sample": False}
    with counted() as calls:
        found = model.generate(ids, **options)
    assert calls[True] >= 24 * 4 and not calls[False]
    if weights is None:
        assert torch.equal(found, stock.generate(ids, **options))
        return
    with counted(native=False):
        near = model(found).logits[0, :-1]
    assert (near.argmax(-1)[36:] == found[0, 37:]).float().mean() > 0.9  # of quantized modules one by one


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_tables_of_half_a_head(weights: Any, dtype: torch.dtype) -> None:
    model = hf_accel.patch(gpt_oss().to(dtype), weights=weights)
    assert len(layers_of(model)) == 4
    calls = same_bits(model)
    assert calls[True] > 10 * calls[False] > 0


@pytest.mark.parametrize("seed", seeds(0, 10))
def test_random_configurations(seed: int) -> None:
    """Heads, their widths, windows, mixes of layers, shared keys and values, and inputs of layers change no token."""
    numbers = random.Random(seed)
    count, own = numbers.randint(2, 6), [FULL, WINDOWED]
    other = {
        "num_attention_heads": numbers.choice([4, 8]), "num_key_value_heads": numbers.choice([1, 2, 4]),
        "head_dim": numbers.choice([8, 16, 24]), "global_head_dim": numbers.choice([8, 16, 40]),
        "num_global_key_value_heads": numbers.choice([1, 2, 4]), "attention_k_eq_v": numbers.random() < 0.5,
        "hidden_size_per_layer_input": numbers.choice([0, 5, 16]), "sliding_window": numbers.choice([2, 5, 30]),
        "num_hidden_layers": count, "layer_types": [*(own + numbers.choices(own, k=count))[: count - 1], FULL],
        "hidden_activation": numbers.choice(["gelu_pytorch_tanh", "silu"]),
        "num_kv_shared_layers": numbers.randint(0, max(0, count - 3)) if count > 2 else 0,
    }  # fmt: skip
    stock = gemma(**other)
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    assert len(layers_of(model)) == count
    ids, options = torch.arange(3, 20)[None], {"max_new_tokens": 20, "do_sample": False}
    with counted() as calls:
        found = model.generate(ids, **options)
    assert calls[True] and not calls[False]
    assert torch.equal(found, stock.generate(ids, **options))


SHARED: dict[str, Any] = {
    "num_kv_shared_layers": 3, "num_hidden_layers": 6, "hidden_size_per_layer_input": 32, "attention_k_eq_v": False,
    "layer_types": [WINDOWED, FULL, WINDOWED, WINDOWED, FULL, FULL],
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_keys_of_other_layers(kv: Any, weights: Any, dtype: torch.dtype) -> None:
    """Those of pages that another layer has written, windows among them: each layer is one native call."""
    sizes = {"head_dim": 32, "global_head_dim": 32}
    model = hf_accel.patch(gemma(dtype, **SHARED | sizes), weights=weights, cache=hf_accel.CacheConfig(dtype=kv))
    assert len(layers_of(model)) == 6
    calls = same_bits(model)
    assert calls[True] > 3 * calls[False] > 0
    with counted() as calls:
        model.generate(torch.arange(3, 40)[None], max_new_tokens=8, do_sample=False)
    assert calls == {True: 48}


@pytest.mark.parametrize("watched", some_long([[1], [2], [3], [5], [1, 3], [2, 4]], [2], [3], [1, 3]))
def test_some_layers_run_their_own_code(watched: list[int]) -> None:
    """Keys that a native call has left are found by code that takes them apart, and those of code by native calls."""
    stock = gemma(**SHARED)
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    seen: list[int] = []
    for index in watched:
        layers_of(model)[index].mlp.down_proj.register_forward_hook(lambda *given: seen.append(1))
    ids, options = torch.arange(3, 40)[None], {"max_new_tokens": 12, "do_sample": False}
    with counted() as calls:
        found = model.generate(ids, **options)
    assert torch.equal(found, stock.generate(ids, **options))
    assert len(seen) == 12 * len(watched)
    # A prompt longer than its window is not all kept: the layer that would leave its keys runs its own code then.
    assert calls[False] in (12 * len(watched), 12 * len(watched) + 1)
    prompts = [[*range(3, 3 + length)] for length in (3, 9, 30)]
    settings = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    together = model.generate_batch(prompts, generation_config=settings)
    for prompt, output in zip(prompts, together.values(), strict=True):
        alone = stock.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert output.generated_tokens == alone.tolist()


@torch.no_grad()
def test_changes_are_seen() -> None:
    model = hf_accel.patch(gemma(hidden_size_per_layer_input=6), weights=None)
    before, layer = logits_of(model), layers_of(model)[1]
    layer.layer_scalar.mul_(1.5)
    second = logits_of(model)
    assert not torch.allclose(second[0], before[0], rtol=1e-3)
    layer.layer_scalar = torch.tensor([0.3])
    layer.per_layer_input_gate.weight.mul_(-1)
    third = logits_of(model)
    with counted(native=False):
        for one, other in zip(third, logits_of(model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(second[0], third[0], rtol=1e-3)


def test_inputs_of_another_size_run_the_own_code() -> None:
    """What a layer is given for each token is read with one size alone."""
    model = hf_accel.patch(gemma(hidden_size_per_layer_input=6), weights=None)
    logits_of(model)
    layer = layers_of(model)[0]
    calls: LayerCalls[Any] = vars(layer)[FUSED]
    assert calls.programme is not None and calls.programme.of_layer.stride == 6
    cache, x, wide = hf_accel.PagedCache(model.config), torch.randn(1, 5, 64), torch.randn(1, 5, 4, 7)
    with pytest.raises(RuntimeError), torch.no_grad():
        model.model(inputs_embeds=x, per_layer_inputs=wide, past_key_values=cache)


# -- what is not known -----------------------------------------------------------------------------------


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos[:, None], sin[:, None]
    parts = [x.chunk(2, -1) for x in (q, k)]
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in parts)


def turned_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return halves(q, k, cos, -sin)


def of_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return x * cos.unsqueeze(unsqueeze_dim) + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin.unsqueeze(unsqueeze_dim)


def of_one_by_head(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return of_one(x, cos, sin, unsqueeze_dim) * (2 if unsqueeze_dim == 2 else 1)


def test_forms_of_rotations() -> None:
    known = rotation_of_two(halves)  # type: ignore[arg-type]
    assert known.half_tables and rotation_of_two(halves) is known  # type: ignore[arg-type]
    assert not rotation_of_two(turned_back).half_tables  # type: ignore[arg-type]
    assert rotation_of_one(of_one) is not None
    assert rotation_of_one(of_one_by_head) is None
    assert rotation_of_one(turned_back) is None  # type: ignore[arg-type]


class Scaled(nn.Module):
    """A layer that ends with a product in the place of its last sum."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.norm, self.linear, self.last = nn.LayerNorm(16), nn.Linear(16, 48), nn.LayerNorm(16)
        self.register_buffer("scalar", torch.full((size,), 0.5))

    def end(self, x: Any, out: Any) -> Any:
        out *= self.scalar
        return out

    def forward(self, x: Any, past_key_values: Any = None) -> Any:
        parts = self.linear(self.norm(x)).view(*x.shape[:-1], -1, 24).transpose(1, 2).chunk(3, dim=-1)
        k, v = past_key_values.update(*parts[1:], 0)
        out, _ = parts[0].attended(self, k, v, None)
        return self.end(x, x + out.reshape(*x.shape[:-1], 16))


class ReadsAgain(Scaled):
    def end(self, x: Any, out: Any) -> Any:
        before = out
        out *= self.scalar
        return before + out


class OverItsInput(Scaled):
    def end(self, x: Any, out: Any) -> Any:
        x *= self.scalar
        return x + out


class NormsOfTheProduct(Scaled):
    def end(self, x: Any, out: Any) -> Any:
        before = self.last(out)
        out *= self.scalar
        return before + out


class SumInPlace(Scaled):
    """A layer that adds to what a linear layer gave in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def end(self, x: Any, out: Any) -> Any:
        out = self.second(x)
        out += x
        return x + out


class ReadsBehindASum(SumInPlace):
    def end(self, x: Any, out: Any) -> Any:
        gate = nn.functional.silu(self.first(x))
        out = before = self.second(x)
        out += x
        return x + gate * before  # the activation and this product are one operation at the place of the product


class SumWithItself(SumInPlace):
    def end(self, x: Any, out: Any) -> Any:
        out = self.second(x)
        out += out
        return x + out


class SumOverItsInput(SumInPlace):
    def end(self, x: Any, out: Any) -> Any:
        x += out
        return x + out


def test_sums_in_place() -> None:
    assert traced(SumInPlace())[-3:] == ["linear", "add", "add"]
    for layer in (ReadsBehindASum(), SumWithItself(), SumOverItsInput()):
        with pytest.raises(UntraceableError, match="in place"):
            traced(layer)


def traced(layer: nn.Module) -> list[str]:
    trace = Trace(torch.float32)
    trace.layer(layer, 16, CallForm("x", frozenset({"past_key_values"})))
    return [operation.kind for operation in trace.operations]


def test_products_in_place_of_a_sum() -> None:
    assert traced(Scaled())[-2:] == ["add", "multiply"]
    assert traced(NormsOfTheProduct())[-1] == "add"  # it reads the sum before it is overwritten
    for layer in (ReadsAgain(), OverItsInput(), Scaled(16), Scaled().to(torch.float64)):
        with pytest.raises(UntraceableError):
            traced(layer)
