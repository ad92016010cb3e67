"""ModelObjects sees each change of a model that a reading of all of it would see, and holds nothing of it."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

import hf_accel
from hf_accel.generation.hf.model_objects import ModelObjects, Samples, samples, spread
from hf_accel.generation.hf.model_watch import ModelWatch, Reading
from hf_accel.kernels.cpu.row_kernels import SampleTable
from hf_accel.undo.state import state_of

from ...devices import without_native_kernels
from ...parity.families import FAMILIES, build, inputs
from .test_model_watch import DTYPES

Change = Callable[[Any], object]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


class Inner(nn.Module):
    """Has what a model may hold besides weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("square", torch.randn(6, 6))
        self.register_parameter("missing", None)
        self.one, self.scale, self.names, self.pair = 1, 0.5, ["a", ["b"]], ("x", 2)
        self.members, self.table, self.kind = {"u", "v"}, {"w": {"deep": 3}}, nn.Linear
        self.numbers = torch.randn(5)
        self.act = torch.nn.functional.relu
        self.curved, self.bound = partial(torch._C._nn.gelu, approximate="tanh"), self.second.extra_repr
        self.held = Held()
        self.config = LlamaConfig(hidden_size=32, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        self.parts = nn.ModuleList([nn.ReLU(), None, nn.ReLU()])  # type: ignore[list-item]
        self.first.register_forward_pre_hook(known_hook)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Held:
    pass


known_hook = torch.nn.functional.silu


def model() -> Any:
    return nn.Sequential(Inner(), nn.Tanh())


@change
def attribute_added(m: Any) -> None:
    m[1].more = None


@change
def attribute_gone(m: Any) -> None:
    del m[0].one


@change
def attribute_renamed(m: Any) -> None:
    value = m[0].parts
    own = vars(m[0].first)
    own["in_feature"] = own.pop("out_features")
    assert value is m[0].parts


@change
def number_of_another_kind(m: Any) -> None:
    m[0].one = True


@change
def number_as_a_tensor(m: Any) -> None:
    m[0].one = torch.tensor(1)


@change
def sign_of_zero(m: Any) -> None:
    m[0].scale = -0.0


@change
def member_of_a_list(m: Any) -> None:
    m[0].names[1][0] = "c"


@change
def longer_list(m: Any) -> None:
    m[0].names[1].append("c")


@change
def member_of_a_set(m: Any) -> None:
    m[0].members.remove("u")


@change
def deep_entry(m: Any) -> None:
    m[0].table["w"]["deep"] = 4


@change
def setting_of_the_config(m: Any) -> None:
    m[0].config.hidden_size = 33


@change
def rotation_of_the_config(m: Any) -> None:
    m[0].config.rope_parameters["rope_theta"] = 1.0


@change
def equal_config(m: Any) -> None:
    m[0].config = LlamaConfig(**m[0].config.to_dict())


@change
def settings_replaced_at_once(m: Any) -> None:
    m[0].config.__dict__ = {**vars(m[0].config)}


@change
def another_class(m: Any) -> None:
    m[0].kind = nn.Bilinear


@change
def class_of_a_module(m: Any) -> None:
    m[1].__class__ = nn.Sigmoid


@change
def class_of_the_model(m: Any) -> None:
    m.__class__ = nn.ModuleList


@change
def function(m: Any) -> None:
    m[0].act = torch.nn.functional.silu


@change
def argument_of_a_function(m: Any) -> None:
    m[0].curved.keywords["approximate"] = "none"


@change
def method_of_another_module(m: Any) -> None:
    m[0].bound = m[0].first.extra_repr


@change
def object_held(m: Any) -> None:
    m[0].held = Held()


@change
def object_gone(m: Any) -> None:
    m[0].held = None


@change
def hook(m: Any) -> None:
    m[1].register_forward_hook(lambda *_: None)


@change
def another_known_hook(m: Any) -> None:
    hooks = m[0].first._forward_pre_hooks
    hooks[next(iter(hooks))] = torch.nn.functional.relu


@change
def equal_dictionary_of_hooks(m: Any) -> None:
    m[1]._forward_hooks = OrderedDict()


@change
def forward_set(m: Any) -> None:
    m[1].forward = torch.tanh


@change
def module_replaced(m: Any) -> None:
    m[1] = nn.Tanh()


@change
def modules_swapped(m: Any) -> None:
    m[0].first, m[0].second = m[0].second, m[0].first


@change
def module_put_into_an_empty_place(m: Any) -> None:
    m[0].parts._modules["1"] = nn.ReLU()


@change
def module_gone(m: Any) -> None:
    m[0].parts._modules["0"] = None


@change
def modules_tied(m: Any) -> None:
    m[0].second = m[0].first


@change
def parameter_put_into_an_empty_place(m: Any) -> None:
    m[0].missing = nn.Parameter(torch.ones(3))


@change
def parameter_replaced(m: Any) -> None:
    m[0].first.weight = nn.Parameter(m[0].first.weight.detach().clone())


@change
def weights_tied(m: Any) -> None:
    m[0].second.weight = m[0].first.weight


@change
def bias_gone(m: Any) -> None:
    m[0].first.bias = None


@change
def counted_write(m: Any) -> None:
    with torch.no_grad():
        m[0].first.bias.add_(1)


@change
def uncounted_write(m: Any) -> None:
    m[0].first.bias.data.add_(1)


@change
def write_by_numpy(m: Any) -> None:
    m[0].first.weight.detach().numpy()[3, 4] = 9


@change
def data_of_another_dtype(m: Any) -> None:
    m[0].second.weight.data = m[0].second.weight.data.double()


@change
def data_transposed(m: Any) -> None:
    m[0].square.data = m[0].square.data.t()


@change
def tensor_of_a_module_is_written_to(m: Any) -> None:
    m[0].numbers.data[4] = 7


@change
def tensor_of_a_module_is_another(m: Any) -> None:
    m[0].numbers = torch.zeros(5)


@change
def tensor_of_a_module_is_sparse(m: Any) -> None:
    m[0].numbers = torch.zeros(5).to_sparse()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        without_native_kernels(monkeypatch, "a device without them")
    made = model()
    objects = ModelObjects(made)
    assert objects.hold(made) and objects.hold(made)
    CHANGES[name](made)
    assert not objects.hold(made)
    assert ModelObjects(made).hold(made) is (name not in UNKNOWN)


UNKNOWN = {"hook", "modules_tied", "tensor_of_a_module_is_sparse"}


def test_another_model_is_not_the_same() -> None:
    made = model()
    assert not ModelObjects(made).hold(model())


ODD = [
    [torch.ones(2)],
    {"a": nn.ReLU()},
    lambda x: x,
    {torch.float32, (1, 2)},
    partial(lambda x: x),
    nn.ReLU().extra_repr,
]


@pytest.mark.parametrize("odd", ODD, ids=["list", "dict", "function", "set", "partial", "method"])
def test_what_is_not_known_is_never_the_same(odd: Any) -> None:
    made = model()
    made[0].odd = odd
    assert not ModelObjects(made).hold(made)
    assert Reading(made).equals(Reading(made))


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_use_stays_the_same(family: str, weights: Any) -> None:
    """It would be read again by each call."""
    made = hf_accel.patch(build(family), weights=weights)
    watch = state_of(made).generation.watch
    seen = []
    for _ in range(6):
        made.generate(**inputs("left"), max_new_tokens=2, do_sample=False)
        seen.append(watch.reading)
    assert seen[-1] is seen[-2] is not None
    for parameter in [*made.parameters()][-2:]:
        parameter.data.neg_()
    made.generate(**inputs("left"), max_new_tokens=2, do_sample=False)
    assert watch.reading is not seen[-1]


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
def test_a_packed_weight_is_written_to(weights: Any) -> None:
    made = hf_accel.patch(build("llama"), weights=weights)
    packed = made.model.layers[1].mlp.up_proj._packed
    objects = ModelObjects(made)
    assert objects.hold(made)
    inner = packed.weight if hasattr(packed, "weight") and not isinstance(packed.weight, Tensor) else packed
    tensor = next(value for value in vars(inner).values() if isinstance(value, Tensor))
    tensor.view(-1)[0] += 1
    assert not objects.hold(made)


def test_nothing_is_kept_alive() -> None:
    """The watch is on the model."""
    made = model()
    made.first = nn.Linear(3, 3)
    vars(made)["watch"] = watch = ModelWatch()
    salt = watch.look(made)
    assert watch.look(made) == salt
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(made.first), weakref.ref(made.first.weight.untyped_storage())
        made.first = nn.Identity()
        assert [reference() for reference in gone] == [None, None]
        assert watch.look(made) != salt
        whole = weakref.ref(made)
        del made, watch
        assert whole() is None
    finally:
        gc.enable()


SHAPES: list[Any] = [(), (7,), (64, 64), (48, 97), (3, 5, 40)]


def zeros() -> list[Tensor]:
    odd = [torch.zeros(40, 30).t(), torch.zeros(40, 30)[::3, 5:9], torch.zeros(5).expand(40, 5)]
    return [*(torch.zeros(shape).to(dtype) for shape in SHAPES for dtype in DTYPES), *odd]


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_samples_of_any_tensor(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        without_native_kernels(monkeypatch, "a device without them")
    made = zeros()
    tensors = [*made, torch.empty(0, 4)]
    for tensor in made:
        seen = Samples(tensors)
        assert seen.hold(tensors)
        (tensor[0] if tensor.ndim and not tensor.stride(0) else tensor).copy_(torch.ones(()))
        assert not seen.hold(tensors)


def test_native_samples_are_those_of_torch() -> None:
    tensors = [torch.randn(each.shape).to(each.dtype) for each in zeros()]
    expected = [part for tensor in tensors for part in samples([tensor]).values()]
    assert SampleTable([spread(tensor) for tensor in tensors]).read() == b"".join(
        part.view(torch.uint8).numpy().tobytes() for part in expected
    )
