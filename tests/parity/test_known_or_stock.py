"""What the fast path does not know goes to stock's loop: the same tokens, and stats(), the plan or a warning tell."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import hf_accel
from hf_accel.attention.hf.forward import attention_forward
from hf_accel.cache.hf.cache_argument import CACHE_NAME

from .families import PADDING, build, inputs, prompts


def patched(family: str = "llama", **keywords: Any) -> PreTrainedModel:
    return hf_accel.patch(build(family), weights=None, **keywords)


def tokens(model: PreTrainedModel, layout: str = "left", **settings: Any) -> Tensor:
    torch.manual_seed(3)
    defaults = {"do_sample": False, "max_new_tokens": 8}
    output: Any = model.generate(**inputs(layout), **defaults | settings)
    return output if isinstance(output, Tensor) else output.sequences


def loop(model: PreTrainedModel) -> str:
    return str(hf_accel.stats(model)["loop"])


def attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


# -- one call ----------------------------------------------------------------------------------------------


def test_a_call_that_falls_back_warns_once() -> None:
    model = patched()
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    with pytest.warns(hf_accel.HfAccelWarning, match=r"output_hidden_states=True.*stats\(model\)") as caught:
        tokens(model, **asked)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens(model, **asked)
        assert loop(model).startswith("stock: output_hidden_states=True")
        tokens(model)
        assert loop(model) == "ragged"


def last_token(module: nn.Module, args: Any, out: Any) -> Any:
    """A hook that changes the last token of each row."""
    out = out.clone()
    out[:, -1] = out[:, -1].flip(-1)
    return out


def mean_forward(module: nn.Module) -> None:
    """Replace a forward by one that reads all tokens of a row."""
    forward = module.forward
    module.forward = lambda x: forward(x) + x.mean(1, keepdim=True)  # type: ignore[method-assign]


class Mixer(nn.Module):
    """A part of a layer that the user has written, which reads the tokens of a row, and other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(1.0, len(x) + 1)[:, None, None]
        mixed: Tensor = (self.linear(x) + x.roll(1, dims=1)) * rows
        return mixed


class NamedLlama(LlamaForCausalLM):
    """A class of the user's that computes what its base does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.name = "mine"

    def describe(self) -> str:
        return self.name


def replaced(parent: nn.Module, name: str) -> None:
    torch.manual_seed(4)
    setattr(parent, name, Mixer())


class ScaledCache(DynamicCache):
    """A cache of the user's, which gives other values than it was given."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values * 1.3


def make_scaled_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
    model_kwargs[CACHE_NAME] = ScaledCache(config=self.config)


class LlamaWithCache(LlamaForCausalLM):
    _prepare_cache_for_generation = make_scaled_cache


def other_class(model: Any) -> None:
    model.__class__ = LlamaWithCache


OTHERS_CODE = {
    "a class in a layer": lambda model: replaced(model.model.layers[1], "mlp"),
    "a class as a norm": lambda model: replaced(model.model, "norm"),
    "a hook on a layer's part": lambda model: model.model.layers[0].mlp.register_forward_hook(last_token),
    "a hook on the head": lambda model: model.lm_head.register_forward_hook(last_token),
    "a forward": lambda model: mean_forward(model.model.layers[1].mlp),
}


@pytest.mark.filterwarnings("ignore:generate\\(\\) :hf_accel.HfAccelWarning")
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_a_class_that_makes_a_cache_of_its_own_keeps_it(settings: dict[str, Any]) -> None:
    """Remote code that evicts or compresses keys does so."""
    stock = build("llama")
    plain = tokens(stock, **settings)
    other_class(stock)
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    assert tokens(model, **settings).equal(tokens(stock, **settings))
    assert not tokens(model, **settings).equal(plain)
    assert "makes a cache of its own" in loop(model)


