"""Encoders by native calls: tokens as stock computes them, zeros at padding, stock's path for the rest."""

from __future__ import annotations

import contextlib
import copy
import pickle
import platform
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, Wav2Vec2Config, Wav2Vec2ForCTC

import hf_accel
from hf_accel.fused import encoder_rows
from hf_accel.fused.encoder_programme import EncoderProgramme
from hf_accel.fused.hf.encoder_calls import MOST_KINDS, EncoderCalls, EncoderLayerCalls
from hf_accel.fused.operations import ProductOperation
from hf_accel.hardware.isa_levels import ISA_LEVELS, Level
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels.cpu.build import levels_for
from hf_accel.recognition.trace import Trace
from hf_accel.undo.state import FUSED
from tests.families.models import enliven

from .snapshot import snapshot

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 60, "num_attention_heads": 5, "intermediate_size": 92, "num_hidden_layers": 3,
    "max_position_embeddings": 80, "pad_token_id": 1,
}  # fmt: skip
DISTILBERT = {"dim": 60, "n_heads": 5, "hidden_dim": 92, "n_layers": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_act": "gelu_new"}, "Roberta": {}, "XLMRoberta": {"hidden_act": "quick_gelu"},
    "DistilBert": DISTILBERT, "Electra": {"embedding_size": 20, "hidden_act": "relu"}, "RobertaPreLayerNorm": {},
    "Data2VecText": {}, "Camembert": {}, "XLMRobertaXL": {}, "Ernie": {},
    "MobileBert": {"embedding_size": 20, "intra_bottleneck_size": 40, "classifier_activation": False},
}  # fmt: skip
LENGTHS = {"right": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1]}


def made(family: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The base model of a family of transformers, with weights that all matter."""
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{family}Model")(config)
    enliven(model)
    return model.to(dtype).eval()


def build(family: str = "Bert", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return made(family, SIZES | FAMILIES[family] | changes, dtype)


def batch(lengths: list[int], *, holes: bool = False) -> dict[str, Tensor]:
    """Random tokens padded on the right; holes: in the middle of the first row as well."""
    torch.manual_seed(1)
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    if holes:
        mask[0, 2:5] = 0
    ids = torch.randint(5, 61, mask.shape) * mask + (1 - mask)
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the native layers, and the encoders and layers whose calls were native."""
    calls: Counter[str] = Counter()
    run, programme = EncoderCalls.run, EncoderProgramme.__call__

    def watched_run(self: EncoderCalls, *args: Any) -> Any:
        result = run(self, *args)
        calls[type(self).__name__] += result is not None
        return result

    def watched(self: EncoderProgramme, *args: Any, **keywords: Any) -> Tensor:
        calls["layers"] += 1
        return programme(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderCalls, "run", watched_run)
        patch.setattr(EncoderProgramme, "__call__", watched)
        yield calls


@contextmanager
def module_by_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderCalls, "run", lambda *args: None)
        yield


def same(ours: Any, stock: Any, mask: Tensor, rtol: float = 2e-5) -> None:
    """At tokens, relative to the largest number; ours are zeros at padding."""
    real = mask.bool()
    for name in ("last_hidden_state", "pooler_output"):
        expected = stock.get(name)
        if expected is not None:
            got = ours[name]
            assert got.dtype is expected.dtype and got.shape == expected.shape
            if name == "last_hidden_state":
                got, expected = got[real], expected[real]
            torch.testing.assert_close(got, expected, rtol=0, atol=rtol * float(expected.abs().max()))


def undo_is_exact(model: PreTrainedModel, given: dict[str, Tensor]) -> None:
    before = snapshot(model, given)
    hf_accel.patch(model, weights="int8", keep_original=True)
    with torch.no_grad():
        model(**given)
    hf_accel.unpatch(model)
    assert snapshot(model, given) == before


def same_states_and_attentions(stock: PreTrainedModel, ours: PreTrainedModel, given: dict[str, Any]) -> None:
    """All hidden states at tokens, and the attentions of every place."""
    same_states(stock, ours, given)
    for model in (stock, ours):
        model.set_attn_implementation("eager")
    same_attentions(stock, ours, given)


