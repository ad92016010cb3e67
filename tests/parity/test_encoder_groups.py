"""The groups that INT8 gives encoders whose rounding would add up: deep ones that end their layers in a norm."""

import copy

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    XLMRobertaConfig,
    XLMRobertaForCausalLM,
    XLMRobertaForMaskedLM,
    XLMRobertaModel,
)

import hf_accel
from hf_accel.kernels import cpu as kernels

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES = {"vocab_size": 120, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "pad_token_id": 1}
DEEP = 13
TOKENS = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}


def xlm_roberta(kind=XLMRobertaModel, *, layers=DEEP, **settings):
    torch.manual_seed(0)
    return kind(XLMRobertaConfig(num_hidden_layers=layers, **SIZES | settings)).eval()


def groups(model, weights="int8"):
    """The group size of each quantized weight, by its name."""
    return {p.site.name: p.config.group_size for p in hf_accel.plan(model, weights=weights).linears if p.choice}


@pytest.mark.parametrize("kind", [XLMRobertaModel, XLMRobertaForMaskedLM])
@pytest.mark.parametrize("training", [False, True])
def test_linears_of_a_deep_encoder_of_norms_get_groups_of_64(kind, training):
    found = groups(xlm_roberta(kind).train(training))
    assert {size for name, size in found.items() if ".layer." in name} == {64}
    assert {size for name, size in found.items() if ".layer." not in name} == {None}


def models():
    yield "12 layers", xlm_roberta(layers=12)
    yield "generates text", xlm_roberta(XLMRobertaForCausalLM, is_decoder=True)
    yield "sees tokens before alone", xlm_roberta(is_decoder=True)
    yield "a norm at the beginning", ModernBertModel(ModernBertConfig(num_hidden_layers=DEEP, **SIZES, **TOKENS)).eval()
    yield "inputs that groups do not divide", xlm_roberta(hidden_size=96, intermediate_size=160)
    yield "a causal model", LlamaForCausalLM(LlamaConfig(num_hidden_layers=DEEP, num_key_value_heads=4, **SIZES))


@pytest.mark.parametrize("name, model", [pytest.param(*each, id=each[0]) for each in models()])
def test_others_keep_a_scale_for_each_output(name, model):
    assert set(groups(model).values()) == {None}


@pytest.mark.parametrize("asked", [None, 32])
def test_what_is_asked_for_is_kept(asked):
    found = groups(xlm_roberta(), {"bits": 8, "group_size": asked})
    assert {size for name, size in found.items() if ".layer." in name} == {asked}


def test_patched_loaded_and_saved_models_have_the_same_bits(tmp_path):
    model, ids = xlm_roberta(), torch.arange(2, 22).view(2, 10)
    model.save_pretrained(tmp_path / "float")
    with torch.no_grad():
        patched = hf_accel.patch(copy.deepcopy(model), weights="int8")
        expected = patched(ids).last_hidden_state
        patched.save_pretrained(tmp_path / "int8")
        for path in ("float", "int8"):
            loaded = hf_accel.load(tmp_path / path)
            assert torch.equal(loaded(ids).last_hidden_state, expected)
        config = hf_accel.AccelConfig("int8")
        loaded = XLMRobertaModel.from_pretrained(tmp_path / "float", quantization_config=config)
        assert torch.equal(loaded(ids).last_hidden_state, expected)


@pytest.mark.parametrize("outliers", [1.0, 3.0])
def test_rounding_does_not_add_up(outliers):
    """outliers: by how much a few channels, inputs and weights are larger than the others."""
    model = xlm_roberta(layers=24, hidden_size=256, intermediate_size=1024)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data[::50] *= outliers
        if isinstance(module, torch.nn.Linear):
            module.weight.data[:, ::101] *= outliers
            module.weight.data.view(-1)[::1001] *= outliers
    ids = torch.arange(2, 66).view(2, 32)
    with torch.no_grad():
        expected = model(ids).last_hidden_state.double()
        found, coarse = (
            hf_accel.patch(copy.deepcopy(model), weights=weights)(ids).last_hidden_state.double()
            for weights in ("int8", {"bits": 8, "group_size": None})
        )
    error, coarse_error = (
        1 - torch.cosine_similarity(states.flatten(), expected.flatten(), dim=0) for states in (found, coarse)
    )
    assert error < 0.0005 and error < 0.8 * coarse_error