@pytest.mark.filterwarnings("ignore:generate\\(\\) :hf_accel.HfAccelWarning")
def test_a_cache_that_others_make_for_all_models_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", make_scaled_cache)
    assert tokens(model).equal(tokens(build("llama")))


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:generate\\(\\) :hf_accel.HfAccelWarning")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [("left", {}), ("single", {"num_beams": 2}), ("single", {"num_return_sequences": 2, "do_sample": True})],
    ids=["rows", "beams", "samples"],
)
@pytest.mark.parametrize("added", OTHERS_CODE.values(), ids=OTHERS_CODE)
def test_code_of_others_sees_rows_and_columns(added: Any, layout: str, settings: dict[str, Any]) -> None:
    """In a ragged pass the tokens of all rows stand in one row, of which it would change the last."""
    model, stock = patched(), build("llama")
    for each in (model, stock):
        added(each)
    assert tokens(model, layout, **settings).equal(tokens(stock, layout, **settings))
    assert "may read rows and columns" in loop(model)
    assert "may read rows and columns" in " ".join(str(hf_accel.plan(stock, weights=None)).split())


@pytest.mark.filterwarnings("ignore:generate\\(\\) :hf_accel.HfAccelWarning")
@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_code_of_others_sees_each_row_of_a_prompt(settings: dict[str, Any]) -> None:
    """Equal rows are computed once, and share pages, only where nobody can tell rows apart."""

    def second_row(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.cat([out[:1], out[1:2].flip(-1), out[2:]])

    model, stock = patched(), build("llama")
    for each in (model, stock):
        each.model.layers[0].mlp.register_forward_hook(second_row)
    assert tokens(model, **settings).equal(tokens(stock, **settings))


PARTS = ("layers.0.mlp", "layers.0.mlp.act_fn", "layers.0.self_attn.o_proj", "layers.0.input_layernorm", "norm")


@pytest.mark.filterwarnings("ignore:generate\\(\\) :hf_accel.HfAccelWarning")
@pytest.mark.parametrize("path", PARTS)
def test_a_module_that_gets_another_class(path: str) -> None:
    """A native call of its layer, made before, must not go on."""
    model, stock = patched(), build("llama")
    tokens(model)
    for each in (model, stock):
        module = each.model.get_submodule(path)

        class Louder(type(module)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Any:
                return super().forward(x) * torch.arange(1.0, len(x) + 1).view(-1, *[1] * (x.ndim - 1)) * -1.5

        module.__class__ = Louder
    for layout in ("left", "single"):
        assert tokens(model, layout).equal(tokens(stock, layout))
    with torch.no_grad():
        given = inputs("single")
        assert torch.allclose(model(**given).logits, stock(**given).logits, atol=1e-4)


def test_code_of_others_in_an_engine_is_warned_of() -> None:
    model, prompts = patched(), [[5, 6, 7]]
    model.model.layers[0].mlp = Mixer()
    with pytest.warns(hf_accel.HfAccelWarning, match="an Engine gives the class Mixer the tokens of all requests"):
        hf_accel.Engine(model).close()
    with pytest.warns(hf_accel.HfAccelWarning, match=r"generate_batch\(\) gives the class Mixer"):
        model.generate_batch(prompts, max_new_tokens=1)


def test_a_class_of_others_that_computes_as_its_base_is_known() -> None:
    stock = NamedLlama(build("llama").config).eval()
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    assert tokens(model).equal(tokens(stock))
    assert loop(model) == "ragged"


@pytest.mark.filterwarnings("ignore:generate\\(\\) :hf_accel.HfAccelWarning")
def test_code_of_others_sees_no_drafts() -> None:
    model, stock = patched(), build("llama")
    for each in (model, stock):
        each.model.layers[0].mlp.register_forward_hook(last_token)
    assert tokens(model, "single", speculative="ngram").equal(tokens(stock, "single"))
    assert "drafts add some" in hf_accel.stats(model)["drafts"]
    assert loop(model) == "ragged"


def test_a_call_that_asks_for_another_cache_does_not_warn() -> None:
    model = patched()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens(model, use_cache=False)
        assert loop(model) == "stock: it has no paged cache"


def test_an_input_that_is_no_tensor_is_an_input() -> None:
    """As vision-language models hand on what their encoder made of an image."""
    from hf_accel.generation.prompt_inputs import other_input

    text = {"input_ids": prompts(1, 3), "use_cache": True, "attention_mask": None, "token_type_ids": None}
    assert other_input(text) is None
    assert other_input(text | {"mm_encoder_outputs": {}}) is None  # a prompt without images
    assert other_input(text | {"mm_encoder_outputs": {"image": object()}}) == "mm_encoder_outputs"
    assert other_input(text | {"is_causal": False}) == "is_causal"


@torch.no_grad()
@pytest.mark.parametrize(("heads", "rows"), [((4, 2, 4), 1), ((4, 2, 2), 3), ((4, 4, 4), 3)], ids=str)
def test_attention_over_other_heads_and_rows(heads: tuple[int, int, int], rows: int) -> None:
    """As towers of sound have it: values of more heads than keys, and learned queries for the keys of all rows."""
    module = attentions(patched())[0]
    module.num_key_value_groups = heads[0] // heads[1]
    module.is_causal = False
    generator = torch.Generator().manual_seed(1)
    batches, lengths = (1, rows, rows), (3, 5, 5)
    shapes = zip(batches, heads, lengths, strict=True)
    query, key, value = (torch.randn(*shape, 16, generator=generator) for shape in shapes)
    out, _ = attention_forward(module, query, key, value, None, is_causal=False)
    groups = [heads[0] // each.shape[1] for each in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.expand(rows, -1, -1, -1), *(x.repeat_interleave(n, 1) for x, n in zip((key, value), groups, strict=True))
    )
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-5)


# -- a model that was changed after patch() ----------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_attention_that_was_switched(family: str, implementation: str) -> None:
    model = patched(family)
    expected = {mode: tokens(build(family), **settings) for mode, settings in MODES.items()}
    model.set_attn_implementation(implementation)
    with pytest.warns(hf_accel.HfAccelWarning, match=f"set to '{implementation}' after"):
        assert torch.equal(tokens(model), expected["greedy"])
    assert implementation in loop(model)
    for mode, settings in MODES.items():
        assert torch.equal(tokens(model, **settings), expected[mode])
    own = hf_accel.PagedCache(model.config, block_size=4)  # one of ours then serves as any other
    assert torch.equal(tokens(model, past_key_values=own), expected["greedy"])
    with pytest.raises(hf_accel.UnsupportedError, match=r"set_attn_implementation\('hf_accel'\)"):
        hf_accel.Engine(model)
    model.set_attn_implementation("hf_accel")  # the way out that it names
    assert torch.equal(tokens(model), expected["greedy"])
    assert loop(model) == "ragged"


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "beams": {"num_beams": 3},
}