def same_states(stock: PreTrainedModel, ours: PreTrainedModel, given: dict[str, Any]) -> None:
    real = given["attention_mask"].bool()
    found, expected = (model(**given, output_hidden_states=True).hidden_states for model in (ours, stock))
    assert len(found) == stock.config.num_hidden_layers + 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=1e-4, atol=2e-5)


def same_attentions(stock: PreTrainedModel, ours: PreTrainedModel, given: dict[str, Any]) -> None:
    found, expected = (model(**given, output_attentions=True).attentions for model in (ours, stock))
    assert len(found) == stock.config.num_hidden_layers
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def same_by_modules(stock: PreTrainedModel, ours: PreTrainedModel, given: dict[str, Tensor], **more: Any) -> None:
    """A call that is no native one."""
    with counted() as calls:
        found = ours(**given, **more)
    assert not calls["layers"]
    same(found, stock(**given, **more), given["attention_mask"])


def same_head(stock: PreTrainedModel, given: dict[str, Tensor]) -> Counter[str]:
    """What a head makes of the states, in inference mode; returns the native calls."""
    ours, real = hf_accel.patch(copy.deepcopy(stock), weights=None), given["attention_mask"].bool()
    with torch.inference_mode(), counted() as calls:
        found, expected = ours(**given)[0], stock(**given)[0]
    if expected.shape[:2] == real.shape:
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return calls


NATIVE = {"EncoderStackCalls": 1, "layers": 3}  # a pass through an encoder


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


# -- what is native --------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype, threads: int) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    layouts = [batch(lengths) for lengths in LENGTHS.values()] + [batch([11, 3, 7], holes=True)]
    for given in layouts:
        with counted() as calls:
            found = ours(**given)
        assert calls["layers"] == 3
        assert family == "XLMRobertaXL" or calls == NATIVE
        same(found, stock(**given), given["attention_mask"], 2e-5 if dtype is torch.float32 else 0.04)
        if calls["EncoderStackCalls"] and family != "RobertaPreLayerNorm":
            assert not found.last_hidden_state[given["attention_mask"] == 0].any()
    bare = {"input_ids": batch([6, 6])["input_ids"]}
    same(ours(**bare), stock(**bare), torch.ones(2, 6), 2e-5 if dtype is torch.float32 else 0.04)


@pytest.mark.parametrize("level", levels_for(platform.machine()))
@pytest.mark.parametrize("family", ["Bert", "RobertaPreLayerNorm"])
@torch.no_grad()
def test_every_instruction_set_computes_layers(family: str, level: str) -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(kernels.using_isa(level))
        except hf_accel.UnsupportedError as error:
            pytest.skip(str(error))
        stock, ours, given = build(family), hf_accel.patch(build(family), weights=None), batch([11, 3, 7, 1])
        with counted() as calls:
            found = ours(**given)
        assert calls == NATIVE
        same(found, stock(**given), given["attention_mask"])


@pytest.mark.usefixtures("in_floats")
@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", ["int8", {"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "RobertaPreLayerNorm"])
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(family: str, weights: Any) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    if family == "DistilBert":
        sizes |= {"dim": 64, "hidden_dim": 96, "n_heads": 4}
    ours, given = hf_accel.patch(build(family, **sizes), weights=weights), batch([11, 3, 7, 1])
    with counted() as calls:
        found = ours(**given)
    assert calls == NATIVE
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.02)  # a level of an activation may round to its neighbour


@pytest.mark.parametrize("weights", ["int8", None])
@torch.no_grad()
def test_a_sequence_has_its_bits_in_any_batch(weights: str | None) -> None:
    ours, lengths = hf_accel.patch(build(), weights=weights), [11, 3, 7, 1]
    given = batch(lengths)
    together = ours(**given).last_hidden_state
    for row, length in enumerate(lengths):
        alone = ours(**{name: tensor[row : row + 1, :length] for name, tensor in given.items()}).last_hidden_state
        assert torch.equal(alone[0], together[row, :length])


