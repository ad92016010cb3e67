"""The gated delta rule in C++, against the same in torch, and against transformers' rules for chunks and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.delta_rule import DeltaInputs, delta_rule, reference

# (key heads, value heads, key_dim, value_dim)
SHAPES = [
    (1, 1, 1, 1), (1, 2, 4, 6), (2, 6, 8, 8), (2, 2, 3, 65), (1, 3, 16, 64), (2, 4, 32, 130), (1, 1, 128, 128),
    (2, 6, 128, 128),  # of which three sequences store their states past the caches, and one does not
]  # fmt: skip
NONE = -1
EACH = {*"qkvab", "decays"}  # what each token has


def inputs(shape: tuple[int, int, int, int], tokens: int) -> dict[str, Tensor]:
    keys, values, key_dim, value_dim = shape
    return {
        "q": torch.randn(tokens, keys, key_dim),
        "k": torch.randn(tokens, keys, key_dim),
        "v": torch.randn(tokens, values, value_dim),
        "a": torch.randn(tokens, values),
        "b": torch.randn(tokens, values),
        "log_rate": torch.rand(values).log(),
        "bias": torch.randn(values),
    }


def places(counts: list[int], before: list[int], slots: list[int]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *counts]).cumsum(0)
    return {"starts": starts, "before": torch.tensor(before), "slots": torch.tensor(slots)}


def pages(shape: tuple[int, int, int, int], slots: int) -> Tensor:
    return torch.randn(slots, shape[1], *shape[2:])


def called(rule: Callable[..., Tensor], **given: Any) -> Tensor:
    inputs = DeltaInputs(**{name: given.pop(name) for name in DeltaInputs._fields if name in given})
    return rule(inputs, **given)


def with_decays(given: dict[str, Any]) -> dict[str, Any]:
    """The inputs with a decay of each number of a key in place of one of each head, and beta from 0 to 2."""
    keys, values = given["k"], given["v"]
    rates = torch.rand(*values.shape[:2], keys.shape[2])
    return given | {"a": None, "log_rate": None, "bias": None, "decays": rates, "beta_factor": 2.0}


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_of_several_lengths(shape: tuple[int, int, int, int], each: bool) -> None:
    """A new one, one that goes on, and one of whose tokens each state is kept; slots of others stay as they are."""
    given = (with_decays if each else dict)(inputs(shape, 7)) | places(
        [3, 1, 3], [NONE, 4, 1], [NONE, NONE, 0, 2, 3, 5, 6]
    )
    expected = pages(shape, 8)
    found = expected.clone()
    near(called(delta_rule, **given, states=found), called(reference, **given, states=expected))
    near(found, expected)
    assert torch.equal(found[[1, 4, 7]], expected[[1, 4, 7]])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_pass(shape: tuple[int, int, int, int], each: bool) -> None:
    """Alone, in chunks, with its states kept or not, and beside others: a token's numbers are the same."""
    given, states = (with_decays if each else dict)(inputs(shape, 9)), pages(shape, 12)
    whole = called(delta_rule, **given, **places([9], [0], [NONE] * 8 + [1]), states=states)
    steps = []
    for token, slot in enumerate(range(2, 11)):
        part = {n: x[token : token + 1] if n in EACH and x is not None else x for n, x in given.items()}
        steps.append(called(delta_rule, **part, **places([1], [slot - 1 if token else 0], [slot]), states=states))
    assert torch.equal(torch.cat(steps), whole) and torch.equal(states[10], states[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pairs = {n: torch.cat([x.flip(0), x]) if n in EACH and x is not None else x for n, x in given.items()}
        both = called(delta_rule, **pairs, **places([9, 9], [NONE, 0], [NONE] * 18), states=states)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(both[9:], whole)


@pytest.mark.usefixtures("isa")
def test_tensors_that_are_parts_of_others() -> None:
    shape = (2, 4, 16, 32)
    given = inputs(shape, 5)
    row = torch.cat([given[name].flatten(1) for name in "qkv"], 1)
    parts = row.split([32, 32, 128], 1)
    views: dict[str, Any] = {"q": parts[0].view(5, 2, 16), "k": parts[1].view(5, 2, 16), "v": parts[2].view(5, 4, 32)}
    settings = places([5], [NONE], [NONE] * 5) | {"states": pages(shape, 1)}
    assert torch.equal(called(delta_rule, **given | views, **settings), called(delta_rule, **given, **settings))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_it_is_transformers_rule(name: str) -> None:
    shape = (2, 4, 16, 24)
    given, states = inputs(shape, 70), pages(shape, 2)
    first = states[0].clone()
    repeated = {key: given[key].repeat_interleave(2, 1)[None] for key in "qk"}  # transformers 5.17 repeats outside
    decay = -given["log_rate"].exp() * F.softplus(given["a"] + given["bias"])
    expected, last = getattr(theirs, name)(
        repeated["q"], repeated["k"], given["v"][None], g=decay[None], beta=given["b"].sigmoid()[None],
        initial_state=first[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    near(called(delta_rule, **given, **places([70], [0], [NONE] * 69 + [1]), states=states), expected[0])
    near(states[1], last[0])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_it_is_transformers_rule_with_decays_of_each_number(name: str) -> None:
    kimi: Any = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    shape = (3, 3, 16, 16)
    given, states = with_decays(inputs(shape, 70)), pages(shape, 2)
    first, tokens = states[0].clone(), {n: given[n][None] for n in "qkv"}
    expected, last = getattr(kimi, name)(
        tokens["q"], tokens["k"], tokens["v"], g=given["decays"].log()[None], beta=2 * given["b"].sigmoid()[None],
        initial_state=first[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    near(called(delta_rule, **given, **places([70], [0], [NONE] * 69 + [1]), states=states), expected[0])
    near(states[1], last[0])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_beta_is_rounded_as_in_transformers(dtype: torch.dtype) -> None:
    shape = (1, 2, 8, 8)
    given = inputs(shape, 6) | places([6], [NONE], [NONE] * 6) | {"states": pages(shape, 1)}
    given["a"], given["b"] = given["a"].to(dtype), given["b"].to(dtype)
    near(called(delta_rule, **given), called(reference, **given))


@pytest.mark.usefixtures("isa")
def test_large_gates() -> None:
    shape = (1, 2, 8, 8)
    given = inputs(shape, 6) | places([6], [NONE], [NONE] * 6) | {"states": pages(shape, 1)}
    given["a"], given["b"] = given["a"] * 60, given["b"] * 60
    near(called(delta_rule, **given), called(reference, **given))


def test_no_sequences() -> None:
    given = inputs((1, 2, 4, 4), 0) | places([], [], []) | {"states": pages((1, 2, 4, 4), 1)}
    assert called(delta_rule, **given).shape == called(reference, **given).shape == (0, 2, 4)


def test_gradients_are_refused() -> None:
    given = inputs((1, 1, 4, 4), 1) | places([1], [NONE], [NONE]) | {"states": pages((1, 1, 4, 4), 1)}
    given["q"].requires_grad_()
    with pytest.raises(UnsupportedError, match="delta_rule: the cpu kernel has no gradient"):
        called(delta_rule, **given)
