"""Decoder layers on a GPU whose steps share launches: the bits of their modules one by one, and fewer launches.

By Triton, in its interpreter or on a GPU; and on the CPU, where the native library stands in for the two kernels.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.fused import joined_layer, modules
from hf_accel.fused.hf import joined_calls, sites
from hf_accel.fused.hf.joined_calls import JoinedCalls
from hf_accel.fused.hf.layer_calls import TracedForward
from hf_accel.fused.hf.sites import JOINED
from hf_accel.fused.modules import ACTIVATIONS, form_of_rotation, rms_norm, rope
from hf_accel.fused.norms import NativeNorm
from hf_accel.fused.row_products import products_of_rows
from hf_accel.kernels import cpu, triton
from hf_accel.kernels.cpu.attention import write_pages
from hf_accel.kernels.layouts import KV
from hf_accel.kernels.triton.launch import Launch
from hf_accel.patching import planning
from hf_accel.undo.state import FUSED
from tests.devices import triton_device, without_native_kernels

from .test_decoder_layers import PROMPTS, SIZES, llama, padded

INT4 = {"bits": 4, "group_size": 32}
BOTH = frozenset({"rope", "add"})
# What of each can share a launch. Each has something that the others lack: HunYuan a norm between rotation and write,
# Granite a factor of what is added, Olmo2 no norm behind a sum, Gemma2 a window.
CLASSES: dict[str, tuple[frozenset[str], dict[str, Any]]] = {
    "Qwen3": (BOTH, {}),
    "Gemma2": (BOTH, {"sliding_window": 2, "head_dim": 16, "attn_implementation": "eager"}),
    "Olmo2": (frozenset({"rope"}), {}),
    "Granite": (frozenset({"rope"}), {"residual_multiplier": 0.5}),
    "HunYuanDenseV1": (frozenset({"add"}), {"head_dim": 16}),
}


def add_rms_norm(x: Tensor, y: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """What the kernel computes, by the library."""
    total = x + y
    return total, rms_norm(total, *given, **options)


def rope_and_write(
    heads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], pages: KV, slots: Tensor, **form: bool
) -> tuple[Tensor, Tensor]:
    q, k = rope(*heads[:2], *tables, **form)
    write_pages(*(x.transpose(1, 2).flatten(0, 1) for x in (k, heads[2])), pages, slots)
    return q, k


@pytest.fixture(params=["library", pytest.param("triton", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where models are, and what computes there."""
    place = triton_device() if request.param == "triton" else "cpu"
    form_of_rotation.cache_clear()
    if request.param == "triton":
        if triton.refusal(place) is not None:
            pytest.skip(str(triton.refusal(place)))
        without_native_kernels(monkeypatch, "it is hidden")
    else:
        if triton.is_interpreted() or cpu.refusal() is not None:
            pytest.skip(cpu.refusal() or "Triton's interpreter takes the place of the library")
        for planner in (planning, sites):
            monkeypatch.setattr(planner, "has_library", lambda device_type: False)
        # Next to a GPU the library need not have been built.
        monkeypatch.setattr(planning, "rows_here", lambda dtype, **more: pytest.fail("the library is asked"))
        monkeypatch.setattr(joined_calls, "by_library", lambda x: False)
        monkeypatch.setattr(modules, "gated", lambda gate, up, activation: ACTIVATIONS[activation](gate) * up)
        monkeypatch.setattr(joined_layer, "add_rms_norm", add_rms_norm)
        monkeypatch.setattr(joined_layer, "rope_and_write", rope_and_write)
    yield place
    form_of_rotation.cache_clear()


def small(device: str, **changes: Any) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return llama(**sizes | {"num_key_value_heads": 1} | changes).to(device)


def of_class(name: str, device: str, **settings: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**SIZES | {"num_hidden_layers": 2} | settings)
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval().to(device)  # type: ignore[no-any-return]


@contextmanager
def counted(*, by_module: bool = False) -> Iterator[Counter[Any]]:
    """Counts the calls of layers by whether they went by the trace, and of what is joined; by_module: none does."""
    calls: Counter[Any] = Counter()
    run = JoinedCalls.run

    def watched(self: JoinedCalls, *args: Any) -> Any:
        result = None if by_module else run(self, *args)
        calls[result is not None] += 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JoinedCalls, "run", watched)
        for name in ("add_rms_norm", "rope_and_write"):
            patch.setattr(joined_layer, name, watching(calls, name))
        yield calls