def test_modules_that_are_made_bidirectional() -> None:
    """As LLM2Vec does; stock's sdpa then sees all of a prompt without padding."""
    stock, model = build("llama"), patched()
    causal = tokens(stock, "single")
    for module in (*attentions(stock), *attentions(model)):
        module.is_causal = False
    expected = tokens(stock, "single")
    assert not torch.equal(expected, causal)
    with pytest.warns(hf_accel.HfAccelWarning, match="it is not causal"):
        assert torch.equal(tokens(model, "single"), expected)
    assert torch.equal(tokens(model, "single", num_beams=2), tokens(stock, "single", num_beams=2))
    with torch.no_grad():
        ids = inputs("single")["input_ids"]
        assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-4)
    assert "is not causal" in str(hf_accel.plan(stock, weights=None).stock_cache)
    engine = hf_accel.Engine(model)
    with engine, pytest.raises(hf_accel.UnsupportedError, match="it is not causal"):
        engine.submit(ids[0].tolist(), max_new_tokens=2).result()


def test_nothing_was_drawn_before_it_fell_back() -> None:
    stock, model = build("llama"), patched()
    for module in (*attentions(stock), *attentions(model)):
        module.is_causal = False
    expected = tokens(stock, "single", do_sample=True, top_k=0)
    with pytest.warns(hf_accel.HfAccelWarning):
        assert torch.equal(tokens(model, "single", do_sample=True, top_k=0), expected)


def test_a_module_that_is_not_causal_keeps_the_mask_of_eager() -> None:
    """BigBirdPegasus' way: is_causal is False, the mask is causal, and eager goes by the mask."""
    stock = build("llama")
    stock.set_attn_implementation("eager")
    for module in attentions(stock):
        module.is_causal = False
    expected = tokens(stock, "single")
    model = hf_accel.patch(stock, weights=None)
    assert torch.equal(tokens(model, "single"), expected)
    assert loop(model) == "ragged"


# -- attention ---------------------------------------------------------------------------------------------


