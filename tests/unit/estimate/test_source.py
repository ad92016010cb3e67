from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    CLIPConfig,
    DeepseekV32Config,
    DistilBertConfig,
    LlamaForCausalLM,
    MambaConfig,
    MiMoV2FlashConfig,
    ModernBertConfig,
    ResNetConfig,
    T5Config,
    ViTConfig,
)

from hf_accel import estimate
from hf_accel.errors import UnsupportedError
from hf_accel.estimate.shapes import shapes_of

from .shapes import TINY


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CLIPConfig(), "CLIPConfig describes a model of several parts"),
        (ResNetConfig(), "ResNetConfig has no num_attention_heads"),
        (T5Config(architectures=["T5Model"]), "T5Config describes an encoder-decoder without a head"),
        (MambaConfig(), "MambaConfig has no num_attention_heads"),
        (DeepseekV32Config(), "DeepseekV32Config has attention over chosen keys"),
        (MiMoV2FlashConfig(), "MiMoV2FlashConfig has values of another size than keys"),
        ("/no/such/model", "no model config can be read from '/no/such/model'"),
        (42, "estimate\\(\\) takes a config, a model or a path, not int"),
        (nn.Linear(2, 2), "Linear has no transformers config"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_neither_decoder_nor_encoder_is_refused(source, message):
    with pytest.raises(UnsupportedError, match=message):
        shapes_of(source, dtype=None)


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
ENCODERS = {
    "bert": BertConfig(**SIZES, vocab_size=100, architectures=["BertForSequenceClassification"]),
    "no architecture": BertConfig(**SIZES, vocab_size=100),
    "distilbert": DistilBertConfig(dim=64, n_layers=2, n_heads=2, hidden_dim=96, vocab_size=100),
    "vit": ViTConfig(**SIZES, image_size=32),
    "windows": ModernBertConfig(**SIZES, vocab_size=100, local_attention=8, pad_token_id=0),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_passes_and_no_decode(name):
    """Against the model itself, and attention by hand: every token sees all others, or those within a window."""
    config, tokens, batch = ENCODERS[name], 24, 3
    with torch.device("meta"):
        model = shapes_of(config, dtype=None)
    if config.architectures:
        assert type(model).__name__ == config.architectures[0]
    found = estimate(config, context=tokens, batch=batch, bandwidth=1e9, compute=1e9, price_per_hour=1.0)
    assert found.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert (
        found.kv_bytes == 0 and found.seconds_per_token is found.bound.decode is found.cost_per_million_tokens is None
    )
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    seen = {"full_attention": tokens, "sliding_attention": config.local_attention} if name == "windows" else {}
    pairs = sum(seen.get(kind, tokens) for kind in getattr(config, "layer_types", None) or ["full"] * 2) * tokens
    operations = batch * (2 * linears * tokens + 4 * 64 * pairs)
    assert found.prefill_seconds == pytest.approx(operations / 1e9)
    assert "decode" not in str(found) and "KV cache" not in str(found) and "a pass" in str(found)
    assert estimate(model, context=tokens, batch=batch, bandwidth=1e9, compute=1e9, price_per_hour=1.0) == found
    with pytest.raises(UnsupportedError, match="is an encoder"):
        found.serving(requests_per_second=1, prompt_tokens=2, output_tokens=2)


def test_an_encoder_is_measured_here():
    assert estimate(ENCODERS["bert"], context=8, weights="int8").prefill_seconds > 0


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