@pytest.mark.parametrize("most", [1, 8, 12])
@torch.no_grad()
def test_long_batches_are_cut_between_sequences(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, given = hf_accel.patch(build(), weights="int8"), batch([11, 3, 7, 1, 4])
    expected = ours(**given).last_hidden_state
    monkeypatch.setattr(encoder_rows, "CALL_TOKENS", most)
    assert torch.equal(ours(**given).last_hidden_state, expected)


@pytest.mark.parametrize("family", ["Bert", "RobertaPreLayerNorm", "MobileBert"])
@torch.no_grad()
def test_many_rows_of_float_weights_are_torchs_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ISA_LEVELS, kernels.isa(), Level(frozenset()))
    stock, ours = build(family), hf_accel.patch(build(family), weights=None)
    for given in (batch([60, 50, 40, 3]), batch([64, 64, 64])):
        with counted() as calls:
            found = ours(**given)
        assert calls == NATIVE
        same(found, stock(**given), given["attention_mask"])


@pytest.mark.parametrize(("family", "most"), [("Bert", 5), ("MobileBert", 7)])
@torch.no_grad()
def test_results_are_let_go_when_nothing_reads_them_again(
    family: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later one would else take memory that no cache holds: MobileBERT's layers have 40 small results."""
    monkeypatch.setitem(ISA_LEVELS, kernels.isa(), Level(frozenset()))
    ours, held, counts = hf_accel.patch(build(family), weights=None), list[Any](), list[int]()
    compute = ProductOperation.compute

    def watched(self: ProductOperation, *args: Any) -> list[Tensor]:
        results = compute(self, *args)
        held.extend(map(weakref.ref, results))
        counts.append(sum(each() is not None for each in held))
        return results

    monkeypatch.setattr(ProductOperation, "compute", watched)
    ours(**batch([64, 64, 64]))
    assert len(counts) > 3 * 5 and max(counts) <= most


@torch.no_grad()
def test_products_of_many_rows_do_not_call_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code around a small product takes as long as the product."""
    ours = hf_accel.patch(build("MobileBert"), weights=None)
    states = ours.embeddings(batch([64, 64, 64])["input_ids"])
    expected = ours.encoder(states).last_hidden_state
    linears = [module for module in ours.encoder.modules() if isinstance(module, nn.Linear)]
    with monkeypatch.context() as patch:
        for kind in {type(linear) for linear in linears}:
            patch.setattr(kind, "forward", lambda *args: pytest.fail("a module was called"))
        assert torch.equal(ours.encoder(states).last_hidden_state, expected)
    seen = list[nn.Module]()
    linears[5].register_forward_hook(lambda module, args, out: seen.append(module))
    assert torch.allclose(ours.encoder(states).last_hidden_state, expected, atol=1e-5) and seen == [linears[5]]


@pytest.mark.parametrize("tokens", [256, 257, 1100])
@torch.no_grad()
def test_many_rows_of_integer_weights_are_one_call(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, given = hf_accel.patch(build(), weights="int8"), batch([tokens // 20] * 19 + [tokens - tokens // 20 * 19])
    alone = ours(**{name: tensor[-1:] for name, tensor in given.items()}).last_hidden_state
    monkeypatch.delattr(EncoderProgramme, "_one_by_one")
    assert torch.equal(ours(**given).last_hidden_state[-1:], alone)


@torch.no_grad()
def test_deterministic_encoders_are_native_for_any_number_of_rows() -> None:
    given = batch([64, 64, 64])
    exact = hf_accel.patch(build(), weights=None, deterministic=True)
    alone = exact(**{name: tensor[:1] for name, tensor in given.items()}).last_hidden_state
    assert torch.equal(exact(**given).last_hidden_state[:1], alone)


@torch.no_grad()
def test_positions_and_kinds_of_segments_may_be_given() -> None:
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    given = batch([7, 5])
    given["position_ids"] = torch.arange(7).flip(0)[None]
    given["token_type_ids"] = torch.ones(2, 7, dtype=torch.long)
    with counted() as calls:
        same(ours(**given), stock(**given), given["attention_mask"])
    assert calls == NATIVE


@torch.no_grad()
def test_heads_and_inference_mode() -> None:
    config = transformers.BertConfig(**SIZES, num_labels=2)
    for kind in (
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForMaskedLM",
        "BertForQuestionAnswering",
    ):
        torch.manual_seed(0)
        stock = getattr(transformers, kind)(config).eval()
        enliven(stock)
        assert same_head(stock, batch([7, 5])) == NATIVE


@torch.no_grad()
def test_states_that_a_caller_gives_stay_as_they_are() -> None:
    """Layers take turns with two outputs, of which what the caller holds is none."""
    stock = build()
    ours, states = hf_accel.patch(copy.deepcopy(stock), weights=None), torch.randn(2, 5, stock.config.hidden_size)
    given = states.clone()
    with counted() as calls:
        first, second = (ours.encoder(given).last_hidden_state for _ in range(2))
    assert calls["EncoderStackCalls"] == 2 and torch.equal(given, states) and torch.equal(first, second)
    torch.testing.assert_close(first, stock.encoder(states).last_hidden_state, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_calls_in_turns_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches with and without padding, which have a mask or none."""
    ours, traced = hf_accel.patch(build(), weights=None), Counter[str]()
    call = Trace.call

    def watched(self: Trace, module: nn.Module, *args: Any) -> Any:
        traced[type(module).__name__] += 1
        return call(self, module, *args)

    monkeypatch.setattr(Trace, "call", watched)
    for _ in range(3):
        ours(**batch([6, 4])), ours(**batch([6, 6])), ours(**batch([6]), output_hidden_states=True)
    assert traced == {"BertEncoder": 3, "BertLayer": 9}


@torch.no_grad()
def test_many_kinds_of_calls_do_not_pile_up() -> None:
    ours, x = hf_accel.patch(build(), weights=None), torch.randn(1, 3, 60)
    layer = ours.encoder.layer[0]
    for number in range(30):
        layer(x, num_items_in_batch=number)
    assert len(vars(layer)[FUSED]._known) <= MOST_KINDS


# -- what is asked for -----------------------------------------------------------------------------------


@torch.no_grad()
def test_hidden_states_have_the_padded_shape() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7])
    real = given["attention_mask"].bool()
    with counted() as calls:
        found = ours(**given, output_hidden_states=True)
    assert calls == {"EncoderStackCalls": 0, "EncoderLayerCalls": 3, "layers": 3}
    expected = stock(**given, output_hidden_states=True)
    assert len(found.hidden_states) == len(expected.hidden_states) == 4
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one[real], other[real], rtol=1e-4, atol=2e-5)
    with counted() as calls:  # transformers' hooks stay on the modules, and ask for nothing
        same(ours(**given), stock(**given), given["attention_mask"])
    assert calls == NATIVE


