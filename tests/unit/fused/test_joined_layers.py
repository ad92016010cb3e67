"""Decoder layers on a GPU whose steps share launches: the bits of their modules one by one, and fewer launches.

In Triton's interpreter, where the native library is hidden, or on a GPU.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.fused.forms import form_of_rotation
from hf_accel.fused.hf import JOINED, JoinedCalls, TracedForward
from hf_accel.fused.modules import NativeNorm
from hf_accel.kernels import triton
from hf_accel.kernels.triton.launch import Launch
from hf_accel.state import FUSED
from tests.devices import triton_device, without_native_kernels
from tests.families.models import build, families

from .test_decoder_layers import PROMPTS, llama, padded

DEVICE = triton_device()
LONG = pytest.mark.long
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.refusal(DEVICE) is not None, reason=str(triton.refusal(DEVICE))),
]
BOTH = frozenset({"rope", "add"})
# What of each can share a launch. Each has something that the others lack: HunYuan a norm between rotation and write,
# Granite a factor of what is added, Olmo2 no norm behind a sum, Gemma2 a window.
CLASSES: dict[str, frozenset[str]] = {
    "Qwen3": BOTH, "Gemma2": BOTH, "Olmo2": frozenset({"rope"}), "Granite": frozenset({"rope"}),
    "HunYuanDenseV1": frozenset({"add"}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_native_kernels(monkeypatch, "it is hidden")
    form_of_rotation.cache_clear()
    yield
    form_of_rotation.cache_clear()


def small(**changes: Any) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    return llama(**sizes | {"num_key_value_heads": 1} | changes).to(DEVICE)


@contextmanager
def counted(*, by_module: bool = False) -> Iterator[Counter[Any]]:
    """Counts the calls of layers by whether they went by the trace, and launches by name; by_module: none does."""
    calls: Counter[Any] = Counter()
    run, launch = JoinedCalls.run, Launch.run

    def watched(self: JoinedCalls, *args: Any) -> Any:
        result = None if by_module else run(self, *args)
        calls[result is not None] += 1
        return result

    def launched(self: Launch) -> None:
        of_sum = self.arguments.get("added") is not None
        calls["sum and norm" if of_sum else self.kernel.__name__] += 1
        launch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JoinedCalls, "run", watched)
        patch.setattr(Launch, "run", launched)
        yield calls


@torch.no_grad()
def logits_of(model: PreTrainedModel, *, inference: bool = False) -> list[Tensor]:
    """The logits of two rows over pages: a prompt, a token after it, and a prompt with padding."""
    seen = []
    with torch.inference_mode() if inference else nullcontext():
        for prompts in (PROMPTS[0][:3], PROMPTS[0][3:6]), (PROMPTS[0][:3], PROMPTS[1]):
            ids, mask = (x.to(DEVICE) for x in padded([list(prompt) for prompt in prompts]))
            cache = hf_accel.PagedCache(model.config)
            for columns in (slice(0, 2), slice(2, 3)):
                known = mask[:, : columns.stop]
                out: Any = model(ids[:, columns], attention_mask=known, past_key_values=cache, use_cache=True)
                seen.append(out.logits)
    return seen


def same_bits(model: PreTrainedModel, **options: Any) -> Counter[Any]:
    """Assert that layers by their trace give the bits of the modules one by one; returns what was counted."""
    with counted() as calls:
        got = logits_of(model, **options)
    with counted(by_module=True):
        expected = logits_of(model, **options)
    assert len(got) == len(expected) > 0
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), i
    return calls


def layers_of(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, TracedForward)]


# -- the same bits, in fewer launches ------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "HunYuanDenseV1" else LONG) for n in CLASSES])
def test_bits_of_the_modules_one_by_one(name: str) -> None:
    model = build(families()[f"{name}ForCausalLM"]).eval().to(DEVICE)
    plan = hf_accel.plan(model, weights=None)
    sites = [site for site in plan.fused.sites if site.kind == JOINED]
    assert {site.state.joined for site in sites} == {CLASSES[name]}, plan.fused.dropped
    hf_accel.patch(model, weights=None)
    calls = same_bits(model)
    assert calls[True] > calls[False] > 0  # padding runs the layer's own code
    assert ("rope" in CLASSES[name]) is (calls["rotate_and_write"] > 0)
    assert ("add" in CLASSES[name]) is (calls["sum and norm"] > 0)


@pytest.mark.parametrize(
    ("dtype", "weights", "kv", "deterministic"),
    [
        (torch.bfloat16, None, "int4", False),
        pytest.param(torch.bfloat16, {"bits": 4, "group_size": 32}, "auto", True, marks=LONG),
        pytest.param(torch.float16, "int8", "int8", False, marks=LONG),
        pytest.param(torch.float32, None, "fp8", False, marks=LONG),
    ],
)
def test_weights_dtypes_and_pages(weights: Any, dtype: torch.dtype, kv: Any, deterministic: bool) -> None:
    model = small(attention_bias=True).to(dtype)
    hf_accel.patch(model, weights=weights, cache=hf_accel.CacheConfig(dtype=kv), deterministic=deterministic)
    calls = same_bits(model)
    assert calls[True] and calls["rotate_and_write"] == calls[True]


def test_launches_of_a_layer() -> None:
    """Of a decode step: one less for K and V, one less for each sum but the last, which no layer's norm follows."""
    model = small()
    hf_accel.patch(model, weights=None, attention="triton")
    found = {}
    for by_module in (True, False):
        with counted(by_module=by_module) as calls, torch.no_grad():
            cache = hf_accel.PagedCache(model.config)
            model(torch.tensor([[5, 6]], device=DEVICE), past_key_values=cache)
            calls.clear()
            model(torch.tensor([[7]], device=DEVICE), past_key_values=cache)
        found[by_module] = calls
    layers, attention = 2, found[True]["attend"]
    apart = {"norm": 2 * layers + 1, "rotate": layers, "write": layers, "gate_and_multiply": layers, False: layers}
    assert found[True] == apart | {"attend": attention} | rest(found[True])
    together = {"rotate_and_write": layers, "sum and norm": 2 * layers - 1, "norm": 2, "gate_and_multiply": layers}
    assert found[False] == together | {True: layers, "attend": attention} | rest(found[True])


