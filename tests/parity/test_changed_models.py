"""What users do to a patched model with torch's and transformers' own tools: it runs as stock's, and is unpatched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
    spectral_norm,
    weight_norm,
)
from transformers import LlamaForSequenceClassification

import hf_accel

from .families import build, inputs
from .snapshot import logits

Step = Callable[[nn.Module], object]


class Half(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 0.5


def reparametrized(*, leave: bool = True) -> Step:
    return lambda m: parametrize.remove_parametrizations(m, "weight", leave_parametrized=leave)


# What is done to a module, and how it is taken back.
CHANGES: dict[str, tuple[Step, Step]] = {
    "prune": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight")),
    "parametrize": (lambda m: parametrize.register_parametrization(m, "weight", Half()), reparametrized()),
    "parametrize for a time": (
        lambda m: parametrize.register_parametrization(m, "weight", Half()),
        reparametrized(leave=False),
    ),
    "weight_norm": (parametrizations.weight_norm, reparametrized()),
    "spectral_norm": (parametrizations.spectral_norm, reparametrized()),
    "old weight_norm": (weight_norm, remove_weight_norm),
    "old spectral_norm": (spectral_norm, remove_spectral_norm),
}
PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "up_proj": lambda m: m.model.layers[0].mlp.up_proj,
    "q_proj": lambda m: m.model.layers[1].self_attn.q_proj,
    "lm_head": lambda m: m.lm_head,
    "norm": lambda m: m.model.layers[0].post_attention_layernorm,
}
COMPUTED = [
    *((place, how) for place in ("up_proj", "norm") for how in ("prune", "parametrize", "parametrize for a time")),
    *(("up_proj", how) for how in CHANGES if "norm" in how),
    ("q_proj", "parametrize"),
    ("lm_head", "parametrize"),
]


def tokens(model: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(**inputs("left"), max_new_tokens=4, do_sample=False).tolist()
    return found


def done(step: Step, module: nn.Module) -> None:
    torch.manual_seed(0)
    step(module)


def classes(model: nn.Module) -> list[list[str]]:
    return [[kind.__name__ for kind in type(module).__mro__] for module in model.modules()]


@pytest.mark.parametrize(("place", "how"), COMPUTED)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the old norms
def test_a_weight_that_is_computed(place: str, how: str) -> None:
    """Patched, used, changed, unpatched, and changed back: at each step the numbers are stock's."""
    stock = build("llama").eval()
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    tokens(model)
    (change, undo), find = CHANGES[how], PLACES[place]
    for each in (stock, model):
        done(change, find(each))
    assert tokens(model) == tokens(stock)
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)
    hf_accel.unpatch(model)
    assert torch.equal(logits(model), logits(stock))
    for each in (stock, model):
        undo(find(each))
    assert torch.equal(logits(model), logits(stock))
    assert classes(model) == classes(stock)
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in stock.modules()]


@pytest.mark.parametrize("order", ["patch, change, undo, unpatch", "change, patch, undo, unpatch"])
@pytest.mark.parametrize("place", ["up_proj", "norm"])
def test_a_change_that_is_taken_back_before_unpatch(order: str, place: str) -> None:
    stock = build("llama").eval()
    model, find = copy.deepcopy(stock), PLACES[place]
    change, undo = CHANGES["parametrize"]
    steps: dict[str, Callable[[], object]] = {
        "patch": lambda: hf_accel.patch(model, weights=None),
        "change": lambda: change(find(model)),
        "undo": lambda: undo(find(model)),
        "unpatch": lambda: hf_accel.unpatch(model),
    }
    for step in order.split(", "):
        steps[step]()
        logits(model)
    change(find(stock))
    undo(find(stock))
    assert torch.equal(logits(model), logits(stock))
    assert classes(model) == classes(stock)


