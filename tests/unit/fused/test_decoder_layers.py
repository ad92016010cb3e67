"""Decoder layers as one native call: the bits of their own code, and this code wherever something is not known."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.cache.hf.cache_argument import CACHE_NAME
from hf_accel.fused import layer_programme
from hf_accel.fused.hf.layer_calls import LayerCalls, TracedForward
from hf_accel.fused.hf.sites import KIND
from hf_accel.hardware import UNLIMITED
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels.cpu.row_kernels import add
from hf_accel.patching import planning
from hf_accel.undo.state import FUSED, state_of
from tests.families.models import build, family

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

# Each has something that the others lack: biases, norms of heads before and behind the rotation, norms behind
# attention, a window, softcaps, factors of what is added, a form of MLP.
CLASSES = ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Mistral", "Granite", "Olmo2", "SmolLM3", "HunYuanDenseV1"]
PROMPTS = [[5, 9, 12, 40, 7, 3, 21, 33, 8, 14, 30], [4, 11], [6, 19, 23, 5, 17]]
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).eval()


@contextmanager
def counted(*, native: bool = True) -> Iterator[Counter[bool]]:
    """Counts the calls of layers by whether they were native; with native=False none of them is."""
    calls: Counter[bool] = Counter()
    run = LayerCalls.run

    def watched(self: LayerCalls, *args: Any) -> Any:
        result = run(self, *args) if native else None
        calls[result is not None] += 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCalls, "run", watched)
        yield calls


def padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts [B, T] with padding on the left, and their mask."""
    length = max(map(len, prompts))
    rows = [[0] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, new: int = 8) -> list[Tensor]:
    """The logits of every pass of generate_batch, of generate, and of transformers' own loop over pages."""
    seen: list[Tensor] = []
    head: Any = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
    try:
        model.generate_batch(prompts, generation_config=config)
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        model.generate(torch.tensor(prompts[:1]), **options)
        ids, mask = padded(prompts)
        cache = hf_accel.PagedCache(model.config, state_of(model).config.cache)  # padding in it keeps stock's loop
        model.generate(ids, attention_mask=mask, num_beams=2, past_key_values=cache, **options)
        cache = hf_accel.PagedCache(model.config)
        for chunk in (slice(0, 1), slice(1, 4), slice(4, 5)):  # of two rows of one length
            tokens = torch.tensor([prompts[0], prompts[0][::-1]])[:, chunk]
            model(tokens, past_key_values=cache, use_cache=True)
    finally:
        hook.remove()
    return seen


def same_bits(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, new: int = 8) -> Counter[bool]:
    """Assert that native layers give the bits of the modules one by one; returns how many calls were native."""
    with counted() as calls:
        got = logits_of(model, prompts, new)
    with counted(native=False):
        expected = logits_of(model, prompts, new)
    assert len(got) == len(expected)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), i
    return calls


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, TracedForward)]


# -- the same bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_bits_of_the_modules_one_by_one(name: str) -> None:
    model = build(family(f"{name}ForCausalLM")).eval()
    hf_accel.patch(model, weights=None)
    assert len(layers_of(model)) == model.config.get_text_config().num_hidden_layers
    calls = same_bits(model)
    assert calls[True] > 10 * calls[False] > 0  # a pass over padding is not native


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["float", "int8", "int4"])
@pytest.mark.parametrize("kv", ["auto", "int8", "int4", "int8-int4"])
def test_weights_dtypes_and_pages(weights: Any, dtype: torch.dtype, kv: Any) -> None:
    model = llama(attention_bias=kv == "auto", mlp_bias=kv == "int8").to(dtype)
    hf_accel.patch(model, weights=weights, cache=hf_accel.CacheConfig(dtype=kv))
    calls = same_bits(model)
    assert calls[True] > 10 * calls[False] > 0


def test_some_layers_quantized_and_some_not() -> None:
    model = llama()
    hf_accel.patch(model, weights={"bits": 8, "skip": ["q_proj", "layers.1.mlp.down_proj"]})
    assert same_bits(model)[True] > 0


def test_window_that_prompts_exceed() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=4)
    model = transformers.MistralForCausalLM(config).eval()
    hf_accel.patch(model, weights=None)
    assert same_bits(model)[True] > 0


def test_threads_do_not_matter() -> None:
    model = llama(hidden_size=192, intermediate_size=1024)
    hf_accel.patch(model, weights="int8")
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(logits_of(model))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


LONG = [list(range(1, 101)) * 3]


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", CLASSES)
def test_long_prompts(name: str, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family(f"{name}ForCausalLM")).eval()
    monkeypatch.setattr(planning, "rows_here", lambda *args, **settings: UNLIMITED)
    hf_accel.patch(model, weights=weights)
    calls = same_bits(model, LONG, new=2)
    assert calls[True] > 2 * len(layers_of(model)) and not calls[False]


