"""Decoder layers that rotate by a table that they keep, as those of GPT-J and CodeGen, as one native call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gptj import modeling_gptj

import hf_accel
from hf_accel.fused.modules import form_of_rotation
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.call_form import POSITION_IDS
from hf_accel.recognition.of_positions import OfPositions
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.position_tables import OwnTables, TableRows, TableStandIn, own_tables
from hf_accel.recognition.rotations import rotation_by_half
from hf_accel.recognition.symbols import BATCH
from tests.unit.fused.test_decoder_layers import PROMPTS, counted, layers_of
from tests.unit.fused.test_operator_layers import OPTIONS, check_native_layers

pytestmark = [
    pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal())),
    pytest.mark.skipif(
        hasattr(modeling_gptj, "GPTJRotaryEmbedding"),
        reason="from transformers 5.24 on, models keep one table for all layers",
    ),
]

SIZES: dict[str, Any] = {
    "vocab_size": 101, "n_embd": 96, "n_head": 4, "n_layer": 3, "rotary_dim": 8, "n_positions": 64,
    "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS = {
    "GPTJ": (transformers.GPTJConfig, transformers.GPTJForCausalLM),
    "CodeGen": (transformers.CodeGenConfig, transformers.CodeGenForCausalLM),
}
TABLE = "embed_positions"
HALVES = [torch.bfloat16, torch.float16]


def made(kind: str, **other: Any) -> PreTrainedModel:
    config, model = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found: PreTrainedModel = model(config(**SIZES | other)).eval()
    return found


def tables(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The buffers among which each layer keeps its table."""
    return [module._buffers for module in model.modules() if TABLE in module._buffers]


