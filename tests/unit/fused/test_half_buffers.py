"""Results inside float32 layers of quantized weights that are bfloat16: which they are, and what that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ModernBertConfig,
    ModernBertModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_accel
from hf_accel.fused import layer_programme
from hf_accel.fused.half_buffers import half_buffers
from hf_accel.kernels.cpu import refusal
from hf_accel.kernels.cpu.layer_call import KINDS, Columns, LayerOp

from ...devices import multiply_pairs
from ...parity.families import build

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"no CPU kernels: {refusal()}")
SIZES = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 97,
    "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "Bert": lambda: BertModel(BertConfig(**SIZES), add_pooling_layer=False),
    "ModernBert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2)
    ),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "DebertaV2": lambda: DebertaV2Model(
        DebertaV2Config(**SIZES, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"])
    ),
}


@pytest.fixture(autouse=True)
def _on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take bfloat16 on each; where it does not pay it is not chosen."""
    multiply_pairs(monkeypatch, does=True)


def op(kind: str, **places: int) -> LayerOp:
    return LayerOp(kind=KINDS[kind], **{name: Columns(buffer, 0, 8) for name, buffer in places.items()})


def layer() -> list[LayerOp]:
    """A layer like Bert's: 2 to 4 are q, k and v, 5 what attention gives, 6 a sum, 7 its norm, 8 what follows."""
    return [
        op("integer_linear", x=0, out=2), op("integer_linear", x=0, out=3), op("integer_linear", x=0, out=4),
        op("attend_rows", x=2, y=3, z=4, out=5),
        op("integer_linear", x=5, out=6), op("layer_norm", x=6, y=0, out=7),
        op("integer_linear", x=7, out=8), op("integer_linear", x=8, out=9), op("add", x=9, y=7, out=1),
    ]  # fmt: skip


def test_results_of_products_and_attention_are_halves() -> None:
    operations = layer()
    assert half_buffers(operations, torch.float32) == {2, 3, 4, 5, 8}
    said = [(bool(each.halves_in), bool(each.halves_out)) for each in operations]
    no, into, out, both = (False, False), (True, False), (False, True), (True, True)
    assert said == [out, out, out, both, into, no, out, into, no]


def test_both_parts_of_a_gate_are_or_none() -> None:
    gate = op("gate", x=2, y=3, out=4)
    operations = [*layer()[:2], gate, op("integer_linear", x=4, out=1)]
    assert half_buffers(operations, torch.float32) == {2, 3, 4} and gate.halves_in and gate.halves_out
    assert half_buffers([*operations, op("add", x=3, out=1)], torch.float32) == set()


def test_what_another_operation_reads_is_not() -> None:
    operations = [*layer(), op("add", x=3, y=7, out=1)]  # the keys: attention takes all of one dtype
    assert half_buffers(operations, torch.float32) == {8}
    gated = layer()
    gated[3].out2 = Columns(10, 0, 8)  # gates of a bias are float32
    gated.insert(0, op("integer_linear", x=0, out=10))
    assert half_buffers(gated, torch.float32) == {2, 3, 4, 5, 8}


def test_a_rotation_is_rounded_once() -> None:
    turned = op("rope", x=2, y=3, out=10, out2=11)
    turned.round_each = True
    operations = [*layer()[:3], turned, op("attend_rows", x=10, y=11, z=4, out=5), op("integer_linear", x=5, out=1)]
    assert half_buffers(operations, torch.float32) == {2, 3, 4, 5, 10, 11}
    assert not turned.round_each
    operations.append(op("layer_norm", x=10, out=1))
    turned.round_each = True
    assert half_buffers(operations, torch.float32) == set() and turned.round_each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_they_were(dtype: torch.dtype) -> None:
    assert half_buffers(layer(), dtype) == set()


def test_none_beside_float_weights_nor_on_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert half_buffers([*layer(), op("float_linear", x=7, out=1)], torch.float32) == set()
    multiply_pairs(monkeypatch, does=False)
    assert half_buffers(layer(), torch.float32) == set()


class Counted:
    """Notes the halves of each layer that is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.halves: list[int] = []
        monkeypatch.setattr(layer_programme, "half_buffers", self)

    def __call__(self, operations: Any, dtype: torch.dtype) -> set[int]:
        found = half_buffers(operations, dtype)
        self.halves.append(len(found))
        return found


@pytest.mark.parametrize(("family", "halves"), [("Bert", 3), ("ModernBert", 6), ("DebertaV2", 1)])
@torch.no_grad()
def test_models_are_about_as_close_to_stock(monkeypatch: pytest.MonkeyPatch, family: str, halves: int) -> None:
    stock, ids = MODELS[family]().eval(), torch.randint(3, 50, (3, 40))
    expected, ours = stock(input_ids=ids)[0], hf_accel.patch(MODELS[family]().eval())
    _take_weights(ours, stock)
    counted = Counted(monkeypatch)
    found = ours(input_ids=ids)[0]
    assert counted.halves == [halves] * 3
    multiply_pairs(monkeypatch, does=False)
    floats = hf_accel.patch(stock)(input_ids=ids)[0]
    assert not torch.equal(found, floats)
    assert (found - expected).norm() < 1.1 * (floats - expected).norm()
    assert torch.equal(found[1], ours(input_ids=ids[1:2])[0][0])  # whatever else is in the batch


def _take_weights(ours: nn.Module, stock: nn.Module) -> None:
    hf_accel.unpatch(ours)
    ours.load_state_dict(stock.state_dict())
    hf_accel.patch(ours)


@torch.no_grad()
def test_none_in_layers_of_float_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, ours = Counted(monkeypatch), hf_accel.patch(MODELS["Bert"]().eval(), weights=None)
    ours(input_ids=torch.randint(3, 50, (2, 9)))
    assert counted.halves == [0] * 3


@torch.no_grad()
def test_none_in_layers_of_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute a token in other passes too: without a cache, of a prompt and one by one."""
    counted, ours = Counted(monkeypatch), hf_accel.patch(build("llama").eval())
    ids = torch.randint(3, 50, (2, 9))
    ours(input_ids=ids, use_cache=False)
    ours.model(input_ids=ids, use_cache=False)
    ours.generate(ids, max_new_tokens=2)
    assert sum(counted.halves) == 0


@torch.no_grad()
def test_verify_knows_of_them() -> None:
    ours = hf_accel.patch(MODELS["Bert"]().eval())
    assert hf_accel.verify(ours).explained


@pytest.mark.parametrize("weights", ["int8", None])
@pytest.mark.parametrize("family", ["Bert", "T5", "llama"])
def test_the_plan_says_so(weights: str | None, family: str) -> None:
    """Of each model with such layers, also of one that writes text."""
    said = str(hf_accel.plan(MODELS[family]().eval() if family in MODELS else build("llama"), weights=weights))
    assert ("inside layers" in said) is (weights is not None and family != "llama")