def test_prompts_of_much_memory_run_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(layer_programme, "MOST_BYTES", 4)
    hf_accel.patch(model, weights="int8")
    calls = same_bits(model, LONG, new=2)
    assert calls[True] and calls[False] >= 2 * len(layers_of(model))


def test_the_plan_counts_layers() -> None:
    model = llama()
    plan = hf_accel.plan(model)
    assert [site.kind for site in plan.fused.sites].count(KIND) == 3
    assert "3 decoder layers" in str(plan)


# -- what changes after patch() ------------------------------------------------------------------------


@pytest.fixture
def model() -> PreTrainedModel:
    model = llama()
    hf_accel.patch(model, weights=None)
    logits_of(model)  # programmes are made
    return model


def change_scaling(layer: Any) -> None:
    layer.self_attn.scaling = 0.01


def change_eps(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 0.5


def change_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def change_weight(layer: Any) -> None:
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * 2


def change_parameter(layer: Any) -> None:
    layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.detach() * 2)


def change_norm(layer: Any) -> None:
    layer.post_attention_layernorm.weight.data = layer.post_attention_layernorm.weight.data * 2


def change_in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.self_attn.q_proj.weight.mul_(2)


def change_module(layer: Any) -> None:
    old = layer.self_attn.v_proj
    layer.self_attn.v_proj = nn.Linear(old.in_features, old.out_features, bias=False)


@pytest.mark.parametrize(
    "change",
    [
        change_scaling, change_eps, change_activation, change_weight, change_parameter, change_norm, change_in_place,
        change_module,
    ],
)  # fmt: skip
def test_a_change_is_seen(model: PreTrainedModel, change: Callable[[Any], None]) -> None:
    before = logits_of(model)
    change(layers_of(model)[1])
    same_bits(model)
    assert not torch.equal(logits_of(model)[0], before[0])


def test_a_wrapped_linear_is_called_and_a_hook_sees_its_call(model: PreTrainedModel) -> None:
    layer: Any = layers_of(model)[0]
    seen: list[int] = []
    hook = layer.mlp.down_proj.register_forward_hook(lambda *given: seen.append(1))
    with counted() as calls:
        logits_of(model)
    others = calls.total() * 2 // 3  # layers without a hook, whose pass over padding is not native
    assert len(seen) == calls.total() // 3
    assert calls[True] == others - 2
    hook.remove()
    assert same_bits(model)[False] == 3


def test_a_hook_that_is_there_first_delays_the_native_call() -> None:
    model = llama()
    hf_accel.patch(model, weights=None)
    layer: Any = layers_of(model)[0]
    hooks = [each.register_forward_hook(lambda *given: None) for each in (layer.mlp.act_fn, layer.self_attn.q_proj)]
    with counted() as calls:
        logits_of(model)
    assert calls[False] == calls.total() // 3 + 2  # and the padding of the other layers
    for hook in hooks:
        hook.remove()
    assert same_bits(model)[False] == 3


def test_what_was_not_known_is_tried_again_when_it_changes(model: PreTrainedModel) -> None:
    layer: Any = layers_of(model)[0]
    known = layer.mlp.act_fn
    layer.mlp.act_fn = nn.GELU()
    assert same_bits(model)[False] > 3
    layer.mlp.act_fn = known
    assert same_bits(model)[False] == 3


def test_hidden_states_and_attentions_can_still_be_asked_for(model: PreTrainedModel) -> None:
    ids = torch.tensor(PROMPTS[:1])
    stock = llama()
    for name in ("output_hidden_states", "output_attentions"):
        kwargs = {name: True, "return_dict_in_generate": True, "max_new_tokens": 3, "do_sample": False}
        got, expected = model.generate(ids, **kwargs), stock.generate(ids, **kwargs)
        assert torch.equal(got.sequences, expected.sequences)
        key = name.removeprefix("output_")
        assert len(got[key]) == len(expected[key])
    same_bits(model)


