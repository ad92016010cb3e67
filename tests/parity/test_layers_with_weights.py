"""Encoders whose layers return the weights of their attention with each result, which the encoder leaves unread."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import (
    MegatronBertConfig,
    MegatronBertForCausalLM,
    MegatronBertForMaskedLM,
    MegatronBertModel,
    RemBertConfig,
    RemBertModel,
)
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertEncoder

import hf_accel
from hf_accel.fused.encoder_programme import EncoderProgramme
from hf_accel.fused.hf.encoder_sites import LAYER, RETURNS_WEIGHTS, STACK
from hf_accel.kernels import cpu as kernels
from tests.families.models import enliven

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES = {
    "vocab_size": 61, "hidden_size": 60, "num_attention_heads": 5, "intermediate_size": 92, "num_hidden_layers": 3,
    "max_position_embeddings": 80,
}  # fmt: skip
KINDS = {
    "MegatronBert": lambda: MegatronBertModel(MegatronBertConfig(**SIZES)),
    "RemBert": lambda: RemBertModel(RemBertConfig(input_embedding_size=36, **SIZES)),
    "with a head": lambda: MegatronBertForMaskedLM(MegatronBertConfig(**SIZES)),
}
LENGTHS = [11, 3, 7, 1]


def made(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    enliven(model)
    return model


def inputs(padding):
    ids = torch.randint(2, 61, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(11) < torch.tensor(LENGTHS)[:, None]).long()
    mask = {"right": mask, "left": mask.flip(1), "none": torch.ones_like(mask)}[padding]
    return {"input_ids": ids, "attention_mask": mask}


class Rows:
    """Counts the tokens that layers compute natively."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        call = EncoderProgramme.__call__

        def counted(programme, x, *args, **kwargs):
            self.count += len(x)
            return call(programme, x, *args, **kwargs)

        self._patch = mock.patch.object(EncoderProgramme, "__call__", counted)
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()


@torch.no_grad()
@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_stocks_and_padding_is_left_out(kind, padding):
    model, given = made(kind), inputs(padding)
    expected, real = model(**given)[0], given["attention_mask"].bool()
    with hf_accel.patched(model, weights=None), Rows() as rows:
        found = model(**given)[0]
    assert rows.count == (0 if padding == "left" else 3 * int(real.sum()))  # the pooler reads the first place
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(model(**given)[0], expected)


@pytest.mark.usefixtures("in_floats")
@torch.no_grad()
@pytest.mark.parametrize("kind", ["MegatronBert", "RemBert"])
def test_int8_is_that_of_the_modules(kind):
    given = inputs("right")
    real = given["attention_mask"].bool()
    native, by_module = (hf_accel.patch(made(kind), weights="int8", fuse=fuse) for fuse in (True, False))
    found, expected = native(**given)[0][real], by_module(**given)[0][real]
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.9999


@torch.no_grad()
def test_who_reads_the_weights_gets_them():
    model, given = made("MegatronBert"), inputs("right")
    expected, states = model(**given, output_attentions=True), torch.randn(2, 5, 60)
    of_layer, seen = model.encoder.layer[1](states), []
    with hf_accel.patched(model, weights=None), Rows() as rows:
        found = model(**given, output_attentions=True)
        torch.testing.assert_close(found.attentions, expected.attentions)
        torch.testing.assert_close(model.encoder.layer[1](states), of_layer)
        hook = model.encoder.layer[1].register_forward_hook(lambda module, args, result: seen.append(result[1]))
        model(**given)
        hook.remove()
        assert rows.count == 0
        model(**given)
        assert rows.count > 0
    torch.testing.assert_close(seen[0], expected.attentions[1])


@torch.no_grad()
def test_what_stands_around_the_layers_may_change():
    model, given, shapes = made("MegatronBert"), inputs("right"), []
    real, norm = given["attention_mask"].bool(), nn.LayerNorm(60, bias=False)
    norm.weight.data.uniform_()
    changed = copy.deepcopy(model)
    changed.encoder.ln = norm
    with hf_accel.patched(model, weights=None):
        model(**given)
        hook = model.encoder.ln.register_forward_hook(lambda module, args, result: shapes.append(result.shape))
        model(**given)
        hook.remove()
        model.encoder.ln = norm
        torch.testing.assert_close(model(**given)[0][real], changed(**given)[0][real], rtol=1e-4, atol=1e-4)
    assert shapes == [(4, 11, 60)]


class Reading(MegatronBertEncoder):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        for layer in self.layer:
            hidden_states, weights = layer(hidden_states, attention_mask)
        return hidden_states * weights.sum(-1).mean(1)[..., None]


def reading():
    model = MegatronBertModel(MegatronBertConfig(**SIZES)).eval()
    model.encoder.__class__ = Reading
    return model


@pytest.mark.parametrize(
    "make",
    [
        reading,
        lambda: MegatronBertForCausalLM(MegatronBertConfig(is_decoder=True, **SIZES)).eval(),
    ],
    ids=["an encoder that reads them", "a model that generates text"],
)
def test_where_they_may_be_read_layers_keep_their_code(make):
    plan = hf_accel.plan(make(), weights=None)
    assert not {site.kind for site in plan.fused.sites} & {LAYER, STACK}
    assert RETURNS_WEIGHTS in str([each.reason for each in plan.fused.dropped])
