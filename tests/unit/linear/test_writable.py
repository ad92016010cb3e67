"""Each way to edit a tensor, on the weight of a quantized layer: what a float weight would be then, packed anew."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.linear import QuantLinear
from hf_accel.linear.formats import readable
from hf_accel.linear.writable import WritableWeight

from .layers import quantized_layer

SHAPE = (8, 32)
OTHER = torch.linspace(-1, 1, 256).view(SHAPE)
CONFIGS = {
    "int8": WeightConfig(),
    "fp8": WeightConfig(format="fp8"),
    "int4": WeightConfig(bits=4, group_size=32, symmetric=False),
}


def a_layer(config: str = "int8") -> QuantLinear:
    torch.manual_seed(0)
    return quantized_layer(torch.randn(SHAPE), config=CONFIGS[config])


def stored(layer: QuantLinear) -> dict[str, Tensor]:
    return {name: readable(tensor) for name, tensor in layer.state_dict().items()}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


@torch.jit.script
def scripted(w: Tensor) -> Tensor:
    return w.mul_(2)


def stepped(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Tensor], object]:
    def edit(w: Tensor) -> None:
        w.requires_grad_()
        w.grad = torch.ones(SHAPE)
        kind([w], lr=0.1, **settings).step()  # type: ignore[call-arg]

    return edit


def seeded(edit: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    return lambda w: (torch.manual_seed(0), edit(w))


def fused_adam(w: Tensor) -> None:
    zeros = [torch.zeros(SHAPE) for _ in range(2)]
    torch._fused_adam_(
        [w], [torch.ones(SHAPE)], zeros[:1], zeros[1:], [], [torch.ones(())], lr=0.1, beta1=0.9, beta2=0.99,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def in_inference_mode(w: Tensor) -> None:
    with torch.inference_mode():
        w.mul_(2)
        w.view(-1)[:4].zero_()


APPLIED: dict[str, Callable[[Any], object]] = {
    "+=": lambda w: w.__iadd__(1),
    "**=": lambda w: w.__ipow__(2),
    "mul_": lambda w: w.mul_(3),
    "addmm_": lambda w: w.addmm_(OTHER, torch.eye(32)),
    "lerp_": lambda w: w.lerp_(OTHER, 0.5),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "copy_": lambda w: w.copy_(OTHER.double()),
    "fill_": lambda w: w.fill_(0.3),
    "fill_diagonal_": lambda w: w.fill_diagonal_(1.0),
    "normal_": seeded(lambda w: w.normal_()),
    "init.constant_": lambda w: nn.init.constant_(w, 0.5),
    "init.orthogonal_": seeded(nn.init.orthogonal_),
    "relu(inplace=True)": lambda w: torch.relu_(w),
    "F.relu(inplace=True)": lambda w: nn.functional.relu(w, inplace=True),
    "masked_fill_": lambda w: w.masked_fill_(OTHER > 0.5, 0),
    "index_put_": lambda w: w.index_put_((torch.tensor([1]),), torch.tensor(2.0)),
    "scatter_": lambda w: w.scatter_(1, torch.zeros(8, 1, dtype=torch.long), 1.0),
    "apply_": lambda w: w.apply_(lambda v: v * 2),
    "map_": lambda w: w.map_(OTHER, lambda a, b: a + b),
    "w[0, 1] =": lambda w: w.__setitem__((0, 1), 5.0),
    "w[0].mul_": lambda w: w[0].mul_(2),
    "T.mul_": lambda w: w.T.mul_(2),
    "view of another dtype": lambda w: w.view(torch.int32).bitwise_and_(~0xFFFF),
    "as_strided": lambda w: torch.as_strided(w, (4,), (3,)).zero_(),
    "diagonal": lambda w: w.diagonal().zero_(),
    "for row in w": lambda w: [row.mul_(2) for row in w],
    "split": lambda w: w.split(2)[1].zero_(),
    "unbind": lambda w: torch.unbind(w, 1)[3].zero_(),
    "a view of views": lambda w: w.view(-1).view(16, -1).t()[0].add_(1),
    "flatten": lambda w: w.flatten()[:10].zero_(),
    "contiguous": lambda w: w.contiguous().mul_(2),
    "as_tensor": lambda w: torch.as_tensor(w).mul_(2),
    "as_subclass": lambda w: w.as_subclass(Tensor).mul_(2),
    "data =": lambda w: setattr(w, "data", OTHER),
    "data.mul_": lambda w: w.data.mul_(2),
    "detach.mul_": lambda w: w.detach().mul_(3),
    "set_": lambda w: w.set_(OTHER.clone()),
    "set_ of a storage": lambda w: w.set_(OTHER.clone().untyped_storage(), 0, SHAPE, (32, 1)),
    "out=": lambda w: torch.mul(w, 3, out=w),
    "out= of a view": lambda w: torch.add(OTHER[0], 1, out=w[0]),
    "out= of a factory": lambda w: torch.zeros(SHAPE, out=w),
    "out= of cat": lambda w: torch.cat([OTHER[:4]] * 2, out=w),
    "foreach_mul_": lambda w: torch._foreach_mul_([OTHER.clone(), w], 3.0),
    "foreach_copy_": lambda w: torch._foreach_copy_([w], [OTHER]),
    "SGD": stepped(torch.optim.SGD),
    "AdamW, foreach": stepped(torch.optim.AdamW, foreach=True),
    "AdamW, fused": stepped(torch.optim.AdamW, fused=True),
    "fused_adam_": fused_adam,
    "torch.ops": lambda w: torch.ops.aten.mul_(w, 2),
    "a scripted function": scripted,
    "a Function": Doubled.apply,
    "vmap": torch.func.vmap(lambda row: row.mul_(2)),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(OTHER.flatten(), [w]),
    "share_memory_": lambda w: w.share_memory_().mul_(2),
    "inference_mode": in_inference_mode,
    "an address": lambda w: ctypes.memset(w.data_ptr(), 0, 64) if w.nbytes else None,
    "two edits": lambda w: (w.mul_(1.3), w.data.add_(0.01)),
}
REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "numpy": (lambda w: w.numpy().__imul__(2), ValueError, "read-only"),
    "numpy of a view": (lambda w: w.detach()[0].numpy().fill(0), ValueError, "read-only"),
    "np.asarray": (lambda w: np.asarray(w).fill(0), ValueError, "read-only"),
    "torch.from_dlpack": (lambda w: torch.from_dlpack(w).mul_(2), UnsupportedError, "__dlpack__.*layer.weight.clone"),
    "np.from_dlpack": (lambda w: np.from_dlpack(w).fill(0), UnsupportedError, "__dlpack__.*layer.weight.copy_"),
    "storage": (lambda w: w.untyped_storage().fill_(0), UnsupportedError, "this storage.*layer.weight.copy_"),
    "typed storage": (lambda w: w.storage().fill_(0), UnsupportedError, r"storage\(\).*layer.weight.copy_"),
    "swap_tensors": (lambda w: torch.utils.swap_tensors(w, nn.Parameter(OTHER)), RuntimeError, "weakref"),
    "resize_": (lambda w: w.resize_(4, 4), UnsupportedError, r"resize_\(\) cannot change the shape.*unpatch"),
    "t_": (lambda w: w.t_(), UnsupportedError, r"t_\(\) cannot change the shape"),
}


@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
@pytest.mark.parametrize("how", APPLIED)
def test_an_edit_is_applied(how: str, held: bool) -> None:
    layer = a_layer()
    alone = nn.Parameter(layer.weight.clone(), requires_grad=False)
    kept = [layer.weight] if held else []
    with torch.no_grad():
        APPLIED[how](alone)
        APPLIED[how](kept[0] if held else layer.weight)
    expected = stored(quantized_layer(alone.detach(), config=CONFIGS["int8"]))
    assert {n: t.tolist() for n, t in stored(layer).items()} == {n: t.tolist() for n, t in expected.items()}
    assert layer.writes > 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", ["detach.mul_", "out=", "foreach_mul_", "data ="])
def test_every_format_takes_edits(how: str, config: str) -> None:
    layer = a_layer(config)
    alone = layer.weight.clone()
    APPLIED[how](alone)
    APPLIED[how](layer.weight)
    assert torch.equal(layer.weight, quantized_layer(alone, config=CONFIGS[config]).weight)


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_cannot_be_applied_raises_where_it_is_done(how: str) -> None:
    edit, error, text = REFUSED[how]
    layer = a_layer()
    before = stored(layer)
    with pytest.raises(error, match=text):
        edit(layer.weight)
    assert layer.writes == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(layer).items())


def torch_saved(weight: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": torch_saved,
    "numpy": lambda w: torch.tensor(w.numpy()),
    "np.asarray": lambda w: torch.tensor(np.asarray(w)),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "storage": lambda w: torch_saved(w) if w.untyped_storage().nbytes() == 1024 else None,
    "an address": lambda w: (w.data_ptr() == w.untyped_storage().data_ptr()) and w.clone(),
    "written elsewhere": lambda w: torch.zeros(SHAPE).copy_(w),
    "foreach": lambda w: torch._foreach_add([torch.zeros(SHAPE)], [w])[0],
    "dlpack of a copy": lambda w: torch.from_dlpack(w.clone()),
    "mul_(1)": lambda w: w.mul_(1).clone(),
    "state_dict": lambda w: nn.ParameterDict({"a": nn.Parameter(w)}).state_dict()["a"].clone().as_subclass(Tensor),
}


@pytest.mark.parametrize("how", READS)
def test_reading_gives_plain_tensors_and_writes_nothing(how: str) -> None:
    layer = a_layer()
    expected = layer.quantized.dequantize(torch.float32)
    read = READS[how](layer.weight)
    assert type(read) is Tensor
    assert torch.equal(read, expected)
    read.zero_()
    assert torch.equal(layer.weight, expected)
    assert layer.writes == 0


def test_all_who_hold_it_hold_one_weight() -> None:
    layer = a_layer()
    first, second = layer.weight, layer.weight
    first.mul_(2)
    second.add_(1)
    layer.weight.T.sub_(0.5)
    assert first is second
    alone = a_layer().weight.clone().mul_(2).add_(1).sub_(0.5)
    assert torch.equal(first.clone(), alone)
    assert layer.writes == 3
    del first, second
    assert torch.equal(layer.weight, quantized_layer(alone, config=CONFIGS["int8"]).weight)


def test_small_edits_of_a_weight_that_is_held_add_up() -> None:
    layer = a_layer()
    weight, alone = layer.weight, layer.weight.clone()
    for _ in range(20):
        weight.add_(1e-3)
        alone.add_(1e-3)
    del weight
    assert torch.equal(layer.weight, quantized_layer(alone, config=CONFIGS["int8"]).weight)


def test_a_weight_follows_what_is_loaded_and_not_what_takes_its_place() -> None:
    layer, other = a_layer(), quantized_layer(OTHER, config=CONFIGS["int8"])
    weight = layer.weight
    layer.load_state_dict(other.state_dict())
    assert torch.equal(weight.clone(), other.weight)
    layer.weight = torch.ones(SHAPE)
    weight.mul_(2)
    assert torch.equal(layer.weight, torch.ones(SHAPE))


def test_a_weight_of_another_dtype_says_so_when_it_is_written_to() -> None:
    layer = a_layer()
    weight = layer.weight
    layer.to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"another dtype or device.*read layer.weight again"):
        weight.mul_(2)
    assert layer.weight.dtype is torch.bfloat16
    assert layer.writes == 0


def test_copies_of_a_layer_whose_weight_is_held_stand_alone() -> None:
    layer = a_layer()
    weight = layer.weight
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    weight.zero_()
    assert type(weight) is WritableWeight
    assert all(twin.weight.any() for twin in twins)
    assert not layer.weight.any()