def watching(calls: Counter[Any], name: str) -> Any:
    joint = getattr(joined_layer, name)

    def counting(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return joint(*args, **options)

    return counting


@contextmanager
def launched() -> Iterator[Counter[str]]:
    """Counts the launches of each kernel; those of a norm that come with a sum apart."""
    counts: Counter[str] = Counter()
    run = Launch.run

    def counting(launch: Launch) -> None:
        counts["sum and norm" if launch.arguments.get("added") is not None else launch.kernel.__name__] += 1
        run(launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", counting)
        yield counts


@torch.no_grad()
def logits_of(model: PreTrainedModel, *, inference: bool = False) -> list[Tensor]:
    """The logits of two rows over pages: a prompt, a token after it, and a prompt with padding."""
    seen = []
    with torch.inference_mode() if inference else nullcontext():
        for prompts in (PROMPTS[0][:3], PROMPTS[0][3:6]), (PROMPTS[0][:3], PROMPTS[1]):
            ids, mask = (x.to(model.device) for x in padded([list(prompt) for prompt in prompts]))
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


@pytest.mark.parametrize("name", CLASSES)
def test_bits_of_the_modules_one_by_one(name: str, device: str) -> None:
    joined, settings = CLASSES[name]
    model = of_class(name, device, **settings)
    plan = hf_accel.plan(model, weights=None)
    found = [site.state.joined for site in plan.fused.sites if site.kind == JOINED]
    assert set(found) == {joined}, plan.fused.dropped
    hf_accel.patch(model, weights=None)
    calls = same_bits(model)
    assert calls[True] > calls[False] > 0  # padding runs the layer's own code
    assert ("rope" in joined) is (calls["rope_and_write"] > 0)
    assert ("add" in joined) is (calls["add_rms_norm"] > 0)


@pytest.mark.covering(3)
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize(
    ("dtype", "weights", "deterministic"),
    [
        (torch.bfloat16, None, False),
        (torch.float16, "int8", True),
        (torch.float32, {"bits": 4, "group_size": 32}, True),
    ],
    ids=["bfloat16", "int8", "int4"],
)
def test_weights_dtypes_and_pages(weights: Any, dtype: torch.dtype, kv: Any, deterministic: bool, device: str) -> None:
    model = small(device, attention_bias=True).to(dtype)
    hf_accel.patch(model, weights=weights, cache=hf_accel.CacheConfig(dtype=kv), deterministic=deterministic)
    calls = same_bits(model)
    assert calls[True] == calls["rope_and_write"] > 0


def test_launches_of_a_layer(request: pytest.FixtureRequest, device: str) -> None:
    """Of a decode step: one less for K and V, one less for each sum but the last, which no layer's norm follows."""
    if "triton" not in request.node.name:
        pytest.skip("the library launches nothing")
    model = small(device)
    hf_accel.patch(model, weights=None, attention="triton")
    found = {}
    for by_module in (True, False):
        cache = hf_accel.PagedCache(model.config)
        with torch.no_grad(), counted(by_module=by_module):
            model(torch.tensor([[5, 6]], device=device), past_key_values=cache)
            with launched() as found[by_module]:
                model(torch.tensor([[7]], device=device), past_key_values=cache)
    layers = 2
    same = {"attend": layers, "gate_and_multiply": layers}
    assert found[True] == same | {"norm": 2 * layers + 1, "rotate": layers, "write": layers}
    assert found[False] == same | {"norm": 2, "sum and norm": 2 * layers - 1, "rotate_and_write": layers}


def test_in_inference_mode_a_sum_at_the_end_of_a_layer_stays_alone(device: str) -> None:
    """torch does not count writes to tensors there, and what stands between two layers may write."""
    model = small(device)
    hf_accel.patch(model, weights=None)
    calls = same_bits(model, inference=True)
    assert calls["add_rms_norm"] == calls["rope_and_write"] == calls[True] > 0


def test_the_plan_says_what_shares_a_launch_and_why_other_layers_do_not(device: str) -> None:
    def lines(model: PreTrainedModel, **options: Any) -> list[tuple[str, str]]:
        plan = hf_accel.plan(model.to(device), weights=None, **options)
        return [(line.choice, line.reason) for line in plan.lines if line.what.endswith("decoder layers")]

    both = "rotation with the write of K and V; sum with the norm behind it"
    assert lines(small(device)) == [("one launch for two steps", both)]
    [(choice, reason)] = lines(of_class("Mixtral", device))
    assert choice == "module by module" and reason
    assert lines(small(device), fuse=False) == lines(small(device), cache=None) == []


# -- several weights in one launch ---------------------------------------------------------------------

TOGETHER = ("multiply_few", "multiply_by_some")


@pytest.fixture
def on_triton(request: pytest.FixtureRequest) -> None:
    if "triton" not in request.node.name:
        pytest.skip("the library launches nothing")


def quantized(device: str, weights: Any = "int8", **options: Any) -> PreTrainedModel:
    return hf_accel.patch(small(device, attention_bias=True), weights=weights, attention="triton", **options)


def behind(model: PreTrainedModel, rows: int = 1, *, by_module: bool = False) -> tuple[Tensor, Counter[str]]:
    """The logits of a token of each row behind a prompt, and the launches of that step."""
    cache = hf_accel.PagedCache(model.config)
    numbers = torch.arange(2 * rows, device=model.device).view(2, rows, 1) % 89 + 3
    with torch.no_grad(), counted(by_module=by_module):
        model(numbers[0], past_key_values=cache)
        with launched() as counts:
            logits = model(numbers[1], past_key_values=cache).logits
    return logits, counts


def in_one_launch(model: PreTrainedModel, rows: int = 1) -> int:
    """How many launches of a step are of several weights; its logits are those of the modules one by one."""
    got, counts = behind(model, rows)
    expected, alone = behind(model, rows, by_module=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # a sum may be in another order
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    together = sum(counts[name] for name in TOGETHER)
    assert not any(alone[name] for name in TOGETHER)
    assert not together or counts.total() < alone.total() - together  # next to those that a rotation and a sum save
    return together


@pytest.mark.usefixtures("on_triton")
def test_several_weights_share_a_launch(device: str) -> None:
    model = quantized(device)
    # Of q, k and v, and of gate and up, in each of two layers.
    assert [in_one_launch(model, rows) for rows in (1, 3, 65)] == [4, 4, 0]


def hook(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: out * 2)


def peft_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, layers_to_transform=[0]
    )
    peft.get_peft_model(model, config)


def float_linear(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = nn.Linear(32, attention.k_proj.out_features, device=model.device)


def other_layout(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj = quantized(str(model.device), INT4).model.layers[1].self_attn.v_proj


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(("change", "left"), [(hook, 2), (peft_adapter, 2), (float_linear, 3), (other_layout, 3)])
def test_a_weight_that_cannot_share_has_its_own_launch(change: Any, left: int, device: str) -> None:
    """One less of the two of a layer, or none where the layer's own code runs."""
    model = quantized(device)
    before, _ = behind(model)
    change(model)
    assert in_one_launch(model) == left
    assert not torch.equal(behind(model)[0], before)


@pytest.mark.usefixtures("on_triton")
def test_deterministic_products_gradients_and_autocast_are_one_by_one(device: str) -> None:
    assert in_one_launch(quantized(device, deterministic=True)) == 0
    model = quantized(device)
    with torch.autocast(device, torch.bfloat16):
        _, counts = behind(model)
    assert not any(counts[name] for name in TOGETHER)
    x = torch.randn(1, 1, 32, device=device)
    linears = [getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj")]
    with torch.no_grad():
        assert products_of_rows(linears, x) is not None
    assert products_of_rows(linears, x) is None


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_a_weight_that_is_written_is_seen(name: str, device: str) -> None:
    model = quantized(device)
    before, _ = behind(model)
    with torch.no_grad():
        model.model.layers[1].get_submodule(name).weight.mul_(-3)
    assert in_one_launch(model) == 4 and not torch.equal(behind(model)[0], before)


# -- what changes after patch() ------------------------------------------------------------------------


@pytest.fixture
def model(device: str) -> PreTrainedModel:
    model = small(device)
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


@pytest.mark.parametrize("change", [change_eps, change_weight, change_scaling])
def test_a_change_is_seen(model: PreTrainedModel, change: Any) -> None:
    before = logits_of(model)
    change(layers_of(model)[1])
    assert same_bits(model)[True]
    assert not torch.equal(logits_of(model)[0], before[0])


def test_gradients_run_the_own_code(model: PreTrainedModel) -> None:
    ids = torch.tensor(PROMPTS[:1], device=model.device)
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


def test_a_model_that_was_moved_to_a_cpu_runs_module_by_module(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.refusal() is not None:
        pytest.skip("its kernels are not there")
    assert same_bits(model)[True]
    monkeypatch.setattr(joined_calls, "by_library", modules.by_library)
    layers = layers_of(model)
    for layer in layers:
        layer.self_attn.scaling *= 0.5  # they are traced again
    calls = same_bits(model)
    assert calls[False] == 4 * len(layers) and not calls[True]


def test_unpatch_takes_the_layers_out(model: PreTrainedModel) -> None:
    hf_accel.unpatch(model)
    assert not layers_of(model) and not [m for m in model.modules() if isinstance(m, NativeNorm)]
    assert all(FUSED not in vars(layer) for layer in model.model.layers)


def test_a_request_s_adapter_is_added(device: str, tmp_path: Path) -> None:
    """By its own hooks: in a pass that has one, layers go module by module."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    outer = peft.get_peft_model(small("cpu"), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in outer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    outer.save_pretrained(tmp_path)
    torch.manual_seed(3)
    model = hf_accel.patch(small(device), weights=None)
    prompt = torch.tensor(PROMPTS[:1], device=device)
    wanted = outer.to(device).eval().generate(prompt, max_new_tokens=3, do_sample=False)
    with counted() as calls, hf_accel.Engine(model) as engine:
        engine.load_adapter("own", tmp_path)  # which tries passes with it and without
        calls.clear()
        found = engine.submit(PROMPTS[0], max_new_tokens=3, temperature=0, adapter="own").result().tokens
    assert [*PROMPTS[0], *found] == wanted[0].tolist() and calls == {False: 6}