@torch.no_grad()
def test_attentions_are_stocks() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7])
    stock.set_attn_implementation("eager")
    with counted() as calls:
        found = ours(**given, output_attentions=True)
    expected = stock(**given, output_attentions=True)
    assert not calls["layers"] and len(found.attentions) == 3
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not any(calls.values())


@torch.no_grad()
def test_tuples() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7])
    real = given["attention_mask"].bool()
    found, expected = ours(**given, return_dict=False), stock(**given, return_dict=False)
    assert type(found) is type(expected) and len(found) == len(expected)
    torch.testing.assert_close(found[0][real], expected[0][real], rtol=1e-4, atol=2e-5)


def hook_on(model: PreTrainedModel, name: str) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def see(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        shapes.append(tuple(tensor.shape))

    model.get_submodule(name).register_forward_hook(see)
    return shapes


@pytest.mark.parametrize(
    ("name", "size", "native"),
    [
        ("encoder", 60, 3), ("encoder.layer.1", 60, 3), ("encoder.layer.1.attention", 60, 2),
        ("encoder.layer.1.intermediate.dense", 92, 2), ("encoder.layer.1.output.LayerNorm", 60, 2),
        ("encoder.layer.1.attention.self.dropout", 0, 3), ("encoder.layer.1.output.dropout", 60, 2),
        ("encoder.layer.1.intermediate.intermediate_act_fn", 92, 2), ("encoder.layer.1.attention.self.query", 60, 2),
    ],
)  # fmt: skip
@torch.no_grad()
def test_hooks_see_what_stock_shows(name: str, size: int, native: int) -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7])
    ours(**given)
    shapes = hook_on(ours, name)
    with counted() as calls:
        same(ours(**given), stock(**given), given["attention_mask"])
    assert calls["layers"] == native
    assert shapes == ([(3, 11, size)] if size else [])