@pytest.mark.parametrize("wide", [False, True], ids=["tables of the model's dtype", "float32 tables"])
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["float", "int8", "int4"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_halves(kind: str, dtype: torch.dtype, weights: Any, wide: bool) -> None:
    """from_pretrained leaves these tables in float32."""
    stock = made(kind).to(dtype)
    for held in tables(stock) if wide else ():
        held[TABLE] = held[TABLE].float()
    model = hf_accel.patch(stock, weights=weights)
    check_native_layers(model, 0.02)


@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["float", "int8", "int4"])
@pytest.mark.parametrize("other", [{}, {"rotary_dim": 24}, {"activation_function": "relu"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str, other: dict[str, Any], weights: Any) -> None:
    sizes = other if kind == "GPTJ" else {"n_head": 8} | other | ({"rotary_dim": 12} if "rotary_dim" in other else {})
    stock = made(kind, **sizes)
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    check_native_layers(model, 1e-5 if weights is None else 0.02)
    if weights is None:
        ids = torch.tensor(PROMPTS[:1])
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_a_rotation_has_the_bits_of_its_code(dtype: torch.dtype, wide: bool) -> None:
    known = rotation_by_half(modeling_gptj.apply_rotary_pos_emb)
    assert known is not None
    form = form_of_rotation(known.function, dtype, torch.float32 if wide else dtype)  # which compares bits
    assert form is not None and form.interleaved == 2


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_layer_reads_its_own_table_as_it_is(kind: str) -> None:
    """Without a hook, the layers of a pass share what they are given."""
    stock = made(kind)
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    ids, options = torch.tensor(PROMPTS[:1]), {"max_new_tokens": 30, "do_sample": False}
    before = None
    for change in (None, 1, 2):
        for held in (tables(stock), tables(model)):
            if change == 1:
                held[1][TABLE].mul_(0.1)
            elif change == 2:
                held[2][TABLE] = held[2][TABLE].flip(0)
        with counted() as calls:
            got = model.generate(ids, **options)  # type: ignore[operator]
        assert calls[True] and not calls[False]
        assert torch.equal(got, stock.generate(ids, **options))  # type: ignore[operator]
        assert before is None or not torch.equal(got, before)
        before = got


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_behind_the_table_is_an_error_as_without_us(kind: str) -> None:
    stock = made(kind, n_positions=16)
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    ids = torch.arange(3, 15)[None]
    assert torch.equal(model.generate(ids, max_new_tokens=4), stock.generate(ids, max_new_tokens=4))  # type: ignore[operator]
    for each in (stock, model):
        with pytest.raises((IndexError, RuntimeError), match="index"):
            each.generate(ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_undo(kind: str) -> None:
    stock = made(kind)
    model = copy.deepcopy(stock)
    ids = torch.tensor(PROMPTS[:1])
    hf_accel.patch(model, weights=None)
    assert len(layers_of(model)) == 3
    assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))  # type: ignore[operator]
    hf_accel.unpatch(model)
    assert torch.equal(model(ids).logits, stock(ids).logits)


# -- what code may do with a table ---------------------------------------------------------------------


def swapped(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    return modeling_gptj.apply_rotary_pos_emb(tensor, cos, sin)


def test_code_that_rotates_otherwise_has_no_form() -> None:
    known = rotation_by_half(swapped)
    assert known is not None and form_of_rotation(known.function, torch.float32, torch.float32) is None
    assert rotation_by_half(lambda tensor, angle: tensor) is None


def given() -> OfPositions:
    return OfPositions(POSITION_IDS, counted=False)


def test_rows_of_a_table() -> None:
    table = torch.arange(40.0).view(10, 4)
    rows = TableStandIn(table)[given()]
    index = given().unsqueeze(-1).repeat(1, 1, 4)
    gathered = torch.gather(TableStandIn(table).repeat(BATCH, 1, 1), 1, index)  # type: ignore[call-overload]
    for each in (rows, gathered.to(torch.bfloat16)):
        sin, cos = torch.split(each, 2, dim=-1)
        found = own_tables(cos, sin)
        assert found == OwnTables(table, 2, 0, 2, each.dtype)
        positions = torch.tensor([[3, 1], [9, 0]])
        for one, columns in zip(found.of(positions), (slice(2, 4), slice(0, 2)), strict=True):
            assert torch.equal(one, table[positions][..., columns].to(each.dtype))


OTHERS: dict[str, Any] = {
    "other positions": lambda table: table[given() + 1],
    "counted positions": lambda table: table[OfPositions("positions", counted=True)],
    "rows by number": lambda table: table[3],
    "of another dimension": lambda table: torch.gather(table.repeat(BATCH, 1, 1), 2, given()),
    "fewer columns": lambda table: torch.gather(table.repeat(BATCH, 1, 1), 1, given().unsqueeze(-1).repeat(1, 1, 3)),
    "other rows": lambda table: torch.gather(
        table.repeat(BATCH, 1, 1), 1, (given() + 1).unsqueeze(-1).repeat(1, 1, 4)
    ),
    "other shapes": lambda table: torch.gather(table.repeat(BATCH, 1, 1), 1, given()),
    "several copies": lambda table: table.repeat(2, 1, 1),
    "a product": lambda table: table * 2,
    "uneven columns": lambda table: torch.split(table[given()], 3, dim=-1),
    "rows": lambda table: torch.split(table[given()], 2, dim=1),
    "rounded twice": lambda table: table[given()].to(torch.bfloat16).to(torch.float32),
    "integers": lambda table: table[given()].to(torch.int64),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_else_code_does_with_a_table_is_not_followed(other: str) -> None:
    with pytest.raises((UntraceableError, TypeError)):
        OTHERS[other](TableStandIn(torch.ones(10, 4)))


def test_cos_and_sin_are_of_one_table() -> None:
    first, second = (TableStandIn(torch.ones(10, 4))[given()] for _ in range(2))
    parts = [torch.split(each, 2, dim=-1) for each in (first, second, first.to(torch.bfloat16))]
    for cos, sin in (
        (parts[0][0], parts[1][1]),
        (parts[0][0], parts[2][1]),
        (parts[0][0], first),
        (None, parts[0][0]),
    ):
        with pytest.raises(UntraceableError):
            own_tables(cos, sin)
    assert isinstance(parts[0][0], TableRows)