def rest(calls: Counter[Any]) -> dict[Any, int]:
    """What attention launches besides "attend"."""
    return {name: count for name, count in calls.items() if name == "merge"}


def test_in_inference_mode_a_sum_at_the_end_of_a_layer_stays_alone() -> None:
    """torch does not count writes to tensors there, and what stands between two layers may write."""
    model = small()
    hf_accel.patch(model, weights=None)
    calls = same_bits(model, inference=True)
    assert calls["sum and norm"] == calls["rotate_and_write"] == calls[True] > 0


def test_the_plan_says_what_shares_a_launch_and_why_other_layers_do_not() -> None:
    def lines(model: PreTrainedModel, **options: Any) -> list[tuple[str, str]]:
        plan = hf_accel.plan(model.to(DEVICE), weights=None, **options)
        return [(line.choice, line.reason) for line in plan.lines if line.what.endswith("decoder layers")]

    both = "rotation with the write of K and V; sum with the norm behind it"
    assert lines(small()) == [("one launch for two steps", both)]
    [(choice, reason)] = lines(build(families()["MixtralForCausalLM"]))
    assert choice == "module by module" and reason
    assert lines(small(), fuse=False) == lines(small(), cache=None) == []


# -- what changes after patch() ------------------------------------------------------------------------


@pytest.fixture
def model() -> PreTrainedModel:
    model = small()
    hf_accel.patch(model, weights=None)
    return model


def test_what_writes_between_two_layers_is_seen(model: PreTrainedModel) -> None:
    """The norm that was computed with the sum is that of another tensor, or of other numbers, then."""
    first: Any = layers_of(model)[0]
    plain = logits_of(model)

    def write(module: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(2)

    def replaces(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * 2

    for change in (write, replaces):
        hook = first.register_forward_hook(change)
        with counted() as calls:
            changed = logits_of(model)
        with counted(by_module=True):
            assert all(torch.equal(a, b) for a, b in zip(changed, logits_of(model), strict=True))
        assert calls[True] and not torch.equal(changed[0], plain[0])
        hook.remove()


def test_a_hook_on_a_part_brings_its_layers_own_code_back(model: PreTrainedModel) -> None:
    seen: list[int] = []
    hook = layers_of(model)[0].self_attn.k_proj.register_forward_hook(lambda *given: seen.append(1))
    with counted() as calls:
        passes = len(logits_of(model))
    assert len(seen) == passes and calls[True] + calls[False] == 2 * passes
    hook.remove()
    assert same_bits(model)[True] == 2 * calls[True] > 0


def change_eps(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 0.5


def change_weight(layer: Any) -> None:
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2


def change_scaling(layer: Any) -> None:
    layer.self_attn.scaling = 0.01


@pytest.mark.parametrize(
    "change", [*(pytest.param(c, marks=LONG) for c in (change_eps, change_scaling)), change_weight]
)
def test_a_change_is_seen(model: PreTrainedModel, change: Any) -> None:
    before = logits_of(model)
    change(layers_of(model)[1])
    assert same_bits(model)[True]
    assert not torch.equal(logits_of(model)[0], before[0])


def test_gradients_run_the_own_code(model: PreTrainedModel) -> None:
    ids = torch.tensor(PROMPTS[:1], device=DEVICE)
    with counted() as calls:
        model(ids, labels=ids).loss.backward()
    assert calls[False] and not calls[True]


def test_copies_know_their_own_norms(model: PreTrainedModel) -> None:
    logits_of(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        first, second = layers_of(twin)
        assert vars(first)[FUSED].programme is None
        assert vars(first)[FUSED].following is second.input_layernorm is not model.model.layers[1].input_layernorm
    change_weight(second)
    assert same_bits(twin)[True]


def test_unpatch_takes_the_layers_out(model: PreTrainedModel) -> None:
    hf_accel.unpatch(model)
    assert not layers_of(model) and not [m for m in model.modules() if isinstance(m, NativeNorm)]
    assert all(FUSED not in vars(layer) for layer in model.model.layers)