@torch.no_grad()
def test_a_hook_that_changes_what_a_layer_returns() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7])
    ours(**given)
    for model in (stock, ours):
        model.encoder.layer[0].register_forward_hook(lambda module, args, output: output * 2)
        model.encoder.layer[1].register_forward_pre_hook(lambda module, args: (args[0].add_(1), *args[1:]))
    same(ours(**given), stock(**given), given["attention_mask"])


# -- what is not known -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["left", "empty row", "3-D", "float", "by query"])
@torch.no_grad()
def test_masks_that_are_not_taken_are_stocks(mask: str) -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    real = given["attention_mask"].bool()
    if mask == "left":
        given["attention_mask"][1, :3] = 0
    elif mask == "empty row":
        given["attention_mask"][1] = 0
    elif mask == "float":
        given["attention_mask"] = given["attention_mask"].float()
    else:
        full = torch.ones(6, 6, dtype=torch.bool).tril()[None].expand(3, 6, 6) & real[:, None]
        given["attention_mask"] = full if mask == "3-D" else full[:, None]
    try:
        expected = stock(**given)
    except Exception as error:
        with pytest.raises(type(error)):
            ours(**given)
        return
    with counted() as calls:
        found = ours(**given)
    assert bool(calls["layers"]) is (mask == "float")
    kept = real if mask == "float" else torch.ones_like(real)
    same(found, expected, kept)


@torch.no_grad()
def test_a_mask_of_four_dimensions() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    real = given["attention_mask"].bool()
    numbers = torch.zeros(3, 1, 6, 6).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)
    for full in (real[:, None, None].expand(3, 1, 6, 6), real[:, None, None].repeat(1, 1, 6, 1), numbers):
        with counted() as calls:
            found = ours(given["input_ids"], attention_mask=full)
        assert calls == NATIVE
        same(found, stock(given["input_ids"], attention_mask=full), given["attention_mask"])
    alibi = numbers + 0.1 * torch.arange(6)
    with counted() as calls:
        found = ours(given["input_ids"], attention_mask=alibi)
    assert not calls["layers"]
    same(found, stock(given["input_ids"], attention_mask=alibi), torch.ones(3, 6))


def test_gradients_are_stocks() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    with torch.no_grad():
        ours(**given)
    for model in (stock, ours):
        model.train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its older name
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model(**given).last_hidden_state.square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3, msg=name)


@torch.no_grad()
def test_training_between_calls_drops_at_random() -> None:
    ours, given = hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    before = ours(**given).last_hidden_state
    ours.train()
    with counted() as calls:
        first, second = ours(**given).last_hidden_state, ours(**given).last_hidden_state
    assert not calls["layers"] and not torch.equal(first, second)
    ours.eval()
    with counted() as calls:
        assert torch.equal(ours(**given).last_hidden_state, before)
    assert calls == NATIVE


def test_autocast_and_compile_are_stocks() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16), counted() as calls:
            same(ours(**given), stock(**given), given["attention_mask"], 0.05)
        assert not calls["layers"]
        compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
        same(compiled(**given), stock(**given), given["attention_mask"])


def replace_layer(model: Any) -> None:
    model.encoder.layer[1] = copy.deepcopy(model.encoder.layer[0])


def drop_layer(model: Any) -> None:
    del model.encoder.layer[1]


def append_layer(model: Any) -> None:
    model.encoder.layer.append(copy.deepcopy(model.encoder.layer[0]))


