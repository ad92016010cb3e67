"""Encoders of sound whose bias has gates (WavLM), and those that convolve over rows (Conformers)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

import hf_accel
from hf_accel.errors import UnsupportedError
from hf_accel.kernels import cpu as kernels
from hf_accel.linear.quant_convolution import QuantConvolution

from .test_encoders import counted, module_by_module, undo_is_exact

pytestmark = [
    pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal())),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),  # torch says so of what WavLM gives it
]

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2,
    "conv_depthwise_kernel_size": 7,
}  # fmt: skip
SOUND: dict[str, Any] = SIZES | {
    "conv_dim": (16, 16), "conv_kernel": (5, 3), "conv_stride": (3, 2), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
}  # fmt: skip
WAVLM: dict[str, Any] = SOUND | {"num_buckets": 12, "max_bucket_distance": 30}
FEATURES: dict[str, Any] = SIZES | {"feature_projection_input_dim": 20, "max_source_positions": 100}
KEYS: dict[str, Any] = {"left_max_position_embeddings": 9, "right_max_position_embeddings": 3}
SEAMLESS: dict[str, Any] = {
    "hidden_size": 64, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 96,
    "speech_encoder_layers": 2, "conv_depthwise_kernel_size": 7, "feature_projection_input_dim": 20,
    "max_source_positions": 60,
}  # fmt: skip
PARAKEET: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2,
    "conv_kernel_size": 5, "subsampling_factor": 2, "subsampling_conv_channels": 8, "num_mel_bins": 20,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "WavLM": ("WavLM", WAVLM),
    "WavLM, norms first": ("WavLM", WAVLM | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
    "Wav2Vec2-BERT": ("Wav2Vec2Bert", FEATURES | KEYS),
    "Wav2Vec2-BERT, vectors": ("Wav2Vec2Bert", FEATURES | {"position_embeddings_type": "relative"}),
    "Wav2Vec2-Conformer": ("Wav2Vec2Conformer", SOUND | {"hidden_act": "swish"}),
    "Wav2Vec2-Conformer, rotations": ("Wav2Vec2Conformer", SOUND | {"position_embeddings_type": "rotary"}),
    "Wav2Vec2-BERT, rotations": ("Wav2Vec2Bert", FEATURES | {"position_embeddings_type": "rotary"}),
    "SeamlessM4T": ("SeamlessM4T", SEAMLESS),
    "SeamlessM4T v2": ("SeamlessM4Tv2", SEAMLESS | KEYS),
    "Parakeet": ("ParakeetEncoder", PARAKEET),
    "Parakeet without biases": ("ParakeetEncoder", PARAKEET | {"convolution_bias": False, "attention_bias": False}),
}
ENCODERS = {"SeamlessM4T": SeamlessM4TSpeechEncoder, "SeamlessM4Tv2": SeamlessM4Tv2SpeechEncoder}
CONFORMERS = [name for name in FAMILIES if "WavLM" not in name]
LAYERS = {"EncoderLayerCalls": 2, "layers": 2}


SHARP = ("_q", "_k", "q_proj", "k_proj", "_pos", "distance_embedding", "rel_attn_embed", "gru_rel_pos_linear")


def build(family: str, dtype: torch.dtype = torch.float32, *, sharp: bool = True) -> Any:
    """Make a model. sharp: whether its scores are so large that tokens see few others, so that a wrong bias shows."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    kind: Any = ENCODERS.get(name) or getattr(transformers, name if name.endswith("Encoder") else f"{name}Model")
    model = kind(config).eval()
    with torch.no_grad():  # what is zeros and ones at first would hide a mistake
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim == 1 or name.endswith(("_u", "_v", "const")):
                changed = torch.rand_like(tensor) * 0.4 + (0.8 if "var" in name or "weight" in name else 0)
                tensor.copy_(changed if tensor.is_floating_point() else tensor)
            elif sharp and name.removesuffix(".weight").endswith(SHARP):
                tensor.normal_(0, 0.3)
    return model.to(dtype)


