"""The convolutions ahead of encoders of sound: products of windows, float and quantized, and stock's path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import hf_accel
from hf_accel.config import WeightConfig
from hf_accel.fused import convolution_layers
from hf_accel.fused.convolution_layers import NativeConvolutionLayer
from hf_accel.kernels import cpu as kernels
from hf_accel.linear.quant_convolution import QuantConvolution
from hf_accel.patching.convolution_site import ConvolutionSite
from hf_accel.recognition.window_products import ConvolutionLayer, convolution_layer

from .test_encoders import undo_is_exact
from .test_speech_encoders import SOUND

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

STACK: dict[str, Any] = SOUND | {
    "conv_dim": (32, 64, 32, 32), "conv_kernel": (10, 3, 6, 2), "conv_stride": (5, 2, 3, 2),
    "num_feat_extract_layers": 4, "num_hidden_layers": 1,
}  # fmt: skip
BY_ROW = STACK | {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Wav2Vec2": ("Wav2Vec2", STACK),
    "Wav2Vec2, norms of rows": ("Wav2Vec2", BY_ROW),
    "Wav2Vec2, biases": ("Wav2Vec2", STACK | {"conv_bias": True, "feat_extract_activation": "relu"}),
    "HuBERT": ("Hubert", BY_ROW),
    "WavLM": ("WavLM", STACK | {"num_hidden_layers": 2}),
    "UniSpeech": ("UniSpeech", STACK),
    "Data2Vec": ("Data2VecAudio", STACK | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}),
    "SEW": ("SEW", STACK | {"squeeze_factor": 1}),
}
LENGTHS = (100, 331, 5_000)  # 100 make one row


def build(family: str = "Wav2Vec2", dtype: torch.dtype = torch.float32) -> Any:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings)).eval()
    with torch.no_grad():  # what is zeros and ones at first would hide a mistake
        for part_name, tensor in model.feature_extractor.named_parameters():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand_like(tensor) * 0.4 + (0.8 if "weight" in part_name else 0))
    return model.to(dtype)


def sound(length: int = 331, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, generator=torch.Generator().manual_seed(1)) * 2 + 0.3


def layers_of(model: Any) -> Any:
    return model.feature_extractor.conv_layers


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call of a layer was a product of ours."""
    calls: list[bool] = []

    def seen(own: dict[str, Any], x: Tensor) -> Tensor | None:
        result = inner(own, x)
        calls.append(result is not None)
        return result

    inner = convolution_layers._computed
    monkeypatch.setattr(convolution_layers, "_computed", seen)
    yield calls


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_features_are_stocks(family: str, computed: list[bool]) -> None:
    stock = build(family)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for length in LENGTHS:
        for batch in (1, 3):
            given = sound(length, batch)
            expected, found = (model.feature_extractor(given) for model in (stock, ours))
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert computed == [True] * (4 * 2 * len(LENGTHS))
    torch.testing.assert_close(ours(sound())[0], stock(sound())[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_blocks_of_rows_and_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build("Wav2Vec2, norms of rows")
    ours, given, threads = hf_accel.patch(copy.deepcopy(stock), weights=None), sound(5_000), torch.get_num_threads()
    expected = stock.feature_extractor(given)
    for block, count in ((7, 1), (64, 2), (10_000, 3)):
        monkeypatch.setattr(convolution_layers, "BLOCK_ROWS", block)
        torch.set_num_threads(count)
        try:
            torch.testing.assert_close(ours.feature_extractor(given), expected, rtol=2e-5, atol=2e-5)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Wav2Vec2", "HuBERT", "WavLM"])
@torch.no_grad()
def test_quantized_features_are_those_of_the_same_weights(
    family: str, dtype: torch.dtype, computed: list[bool]
) -> None:
    stock = build(family, dtype)
    ours, given = hf_accel.patch(copy.deepcopy(stock), weights="int8"), sound(900, 3).to(dtype)
    kinds = [type(layer.conv) for layer in layers_of(ours)]
    assert kinds == [nn.Conv1d, QuantConvolution, QuantConvolution, nn.Conv1d]  # a wave; two; one of little work
    found = ours.feature_extractor(given)
    assert computed == ([True] * 4 if dtype is torch.float32 else [False, True, True, False])
    rounded = copy.deepcopy(stock)
    for layer, quantized in zip(layers_of(rounded), layers_of(ours), strict=True):
        if isinstance(quantized.conv, QuantConvolution):
            layer.conv = quantized.conv.original()
    expected = rounded.feature_extractor(given)
    near = 0.06 if dtype is torch.float32 else 0.1  # inputs are rounded
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    cosine = torch.cosine_similarity(found.mT.double(), stock.feature_extractor(given).mT.double(), dim=-1)
    assert cosine.min() > (0.9995 if dtype is torch.float32 else 0.999)


@pytest.mark.parametrize(("size", "step", "padding"), [(1, 1, 0), (3, 2, 1), (4, 3, 0), (2, 5, 2), (5, 1, 4)])
@torch.no_grad()
def test_a_quantized_convolution_is_one_of_its_numbers(size: int, step: int, padding: int) -> None:
    torch.manual_seed(0)
    stock, config = nn.Conv1d(32, 64, size, step, padding), WeightConfig(8)
    site = ConvolutionSite.of("conv", stock, None)
    kept = site.config_in(config)
    assert kept is not None and kept.layout.group_size == 32
    choice = site.choose(site.spec(kept), kept, row_invariant=False)
    layer: Any = site.layer(site.pack(site.tensor, kept, choice), choice)
    ours = QuantConvolution(stock, layer)
    original: Any = ours.original()
    for x in (torch.randn(3, 32, 17), torch.randn(32, 6)):
        expected = F.conv1d(x, original.weight, original.bias, step, padding)
        torch.testing.assert_close(ours(x), expected, rtol=0.05, atol=0.05)
        assert original(x).equal(expected)


@torch.no_grad()
def test_quantized_convolutions_are_saved_and_skipped(tmp_path: Path) -> None:
    stock, given = build("HuBERT"), sound()
    ours = hf_accel.patch(copy.deepcopy(stock), weights="int8")
    expected = ours(given)[0]
    ours.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert [type(layer.conv) for layer in layers_of(loaded)] == [type(layer.conv) for layer in layers_of(ours)]
    torch.testing.assert_close(loaded(given)[0], expected, rtol=1e-5, atol=1e-5)
    skipping = hf_accel.patch(copy.deepcopy(stock), weights={"bits": 8, "skip": ["conv_layers.1.conv"]})
    kinds = [type(layer.conv) for layer in layers_of(skipping)]
    assert kinds == [nn.Conv1d, nn.Conv1d, QuantConvolution, nn.Conv1d]


def change_weight(layer: Any) -> None:
    layer.conv.weight.data.mul_(-2)


def change_activation(layer: Any) -> None:
    layer.activation = nn.ReLU()


def change_stride(layer: Any) -> None:
    layer.conv.stride = (1,)


def change_eps(layer: Any) -> None:
    layer.layer_norm.eps = 0.7


def change_norm(layer: Any) -> None:
    layer.layer_norm = nn.Identity()


def change_forward(layer: Any) -> None:
    layer.conv.forward = lambda x: F.conv1d(x, layer.conv.weight.flip(0), None, layer.conv.stride)


def add_hook(layer: Any) -> None:
    layer.activation.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "change",
    [change_weight, change_activation, change_stride, change_eps, change_norm, change_forward, add_hook],
    ids=lambda each: str(each.__name__),
)
@torch.no_grad()
def test_changes_between_calls_are_seen(place: int, change: Callable[[Any], None]) -> None:
    stock = build("Wav2Vec2" if place == 0 else "HuBERT")
    ours, given = hf_accel.patch(copy.deepcopy(stock), weights=None), sound()
    before = ours.feature_extractor(given)
    for model in (stock, ours):
        change(layers_of(model)[place])
    found, expected = (model.feature_extractor(given) for model in (ours, stock))
    assert found.shape != before.shape or not torch.allclose(found, before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hooks_see_every_part_of_a_quantized_layer() -> None:
    ours, given = hf_accel.patch(build(), weights="int8"), sound()
    expected, layer, shapes = ours.feature_extractor(given), layers_of(ours)[1], []
    for part in (layer.conv, layer.conv.linear, layer.activation):
        handle = part.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
        torch.testing.assert_close(ours.feature_extractor(given), expected, rtol=1e-5, atol=1e-5)
        handle.remove()
    assert shapes == [(2, 64, 32), (2, 32, 64), (2, 64, 32)]


def test_gradients_are_stocks() -> None:
    stock = build("HuBERT")
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for model in (stock, ours):
        model.feature_extractor(sound()).square().sum().backward()
    for one, other in zip(layers_of(ours).parameters(), layers_of(stock).parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Wav2Vec2", "HuBERT"])
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), {"input_values": sound()})


class Twice(nn.Module):
    """A layer of the same parts that does something else."""

    def __init__(self, convolution: nn.Module, norm: nn.Module | None = None, *, behind: bool = False) -> None:
        super().__init__()
        self.conv, self.activation, self.behind = convolution, nn.GELU(), behind
        if norm is not None:
            self.layer_norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.conv(x))
        return self.activation(x) if self.behind else x


