"""What a ModelWatch sees of a model, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_accel
from hf_accel.generation.agreement import ProcessAgreement
from hf_accel.generation.hf.model_objects import SAMPLES, samples, spread
from hf_accel.generation.hf.model_runner import weights_salt
from hf_accel.generation.hf.model_watch import ModelWatch, Reading
from hf_accel.undo.state import state_of

from ...parity.families import FAMILIES, build, inputs

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def differ(before: dict[Any, Tensor], after: dict[Any, Tensor]) -> bool:
    assert before.keys() == after.keys()
    return not all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (64, 64), (48, 97), (3, 5, 40)], ids=str)
def test_a_write_to_a_whole_tensor_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape).to(dtype)
    before = samples([tensor])
    assert not differ(before, samples([tensor.clone()]))
    tensor.copy_(torch.ones(shape).to(dtype))
    assert differ(before, samples([tensor]))


@pytest.mark.parametrize("shape", [(2048, 2048), (1000, 64), (64, 1000), (257,), (1 << 20,)], ids=str)
def test_numbers_are_spread_over_rows_and_columns(shape: tuple[int, ...]) -> None:
    where = spread(torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape))
    total = torch.Size(shape).numel()
    assert SAMPLES // 2 < len(where) <= SAMPLES and where[0] == 0 and total * 0.99 < where[-1] + total // SAMPLES + 1
    if len(shape) == 2:
        rows, columns = where // shape[1], where % shape[1]
        assert len(rows.unique()) > min(shape[0], SAMPLES) / 2 and len(columns.unique()) > min(shape[1], SAMPLES) / 4


def test_bits_are_compared() -> None:
    """Sums would not see numbers that change places, nor zeros, infinities and NaN that change their signs."""
    numbers = torch.randn(400)
    assert differ(samples([numbers]), samples([numbers.flip(0)]))
    for value in (0.0, float("inf"), float("nan")):
        assert differ(samples([torch.full((3,), value)]), samples([torch.full((3,), -value)]))
        assert not differ(samples([torch.full((3,), value)]), samples([torch.full((3,), value)]))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(40, 30).t(),
        torch.randn(40, 30)[::3, 5:9],
        torch.randn(5).expand(40, 5),
        torch.randn(60, 60)[59:, 59:],
        torch.empty(0, 4),
    ],
    ids=["transposed", "strided", "expanded", "the last number", "empty"],
)
def test_any_layout(tensor: Tensor) -> None:
    before = samples([tensor])
    assert not differ(before, samples([tensor]))
    if before:
        tensor.add_(1) if tensor.stride()[0] else tensor[0].add_(1)
        assert differ(before, samples([tensor]))


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 4).to_sparse(), torch.randn(4, 4).to_mkldnn(), torch.randn(4, 4, device="meta")],
    ids=["sparse", "opaque", "meta"],
)
def test_without_numbers_that_can_be_read(tensor: Tensor) -> None:
    module = nn.Identity()
    module.register_buffer("odd", tensor)
    before = Reading(module)
    assert before.equals(Reading(module))
    module.odd = torch.randn(4, 4)
    assert not before.equals(Reading(module))


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_using_a_model_does_not_change_it(family: str, weights: str | None) -> None:
    model = hf_accel.patch(build(family), weights=weights)
    salts = set()
    for number in range(3):
        model.generate(**inputs("left"), max_new_tokens=2, do_sample=bool(number))
        with torch.no_grad():
            model(**inputs("right"))
        salts.add(weights_salt(model))
    assert len(salts) == 1


# older transformers warn of offloaded weights
@pytest.mark.filterwarnings("ignore:You are calling .generate\\(\\):UserWarning")
def test_an_offloaded_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    stock, model = build("llama"), hf_accel.patch(build("llama"), weights=None)
    accelerate.cpu_offload(model)
    first = weights_salt(model)
    for _ in range(2):
        got = model.generate(**inputs("single"), max_new_tokens=3, do_sample=False)
    assert torch.equal(got, stock.generate(**inputs("single"), max_new_tokens=3, do_sample=False))
    assert weights_salt(model) == first


def test_no_weight_is_kept_alive() -> None:
    model = hf_accel.patch(build("llama"))
    weights_salt(model)
    norm, linear = model.model.norm, model.model.layers[0].mlp.up_proj
    old = [weakref.ref(norm.weight), weakref.ref(norm.weight.untyped_storage()), weakref.ref(linear._packed)]
    norm.weight = nn.Parameter(norm.weight.detach() * 2)
    linear.weight.data.mul_(2)
    assert [reference() for reference in old] == [None, None, None]


def test_an_object_at_the_address_of_another() -> None:
    """Python gives the address of a function that is gone to the next one."""
    module = nn.Linear(2, 2)
    seen = set()
    for _ in range(5):
        module.forward = lambda x: x  # type: ignore[method-assign]
        reading = Reading(module)
        seen.add(id(module.forward))
        del module.forward
        module.forward = lambda x: x + 1  # type: ignore[method-assign]
        assert not reading.equals(Reading(module))
        del module.forward


def test_a_copy_has_another_salt() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    salt, watch = weights_salt(model), state_of(model).generation.watch
    copies = [copy.deepcopy(watch), pickle.loads(pickle.dumps(watch)), ModelWatch()]
    assert salt[:16] not in {each.look(model) for each in copies}
    assert weights_salt(copy.deepcopy(model)) != salt == weights_salt(model)


def test_another_process_sees_a_change() -> None:
    class Both(ProcessAgreement):
        size = 2
        other = 1  # what the other says: that it has seen none

        def least(self, number: int) -> int:
            return min(number, self.other)

    model = hf_accel.patch(build("llama"), weights=None)
    agreement = state_of(model).generation.agreement = Both()
    salt = weights_salt(model)
    assert weights_salt(model) == salt
    agreement.other = 0
    changed = weights_salt(model)
    agreement.other = 1
    assert changed != salt and weights_salt(model) == changed
