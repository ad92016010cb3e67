from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.linear import LinearSpec, QuantLinear, choose, quantize
from hf_accel.linear.formats import readable

from .layers import quantized_layer
from .specs import linear_spec

BF16, FP32 = torch.bfloat16, torch.float32
SHAPE = (48, 128)  # [out, in]
INT8, INT4, FP8 = WeightConfig(), WeightConfig(bits=4, group_size=32), WeightConfig(format="fp8")
ASYMMETRIC = WeightConfig(bits=4, group_size=32, symmetric=False)
STORED = {
    "int8": {"weight": (torch.int8, (48, 128)), "weight_scale": (BF16, (48, 1))},
    "fp8": {"weight": (torch.float8_e4m3fn, (48, 128)), "weight_scale": (BF16, (48, 1))},
    "int4": {
        "weight_packed": (torch.int32, (48, 16)),
        "weight_scale": (BF16, (48, 4)),
        "weight_shape": (torch.int64, (2,)),
    },
}


def stored_form(layer: QuantLinear) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    zero_point = {} if layer.layout.symmetric else {"weight_zero_point": (torch.int32, (6, 4))}
    return STORED[layer.layout.label] | zero_point


def spec_of_layer(config: WeightConfig, device: str = "cpu") -> LinearSpec:
    return linear_spec(
        in_features=128, out_features=48, bits=config.bits, group_size=32, symmetric=config.symmetric, dtype=BF16,
        device_type=device, activations=config.activations, format=config.format,
    )  # fmt: skip


def possible(config: WeightConfig, backend: str) -> bool:
    try:
        return choose(spec_of_layer(config), backend) is not None
    except UnsupportedError:
        return False


KINDS = [
    pytest.param((config, backend), id=f"{config.label}-{backend}{'-rounded' * (config.activations == 'fp8')}")
    for config, backend in [
        (INT8, "onednn"), (INT8, "torch"), (INT8, "reference"), (INT4, "torch"), (INT4, "reference"),
        (ASYMMETRIC, "reference"), (INT8, "cpu"), (INT4, "cpu"), (ASYMMETRIC, "cpu"),
        (FP8, "reference"), (WeightConfig(format="fp8", activations="fp8"), "reference"),
    ]
    if possible(config, backend)
]  # fmt: skip


@pytest.fixture(params=KINDS)
def make_layer(request):
    config, backend = request.param

    def make(dtype=BF16, **keywords):
        weight, bias = torch.randn(SHAPE) * 0.05, torch.randn(SHAPE[0])
        return quantized_layer(weight.to(dtype), bias.to(dtype), **({"config": config, "backend": backend} | keywords))

    make.config, make.backend = config, backend
    return make


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 128).to(BF16)


def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x)


def test_is_a_linear_without_a_float_parameter(make_layer):
    layer = make_layer()
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (128, 48)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert list(layer.buffers()) == []
    assert layer.weight.dtype == layer.compute_dtype == BF16
    assert layer.weight.shape == SHAPE
    assert layer.weight.device == torch.device("cpu")
    stored = [tensor for name, tensor in layer.state_dict().items() if name not in ("bias", "weight_shape")]
    assert layer.spec.weight_bytes == sum(tensor.nbytes for tensor in stored)
    assert f"bits={layer.layout.bits}" in repr(layer)
    assert f"backend={make_layer.backend}" in repr(layer)
    assert ("group_size=32" in repr(layer)) == (layer.layout.bits == 4)
    assert ("symmetric=False" in repr(layer)) == (not layer.layout.symmetric)
    assert ("format='fp8'" in repr(layer)) == (layer.layout.format == "fp8")


def test_computes_with_its_dequantized_weight(make_layer, x):
    layer = make_layer()
    stock = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    rounding = 0.05 if layer.activations == "fp8" else 0.01
    assert (run(layer, x).float() - stock).norm() < rounding * stock.norm()


def test_the_weight_is_the_rounded_one(make_layer):
    weight = torch.randn(SHAPE).to(BF16)
    layer = quantized_layer(weight, config=make_layer.config, backend=make_layer.backend)
    assert torch.equal(layer.weight, quantize(weight, make_layer.config).dequantize(BF16))
    assert layer.bias is None


def test_a_bias_parameter_is_kept_as_the_same_object():
    bias = nn.Parameter(torch.randn(48), requires_grad=False)
    assert quantized_layer(torch.randn(SHAPE), bias, config=INT8).bias is bias
    plain = bias.detach().clone()
    assert torch.equal(quantized_layer(torch.randn(SHAPE), plain, config=INT8).bias, plain)


