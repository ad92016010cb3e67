"""A PagedCache that the caller passes along: chats, shared prefixes, and stock models."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel

from .families import DECODER, FAMILIES, build, inputs, prompts

BLOCK = 4


@functools.cache
def stock(family: str) -> PreTrainedModel:
    return build(family)


@functools.cache
def patched(family: str) -> PreTrainedModel:
    return hf_accel.patch(build(family), weights=None)


def greedy(model: PreTrainedModel, ids: Tensor, **settings: Any) -> Tensor:
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    return model.generate(ids, **given | settings)


def paged(model: PreTrainedModel, **settings: Any) -> hf_accel.PagedCache:
    return hf_accel.PagedCache(model.config, block_size=BLOCK, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_chat(family: str) -> None:
    """Each turn gives the whole conversation and the cache of the last one, as transformers' chats do."""
    conversations = []
    for model in (stock(family), patched(family)):
        given = inputs("left")
        ids, mask, cache = given["input_ids"], given["attention_mask"], None
        for turn in range(3):
            settings = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
            output = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
            cache = output.past_key_values
            ids = torch.cat([output.sequences, prompts(len(ids), 5, seed=10 + turn)], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(ids), 11)], dim=1)
        assert isinstance(cache, hf_accel.PagedCache) == hf_accel.is_patched(model)
        conversations.append(ids)
    assert torch.equal(*conversations)