def test_gradients_and_training_run_the_own_code(model: PreTrainedModel) -> None:
    model.train()
    with counted() as calls:
        model(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()
    assert not calls[True]
    assert all(p.grad is not None for p in model.model.layers.parameters())


def test_copies_and_pickles_make_their_own_calls(model: PreTrainedModel) -> None:
    expected = logits_of(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(vars(layer)[FUSED].programme is None for layer in layers_of(twin))
        assert all(torch.equal(a, b) for a, b in zip(logits_of(twin), expected, strict=True))
        change_weight(layers_of(twin)[0])
    assert all(torch.equal(a, b) for a, b in zip(logits_of(model), expected, strict=True))


def test_unpatch_takes_the_layers_out(model: PreTrainedModel) -> None:
    hf_accel.unpatch(model)
    assert not layers_of(model)
    assert all(FUSED not in vars(layer) for layer in model.model.layers)


def test_another_attention_function_is_called(model: PreTrainedModel) -> None:
    called: list[int] = []

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(query.shape[2])
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    transformers.AttentionInterface.register("counted_sdpa", attention)
    ids = torch.tensor(PROMPTS[:1])
    with counted() as calls:
        before = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert calls[True] and not calls[False]
    model.set_attn_implementation("counted_sdpa")
    with counted() as calls:
        after = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(before, after)
    assert len(called) == calls[False] > 0
    assert not calls[True]


def test_another_dtype_after_patch(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)
    assert same_bits(model)[True] > 0


# -- code that is not known ----------------------------------------------------------------------------


def replaced_forward(model: PreTrainedModel, forward: Callable[..., Any]) -> hf_accel.Plan:
    """The plan of a model whose layers have a forward of their own class."""
    layer = model.model.layers[0]
    kind = type("Changed", (type(layer),), {"forward": forward})
    for each in model.model.layers:
        each.__class__ = kind
    return hf_accel.plan(model)


def doubles_long_inputs(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    out = stock_forward(self, hidden_states, **kwargs)
    return out * 2 if hidden_states.shape[1] > 3 else out


def adds_to_single_tokens(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    out = stock_forward(self, hidden_states, **kwargs)
    return out + hidden_states if hidden_states.shape[1] == 1 else out


def looks_at_numbers(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    out = stock_forward(self, hidden_states, **kwargs)
    return out if bool(out.sum() > 0) else -out


def looks_at_positions(self: Any, hidden_states: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    out = stock_forward(self, hidden_states, **kwargs)
    return out if position_ids is None else out + position_ids[..., None]


def counts_its_calls(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return stock_forward(self, hidden_states, **kwargs)


def clamps(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return stock_forward(self, hidden_states, **kwargs).clamp(max=1)


def returns_its_input(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    stock_forward(self, hidden_states, **kwargs)
    return hidden_states


def adds_in_place(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """The result is written to the input, which is then added to itself."""
    out = hidden_states
    out += stock_forward(self, hidden_states, **kwargs)
    return out + hidden_states


def looks_whether_there_is_a_mask(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    out = stock_forward(self, hidden_states, **kwargs)
    return out + hidden_states if kwargs.get("attention_mask") is None else out


def subtracts(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return hidden_states - stock_forward(self, hidden_states, **kwargs)


stock_forward: Any = transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward


@pytest.mark.parametrize(
    "forward",
    [
        doubles_long_inputs, adds_to_single_tokens, looks_at_numbers, looks_at_positions, counts_its_calls, clamps,
        returns_its_input, subtracts, adds_in_place,
    ],
)  # fmt: skip
def test_a_layer_that_does_more_keeps_its_own_code(forward: Callable[..., Any]) -> None:
    plan = replaced_forward(llama(), forward)
    assert not [site for site in plan.fused.sites if site.kind == KIND]
    assert len({dropped.reason for dropped in plan.fused.dropped if dropped.kind == KIND}) == 1


def test_a_mask_that_is_none_is_another_call() -> None:
    """A layer may do something else without a mask: what was traced with one is not taken then."""
    model = llama()
    kind = type("Changed", (type(model.model.layers[0]),), {"forward": looks_whether_there_is_a_mask})
    for layer in model.model.layers:
        layer.__class__ = kind
    hf_accel.patch(model, weights=None)
    layer, made = layers_of(model)[0], []
    calls: LayerCalls = vars(layer)[FUSED]
    with counted():
        logits_of(model)
    for mask in (object(), None):
        x, table = torch.zeros(1, 2, 64), torch.zeros(1, 2, 16)
        kwargs = {CACHE_NAME: object(), "position_embeddings": (table, table), "position_ids": object()}
        made.append(calls._ready(layer, x, (table, table), {"attention_mask": mask, "use_cache": True} | kwargs))
    assert [len(each._ops) for each in made] == [len(made[0]._ops), len(made[0]._ops) + 1]


# -- sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 64), (5, 1000), (1, 20000)])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_sum(shape: tuple[int, ...], dtype: torch.dtype, factor: float) -> None:
    x, y = torch.randn(2, *shape).to(dtype)
    assert torch.equal(add(x, y, factor), x + y * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 64), (5, 1000), (600, 40)])
def test_one_row_is_added_to_all(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, factors = (torch.randn(*size).to(dtype) for size in (shape[1:], shape, shape[1:]))
    assert torch.equal(add(x, y, factors), y * factors + x)


def test_sum_of_what_is_not_finite() -> None:
    x, y = torch.tensor([float("inf"), float("nan"), 3e38, -1.0]), torch.tensor([1.0, 2.0, 3e38, float("-inf")])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.allclose(add(x.to(dtype), y.to(dtype)), x.to(dtype) + y.to(dtype), equal_nan=True)
