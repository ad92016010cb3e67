from __future__ import annotations

import pytest
import torch

from hf_accel.linear import BACKENDS
from hf_accel.linear.backends.reference import REFERENCES, Reference, differentiable_linear
from hf_accel.linear.formats import Layout, from_state, state, zeros

from ..specs import linear_spec


@pytest.mark.parametrize(
    ("own", "asked", "reason"),
    [
        (None, "auto", None),
        (None, None, None),
        ("int8", "int8", None),
        (None, "int8", "it keeps activations in floating point"),
        ("int8", None, "it rounds activations to INT8"),
    ],
)
def test_refuses_other_activations_only(own, asked, reason):
    spec = linear_spec(
        in_features=7, out_features=3, bits=8, dtype=torch.float64, device_type="mps", activations=asked
    )
    assert Reference(own).refuses(spec) == reason


@pytest.mark.parametrize("bits", [8, 4])
def test_on_the_meta_device(make_weight, bits):
    weight, _ = make_weight(bits, 300, 64)
    meta = from_state(type(weight), {name: tensor.to("meta") for name, tensor in state(weight).items()})
    got = REFERENCES[None].run(torch.empty(2, 64, device="meta"), meta, None)
    assert got.shape == (2, 300)


def test_zero_points_on_the_meta_device():
    meta = zeros(Layout(bits=4, group_size=32, symmetric=False), (300, 64), dtype=torch.float32, device="meta")
    assert REFERENCES[None].run(torch.empty(2, 64, device="meta"), meta, None).shape == (2, 300)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: f"{backend.name}-{backend.layouts[0]}")
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_those_of_the_float_layer(make_weight, backend, has_bias):
    integers, dtype = [int(label[3:]) for label in backend.layouts if label.startswith("int")], torch.bfloat16
    bits = integers[-1] if integers else "fp8"
    spec = linear_spec(in_features=64, out_features=272, bits=min([8, *integers]), group_size=32, dtype=dtype)
    if backend.name == "cpu" and (reason := backend.refuses(spec)):
        pytest.skip(reason)
    weight, dense = make_weight(bits, 272, 64, dtype=dtype)
    packed = backend.pack(weight)
    x = torch.randn(3, 64).to(dtype).requires_grad_()
    bias = torch.randn(272).to(dtype).requires_grad_() if has_bias else None
    out = differentiable_linear(x, bias, backend, packed)
    upstream = torch.randn(3, 272).to(dtype)
    out.backward(upstream)
    expected = upstream.double().numpy() @ dense
    torch.testing.assert_close(x.grad.double(), torch.from_numpy(expected), rtol=2**-6, atol=2**-6 * expected.std())
    if bias is not None:
        torch.testing.assert_close(bias.grad.double(), upstream.double().sum(0), rtol=2**-7, atol=2**-7)


def test_the_forward_of_training_rounds_as_the_backend_does(make_weight):
    weight, _ = make_weight(8, 40, 64)
    rounding = Reference("int8")
    x = torch.randn(3, 64, requires_grad=True)
    trained = differentiable_linear(x, None, rounding, weight)
    assert torch.equal(trained, rounding.run(x.detach(), weight, None))
    assert not torch.equal(trained, Reference(None).run(x.detach(), weight, None))


def test_no_float_copy_of_the_weight_is_kept_for_backward(make_weight):
    weight, _ = make_weight(8, 512, 512)
    saved: list[torch.Tensor] = []
    x = torch.randn(2, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = differentiable_linear(x * 1, None, REFERENCES[None], weight).sum()
    assert sum(t.numel() for t in saved) < weight.weight.numel()
    out.backward()
    assert x.grad is not None