def change_weight(model: Any) -> None:
    model.encoder.layer[1].output.dense.weight.data = torch.randn(60, 92) / 9


def change_in_place(model: Any) -> None:
    model.encoder.layer[1].output.LayerNorm.weight.mul_(1.5)


def change_parameter(model: Any) -> None:
    model.encoder.layer[1].output.LayerNorm.bias = nn.Parameter(torch.ones(60))


def change_eps(model: Any) -> None:
    model.encoder.layer[1].output.LayerNorm.eps = 0.5


def change_activation(model: Any) -> None:
    model.encoder.layer[1].intermediate.intermediate_act_fn = nn.Tanh()


def change_to_known_activation(model: Any) -> None:
    model.encoder.layer[1].intermediate.intermediate_act_fn = nn.SiLU()


def change_norm(model: Any) -> None:
    model.encoder.layer[1].output.LayerNorm = nn.Identity()


def change_forward(model: Any) -> None:
    inner = model.encoder.layer[1].intermediate
    forward = inner.forward
    inner.forward = lambda x: forward(x) * 2


def change_layers_forward(model: Any) -> None:
    layer = model.encoder.layer[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def change_scaling(model: Any) -> None:
    model.encoder.layer[1].attention.self.scaling = 0.01


def change_chunks(model: Any) -> None:
    model.encoder.layer[1].chunk_size_feed_forward = 1


def prune(model: Any) -> None:
    nn.utils.prune.l1_unstructured(model.encoder.layer[1].output.dense, "weight", 0.5)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.encoder.layer[1].output.dense)


CHANGES = [
    replace_layer, drop_layer, append_layer, change_weight, change_in_place, change_parameter, change_eps,
    change_activation, change_to_known_activation, change_norm, change_forward, change_layers_forward, change_scaling,
    change_chunks, prune, parametrize,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_between_calls_are_seen(change: Any) -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        torch.manual_seed(7)
        change(model)
    found = ours(**given)
    same(found, stock(**given), given["attention_mask"])
    assert not torch.equal(found.last_hidden_state, before)
    same(ours(**given), stock(**given), given["attention_mask"])


# -- copies and the way back -----------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "int8"])
@torch.no_grad()
def test_copies_and_pickles(weights: str | None) -> None:
    ours, given = hf_accel.patch(build(), weights=weights), batch([6, 6, 4])
    expected = ours(**given).last_hidden_state
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert vars(other.encoder)[FUSED] is not vars(ours.encoder)[FUSED]
        with counted() as calls:
            assert torch.equal(other(**given).last_hidden_state, expected)
        assert calls == NATIVE


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "XLMRobertaXL"])
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), batch([6, 6, 4]))


@torch.no_grad()
def test_attention_of_another_backend_keeps_the_modules() -> None:
    stock, given = build(), batch([6, 6, 4])
    for attention in ("sdpa", None):
        ours = hf_accel.patch(build(), weights=None, attention=attention)
        with counted() as calls:
            same(ours(**given), stock(**given), torch.ones(3, 6))
        assert not calls["layers"]


