"""Whoever gets a mask gets a right one: static caches, checkpointing, hooks and accelerate, in many families."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

import hf_accel

from ..families.inputs import decoder_prompts, shaped
from ..families.models import build, family

WINDOWED = ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Cohere2ForCausalLM", "MistralForCausalLM"]
NOT_CAUSAL = ["BertLMHeadModel"]  # stock's sdpa goes by that wherever it is given no mask
POSITIONAL = ["GPT2LMHeadModel", "BertLMHeadModel (is_decoder)", "BartForConditionalGeneration"]
MORE = [
    "MarianMTModel", "RobertaForCausalLM (is_decoder)", "OPTForCausalLM", "BertForMaskedLM", "LlamaForCausalLM",
    "T5ForConditionalGeneration", "BioGptForCausalLM", "PegasusForConditionalGeneration", *WINDOWED,
]  # fmt: skip
SHAPES = [(1, 13, False), (3, 13, False), (3, 13, True), (3, 4, False), (1, 6, False)]  # rows, columns, padded
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@cache
def stock(name: str) -> PreTrainedModel:
    return build(family(name))


def patched(name: str, **settings: Any) -> PreTrainedModel:
    return hf_accel.patch(copy.deepcopy(stock(name)), **settings)


@cache
def kept(name: str) -> PreTrainedModel:
    return patched(name, weights=None)


def given(name: str, rows: int = 3, columns: int = 13, *, padded: bool = False) -> dict[str, Tensor]:
    return shaped(family(name).kind, rows=rows, columns=columns, padded=padded)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache_name", ["static", "as an object", "dynamic"])
@pytest.mark.parametrize("rows, columns, padded", SHAPES)
@pytest.mark.parametrize("name", WINDOWED + NOT_CAUSAL)
def test_caches_of_windows(name: str, rows: int, columns: int, padded: bool, cache_name: str) -> None:
    inputs = given(name, rows, columns, padded=padded)

    def text(model: PreTrainedModel) -> Tensor:
        if cache_name == "as an object":
            return model.generate(**inputs, past_key_values=StaticCache(model.config, max_cache_len=32), **GREEDY)
        return model.generate(**inputs, cache_implementation=cache_name, **GREEDY)

    assert torch.equal(text(kept(name)), text(stock(name)))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_static_cache_under_int8(rows: int) -> None:
    """The oracle is our own loop over the same INT8 weights."""
    name = "Gemma3ForCausalLM"
    model, inputs = patched(name, weights="int8"), given(name, rows)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, cache_implementation="static", **GREEDY), expected)


def checkpoint_activations(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # newer transformers' name for it
        model.activation_checkpointing_enable(settings)
    else:
        model.gradient_checkpointing_enable(settings)


def gradients(model: PreTrainedModel, inputs: dict[str, Tensor], **checkpointing: Any) -> Tensor:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    if checkpointing:
        checkpoint_activations(model, checkpointing)
    logits = model(**inputs, use_cache=False).logits
    tokens = ... if "decoder_input_ids" in inputs else inputs["attention_mask"].bool()  # padding has logits of no use
    logits[tokens].square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*POSITIONAL, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_checkpointing(name: str, padded: bool, reentrant: bool) -> None:
    """Stock's gradient without checkpointing is the oracle: checkpointing changes no number."""
    inputs = given(name, padded=padded)
    if stock(name).config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": decoder_prompts(3)}
    expected = gradients(copy.deepcopy(stock(name)), inputs)
    got = gradients(patched(name, weights=None), inputs, use_reentrant=reentrant)
    assert (got - expected).norm() <= 1e-4 * expected.norm()


def copied(values: Any) -> Any:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def hook_that_clones(model: PreTrainedModel) -> None:
    for module in model.modules():
        if "attention" in type(module).__name__.lower() or type(module).__name__.endswith("Layer"):
            module.register_forward_pre_hook(lambda _, args, kwargs: (args, copied(kwargs)), with_kwargs=True)


def hook_that_moves(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("Layer"):
            add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))


def hook_that_hides_a_column(model: PreTrainedModel) -> None:
    """It shows a column to nobody, wherever there is a mask to write to."""

    def hide(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is None:  # as stock's sdpa has it
            mask = torch.ones(3, 1, 13, 13, dtype=torch.bool).tril()
        mask = mask.clone()
        mask[..., 5:, 4] = False
        return args, kwargs | {"attention_mask": mask}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(hide, with_kwargs=True)


HOOKS: list[Callable[[PreTrainedModel], None]] = [hook_that_clones, hook_that_moves, hook_that_hides_a_column]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"])
def test_hooks(name: str, hook: Callable[[PreTrainedModel], None], padded: bool) -> None:
    inputs, answers = given(name, padded=padded), []
    for model in (copy.deepcopy(stock(name)), patched(name, weights=None)):
        hook(model)
        with torch.no_grad():
            answers.append(model(**inputs).logits[inputs["attention_mask"].bool()])
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4 * float(answers[0].abs().max()))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "MistralForCausalLM", "LlamaForCausalLM"])
def test_padding_that_a_loss_reads(name: str, side: str, attention: str) -> None:
    """The label of a first token belongs to the padding before it, which sees nothing: eager and sdpa differ there."""
    if (name, attention) == ("Gemma2ForCausalLM", "sdpa"):
        pytest.skip("transformers refuses sdpa for it, whose scores have a cap")
    ids, held = torch.randint(5, 60, (2, 30), generator=torch.manual_seed(4)), torch.ones(2, 30, dtype=torch.int64)
    held[1, :14] = 0  # more than a window
    ids, held = (ids, held) if side == "left" else (ids.flip(1), held.flip(1))
    inputs = {"input_ids": ids, "attention_mask": held, "labels": ids.masked_fill(held == 0, -100)}
    expected = copy.deepcopy(stock(name))
    expected.set_attn_implementation(attention)
    model = hf_accel.patch(copy.deepcopy(expected), weights=None)
    for use_cache in (False, True):
        with torch.no_grad():
            wanted, found = (each(**inputs, use_cache=use_cache) for each in (expected, model))
        scale = wanted.logits.abs().max()
        assert torch.allclose(found.logits / scale, wanted.logits / scale, atol=1e-5)
        assert torch.allclose(found.loss, wanted.loss, rtol=1e-5)
    for each in (expected, model):
        each.train()
        each(**inputs, use_cache=False).loss.backward()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(other.grad, one.grad, atol=1e-5 * float(one.grad.abs().max()) + 1e-7)