def batch(family: str, lengths: list[int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Frames of sounds of these lengths, with a mask if they differ."""
    generator, most = torch.Generator().manual_seed(1), max(lengths)
    takes_sound = "conv_dim" in FAMILIES[family][1]
    shape = (len(lengths), 6 * most + 8) if takes_sound else (len(lengths), most, 20)
    given = {"input_values" if takes_sound else "input_features": torch.randn(*shape, generator=generator).to(dtype)}
    if len(set(lengths)) > 1:
        ends = torch.tensor([6 * length + 8 if takes_sound else length for length in lengths])
        given["attention_mask"] = (torch.arange(shape[1]) < ends[:, None]).long()
    return given


INPUTS = {"padded": [23, 7, 12], "even": [9, 9], "alone": [31], "short": [3]}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    for name, lengths in INPUTS.items():
        given = batch(family, lengths, dtype)
        expected = stock(**{name: tensor.clone() for name, tensor in given.items()})[0]
        with counted() as calls:
            found = ours(**given)[0]
        # A mask of pairs leaves queries at padding without a key, of which stock makes something of its own.
        assert +calls == ({} if "Parakeet" in family and name == "padded" else LAYERS)
        near = 2e-5 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(family: str, weights: Any) -> None:
    if weights != "int8":
        weights = weights | {"skip": [n for n, m in build(family).named_modules() if _has_odd_inputs(m)]}
    stock, ours = build(family, sharp=False), hf_accel.patch(build(family, sharp=False), weights=weights)
    given = batch(family, [23])
    with counted() as calls:
        found = ours(**given)[0]
    assert calls == LAYERS
    with module_by_module():
        expected = ours(**given)[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # an activation may round to its neighbour
    if weights == "int8":
        cosine = torch.cosine_similarity(found.double(), stock(**given)[0].double(), dim=-1)
        assert cosine.min() > 0.9995


def _has_odd_inputs(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % 32 != 0


@pytest.mark.parametrize("family", ["WavLM", "Wav2Vec2-BERT", "Parakeet"])
@torch.no_grad()
def test_attentions_and_states_are_stocks(family: str) -> None:
    stock, given = build(family), batch(family, [11])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    asked = {"output_attentions": True, "output_hidden_states": True}
    with counted() as calls:
        found, expected = (model(**given, **asked) for model in (ours, stock))
    assert not calls["layers"]
    for name in ("attentions", "hidden_states"):
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def change_gates(layer: Any) -> None:
    layer.attention.gru_rel_pos_linear.weight.data.mul_(3)


def change_factors(layer: Any) -> None:
    layer.attention.gru_rel_pos_const = nn.Parameter(layer.attention.gru_rel_pos_const.detach() * 5)


def change_table(layer: Any) -> None:
    layer.self_attn.distance_embedding.weight.data.mul_(4)


def change_limit(layer: Any) -> None:
    layer.self_attn.left_max_position_embeddings = 5


def change_convolution(layer: Any) -> None:
    layer.conv_module.depthwise_conv.weight.data.mul_(-2)


def change_padding(layer: Any) -> None:
    layer.conv_module.depthwise_conv.padding = (3,)
    layer.conv_module.forward = lambda x, **_: x * 2


def change_means(layer: Any) -> None:
    layer.conv.norm.running_mean += 3


def change_eps(layer: Any) -> None:
    layer.conv.norm.eps = 0.5


def change_vectors(layer: Any) -> None:
    layer.self_attn.bias_v.data.mul_(8)


def change_pointwise(layer: Any) -> None:
    layer.conv.pointwise_conv1.weight.data = layer.conv.pointwise_conv1.weight.data.flip(0)


CHANGES: list[tuple[str, Callable[[Any], None]]] = [
    ("WavLM", change_gates), ("WavLM", change_factors), ("Wav2Vec2-BERT", change_table),
    ("Wav2Vec2-BERT", change_limit),
    ("Wav2Vec2-BERT", change_convolution), ("Wav2Vec2-BERT", change_padding), ("Parakeet", change_means),
    ("Parakeet", change_eps), ("Parakeet", change_vectors), ("Parakeet", change_pointwise),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change"), CHANGES, ids=lambda each: getattr(each, "__name__", each))
@torch.no_grad()
def test_changes_between_calls_are_seen(family: str, change: Callable[[Any], None]) -> None:
    stock, given = build(family), batch(family, [11])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    before = ours(**given)[0]
    for model in (stock, ours):
        change((getattr(model, "encoder", model)).layers[1])
    found, expected = ours(**given)[0], stock(**given)[0]
    assert not torch.allclose(found, before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_masks_that_are_not_taken_are_stocks() -> None:
    stock, given = build("WavLM"), batch("WavLM", [11, 11])
    layers, ours = stock.encoder, hf_accel.patch(copy.deepcopy(stock), weights=None).encoder
    states, mask = torch.randn(2, 11, 64), torch.ones(2, 11, dtype=torch.bool)
    mask[1, 2:4] = False
    with counted() as calls:
        found, expected = (each(states.clone(), mask)[0] for each in (ours, layers))
    assert not calls["layers"] and given
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["WavLM", "Wav2Vec2-BERT", "Parakeet"])
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), batch(family, [11]))


def test_gradients_are_stocks() -> None:
    stock, given = build("Parakeet"), batch("Parakeet", [11])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for model in (stock, ours):
        model(**given)[0].square().sum().backward()
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_convolutions_over_single_rows_are_quantized_and_saved(tmp_path: Path) -> None:
    stock, given = build("Wav2Vec2-BERT"), batch("Wav2Vec2-BERT", [11])
    ours = hf_accel.patch(copy.deepcopy(stock), weights="int8")
    convolution = ours.encoder.layers[0].conv_module.pointwise_conv1
    assert isinstance(convolution, QuantConvolution)
    original = convolution.original()
    assert isinstance(original, nn.Conv1d)
    x = torch.randn(2, 64, 5)
    torch.testing.assert_close(convolution(x), original(x), rtol=0.05, atol=0.05)
    expected = ours(**given)[0]
    ours.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(loaded.encoder.layers[0].conv_module.pointwise_conv1, QuantConvolution)
    torch.testing.assert_close(loaded(**given)[0], expected, rtol=1e-5, atol=1e-5)
    skipping = hf_accel.patch(copy.deepcopy(stock), weights={"bits": 8, "skip": ["pointwise_conv1"]})
    layer = skipping.encoder.layers[0].conv_module
    assert type(layer.pointwise_conv2) is QuantConvolution and isinstance(layer.pointwise_conv1, nn.Conv1d)
    with pytest.raises(UnsupportedError, match="pointwise_conv"):
        hf_accel.patch(copy.deepcopy(stock), weights={"bits": 8, "skip": ["pointwise_conv3"]})


@torch.no_grad()
def test_a_model_that_generates_and_embeds_no_tokens() -> None:
    torch.manual_seed(0)
    config = transformers.ParakeetCTCConfig(vocab_size=20, pad_token_id=19, encoder_config=PARAKEET)
    stock, given = transformers.ParakeetForCTC(config).eval(), batch("Parakeet", [11])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    torch.testing.assert_close(ours(**given).logits, stock(**given).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.generate(**given), stock.generate(**given))


def test_the_plan_says_so() -> None:
    text = str(hf_accel.plan(build("Parakeet"), weights="int8"))
    assert "2 encoder layers    one native call each" in text


@torch.no_grad()
def test_a_bias_of_another_form_is_stocks() -> None:
    stock, states = build("WavLM"), torch.randn(2, 5, 64)
    ours, bias = hf_accel.patch(copy.deepcopy(stock), weights=None), torch.randn(8, 5, 5)
    with counted() as calls:
        found, expected = (model.encoder.layers[1](states, position_bias=bias) for model in (ours, stock))
    assert not calls["layers"]  # each sequence has a bias of its own
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    shared = bias[:4].repeat(2, 1, 1)
    with counted() as calls:
        found, expected = (model.encoder.layers[1](states, position_bias=shared) for model in (ours, stock))
    assert calls["layers"] == 1 and found[1] is shared
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_a_convolution_that_steps_otherwise_is_stocks() -> None:
    stock, given = build("Wav2Vec2-BERT"), batch("Wav2Vec2-BERT", [11])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    ours(**given)
    for model in (stock, ours):
        convolution = model.encoder.layers[1].conv_module.depthwise_conv
        convolution.dilation, convolution.padding = (2,), (3,)
    with counted() as calls:
        found = ours(**given)[0]
    assert calls["layers"] == 1
    torch.testing.assert_close(found, stock(**given)[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["Wav2Vec2-BERT", "SeamlessM4T"])
@torch.no_grad()
def test_quantized_padding(family: str) -> None:
    ours, given = hf_accel.patch(build(family, sharp=False), weights="int8"), batch(family, [23, 7, 12])
    with counted() as calls:
        found = ours(**given)[0]
    assert calls == LAYERS
    with module_by_module():
        expected = ours(**given)[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