@pytest.mark.parametrize("shape", [(128,), (1, 128), (0, 128), (2, 3, 128), (2, 0, 128), (2, 2, 2, 128)])
def test_any_leading_shape(make_layer, shape):
    layer = make_layer()
    x = torch.randn(shape).to(BF16)
    got = run(layer, x)
    assert got.shape == (*shape[:-1], 48)
    assert torch.equal(got.reshape(-1, 48), run(layer, x.reshape(-1, 128)))


def test_views_give_what_their_copies_give(make_layer):
    layer = make_layer()
    wide = torch.randn(4, 6, 300).to(BF16)
    views = [wide[:, :, 7:135], wide[:, 2, 7:135], wide[:, ::2, 1:129], wide[:, 0, :128].t().contiguous().t()]
    for view in views:
        assert not view.is_contiguous()
        assert torch.equal(run(layer, view), run(layer, view.contiguous().clone()))


@pytest.mark.parametrize("dtype", [torch.float64, FP32, torch.float16, BF16])
def test_the_output_has_the_inputs_dtype(make_layer, x, dtype):
    layer = make_layer()
    got = run(layer, x.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.to(BF16), run(layer, x), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16])
def test_under_autocast_the_output_has_the_dtype_of_torchs_linear(make_layer, x, dtype):
    layer, stock = make_layer(), nn.Linear(128, 48).to(dtype)
    for lower in (BF16, torch.float16):
        with torch.autocast("cpu", dtype=lower):
            assert run(layer, x.to(dtype)).dtype == run(stock, x.to(dtype)).dtype
            assert layer(x.to(dtype).requires_grad_()).dtype == stock(x.to(dtype)).dtype
    assert run(layer, x.to(dtype)).dtype == dtype


def test_a_bias_whose_data_is_replaced_is_read_anew(make_layer, x):
    """As PEFT and transformers replace it; the old memory is free then."""
    layer = make_layer()
    expected = run(layer, x) - layer.bias
    layer.bias.data = torch.zeros(48, dtype=FP32)
    torch.testing.assert_close(run(layer, x).to(BF16), expected, rtol=2**-5, atol=2**-5)


def test_gradients_reach_the_input_through_every_backend(make_layer, x):
    layer = make_layer()
    x.requires_grad_()
    layer(x.view(5, 1, 128)).float().sum().backward()
    expected = layer.weight.float().sum(0).expand(5, -1)
    torch.testing.assert_close(x.grad.float(), expected, rtol=2**-6, atol=2**-6)
    assert layer.bias.grad.tolist() == [5.0] * 48


def test_the_bias_learns_where_the_input_does_not(make_layer, x):
    layer = make_layer()
    layer(x).float().sum().backward()
    assert layer.bias.grad.tolist() == [5.0] * 48


@pytest.mark.parametrize("unpacked", [False, True])
def test_state_dict_holds_the_stored_form(make_layer, unpacked):
    layer = make_layer()
    if unpacked:
        layer.unpack()
    state = nn.ModuleDict({"proj": layer}).state_dict()
    stored = {f"proj.{name}": kind for name, kind in stored_form(layer).items()}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items() if name != "proj.bias"} == stored
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert torch.equal(state["proj.bias"], layer.bias)


def test_the_weight_is_held_once(make_layer):
    layer = make_layer()
    assert not layer._buffers
    layer.unpack()
    assert layer._packed is None
    assert set(layer._buffers) == set(stored_form(layer))
    assert layer.pack() is layer
    assert not layer._buffers


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_state_dict_is_loaded_bit_for_bit(make_layer, x, packed, assign):
    layer = make_layer()
    other = QuantLinear.empty(spec_of_layer(make_layer.config), bias=True, backend=make_layer.backend)
    if packed:
        other.pack()
    assert str(other.load_state_dict(layer.state_dict(), assign=assign)) == "<All keys matched successfully>"
    assert (other.choice is not None) == packed
    assert torch.equal(run(other, x), run(layer, x))
    assert other.choice is not None


def test_an_empty_layer_shows_a_loader_its_buffers_on_meta(make_layer, x):
    layer = make_layer()
    other = QuantLinear.empty(spec_of_layer(make_layer.config, "meta"), bias=True)
    assert set(other.state_dict()) == set(layer.state_dict())
    assert other.weight.device.type == "meta"
    for name, tensor in layer.state_dict().items():  # as transformers' loader does
        setattr(other, name, tensor if name in other._buffers else nn.Parameter(tensor))
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(run(other.pack(), x), run(make_layer_like(layer), x))


