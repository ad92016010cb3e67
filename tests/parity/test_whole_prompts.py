"""Encoders that generate: the tokens of a prompt see all of it, and those behind it all before them."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    ElectraConfig,
    ElectraForCausalLM,
    MegatronBertConfig,
    MegatronBertForCausalLM,
    PreTrainedConfig,
    RobertaConfig,
    RobertaForCausalLM,
    RoCBertConfig,
    RoCBertForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
)

import hf_accel
from hf_accel import PagedCache
from hf_accel.fused.hf.operator_models import OperatorModel, operator_model
from hf_accel.generation.hf.model_runner import ModelRunner
from hf_accel.generation.prompt_inputs import whole
from hf_accel.generation.speculation import costs

from .families import VOCABULARY
from .together import PROMPTS, alone, check_preemption, check_programme, check_sampling, check_together

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 160, "initializer_range": 0.25, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SOUNDS = {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY}
KINDS: dict[str, tuple[Callable[..., Any], Callable[[], PreTrainedConfig]]] = {
    "bert": (BertLMHeadModel, lambda: BertConfig(**SIZES)),
    "roberta": (RobertaForCausalLM, lambda: RobertaConfig(**SIZES)),
    "electra": (ElectraForCausalLM, lambda: ElectraConfig(**SIZES, embedding_size=16)),
    "roc_bert": (RoCBertForCausalLM, lambda: RoCBertConfig(**SIZES, **SOUNDS)),  # prepares calls by itself
    "megatron_bert": (MegatronBertForCausalLM, lambda: MegatronBertConfig(**SIZES)),  # attends by operators
    "roformer": (RoFormerForCausalLM, lambda: RoFormerConfig(**SIZES)),  # and counts positions
}
FEW = ("bert", "roformer")


def model_of(kind: str) -> Any:
    make, config = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make(config()).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    check_together(model_of(kind))


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("kind", FEW)
def test_an_engine_with_drafts_and_few_blocks(kind: str, seed: int) -> None:
    check_programme(model_of(kind), random.Random(seed), block_sizes=(4, 16), seed=seed)


@pytest.mark.parametrize("kind", FEW)
def test_prompts_are_computed_again(kind: str) -> None:
    check_preemption(model_of(kind))


@pytest.mark.parametrize("kind", FEW)
def test_samples_and_beams(kind: str) -> None:
    ids, settings = torch.tensor([PROMPTS[0]]), {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    model = model_of(kind)
    expected = model.generate(ids, **settings)
    check_sampling(model)
    assert torch.equal(model.generate(ids, **settings), expected) and hf_accel.stats(model)["loop"] == "ragged"


def count_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes of any size take a second, and all else nothing, for those that choose the lengths of drafts."""
    passes, call = [0.0], ModelRunner.__call__

    def counted(*args: Any, **keywords: Any) -> Any:
        passes[0] += 1
        return call(*args, **keywords)

    monkeypatch.setattr(ModelRunner, "__call__", counted)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: passes[0]))


@pytest.mark.parametrize("kind", FEW)
def test_tokens_looked_up_in_the_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own loop ends in an AttributeError; ours drafts and gives the tokens of a call without drafts."""
    model, ids = model_of(kind), torch.tensor([PROMPTS[0][:6] * 3])
    count_passes(monkeypatch)  # or a slow span ends the drafts
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **settings)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), expected)
    assert hf_accel.stats(model)["loop"] == "ragged" and hf_accel.stats(model)["drafted"] > 0
    assert torch.equal(model.generate(ids, speculative="ngram", **settings), expected)


@pytest.mark.parametrize("kind", FEW)
def test_a_second_turn_is_stocks(kind: str) -> None:
    """The tokens of the second prompt see each other and all before them, which is not what pages were written for."""
    model, turns = model_of(kind), []
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    for patched in (False, True):
        if patched:
            hf_accel.patch(model, weights=None)
        first = model.generate(torch.tensor([PROMPTS[0]]), **settings)
        ids = torch.cat([first.sequences, torch.tensor([PROMPTS[1][:6]])], dim=1)
        second = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=PagedCache(model.config),
                                **settings)  # fmt: skip
        turns.append((first.sequences.tolist(), second.sequences.tolist()))
    assert turns[0] == turns[1]
    with pytest.warns(hf_accel.HfAccelWarning, match="a prompt whose tokens see each other"):
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=first.past_key_values, **settings)


def test_a_prefix_of_a_prompt_is_not_shared() -> None:
    """The keys of its tokens depend on those behind them, in ragged passes and in a cache that is passed along."""
    stock, model = model_of("bert"), model_of("bert")
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config)
    for end in (7, 9):
        ids = torch.tensor([[*range(20, 60), end]])
        cache.reset()
        with torch.no_grad():
            found = model(ids, past_key_values=cache, use_cache=True).logits
            assert torch.allclose(found, stock(ids).logits, atol=1e-4)
        assert alone(model, ids[0].tolist()) == alone(stock, ids[0].tolist())
    one, other = (whole([1, 2, 3, end], 0).contents for end in (4, 5))
    assert not {*one} & {*other} and whole([1, 2, 3, 4], 2).contents != one


def test_types_of_tokens() -> None:
    model, ids = model_of("bert"), torch.tensor([PROMPTS[0], PROMPTS[0]])
    settings = {"token_type_ids": torch.arange(ids.shape[1]).gt(4).long().expand(2, -1), "max_new_tokens": 4}
    expected = model.generate(ids, **settings, do_sample=False)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, **settings, do_sample=False), expected)


def test_eager_attention() -> None:
    model = model_of("bert")
    model.set_attn_implementation("eager")
    check_together(model)


def test_a_window_is_seen_in_a_mask() -> None:
    model = model_of("megatron_bert")
    assert isinstance(operator_model(model, True), OperatorModel)
    encoder = model.base_model.encoder

    def hiding(self: Any, states: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        far = torch.ones(states.shape[1], states.shape[1]).tril(-40) * -1e9
        return super(type(encoder), self).forward(states, far[None, None], *args, **kwargs)

    encoder.__class__ = type("Hiding", (type(encoder),), {"forward": hiding})
    assert "its mask hides tokens of a prompt" in str(operator_model(model, True))
