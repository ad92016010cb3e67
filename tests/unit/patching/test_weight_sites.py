"""What a site says of a module is what patch() puts in, what a checkpoint is loaded into, and what is counted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PreTrainedModel

import hf_accel
from hf_accel.estimate import estimate
from hf_accel.linear import QuantModule, Replacement
from hf_accel.patching.survey import sites_for, sites_named
from hf_accel.patching.weight_sites import empty_original, quantized_layers

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linears": (LlamaConfig(**SIZES, attention_bias=True), {}),
    "inputs first": (GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2), {}),
    "experts": (MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2), {}),
    "shared table": (LlamaConfig(**SIZES, tie_word_embeddings=True), {}),
    "table of its own": (LlamaConfig(**SIZES), {"embedding": "int4"}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(KINDS[kind][0])
    return model.eval()


def config_of(kind: str) -> hf_accel.WeightConfig:
    return hf_accel.WeightConfig(bits=4, group_size=32, **KINDS[kind][1])


def patched(kind: str) -> PreTrainedModel:
    return hf_accel.patch(made(kind), weights=config_of(kind), keep_original=True)


def layers_of(model: nn.Module) -> dict[str, QuantModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}


@each_kind
def test_layers_are_those_that_the_sites_describe(kind: str) -> None:
    config, stock, layers = config_of(kind), made(kind), layers_of(patched(kind))
    sites = {site.name: site for site in sites_for(stock, config)[0] if site.skip is None}
    assert sites.keys() == layers.keys()
    for name, site in sites.items():
        kept = site.config_in(config)
        assert kept is not None and site.whole(site.spec(kept)) == layers[name].spec
        assert set(site.together) <= layers.keys() and name in site.together
        assert dict(stock.named_parameters(remove_duplicate=False))[site.tensor_name] is site.parameter


@each_kind
def test_sites_are_found_again_by_the_names_of_their_layers(kind: str) -> None:
    stock, layers = made(kind), layers_of(patched(kind))
    found = sites_named(stock, [*layers, "model.norm", "nowhere"])
    assert found.keys() == layers.keys()
    for name, site in found.items():
        empty = site.empty(site.spec(config_of(kind)), ordered=False, bias=site.bias is not None, blocks=False)
        assert (type(empty), empty.out_features) == (type(layers[name]), layers[name].out_features)


@each_kind
def test_what_takes_a_place_makes_what_was_there(kind: str) -> None:
    stock, model = made(kind), patched(kind)
    for name, layer in quantized_layers(model).items():
        assert isinstance(layer, Replacement)
        there, shapes, float_layer = stock.get_submodule(name), empty_original(layer), layer.original()
        for key, parameter in shapes.named_parameters():
            wanted = there.get_parameter(key)
            assert sorted(parameter.shape) == sorted(wanted.shape) and parameter.dtype is wanted.dtype
            assert float_layer.get_parameter(key).shape == parameter.shape
    x = torch.randn(3, 32)
    linear = model.get_output_embeddings()
    torch.testing.assert_close(linear.original()(x), nn.functional.linear(x, linear.weight, linear.bias))


@each_kind
def test_a_second_layer_shares_the_weight_and_nothing_that_changes(kind: str) -> None:
    for layer in layers_of(patched(kind)).values():
        before, second = copy.copy(layer.quantized.dequantize(torch.float32)), layer.sibling()
        assert torch.equal(second.quantized.dequantize(torch.float32), before) and type(second) is type(layer)
        second.write(torch.zeros(layer.out_features, layer.in_features))
        assert (layer.writes, second.writes) == (0, 1) and not layer.changes
        assert torch.equal(layer.quantized.dequantize(torch.float32), before)


@each_kind
def test_a_quantized_checkpoint_counts_what_it_holds(kind: str, tmp_path: Path) -> None:
    model = patched(kind)
    model.save_pretrained(tmp_path)
    held = sum(layer.spec.weight_bytes for layer in layers_of(model).values())
    assert estimate(tmp_path, bandwidth=1e9, compute=1e9).weights_bytes == held + sum(
        p.nbytes for p in model.parameters()
    )
