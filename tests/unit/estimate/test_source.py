from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DistilBertConfig,
    LlamaForCausalLM,
    MambaConfig,
    MiMoV2FlashConfig,
    T5Config,
    ViTConfig,
)

from hf_accel.errors import UnsupportedError
from hf_accel.estimate.shapes import shapes_of

from .shapes import TINY


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (BertConfig(), "BertConfig describes an encoder, which has no KV cache"),
        (DistilBertConfig(), "DistilBertConfig describes an encoder"),
        (ViTConfig(), "ViTConfig makes no causal language model"),
        (T5Config(), "T5Config describes an encoder-decoder"),
        (MambaConfig(), "MambaConfig has no num_attention_heads"),
        (DeepseekV3Config(), "DeepseekV3Config has multi-head latent attention"),
        (MiMoV2FlashConfig(), "MiMoV2FlashConfig has values of another size than keys"),
        ("/no/such/model", "no model config can be read from '/no/such/model'"),
        (42, "estimate\\(\\) takes a config, a model or a path, not int"),
        (nn.Linear(2, 2), "Linear has no transformers config"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_decoder_is_refused(source, message):
    with pytest.raises(UnsupportedError, match=message):
        shapes_of(source, dtype=None)


def test_an_encoder_model_is_refused():
    with torch.device("meta"):
        model = BertModel(BertConfig())
    with pytest.raises(UnsupportedError, match="BertConfig describes an encoder"):
        shapes_of(model, dtype=None)


def test_a_bert_that_is_a_decoder_is_one():
    shapes = shapes_of(BertConfig(is_decoder=True, num_hidden_layers=1), dtype=None)
    assert type(shapes).__name__ == "BertLMHeadModel"


def test_an_entry_from_a_stray_config_json_does_not_make_an_encoder():
    config = TINY["llama"].__class__(**{**TINY["llama"].to_dict(), "is_decoder": False})
    assert shapes_of(config, dtype=None).config.is_decoder is False


def test_a_path_gives_what_its_config_gives(tmp_path):
    TINY["mixtral"].save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        assert type(shapes_of(path, dtype=None)).__name__ == "MixtralForCausalLM"


def test_a_config_makes_shapes_without_memory():
    shapes = shapes_of(TINY["llama"], dtype=torch.float16)
    assert {p.device.type for p in shapes.parameters()} == {"meta"}
    assert shapes.dtype == torch.float16


def test_a_model_is_itself_without_an_adapters_wrapper():
    model = LlamaForCausalLM(TINY["llama"])

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
            self.config = model.config

        def get_base_model(self):
            return self.inner

    assert shapes_of(model, dtype=None) is model
    assert shapes_of(Adapter(), dtype=None) is model
