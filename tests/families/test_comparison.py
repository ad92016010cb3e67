"""The comparison itself: it takes roundings for the same, in each dtype, and nothing else."""

from __future__ import annotations

import contextlib
import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from ..selection import some_long
from .comparison import StockCannot, Text, Wrong, forward, generate, given, same_logits, wider
from .configs import tiny_config
from .inputs import prompts
from .models import enliven

SMALL = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DTYPES: dict[torch.dtype, dict[str, Any]] = {  # and models of them, which show what their rounding does
    torch.float32: {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 24}
    | {"num_hidden_layers": 1, "hidden_act": "gelu", "tie_word_embeddings": True, "attention_bias": True},
    torch.bfloat16: {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 96, "attention_bias": True}
    | {"num_hidden_layers": 4, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}
    | {"intermediate_size": 40, "rope_parameters": SMALL | {"rope_theta": 100.0}},
    torch.float16: {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_act": "gelu", "attention_bias": True}
    | {"num_hidden_layers": 1, "rms_norm_eps": 1e-3, "vocab_size": 160, "intermediate_size": 72}
    | {"rope_parameters": SMALL | {"mscale": 0.7, "mscale_all_dim": 1.2, "rope_theta": 1e4}},
}
NEW_TOKENS = 40
GREEDY: dict[str, Any] = {}
SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 1.3}


def model(dtype: torch.dtype) -> PreTrainedModel:
    return of_config(LlamaForCausalLM, tiny_config("llama", **DTYPES[dtype]), dtype)


def of_config(kind: Any, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """In evaluation mode; its texts end by their length."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found: PreTrainedModel = kind._from_config(config, dtype=dtype)
        enliven(found)
    found.generation_config.eos_token_id = None
    return found.eval()


@cache
def stock(dtype: torch.dtype) -> PreTrainedModel:
    found = model(dtype)
    assert found.dtype == dtype
    return found


def inputs() -> dict[str, Tensor]:
    return prompts("causal")


def rounded_otherwise(dtype: torch.dtype) -> PreTrainedModel:
    """The same model, whose products add their numbers in another order."""
    other = model(dtype)
    other.set_attn_implementation("eager")
    return other


@torch.no_grad()
def damaged(dtype: torch.dtype) -> PreTrainedModel:
    """A fifth of what one matrix adds is missing."""
    other = model(dtype)
    other.model.layers[0].self_attn.o_proj.weight.mul_(0.8)
    return other


def compare(one: PreTrainedModel, other: PreTrainedModel) -> None:
    batch = inputs()
    same_logits(one, *[forward(each, batch) for each in (one, other)], batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_if_rounded_otherwise(dtype: torch.dtype) -> None:
    compare(stock(dtype), rounded_otherwise(dtype))
    with pytest.raises(Wrong, match="of a wider dtype"):
        compare(stock(dtype), damaged(dtype))


@pytest.mark.parametrize(("name", "chooses"), [("Llama", False), ("Mixtral", True)])
def test_only_a_model_of_half_precision_that_chooses_may_have_a_token_of_its_own(name: str, chooses: bool) -> None:
    kind = getattr(transformers, f"{name}ForCausalLM")
    mixture = of_config(kind, tiny_config(name.lower()), torch.bfloat16)
    batch = {"input_ids": inputs()["input_ids"][1:2]}
    expected, actual = (forward(mixture, batch) for _ in range(2))
    actual.logits[0, 7] += 1
    for stock, may in ((mixture, chooses), (wider(mixture), False)):
        found = [copy.copy(each) for each in (expected, actual)]
        for each in found:
            each.logits = each.logits.to(stock.dtype)
        with contextlib.nullcontext() if may else pytest.raises(Wrong, match="of a wider dtype"):
            same_logits(stock, *found, batch)
    actual.logits[0, 3:9] += 1
    with pytest.raises(Wrong, match="of a wider dtype"):
        same_logits(mixture, expected, actual, batch)


def written(model: PreTrainedModel, *, seed: int = 0, **settings: Any) -> Tensor:
    torch.manual_seed(seed)
    found: Tensor = model.generate(**given(model, inputs()), max_new_tokens=NEW_TOKENS, **settings)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_the_same_if_rounded_otherwise(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    text = Text(stock(dtype), inputs(), max_new_tokens=NEW_TOKENS, **settings)
    other = written(rounded_otherwise(dtype), **settings)
    assert dtype != torch.bfloat16 or not torch.equal(other, text.output.sequences)  # or else this shows nothing
    text.same(other)
    with pytest.raises(Wrong, match="of a wider dtype"):
        text.same(written(damaged(dtype), **settings))


@pytest.mark.parametrize("dtype", some_long(DTYPES, torch.float32, torch.float16))
def test_tokens_of_other_draws_are_not_the_same(dtype: torch.dtype) -> None:
    text = Text(stock(dtype), inputs(), max_new_tokens=NEW_TOKENS, **SAMPLED)
    with pytest.raises(Wrong, match="of a wider dtype"):
        text.same(written(stock(dtype), seed=1, **SAMPLED))


@pytest.mark.parametrize("dtype", some_long(DTYPES, torch.float32, torch.float16))
def test_beams_have_the_scores_of_their_tokens(dtype: torch.dtype) -> None:
    settings = {"num_beams": 3, "num_return_sequences": 2}
    text = Text(stock(dtype), inputs(), **settings)
    kept = {"return_dict_in_generate": True, "output_scores": True}
    text.same_beams(generate(rounded_otherwise(dtype), inputs(), **settings, **kept))
    with pytest.raises(Wrong, match="beams"):
        text.same_beams(generate(damaged(dtype), inputs(), **settings, **kept))


def test_a_cache_that_changes_what_stock_writes_is_told() -> None:
    """MiniMax's, where its first layer keeps a state and rows are padded: only the text without it is right."""
    kinds = ["linear_attention", "full_attention"]
    config = tiny_config("minimax", num_hidden_layers=2, layer_types=kinds)
    one = of_config(transformers.MiniMaxForCausalLM, config, torch.float32)
    text = Text(one, inputs())
    tokens = generate(one, inputs(), use_cache=False)
    assert not torch.equal(tokens, text.output.sequences)
    with pytest.raises(StockCannot, match="its own cache"):
        text.same(tokens)
    tokens[:, -5:] = 7
    with pytest.raises(Wrong, match="of a wider dtype"):
        text.same(tokens)