def test_what_is_not_known_is_left_alone() -> None:
    assert convolution_layer(Twice(nn.Conv1d(4, 8, 3))) == ConvolutionLayer(None, "gelu")
    assert convolution_layer(Twice(nn.Conv1d(4, 8, 3), nn.LayerNorm(8))) is None  # which it does not call
    layer = layers_of(build())[0]
    assert convolution_layer(layer) == ConvolutionLayer("group", "gelu")
    for norm in (nn.GroupNorm(4, 32), nn.GroupNorm(32, 32, affine=False), nn.BatchNorm1d(32)):
        layer.layer_norm = norm
        assert convolution_layer(layer) is None

    class Again(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    assert convolution_layer(Again(nn.Conv1d(4, 8, 3))) is None


@torch.no_grad()
def test_convolutions_that_are_no_products_are_stocks(computed: list[bool]) -> None:
    stock = build()
    layers_of(stock)[1].conv = nn.Conv1d(32, 64, 3, 2, groups=4)
    layers_of(stock)[2].conv = nn.Conv1d(64, 32, 4, 3, dilation=2)
    ours = hf_accel.patch(copy.deepcopy(stock), weights="int8")
    assert not any(isinstance(layer.conv, QuantConvolution) for layer in layers_of(ours)[1:3])
    assert isinstance(layers_of(ours)[1], NativeConvolutionLayer)
    expected = stock.feature_extractor(sound())
    torch.testing.assert_close(ours.feature_extractor(sound()), expected, rtol=0.03, atol=0.03)
    assert computed == [True, False, False, True]


def test_the_plan_says_so() -> None:
    text = str(hf_accel.plan(build(), weights="int8"))
    assert "4 convolutions" in text and "one product of windows each" in text
    assert "has 10 inputs alone" in text