def test_shared_prefix_is_found_again() -> None:
    model = patched("llama")
    cache = paged(model)
    first, second = prompts(1, 13), prompts(1, 13)
    second[:, 9:] = prompts(1, 4, seed=7)
    for ids, hits in ((first, 0), (second, 2), (first, 3)):  # full blocks of 4 among the first 9 and 13 tokens
        cache.reset()
        before = cache.statistics()["prefix_hits"]
        actual = greedy(model, ids, past_key_values=cache)
        assert torch.equal(actual, greedy(stock("llama"), ids))
        assert cache.statistics()["prefix_hits"] - before >= hits
        assert (cache.statistics()["prefix_hits"] > before) == (hits > 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_again_with_the_same_cache(family: str, layout: str) -> None:
    model, cache = patched(family), paged(patched(family))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    expected = stock(family).generate(**inputs(layout), **settings)
    for _ in range(3):
        cache.reset()
        assert torch.equal(model.generate(**inputs(layout), **settings, past_key_values=cache), expected)


def test_known_prompt_is_not_computed_again() -> None:
    """A user's hook could not count the rows of a pass: with one, all are computed."""
    model, cache = patched("llama"), paged(patched("llama"))
    found = []
    for hook in (None, None, lambda module, args: None):
        handle = None if hook is None else model.model.layers[0].mlp.register_forward_pre_hook(hook)
        before = cache.statistics()["prefix_hits"]
        cache.reset()
        greedy(model, prompts(2, 13), past_key_values=cache, max_new_tokens=2)
        found.append(cache.statistics()["prefix_hits"] - before)
        if handle is not None:
            handle.remove()
    assert found == [0, 6, 0]  # 12 of 13 tokens of each row stand in full blocks


def test_equal_rows_are_stored_once() -> None:
    model = patched("llama")
    used = []
    for rows in (1, 4):
        cache = paged(model)
        with torch.no_grad():
            model(prompts(1, 12).expand(rows, -1), past_key_values=cache)
        used.append(cache.statistics()["blocks_used"])
    assert used == [3, 3]


def test_prefix_sharing_off() -> None:
    model = patched("llama")
    cache = paged(model, prefix_sharing=False)
    for _ in range(2):
        cache.reset()
        assert torch.equal(
            greedy(model, prompts(2, 13), past_key_values=cache), greedy(stock("llama"), prompts(2, 13))
        )
    assert cache.statistics()["prefix_lookups"] == 0


# -- what makes equal tokens have unequal keys ---------------------------------------------------------


def test_changed_weights_drop_the_prefixes() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    cache = paged(model)
    greedy(model, prompts(1, 13), past_key_values=cache)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    cache.reset()
    assert torch.equal(greedy(model, prompts(1, 13), past_key_values=cache), greedy(model, prompts(1, 13)))
    assert cache.statistics()["prefix_hits"] == 0


class Switch(torch.nn.Module):
    """An adapter that can be switched off, told as PEFT tells it."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer, self._active_adapter, self._disable_adapters = base_layer, ["default"], False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * (1 if self._disable_adapters else -1)


def test_switched_adapter_drops_the_prefixes() -> None:
    """A turn of a chat without the adapter is no prefix for a prompt with it, nor is anything of before."""
    model = hf_accel.patch(build("llama"), weights=None)
    attention = model.model.layers[0].self_attn
    attention.k_proj = adapter = Switch(attention.k_proj)
    cache, expected = paged(model), greedy(model, prompts(1, 21))
    greedy(model, prompts(1, 13), past_key_values=cache, max_new_tokens=1)
    adapter._disable_adapters = True
    greedy(model, prompts(1, 21), past_key_values=cache, max_new_tokens=1)
    adapter._disable_adapters = False
    cache.reset()
    assert torch.equal(greedy(model, prompts(1, 21), past_key_values=cache), expected)
    assert cache.statistics()["prefix_hits"] == 0


def test_a_turn_after_a_switch_is_no_prefix() -> None:
    """Its K and V begin with those of the turn before the switch."""
    model = hf_accel.patch(build("llama"), weights=None)
    attention = model.model.layers[0].self_attn
    attention.k_proj = adapter = Switch(attention.k_proj)
    cache = paged(model)
    chat = greedy(model, prompts(1, 13), past_key_values=cache)
    adapter._disable_adapters = True
    chat = greedy(model, chat, past_key_values=cache, max_new_tokens=12)
    expected = greedy(model, chat)
    cache.reset()
    assert torch.equal(greedy(model, chat, past_key_values=cache), expected)
    assert cache.statistics()["prefix_hits"] == 0


def test_another_patch_drops_the_prefixes() -> None:
    model = build("llama")
    cache = paged(model)
    for weights in ("int8", "int4"):
        with hf_accel.patched(model, weights={"int8": "int8", "int4": {"bits": 4, "group_size": 32}}[weights]):
            cache.reset()
            greedy(model, prompts(1, 13), past_key_values=cache)
    assert cache.statistics()["prefix_hits"] == 0


def test_other_positions_are_not_a_prefix() -> None:
    model, cache = patched("llama"), paged(patched("llama"))
    ids = prompts(1, 13)
    with torch.no_grad():
        for offset in (0, 5):
            cache.reset()
            model(ids, position_ids=torch.arange(13)[None] + offset, past_key_values=cache)
    assert cache.statistics()["prefix_hits"] == 0


def test_embeddings_are_not_a_prefix() -> None:
    model, cache = patched("llama"), paged(patched("llama"))
    for seed in (1, 2):
        embeddings = model.get_input_embeddings()(prompts(1, 13, seed=seed)).detach()
        cache.reset()
        settings: dict[str, Any] = {"inputs_embeds": embeddings, "do_sample": False, "max_new_tokens": 8}
        assert torch.equal(model.generate(**settings, past_key_values=cache), stock("llama").generate(**settings))


def test_rotary_scaling_by_length_shares_no_prefix() -> None:
    """Dynamic NTK rotates keys by the length of the input, once that is more than the model was made for."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = LlamaConfig(**DECODER, max_position_embeddings=8, rope_parameters=scaling)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).eval()
    model = hf_accel.patch(LlamaForCausalLM(config).eval(), weights=None)
    model.load_state_dict(plain.state_dict())
    cache = paged(model)
    for length in (13, 26):
        cache.reset()
        ids = prompts(1, 26)[:, :length]
        with torch.no_grad():
            model(ids, past_key_values=cache)
            actual = model(ids[:, :1], past_key_values=cache).logits
            expected = plain(ids[:, :1], past_key_values=plain(ids).past_key_values).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# -- stock models --------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "sampling"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_model_over_a_paged_cache(family: str, mode: str, layout: str) -> None:
    settings: dict[str, Any] = {"greedy": {}, "beam": {"num_beams": 3}, "sampling": {"do_sample": True}}[mode]
    outputs = []
    for cache in (None, paged(stock(family))):
        torch.manual_seed(0)
        given = {"do_sample": False, "max_new_tokens": 12} | settings | inputs(layout)
        outputs.append(stock(family).generate(**given, past_key_values=cache))
    assert torch.equal(*outputs)


def _held(model: PreTrainedModel) -> Any:
    return greedy(model, prompts(2, 7), return_dict_in_generate=True).past_key_values


EDITS: dict[str, Any] = {
    "in place": lambda layer: layer.values[:, :, 0].zero_(),
    "in place, keys": lambda layer: layer.keys.mul_(0.5),
    "others in their place": lambda layer: setattr(layer, "values", layer.values * 1.5),
}


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("edit", EDITS)
def test_keys_and_values_that_somebody_edits_are_refused(edit: str, without_gradients: Any) -> None:
    """What is read of a paged cache is a copy, and a write to it would change nothing."""
    model, cache = patched("llama"), _held(patched("llama"))
    with pytest.raises(hf_accel.UnsupportedError, match="copy of what is in pages"), without_gradients():
        EDITS[edit](cache.layers[1])
        model(prompts(2, 2), past_key_values=cache)
    with pytest.raises(hf_accel.UnsupportedError, match="copy of what is in pages"), without_gradients():
        EDITS[edit](cache.layers[1])
        greedy(model, prompts(2, 16), past_key_values=cache)
    cache.layers[0].keys.mul_(0.5)
    cache.reset()
    assert torch.equal(greedy(model, prompts(2, 7), past_key_values=cache), greedy(stock("llama"), prompts(2, 7)))


@pytest.mark.parametrize("edit", EDITS)
def test_the_way_to_edit_keys_and_values(edit: str) -> None:
    logits = []
    for model in (stock("llama"), patched("llama")):
        settings = {"cache_implementation": "dynamic", "return_dict_in_generate": True}
        cache = greedy(model, prompts(2, 7), **settings).past_key_values
        with torch.no_grad():
            EDITS[edit](cache.layers[1])
            logits.append(model(prompts(2, 2), past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_cache_gives_its_layers_one_by_one() -> None:
    """By which a DynamicCache is made of another cache."""
    logits = []
    for model in (stock("llama"), patched("llama")):
        copied = DynamicCache(_held(model))
        with torch.no_grad():
            logits.append(model(prompts(2, 2), past_key_values=copied).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    windows = [window for _, _, window in _held(patched("mistral"))]
    assert [None if each is None else int(each) for each in windows] == [
        getattr(layer, "sliding_window", None) for layer in _held(stock("mistral")).layers
    ]