@pytest.mark.parametrize("how", ["prune", "parametrize"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_bias_that_is_computed(weights: str | None, how: str) -> None:
    change: dict[str, Step] = {
        "prune": lambda m: prune.l1_unstructured(m, "bias", 0.5),
        "parametrize": lambda m: parametrize.register_parametrization(m, "bias", Half()),
    }
    stock = build("qwen2").eval()
    for name, parameter in stock.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    before = logits(model)
    for each in (stock, model):
        done(change[how], each.model.layers[0].self_attn.q_proj)
    assert tokens(model)
    off = (logits(model) - logits(stock)).norm() / logits(stock).norm()
    assert off < (1e-5 if weights is None else 0.1)
    assert not torch.equal(logits(model), before)
    if weights is None:
        hf_accel.unpatch(model)
        assert torch.equal(logits(model), logits(stock))
        return
    with pytest.raises(hf_accel.HfAccelError, match=r"the bias of the quantized 'model.layers.0.*take that back"):
        hf_accel.unpatch(model)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("shared", ["layers.0", "all"])
def test_a_model_that_shares_modules_with_a_patched_one(shared: str, weights: str | None) -> None:
    policy = build("llama").eval()
    value = LlamaForSequenceClassification(copy.deepcopy(policy.config)).eval()
    value.model = copy.deepcopy(policy.model)
    expected = logits(value)
    if shared == "all":
        value.model = policy.model
    else:
        value.model.layers[0] = policy.model.layers[0]
    hf_accel.patch(policy, weights=weights)
    with pytest.raises(hf_accel.UnsupportedError, match=r"belongs to another model too.*call hf_accel.unpatch\(\) on"):
        hf_accel.patch(value, weights=weights)
    off = (logits(value) - expected).norm() / expected.norm()
    assert off < (1e-4 if weights is None else 0.1)
    hf_accel.unpatch(policy)
    assert torch.equal(logits(value), expected)
    hf_accel.unpatch(hf_accel.patch(value, weights=weights))
    assert torch.equal(logits(value), expected)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_default_device_is_for_the_users_tensors(weights: str | None) -> None:
    settings = {"weights": {"bits": 4, "group_size": 32} if weights == "int4" else weights}
    stock = build("llama").eval()
    expected = hf_accel.patch(copy.deepcopy(stock), **settings)
    model, ids = copy.deepcopy(stock), inputs("left")
    with torch.device("meta"):
        hf_accel.plan(model, **settings)
        hf_accel.patch(model, **settings)
        found = model.generate(**ids, max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            forward = model(**ids).logits
        assert torch.empty(1).device.type == "meta"
    assert found.tolist() == tokens(expected)
    torch.testing.assert_close(forward, logits(expected), rtol=1e-4, atol=1e-4)
    with torch.device("meta"):
        hf_accel.unpatch(model)
    assert torch.equal(logits(model), logits(stock))


# -- another number of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [-10, 7])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_stay_and_ours_goes(tied: bool, weights: str | None, rows: int) -> None:
    stock: Any = build("llama")
    if tied:
        stock.config.tie_word_embeddings = True
        stock = type(stock)(stock.config).eval()
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    tokens(model)
    size = stock.config.vocab_size + rows
    for each in (stock, model):
        torch.manual_seed(0)
        each.resize_token_embeddings(size, mean_resizing=False)
    if weights is None and rows > 0:
        assert tokens(model) == tokens(stock)
    hf_accel.unpatch(model)
    old = min(size, size - rows)
    expected = stock.state_dict()
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    for name, tensor in model.state_dict().items():
        kept = slice(old) if len(tensor) == size else slice(None)
        assert torch.equal(tensor[kept], expected[name][kept])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert type(model.lm_head) is nn.Linear
    assert model.config.vocab_size == size
    assert model.config.tie_word_embeddings == tied
    assert model.lm_head.out_features == size
    for attribute in ("requires_grad", "is_leaf"):
        learn = [{n: getattr(p, attribute) for n, p in each.named_parameters()} for each in (model, stock)]
        assert learn[0] == learn[1]
    assert [m.training for m in model.modules()] == [m.training for m in stock.modules()]


def test_a_tied_head_that_was_resized_is_the_module_of_before() -> None:
    model = build("gpt2")
    head = model.lm_head
    hf_accel.patch(model)
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    hf_accel.unpatch(model)
    assert model.lm_head is head
    assert head.weight is model.transformer.wte.weight
    assert head.out_features == len(head.weight)


def test_rows_of_a_resized_head_that_were_trained_stay() -> None:
    stock = build("llama").eval()
    model = hf_accel.patch(copy.deepcopy(stock))
    model.resize_token_embeddings(stock.config.vocab_size + 3, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    trained = model.lm_head.weight[5].clone()
    hf_accel.unpatch(model)
    assert torch.equal(model.lm_head.weight[5], trained)
    assert torch.equal(model.lm_head.weight[:5], stock.lm_head.weight[:5])


def test_settings_that_were_changed_since_patch_stay() -> None:
    model = build("llama")
    own = model.config
    hf_accel.patch(model)
    model.config.bos_token_id, model.config.use_cache = 7, False
    hf_accel.unpatch(model)
    assert model.config is own
    assert (own.bos_token_id, own.use_cache) == (7, False)
    assert "quantization_config" not in vars(own)


@pytest.mark.parametrize("attention", ["auto", None])
def test_an_attention_that_was_set_since_patch_stays(attention: Any) -> None:
    model = build("llama")
    hf_accel.patch(model, attention=attention)
    model.set_attn_implementation("eager")
    hf_accel.unpatch(model)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        found = model(**inputs("left"), output_attentions=True).attentions
    assert len(found) == len(model.model.layers)


# -- under a living Engine -------------------------------------------------------------------------------


def append_layer(model: Any) -> None:
    layer = copy.deepcopy(model.model.layers[-1])
    layer.self_attn.layer_idx = len(model.model.layers)
    model.model.layers.append(layer)
    model.config.num_hidden_layers += 1


def test_an_idle_engine_makes_pages_for_another_layer() -> None:
    stock, prompt = build("llama").eval(), [5, 6, 7, 8]
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    with hf_accel.Engine(model) as engine:
        engine.submit(prompt, max_new_tokens=2).result()
        for changed in (stock, model):
            append_layer(changed)
        expected = stock.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 4:].tolist()
        assert list(engine.submit(prompt, max_new_tokens=6).result().tokens) == expected


@pytest.mark.filterwarnings("ignore::hf_accel.HfAccelWarning")
def test_an_engine_says_that_its_model_has_another_attention() -> None:
    model, prompt = hf_accel.patch(build("llama").eval(), weights=None), [5, 6, 7, 8]
    text = r"its attention was set to 'eager' after patch\(\) \(set_attn_implementation\('hf_accel'\) sets it back\)"
    with hf_accel.Engine(model) as engine:
        engine.submit(prompt, max_new_tokens=2).result()
        model.set_attn_implementation("eager")
        with pytest.raises(hf_accel.HfAccelError, match=text):
            engine.submit(prompt, max_new_tokens=2).result()
        model.set_attn_implementation("hf_accel")
        assert engine.submit(prompt, max_new_tokens=2).result().tokens