def test_an_attention_of_the_user_stays() -> None:
    def doubled(module: nn.Module, query: Tensor, *arguments: Any, **keywords: Any) -> Any:
        return sdpa_attention_forward(module, query * 2, *arguments, **keywords)

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model = build("llama")
        model.set_attn_implementation("doubled")
        expected = tokens(model)
        plan = hf_accel.plan(model, weights=None)
        assert plan.stock_attention is not None and "'doubled'" in plan.stock_attention
        with pytest.raises(hf_accel.UnsupportedError, match="doubled"):
            hf_accel.plan(model, weights=None, cache="paged")
        hf_accel.patch(model, weights=None)
        assert torch.equal(tokens(model), expected)
    finally:
        AttentionInterface._global_mapping.pop("doubled")
        AttentionMaskInterface._global_mapping.pop("doubled")


def test_a_mask_that_is_given_by_its_place() -> None:
    """model(ids, mask): the pass must know of the padding as if it were named."""
    stock, model = build("llama"), patched()
    given = inputs("left")
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        cache = hf_accel.PagedCache(model.config, block_size=4)
        actual = model(ids, mask, past_key_values=cache).logits
        expected = stock(ids, mask).logits
        assert torch.allclose(actual[mask.bool()], expected[mask.bool()], atol=1e-4)
        assert cache.statistics()["blocks_used"] == sum(-(-int(n) // 4) for n in mask.sum(1))


def test_a_keyword_that_is_not_known_goes_to_stocks_function() -> None:
    model = patched("gpt2")
    module = attentions(model)[0]
    query, key, value = (torch.randn(1, 4, 3, 8) for _ in range(3))
    bias = torch.randn(1, 4, 3, 3)
    expected = sdpa_attention_forward(module, query, key, value, None, position_bias=bias)[0]
    actual = attention_forward(module, query, key, value, None, position_bias=bias)[0]
    assert torch.equal(actual, expected)
    assert not torch.allclose(actual, attention_forward(module, query, key, value, None)[0], atol=1e-3)


def test_values_that_are_not_the_caches_are_never_overlooked() -> None:
    model = patched()
    module = attentions(model)[0]
    cache = hf_accel.PagedCache(model.config)
    cache.prepare(1, 3, device=torch.device("cpu"))
    key, value = cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), 0)
    query = torch.randn(1, 4, 3, 8)
    with pytest.raises(hf_accel.UnsupportedError, match="changes V"):
        attention_forward(module, query, key, value * 2, None)


def test_dropout_in_training_is_not_left_out() -> None:
    """Over pages as over K and V: with a share of 1 nothing is left."""
    model = patched()
    module = attentions(model)[0]
    cache = hf_accel.PagedCache(model.config)
    cache.prepare(1, 3, device=torch.device("cpu"))
    key, value = cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), 0)
    out = attention_forward(module, torch.randn(1, 4, 3, 8), key, value, None, dropout=1.0)[0]
    assert not out.any()


def test_attention_that_came_with_loading_has_a_stock_to_go_back_to() -> None:
    model = build("gpt2")
    model.set_attn_implementation("hf_accel")
    given = inputs("left")
    with torch.no_grad():
        weights = model(**given, output_attentions=True).attentions
        stock = build("gpt2")
        stock.set_attn_implementation("eager")
        expected = stock(**given, output_attentions=True).attentions
    rows = given["attention_mask"].bool()
    for ours, theirs in zip(weights, expected, strict=True):
        assert torch.allclose(ours.transpose(1, 2)[rows], theirs.transpose(1, 2)[rows], atol=1e-5)
    assert PADDING == 0


def test_a_model_that_does_not_hand_on_its_cache() -> None:
    """Each token would be computed as if it was the first one."""

    class Forgets(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **(kwargs | {CACHE_NAME: None}))

    stock, model = build("llama"), patched()
    expected = tokens(stock, "single")
    model.model = Forgets(model.model)
    assert torch.equal(tokens(model, "single", use_cache=False), expected)
    raised = pytest.raises(Exception, match="no layer of LlamaForCausalLM keeps anything")
    with pytest.warns(hf_accel.HfAccelWarning, match="the class Forgets"), raised:
        model.generate_batch([inputs("single")["input_ids"][0].tolist()], max_new_tokens=2)