def make_layer_like(layer: QuantLinear) -> QuantLinear:
    """The same numbers with the backend that "auto" takes."""
    return QuantLinear(layer.quantized, layer.bias, activations=layer.activations, backend="auto")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("weight_scale"), "Missing key.*weight_scale"),
        (lambda state: state.update(extra=torch.zeros(1)), "Unexpected key.*extra"),
        (lambda state: state.update(weight_scale=torch.zeros(48, 2)), "size mismatch for weight_scale"),
        (lambda state: state.pop("bias"), "Missing key.*bias"),
    ],
)
def test_what_does_not_fit_is_reported_as_torch_does(make_layer, spoil, message):
    layer = make_layer()
    state = layer.state_dict()
    spoil(state)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert layer.choice is not None


@pytest.mark.parametrize(
    ("config", "other", "message"),
    [
        (ASYMMETRIC, INT4, "Unexpected key.*weight_zero_point"),
        (INT4, ASYMMETRIC, "Missing key.*weight_zero_point"),
    ],
)
def test_zero_points_are_neither_dropped_nor_made_up(config, other, message):
    saved = quantized_layer(torch.randn(SHAPE), config=config).state_dict()
    layer = quantized_layer(torch.randn(SHAPE), config=other)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(saved)


@pytest.mark.parametrize("config", [INT8, FP8], ids=["INT8", "FP8"])
def test_a_float_weight_is_not_cut_off_to_8_bits(x, config):
    layer = quantized_layer(torch.randn(SHAPE).to(BF16), config=config)
    before = run(layer, x)
    state = layer.state_dict() | {"weight": torch.randn(SHAPE)}
    label = config.label.upper()
    with pytest.raises(RuntimeError, match=rf"weight is torch.float32 in the checkpoint, but an {label} layer stores"):
        layer.load_state_dict(state)
    assert torch.equal(run(layer, x), before)


def save_and_load(layer: QuantLinear) -> QuantLinear:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("copier", [copy.deepcopy, save_and_load, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same_and_stand_alone(make_layer, x, copier, packed):
    layer = make_layer().eval()
    layer = layer if packed else layer.unpack()
    other = copier(layer)
    assert (layer.choice is not None) == (other.choice is not None) == packed
    assert not other.training
    expected = run(layer, x)
    assert torch.equal(run(other, x), expected)
    assert other.choice.backend.name == make_layer.backend
    with torch.no_grad():
        other.bias.zero_()
        other.unpack().weight_scale.zero_()
    assert not run(other, x).any()
    assert torch.equal(run(layer, x), expected)


def test_to_converts_scales_and_bias_and_never_the_integers(make_layer):
    layer = make_layer(backend="auto")
    integers = layer.quantized.integers().clone()
    weight, scale = layer.weight, layer.quantized.weight_scale
    wide = layer.float()
    assert wide is layer
    assert layer.choice is not None
    assert layer.compute_dtype == layer.bias.dtype == layer.weight.dtype == FP32
    assert torch.equal(readable(layer.quantized.integers()), readable(integers))
    assert torch.equal(layer.weight.to(BF16), weight)
    assert run(layer, torch.randn(2, 128)).dtype == FP32
    layer.to(BF16)
    assert torch.equal(layer.quantized.weight_scale, scale)
    assert torch.equal(layer.weight, weight)


def test_the_backend_is_chosen_again_for_a_new_dtype(x):
    layer = quantized_layer(torch.randn(SHAPE).to(BF16), config=WeightConfig(activations=None))
    assert layer.choice.backend.name == "torch"
    assert layer.half().choice.backend.name == "reference"
    assert layer.to(BF16).choice.backend.name == "torch"
    assert run(layer, x).dtype == BF16


def test_to_meta_keeps_shapes(make_layer):
    layer = make_layer(backend="auto").to("meta")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in layer.state_dict().items() if name != "bias"} == (
        stored_form(layer)
    )
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}


def test_an_unpacked_layer_stays_unpacked_under_to(make_layer):
    layer = make_layer().unpack().to(FP32)
    assert layer.choice is None
    assert layer.weight_scale.dtype == FP32


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"backend": "cublas"}, "linear backend 'cublas' is not known"),
        ({"config": WeightConfig(activations=None), "backend": "onednn"}, "it rounds activations to INT8"),
        (
            {"config": ASYMMETRIC, "backend": "torch"},
            r"'torch' refuses .*: it takes symmetric weights only; use 'auto'",
        ),
        ({"config": WeightConfig(bits=4, group_size=64)}, r"group_size=64 .* \[48, 96\]; use group_size=32"),
    ],
)
def test_what_cannot_be_is_refused(keywords, message):
    with pytest.raises(UnsupportedError, match=message):
        quantized_layer(torch.randn(48, 96), **({"config": INT8} | keywords))


def test_compiled(make_layer, x):
    layer = make_layer()
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(run(compiled, x), run(layer, x))
