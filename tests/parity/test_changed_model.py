"""A model that is changed while an Engine and a PagedCache hold prefixes: they answer as a fresh copy does."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import MistralConfig, MistralForCausalLM

import hf_accel
from hf_accel.generation.hf import session as session_module

from ..selection import seeds
from .families import DECODER, build, prompts

NEW_TOKENS = 4
IDS = prompts(1, 34)
KEYWORDS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
Change = Callable[[Any], object]
CHANGES: dict[str, Change] = {}
OFFSET = torch.tensor(0.0)  # which hooks read


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def stock(model: Any) -> list[int]:
    out: Tensor = model.generate(IDS, attention_mask=torch.ones_like(IDS), **KEYWORDS)
    return out[0, IDS.shape[1] :].tolist()


def ask(engine: hf_accel.Engine) -> list[int]:
    return list(engine.submit(IDS[0].tolist(), max_new_tokens=NEW_TOKENS).result(60).tokens)


def cached(model: Any, cache: hf_accel.PagedCache) -> list[int]:
    cache.reset()
    out: Tensor = model.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, **KEYWORDS)
    return out[0, IDS.shape[1] :].tolist()


class Asked:
    """A patched model with an Engine and a PagedCache, both of which hold the prompt already."""

    def __init__(self, model: Any, **keywords: Any) -> None:
        self.model = hf_accel.patch(model, **keywords)
        self.engine, self.cache = hf_accel.Engine(self.model), hf_accel.PagedCache(self.model.config)
        self.answers()

    def answers(self) -> list[list[int]]:
        return [ask(self.engine), cached(self.model, self.cache)]

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close(wait=False)


# -- the changes --------------------------------------------------------------------------------------------


def layer(model: Any, number: int = 0) -> Any:
    return model.model.layers[number]


def values(model: Any) -> list[Tensor]:
    return [each.self_attn.v_proj.weight for each in model.model.layers]


def more(*args: Any) -> Any:
    """The output of a hooked module, changed."""
    out = args[-1]
    return (out[0] * -1.5 + 0.1, *out[1:]) if isinstance(out, tuple) else out * -1.5 + 0.1


@change
def data_copied(model: Any) -> None:
    for weight in values(model):
        weight.data.copy_(weight.data * 1.5)


@change
def data_multiplied(model: Any) -> None:
    torch._foreach_mul_([weight.data for weight in values(model)], 1.5)


@change
def data_of_all_averaged(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.lerp_(torch.randn(parameter.shape, generator=generator), 0.2)


@change
def data_set(model: Any) -> None:
    for weight in values(model):
        weight.data = weight.data * 1.5


@change
def data_transposed(model: Any) -> None:
    for each in model.model.layers:
        each.self_attn.o_proj.weight.data = each.self_attn.o_proj.weight.data.t()


@change
def counted(model: Any) -> None:
    with torch.no_grad():
        values(model)[0].mul_(-2)


@change
def numpy_view(model: Any) -> None:
    for weight in values(model):
        array = weight.detach().numpy()
        array *= 1.5


@change
def dlpack(model: Any) -> None:
    for weight in values(model):
        torch.from_dlpack(weight.detach()).mul_(1.5)


@change
def embedding(model: Any) -> None:
    model.get_input_embeddings().weight.data.neg_()


@change
def norm(model: Any) -> None:
    layer(model).input_layernorm.weight.data.mul_(-1.7)


@change
def new_parameter(model: Any) -> None:
    layer(model).mlp.up_proj.weight = nn.Parameter(layer(model).mlp.up_proj.weight * 1.5)


@change
def swapped_parameter(model: Any) -> None:
    weight = layer(model).self_attn.v_proj.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.data * 1.5))


@change
def new_bias(model: Any) -> None:
    layer(model).self_attn.o_proj.bias = nn.Parameter(torch.full((32,), 0.5))


@change
def state_dict(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.2 for name, tensor in model.state_dict().items()})


@change
def state_dict_assigned(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.2 for name, tensor in model.state_dict().items()}, assign=True)


@change
def inverse_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


@change
def inverse_frequencies_unseen(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(0.5)


@change
def new_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@change
def attention_scaling(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.7


@change
def scaling(model: Any) -> None:
    for each in model.model.layers:
        each.self_attn.scaling = 0.9


@change
def epsilon(model: Any) -> None:
    layer(model).input_layernorm.variance_epsilon = 5.0


@change
def activation(model: Any) -> None:
    layer(model).mlp.act_fn = nn.ReLU()


@change
def activation_function(model: Any) -> None:
    del layer(model).mlp.act_fn
    layer(model).mlp.act_fn = torch.tanh


@change
def embeddings_of_less_norm(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.5


@change
def layers_swapped(model: Any) -> None:
    first, second = model.model.layers
    model.model.layers[0], model.model.layers[1] = second, first


@change
def linears_swapped(model: Any) -> None:
    mlp = layer(model).mlp
    mlp.up_proj, mlp.gate_proj = mlp.gate_proj, mlp.up_proj


@change
def module_replaced(model: Any) -> None:
    layer(model).mlp = nn.Identity()


@change
def forward_hook(model: Any) -> Any:
    return layer(model).register_forward_hook(more)


@change
def forward_hook_with_keywords(model: Any) -> Any:
    return layer(model).mlp.register_forward_hook(lambda *args: more(*args), with_kwargs=True)


@change
def forward_hook_that_is_always_called(model: Any) -> Any:
    return layer(model).mlp.register_forward_hook(more, always_call=True)


@change
def forward_hook_on_a_linear(model: Any) -> Any:
    return layer(model).self_attn.v_proj.register_forward_hook(more)


@change
def forward_hook_on_a_norm(model: Any) -> Any:
    return layer(model).input_layernorm.register_forward_hook(more)


@change
def forward_hook_on_embeddings(model: Any) -> Any:
    return model.get_input_embeddings().register_forward_hook(more)


@change
def forward_hook_on_an_activation(model: Any) -> Any:
    return layer(model).mlp.act_fn.register_forward_hook(more)


@change
def forward_hook_on_the_rotation(model: Any) -> Any:
    return model.model.rotary_emb.register_forward_hook(more)


@change
def pre_hook(model: Any) -> Any:
    return layer(model).mlp.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))


@change
def pre_hook_with_keywords(model: Any) -> Any:
    return layer(model).register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] * 1.5 + 0.1, *args[1:]), kwargs), with_kwargs=True
    )


@change
def global_hook(model: Any) -> Any:
    def hook(module: nn.Module, *args: Any) -> Any:
        return more(*args) if type(module).__name__.endswith("MLP") else None

    return torch_modules.register_module_forward_hook(hook)


@change
def global_pre_hook(model: Any) -> Any:
    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0] * 1.5,) if type(module).__name__.endswith("MLP") else None

    return torch_modules.register_module_forward_pre_hook(hook)


def replaced(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 0.3 + 0.1


for path in ("mlp", "mlp.up_proj", "self_attn.v_proj", "input_layernorm"):
    name = f"forward of {path}"
    CHANGES[name] = lambda model, path=path: replaced(layer(model).get_submodule(path))
CHANGES["forward of the embeddings"] = lambda model: replaced(model.get_input_embeddings())
CHANGES["forward of a layer"] = lambda model: replaced(layer(model))


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    yield
    torch_modules._global_forward_hooks.clear()
    torch_modules._global_forward_pre_hooks.clear()


@pytest.mark.parametrize("name", CHANGES)
def test_answers_are_those_of_a_fresh_copy(name: str) -> None:
    model = build("llama")
    before = stock(model)
    with Asked(copy.deepcopy(model), weights=None) as asked:
        both = (model,) if name.startswith("global") else (model, asked.model)
        handles = [CHANGES[name](each) for each in both]
        expected = stock(model)
        assert expected != before
        assert asked.answers() == [expected, expected]
        if handles[0] is not None:
            for handle in handles:
                handle.remove()
            assert asked.answers() == [before, before]


# -- what a hook goes by ------------------------------------------------------------------------------------


class Steering:
    def __init__(self) -> None:
        self.vector = torch.zeros(32)

    def hook(self, module: nn.Module, args: Any, out: Any) -> Any:
        return out + self.vector

    __call__ = hook


def in_a_closure() -> tuple[Any, Tensor]:
    vector = torch.zeros(32)
    return lambda _, args, out: out + vector, vector


def as_a_default() -> tuple[Any, Tensor]:
    vector = torch.zeros(32)

    def hook(module: nn.Module, args: Any, out: Any, vector: Tensor = vector) -> Any:
        return out + vector

    return hook, vector


def given_by_partial() -> tuple[Any, Tensor]:
    vector = torch.zeros(32)
    return partial(lambda vector, _, args, out: out + vector, vector), vector


def of_a_module() -> tuple[Any, Tensor]:
    shift = nn.Linear(32, 32)
    nn.init.zeros_(shift.weight)
    nn.init.zeros_(shift.bias)
    return lambda _, args, out: out + shift(out), shift.bias.data


def of_an_object() -> tuple[Any, Tensor]:
    steering = Steering()
    return steering.hook, steering.vector


def that_is_an_object() -> tuple[Any, Tensor]:
    steering = Steering()
    return steering, steering.vector


def in_a_global() -> tuple[Any, Tensor]:
    return lambda _, args, out: out + OFFSET, OFFSET


@pytest.mark.parametrize(
    "made",
    [in_a_closure, as_a_default, given_by_partial, of_a_module, of_an_object, that_is_an_object, in_a_global],
    ids=lambda made: made.__name__,
)
def test_a_tensor_of_a_hook_is_written_to(made: Callable[[], tuple[Any, Tensor]]) -> None:
    hook, tensor = made()
    model = build("llama")
    for each in model.model.layers:
        each.mlp.register_forward_hook(hook)
    patched = build("llama")
    for each in patched.model.layers:
        each.mlp.register_forward_hook(hook)
    with Asked(patched, weights=None) as asked:
        before = stock(model)
        tensor.data.add_(torch.linspace(-3, 3, 32) if tensor.ndim else 0.7)
        expected = stock(model)
        assert expected != before
        assert asked.answers() == [expected, expected]
        tensor.data.zero_()
        assert asked.answers() == [before, before]


def test_changed_for_a_part_of_a_sequence() -> None:
    """What was computed of a prompt before a change and what was computed after it are no prefix together."""
    model = build("llama")
    patched = hf_accel.patch(copy.deepcopy(model), weights=None)
    cache, kept = hf_accel.PagedCache(patched.config), {n: p.data.clone() for n, p in patched.named_parameters()}
    ids = torch.cat([torch.zeros_like(IDS[:, :3]), IDS], dim=1)  # padded on the left
    mask = (torch.arange(ids.shape[1]) >= 3).long()[None]
    for start, end in ((0, 17), (17, 21), (21, 37)):
        places = slice(start, end)
        given = {"attention_mask": mask[:, :end], "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, places]}
        with torch.no_grad():
            patched(ids[:, places], past_key_values=cache, **given)
        for name, parameter in patched.named_parameters():
            parameter.data.copy_(kept[name] * (1.0 if start else 1.5))
    assert cached(patched, cache) == stock(model)


# -- quantized models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["embedding", "forward_hook", "data_copied"])
def test_quantized(name: str, weights: str) -> None:
    with Asked(build("llama"), weights={"int8": "int8", "int4": {"bits": 4, "group_size": 32}}[weights]) as asked:
        before = asked.answers()
        CHANGES[name](asked.model)
        fresh = copy.deepcopy(asked.model)
        with hf_accel.Engine(fresh) as engine:
            expected = ask(engine)
        assert expected != before[0]
        assert asked.answers() == [expected, expected]


# -- other pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(None, 4), (8, 4), (8, 20), (8, None)])
def test_the_window_is_another(before: int | None, after: int | None) -> None:
    model = MistralForCausalLM(MistralConfig(**DECODER, sliding_window=before)).eval()
    with Asked(copy.deepcopy(model), weights=None) as asked:
        first = stock(model)
        for each in (model, asked.model):
            each.config.sliding_window = after
        expected = stock(model)
        assert expected != first
        assert asked.answers() == [expected, expected]


# -- what cannot be seen ------------------------------------------------------------------------------------


def test_a_program_says_what_cannot_be_seen() -> None:
    """One number of many, between those that are looked at."""
    model = build("llama")
    with Asked(copy.deepcopy(model), weights=None) as asked:
        for each in (model, asked.model):
            values(each)[0].data.flatten()[1] = 400.0
        hf_accel.weights_changed(asked.model)
        expected = stock(model)
        assert asked.answers() == [expected, expected]


def test_a_program_may_say_it_of_any_model() -> None:
    model = build("llama")
    hf_accel.weights_changed(model)
    hf_accel.patch(model)
    hf_accel.weights_changed(nn.ModuleList([model]))
    with pytest.raises(hf_accel.UnsupportedError, match="is a part of a patched LlamaForCausalLM"):
        hf_accel.weights_changed(model.model)


def test_drafts_of_the_model_itself_are_made_again() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    with hf_accel.Engine(model, speculative="self-int4") as engine:
        before = ask(engine)
        (drafter,) = engine.session.speculation.drafters
        old = drafter.runner.model
        assert ask(engine) == before and drafter.runner.model is old
        data_copied(model)
        hf_accel.weights_changed(model)
        assert ask(engine) == stock(model)
        new = drafter.runner.model
        assert new is not old
        difference = values(new)[0].float() - values(model)[0]
        assert difference.abs().max() < values(model)[0].abs().max() / 8


# -- under load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True], ids=["seen in time", "declared"])
def test_under_load(monkeypatch: pytest.MonkeyPatch, declared: bool) -> None:
    """A request that runs on meanwhile shares what it has computed with nobody."""
    monkeypatch.setattr(session_module, "LOOK_SECONDS", 1e9 if declared else 0.0)
    model = build("llama")
    with Asked(copy.deepcopy(model), weights=None) as asked:
        running = asked.engine.submit(IDS[0].tolist(), max_new_tokens=400)
        tokens = iter(running)
        first = [next(tokens) for _ in range(20)]
        for each in (model, asked.model):
            data_copied(each)
        if declared:
            hf_accel.weights_changed(asked.model)
        assert ask(asked.engine) == stock(model)
        made = [next(tokens) for _ in range(60)]
        prompt = IDS[0].tolist() + first + made
        expected = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **KEYWORDS)
        request = asked.engine.submit(prompt, max_new_tokens=NEW_TOKENS)
        assert request.result(60).tokens == expected[0, len(prompt) :].tolist()
        running.cancel()


def test_prefixes_are_kept_while_nothing_changes() -> None:
    """Neither passes nor looks change what is looked at."""
    seen: list[int] = []
    with Asked(build("llama"), weights="int8") as asked:
        layer(asked.model).register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
        asked.answers()
        hits = asked.engine.stats["prefix_hits"]
        for count in range(1, 4):
            asked.answers()
            assert asked.engine.stats["prefix_hits"] == hits + 2 * count
            time.sleep(0)


# -- many at random -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_changes_at_random(seed: int) -> None:
    """One after another, on a model that is in use; hooks are also taken away again."""
    choose = random.Random(seed)
    model = build("llama")
    handles: list[Any] = []
    names = [name for name in CHANGES if not name.startswith(("global", "activation_function", "module_replaced"))]
    with Asked(copy.deepcopy(model), weights=None) as asked:
        for _ in range(25):
            if handles and choose.random() < 0.3:
                for handle in handles.pop(choose.randrange(len(handles))):
                    handle.remove()
            else:
                name = choose.choice(names)
                made = [CHANGES[name](each) for each in (asked.model, model)]
                handles += [made] if made[0] is not None else []
            if choose.random() < 0.7:
                expected = stock(model)
                assert asked.answers() == [expected, expected], name
