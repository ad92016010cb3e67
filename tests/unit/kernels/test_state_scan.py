"""The scans of Mamba and Mamba 2 in C++, against the same in torch, and against transformers' scans."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2 as theirs

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.state_scan import ScanInputs, reference, state_scan


class Shape(NamedTuple):
    """heads, groups, head_dim, state_size; each: whether there is a rate for each number, as in Mamba."""

    heads: int
    groups: int
    head_dim: int
    state_size: int
    each: bool = False


SHAPES = [
    Shape(1, 1, 1, 1), Shape(2, 1, 6, 4), Shape(6, 2, 8, 8), Shape(4, 4, 65, 3), Shape(3, 1, 64, 16),
    Shape(4, 2, 130, 32), Shape(1, 1, 64, 128), Shape(1, 1, 1, 1, True), Shape(1, 1, 7, 5, True),
    Shape(1, 1, 96, 16, True), Shape(1, 1, 150, 3, True),
    Shape(12, 2, 64, 128),  # of which three sequences store their states past the caches, and one does not
]  # fmt: skip
NONE = -1
EACH = ["x", "dt", "b", "c", "limited"]  # what each token has


def inputs(shape: Shape, tokens: int) -> dict[str, Any]:
    heads, groups, head_dim, size, each = shape
    own = (head_dim,) if each else (heads,)
    return {
        "x": torch.randn(tokens, heads, head_dim),
        "dt": torch.randn(tokens, *own),
        "b": torch.randn(tokens, groups, size),
        "c": torch.randn(tokens, groups, size),
        "log_rate": torch.randn(head_dim, size) if each else torch.randn(heads),
        "bias": torch.randn(own),
        "skip": torch.randn(own),
    }


def places(counts: list[int], before: list[int], slots: list[int]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *counts]).cumsum(0)
    return {"starts": starts, "before": torch.tensor(before), "slots": torch.tensor(slots)}


def pages(shape: Shape, slots: int) -> Tensor:
    return torch.randn(slots, shape.heads, shape.state_size, shape.head_dim)


def called(scan: Callable[..., Tensor], **given: Any) -> Tensor:
    inputs = ScanInputs(**{name: given.pop(name) for name in ScanInputs._fields if name in given})
    return scan(inputs, **given)


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limits", [(0.0, inf), (0.4, 0.9)], ids=str)
def test_sequences_of_several_lengths(shape: Shape, limits: tuple[float, float]) -> None:
    """A new one, one that goes on, and one of whose tokens each state is kept; slots of others stay as they are."""
    given = inputs(shape, 7) | places([3, 1, 3], [NONE, 4, 1], [NONE, NONE, 0, 2, 3, 5, 6]) | {"limits": limits}
    expected = pages(shape, 8)
    for limited in (None, torch.tensor([1, 0, 1, 0, 0, 1, 1])):
        found = expected.clone()
        near(called(state_scan, **given, limited=limited, states=found), called(
            reference, **given, limited=limited, states=expected
        ))  # fmt: skip
        near(found, expected)
        assert torch.equal(found[[1, 4, 7]], expected[[1, 4, 7]])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_pass(shape: Shape) -> None:
    """Alone, in chunks, with its states kept or not, and beside others: a token's numbers are the same."""
    given, states = inputs(shape, 9), pages(shape, 12)
    whole = called(state_scan, **given, **places([9], [0], [NONE] * 8 + [1]), states=states)
    steps = []
    for token, slot in enumerate(range(2, 11)):
        part = {name: value[token : token + 1] if name in EACH else value for name, value in given.items()}
        steps.append(called(state_scan, **part, **places([1], [slot - 1 if token else 0], [slot]), states=states))
    assert torch.equal(torch.cat(steps), whole) and torch.equal(states[10], states[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pairs = {n: torch.cat([value.flip(0), value]) if n in EACH else value for n, value in given.items()}
        both = called(state_scan, **pairs, **places([9, 9], [NONE, 0], [NONE] * 18), states=states)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(both[9:], whole)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameters_of_half_precision_are_read_as_they_are(shape: Shape, dtype: torch.dtype) -> None:
    given, read = inputs(shape, 5), ("dt", "log_rate", "bias", "skip")
    half = given | {name: given[name].to(dtype) for name in read}
    wide = half | {name: half[name].float() for name in read}
    own = places([2, 3], [NONE, 0], [1, 2, 3, 4, 5])
    first = pages(shape, 6)
    second = first.clone()
    assert torch.equal(
        called(state_scan, **half, **own, states=first), called(state_scan, **wide, **own, states=second)
    )
    assert torch.equal(first, second)


@pytest.mark.usefixtures("isa")
def test_tensors_that_are_parts_of_others() -> None:
    shape = Shape(4, 2, 16, 8)
    given = inputs(shape, 5)
    row = torch.cat([given[name].flatten(1) for name in "xbc"], 1)
    parts = row.split([64, 16, 16], 1)
    views = {"x": parts[0].view(5, 4, 16), "b": parts[1].view(5, 2, 8), "c": parts[2].view(5, 2, 8)}
    settings = places([5], [NONE], [NONE] * 5) | {"states": pages(shape, 1)}
    assert torch.equal(called(state_scan, **given | views, **settings), called(state_scan, **given, **settings))


@pytest.mark.usefixtures("isa")
def test_it_is_transformers_scan_of_chunks() -> None:
    shape = Shape(4, 2, 24, 16)
    given, states = inputs(shape, 70), pages(shape, 2)
    first = states[0].clone()
    expected, last = theirs.mamba2_chunk_scan(
        given["x"][None], given["dt"][None], -given["log_rate"].exp(), given["b"][None], given["c"][None],
        chunk_size=16, D=given["skip"], dt_bias=given["bias"], dt_softplus=True, dt_limit=(0.2, 1.5),
        initial_states=first.transpose(1, 2)[None], return_final_states=True,
    )  # fmt: skip
    settings = places([70], [0], [NONE] * 69 + [1]) | {"limits": (0.2, 1.5)}
    near(called(state_scan, **given, **settings, states=states), expected[0])
    near(states[1], last[0].transpose(1, 2))


@pytest.mark.usefixtures("isa")
def test_it_is_transformers_scan_of_a_token() -> None:
    shape = Shape(4, 2, 24, 16)
    given, states = inputs(shape, 1), pages(shape, 2)
    last = states[0].transpose(1, 2).clone()[None]
    heads: dict[str, Any] = {name: given[name][:, None].expand(4, 24) for name in ("skip", "bias")}
    expected = theirs.mamba2_selective_state_update(
        last, given["x"], given["dt"][..., None].expand(1, 4, 24), -given["log_rate"].exp()[:, None, None].expand(
            4, 24, 16
        ), given["b"], given["c"], D=heads["skip"], dt_bias=heads["bias"], dt_softplus=True,
    )  # fmt: skip
    near(called(state_scan, **given, **places([1], [0], [1]), states=states), expected)
    near(states[1], last[0].transpose(1, 2))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [Shape(2, 1, 8, 4), Shape(1, 1, 40, 4, True)], ids=str)
def test_large_and_small_steps(shape: Shape) -> None:
    """A step of a large dt is dt, that of a small one nearly nothing, and NaN stays NaN."""
    given = inputs(shape, 6) | places([6], [NONE], [NONE] * 6) | {"states": pages(shape, 1)}
    given["dt"] = given["dt"] * 60
    given["dt"][2, 0] = 0.0
    near(called(state_scan, **given), called(reference, **given))
    given["dt"][5, 0] = torch.nan
    found, expected = called(state_scan, **given), called(reference, **given)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()


@pytest.mark.usefixtures("isa")
def test_the_step_of_each_column_is_softplus() -> None:
    """By the state after a token of ones: with no rate to speak of, it is the step."""
    dt = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([-100.0, -88.0, 88.0, 1e4])])
    size = len(dt)
    given = {
        "x": torch.ones(1, 1, size), "dt": dt[None], "b": torch.ones(1, 1, 1), "c": torch.ones(1, 1, 1),
        "log_rate": torch.zeros(size, 1), "bias": torch.zeros(size), "skip": torch.zeros(size),
    }  # fmt: skip
    found = called(state_scan, **given, **places([1], [NONE], [0]), states=torch.zeros(1, 1, 1, size))[0, 0]
    torch.testing.assert_close(found, F.softplus(dt.double()).float(), rtol=5e-7, atol=1e-37)


def test_no_sequences() -> None:
    given = inputs(Shape(2, 1, 4, 4), 0) | places([], [], []) | {"states": pages(Shape(2, 1, 4, 4), 1)}
    assert called(state_scan, **given).shape == called(reference, **given).shape == (0, 2, 4)


def test_gradients_are_refused() -> None:
    given = inputs(Shape(1, 1, 4, 4), 1) | places([1], [NONE], [NONE]) | {"states": pages(Shape(1, 1, 4, 4), 1)}
    given["x"].requires_grad_()
    with pytest.raises(UnsupportedError, match="state_scan: the cpu kernel has no gradient"):
        called(state_scan, **given)