def test_the_plan_says_so() -> None:
    lines = {line.what: line for line in hf_accel.plan(build(), weights=None).lines if line.topic == "fused"}
    assert lines["3 encoder layers"].choice == "one native call each"
    assert lines["1 encoder"].reason == "its code calls these layers, and does nothing else"
    odd = build(hidden_act="tanh")
    reasons = [line for line in hf_accel.plan(odd, weights=None).lines if line.what == "3 encoder layers"]
    assert [line.choice for line in reasons] == ["module by module"]
    assert reasons[0].reason == "it calls tanh"


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_the_plan_of_a_bias_of_positions(shared: bool) -> None:
    """BEiT adds it to the mask of each layer, or of all layers."""
    name = "use_shared_relative_position_bias" if shared else "use_relative_position_bias"
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.BeitConfig(**sizes, image_size=16, patch_size=4, **{name: True})
    model, pixels = transformers.BeitModel(config).eval(), torch.randn(2, 3, 16, 16)
    enliven(model)
    lines = [line for line in hf_accel.plan(model, weights=None).lines if line.what == "2 encoder layers"]
    assert [line.choice for line in lines] == ["module by module"]
    expected = model(pixel_values=pixels).last_hidden_state
    with counted() as calls:
        found = hf_accel.patch(model, weights=None)(pixel_values=pixels).last_hidden_state
    assert not calls["layers"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_frames_of_padding_keep_their_numbers() -> None:
    """A CTC head writes out what stands in the frames of padding too, so that zeros there would change the text."""
    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, vocab_size=20, do_stable_layer_norm=True,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model, sound, mask = Wav2Vec2ForCTC(config).eval(), torch.randn(2, 2000), torch.ones(2, 2000, dtype=torch.long)
    mask[1, 800:] = 0
    expected = model(sound, attention_mask=mask).logits
    hf_accel.patch(model, weights=None)
    assert any(isinstance(vars(module).get(FUSED), EncoderLayerCalls) for module in model.modules())
    torch.testing.assert_close(model(sound, attention_mask=mask).logits, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize(
    "family", ["ViT", "DeiT", "CLIPVision", "SiglipVision", "Dinov2", "Dinov2WithRegisters", "Beit"]
)
@torch.no_grad()
def test_images(family: str, weights: str | None) -> None:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, num_attention_heads=4, intermediate_size=96, num_hidden_layers=2, image_size=16, patch_size=4
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config).eval()
    enliven(model)
    stock = copy.deepcopy(model)
    hf_accel.patch(model, weights=weights)
    for count in (1, 2):
        pixels = torch.randn(count, 3, 16, 16)
        with counted() as calls:
            found = model(pixel_values=pixels).last_hidden_state
        assert calls["layers"] == 2
        expected = stock(pixel_values=pixels).last_hidden_state
        close = (0.05 if weights else 2e-5) * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=close)


def scale_other_columns(layer: Any) -> None:
    layer.layer_scale1.lambda1.mul_(torch.linspace(-1, 2, 64))


def replace_scale(layer: Any) -> None:
    layer.layer_scale1.lambda1 = nn.Parameter(torch.linspace(-1, 2, 64))


@torch.no_grad()
def test_parameters_of_columns_that_are_replaced() -> None:
    """MobileBERT's layers multiply columns by a parameter and add another one, in place of a norm."""
    stock, given = build("MobileBert"), batch([7, 5])
    ours: Any = hf_accel.patch(copy.deepcopy(stock), weights=None)
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        model.encoder.layer[0].bottleneck.input.LayerNorm.bias = nn.Parameter(torch.linspace(-1, 2, 40))
    with counted() as calls:
        found = ours(**given)
    assert calls == NATIVE and not torch.equal(found.last_hidden_state, before)
    same(found, stock(**given), given["attention_mask"])


@pytest.mark.parametrize("change", [scale_other_columns, replace_scale])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_scales_of_columns(change: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """DINO's layers multiply the columns of what they add by a parameter; also module by module for many rows."""
    config = transformers.Dinov2Config(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, image_size=16, patch_size=4
    )
    torch.manual_seed(0)
    model: Any = transformers.Dinov2Model(config).eval()
    enliven(model)
    model.to(dtype)
    stock, pixels = copy.deepcopy(model), torch.randn(2, 3, 16, 16, dtype=dtype)
    ours: Any = hf_accel.patch(model, weights=None)
    before = ours(pixel_values=pixels).last_hidden_state
    for each in (stock, ours):
        change(next(module for name, module in each.named_modules() if name.endswith("layer.0")))
        each.to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    for most in (None, 1):
        if most is not None:  # more rows than a native call takes
            for module in ours.modules():
                for known in getattr(vars(module).get(FUSED), "_known", {}).values():
                    if hasattr(known, "programme"):
                        monkeypatch.setattr(known.programme, "max_tokens", most)
        with counted() as calls:
            found = ours(pixel_values=pixels).last_hidden_state
        expected = stock(pixel_values=pixels).last_hidden_state
        assert calls["layers"] == 2 and not torch.equal(found, before)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
