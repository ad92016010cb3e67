"""The trace of encoder layers: what is folded, which calls are known, and what ends a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, Dinov2Config, MobileBertConfig, ModernBertConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertEncoder, BertLayer
from transformers.models.dinov2.modeling_dinov2 import Dinov2Layer
from transformers.models.mobilebert.modeling_mobilebert import MobileBertLayer, NoNorm
from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer, ModernBertMLP
from transformers.models.vit.modeling_vit import ViTLayer

from hf_accel.attention.hf import ATTENTION_NAME
from hf_accel.fused.encoder_programme import attended_window
from hf_accel.fused.operations import refuse_over_rows
from hf_accel.recognition.call_form import CallForm, bound, usual_form
from hf_accel.recognition.operation import INPUT, OUTPUT, UntraceableError
from hf_accel.recognition.stack_trace import StackTrace
from hf_accel.recognition.trace import Trace

SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40, "num_hidden_layers": 2,
    "attn_implementation": "sdpa",
}  # fmt: skip


def traced(layer: nn.Module, form: CallForm | None = None) -> Trace:
    trace = Trace(torch.float32, attention=ATTENTION_NAME)
    trace.layer(layer.eval(), 24, form or usual_form(type(layer)))
    return trace


def test_norms_behind_sums() -> None:
    operations = traced(BertLayer(BertConfig(**SIZES))).operations
    kinds = [operation.kind for operation in operations]
    assert kinds == ["linear", "linear", "linear", "attend", "linear", "layer_norm", "linear", "linear", "layer_norm"]
    assert [len(each.inputs) for each in operations if each.kind == "layer_norm"] == [2, 2]
    assert [each.values.get("activation") for each in operations if each.kind == "linear"] == [
        None, None, None, None, "gelu", None,
    ]  # fmt: skip
    assert operations[0].inputs[0].buffer == INPUT and operations[-1].outputs[0].buffer == OUTPUT


def test_norms_before_products_keep_the_sum() -> None:
    operations = traced(ViTLayer(ViTConfig(**SIZES))).operations
    kinds = [operation.kind for operation in operations]
    expected = [
        "layer_norm",
        "linear",
        "linear",
        "linear",
        "attend",
        "linear",
        "layer_norm",
        "linear",
        "linear",
        "add",
    ]
    assert kinds == expected
    first, second = (each for each in operations if each.kind == "layer_norm")
    assert (len(first.inputs), len(first.outputs)) == (1, 1) and (len(second.inputs), len(second.outputs)) == (2, 2)
    assert operations[-1].inputs[1] == second.outputs[1] or operations[-1].inputs[0] == second.outputs[1]


def dinov2(kind: type[Dinov2Layer] = Dinov2Layer) -> Dinov2Layer:
    return kind(Dinov2Config(**{name: value for name, value in SIZES.items() if name != "intermediate_size"}))


def test_scales_of_columns_are_part_of_the_sum() -> None:
    layer = dinov2()
    operations = traced(layer).operations
    sums = [operation for operation in operations if operation.kind == "add"]
    assert [each.values["vector"].parameter for each in sums] == [
        layer.layer_scale1.lambda1, layer.layer_scale2.lambda1,
    ]  # fmt: skip
    assert sums[0].inputs[0].buffer == INPUT, "the second term is what is scaled"
    assert not any(operation.kind == "scale" for operation in operations)


def mobilebert(**changes: Any) -> MobileBertLayer:
    sizes = SIZES | {"intra_bottleneck_size": 8, "num_feedforward_networks": 1}
    return MobileBertLayer(MobileBertConfig(**sizes | changes))


def test_columns_that_are_scaled_and_shifted() -> None:
    layer = mobilebert()
    operations = traced(layer).operations
    affine = [operation for operation in operations if operation.kind == "affine"]
    norm = layer.bottleneck.input.LayerNorm
    assert [affine[0].values[name].parameter for name in ("vector", "bias")] == [norm.weight, norm.bias]
    assert len(affine) == 5 and operations[-1] is affine[-1] and affine[-1].outputs[0].buffer == OUTPUT
    assert not any(operation.kind == "scale" for operation in operations)


@pytest.mark.parametrize("parameter", [torch.ones(1), torch.ones(8, dtype=torch.bfloat16)])
def test_parameters_of_another_form_shift_no_columns(parameter: torch.Tensor) -> None:
    layer = mobilebert()
    layer.bottleneck.input.LayerNorm.bias = nn.Parameter(parameter)
    with pytest.raises(UntraceableError, match="adds a parameter of another size or dtype"):
        traced(layer)


class OnlyShifted(NoNorm):
    def forward(self, input_tensor: Any) -> Any:
        return input_tensor + self.bias


class ScaledIsReadAgain(NoNorm):
    def forward(self, input_tensor: Any) -> Any:
        scaled = input_tensor * self.weight
        return (scaled + self.bias) + scaled


@pytest.mark.parametrize(
    ("kind", "reason"), [(OnlyShifted, "something else than scaled columns"), (ScaledIsReadAgain, "reads .* again")]
)
def test_other_shifts_of_columns_end_a_trace(kind: type[NoNorm], reason: str) -> None:
    layer = mobilebert()
    layer.bottleneck.input.LayerNorm = kind(8)
    with pytest.raises(UntraceableError, match=reason):
        traced(layer)


def attended(layer: Dinov2Layer, hidden: Any) -> Any:
    found = layer.attention(hidden)
    return found[0] if isinstance(found, tuple) else found  # as older transformers returns it


class AddedTwice(Dinov2Layer):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        scaled = self.layer_scale1(attended(self, hidden_states))
        return (scaled + hidden_states) + scaled


class AddedToItself(Dinov2Layer):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        scaled = self.layer_scale1(attended(self, hidden_states))
        return scaled + scaled


@pytest.mark.parametrize("kind", [AddedTwice, AddedToItself])
def test_scaled_columns_that_are_read_elsewhere_end_a_trace(kind: type[Dinov2Layer]) -> None:
    with pytest.raises(UntraceableError, match="not added once"):
        traced(dinov2(kind))


@pytest.mark.parametrize("parameter", [torch.ones(2), torch.ones(24, dtype=torch.bfloat16)])
def test_parameters_of_another_form_scale_no_columns(parameter: torch.Tensor) -> None:
    layer = dinov2()
    layer.layer_scale2.lambda1 = nn.Parameter(parameter)
    with pytest.raises(UntraceableError, match="another size or dtype"):
        traced(layer)


def test_one_number_that_scales_all_columns_has_no_call_over_rows() -> None:
    layer = dinov2()
    layer.layer_scale2.lambda1 = nn.Parameter(torch.full((1,), 0.5))
    trace = traced(layer)
    assert [operation.kind for operation in trace.operations].count("multiply") == 1
    with pytest.raises(UntraceableError, match="multiply"):
        refuse_over_rows(trace.operations)


def test_calls_are_bound_by_name() -> None:
    x, mask = torch.ones(1, 2, 24), torch.ones(1, 1, 2, 2)
    by_place = bound(BertLayer, (x, mask), {})
    by_name = bound(BertLayer, (), {"hidden_states": x, "attention_mask": mask})
    assert by_place is not None and by_name is not None
    assert by_place[0] is by_name[0] is x and by_place[1] is by_name[1] is mask and by_place[2] == by_name[2]
    plain = bound(BertLayer, (x, None), {"a": True}), bound(BertLayer, (x, None), {"a": 1})
    assert plain[0] is not None and plain[1] is not None and plain[0][2] != plain[1][2]
    assert bound(BertLayer, (x,), {"hidden_states": x}) is None
    with_source = bound(BertLayer, (x, None, x), {})
    assert with_source is not None and with_source[2] != bound(BertLayer, (x, None), {})[2]  # type: ignore[index]
    assert bound(BertLayer, (x,) * 9, {}) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "mish"}, "activation"), ({"chunk_size_feed_forward": 3}, "the number of tokens"),
        ({"is_decoder": True, "add_cross_attention": True}, ""),
    ],
)  # fmt: skip
def test_unknown_code_ends_a_trace(change: dict[str, Any], reason: str) -> None:
    layer = BertLayer(BertConfig(**SIZES | change))
    if not reason:
        assert traced(layer).operations, "without the output of an encoder it attends to itself alone"
        return
    with pytest.raises(UntraceableError, match=reason):
        traced(layer)


class CountsTokens(BertLayer):
    def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        return hidden_states + torch.linspace(0, 1, hidden_states.shape[1])


class DividesTokens(BertLayer):
    def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        return hidden_states.view(-1, hidden_states.shape[1] // 2)


class TakesMore(BertLayer):
    def forward(self, hidden_states: Any, height: int, width: int) -> Any:  # type: ignore[override]
        return hidden_states


class DividesNumbers(BertLayer):
    def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        return hidden_states / 2.0


class SaysMuch(BertLayer):
    def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any:  # type: ignore[override]
        raise ValueError("the first line:\nthe second line")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CountsTokens, "it does more with the number of tokens than a trace follows"),
        (DividesTokens, "it does more with the number of tokens than a trace follows"),
        (TakesMore, "it is given height and width too, which no trace follows"),
        (DividesNumbers, "it does more with a tensor than a trace follows"),
        (SaysMuch, "its code needs values where a trace has none: ValueError, the first line"),
    ],
)
def test_code_that_fails_has_a_reason_of_one_line(kind: type[BertLayer], reason: str) -> None:
    """And not what torch says of it, which is a list of signatures."""
    with pytest.raises(UntraceableError) as caught:
        traced(kind(BertConfig(**SIZES)))
    assert str(caught.value) == reason


def test_dropout_in_training_ends_a_trace() -> None:
    layer = BertLayer(BertConfig(**SIZES)).train()
    with pytest.raises(UntraceableError):
        Trace(torch.float32, attention=ATTENTION_NAME).layer(layer, 24, usual_form(BertLayer))


class Doubled(BertEncoder):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask) * 2
        return hidden_states


class Skipping(BertEncoder):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        for layer in self.layer:
            first = layer(hidden_states, attention_mask)
        return first


class Unmasked(BertEncoder):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask + 1)
        return hidden_states


class Plain(BertEncoder):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


@pytest.mark.parametrize("kind", [BertEncoder, Plain, Doubled, Skipping, Unmasked])
def test_encoders_do_nothing_but_call_their_layers(kind: type[BertEncoder]) -> None:
    encoder = kind(BertConfig(**SIZES)).eval()
    trace = StackTrace(torch.float32, set(encoder.layer))
    if kind not in (BertEncoder, Plain):
        with pytest.raises(UntraceableError):
            trace.stack(encoder, 24, usual_form(kind))
        return
    trace.stack(encoder, 24, usual_form(kind))
    assert [each.layer for each in trace.called] == list(encoder.layer)
    out = trace.outcome(torch.ones(1))
    assert (out if kind is Plain else out.last_hidden_state).equal(torch.ones(1))


def test_a_layer_that_is_not_known_ends_the_trace_of_an_encoder() -> None:
    encoder = BertEncoder(BertConfig(**SIZES)).eval()
    with pytest.raises(UntraceableError, match="more than its layers"):
        StackTrace(torch.float32, {encoder.layer[0]}).stack(encoder, 24, usual_form(BertEncoder))


def test_windows_rotations_and_gates() -> None:
    config = ModernBertConfig(
        hidden_size=24, num_attention_heads=2, intermediate_size=40, num_hidden_layers=2, local_attention=6,
        global_attn_every_n_layers=2, attn_implementation="sdpa",
    )  # fmt: skip
    whole, near = (traced(ModernBertEncoderLayer(config, number)).operations for number in (0, 1))
    kinds = ["linear", "rope", "attend", "linear", "layer_norm", "linear", "gate", "linear", "add"]
    assert [operation.kind for operation in whole] == kinds
    assert [operation.kind for operation in near] == ["layer_norm", *kinds]
    assert (attended_window(whole), attended_window(near)) == (None, 4), "three on both sides, and its own"
    product, rotation, attention = near[1:4]
    assert [span.offset for span in rotation.inputs] == [0, 24] and attention.inputs[2].offset == 48
    assert {span.stride for span in rotation.inputs} == {72} and product.outputs[0].stride == 72
    gate = near[7]
    assert gate.values == {"activation": "gelu", "dim": 40, "heads": 1}
    assert [(span.offset, span.stride) for span in gate.inputs] == [(0, 80), (40, 80)]


FORMS: dict[str, tuple[Any, bool]] = {
    "first": (lambda act, x, y: act(x) * y, True), "second": (lambda act, x, y: x * act(y), True),
    "none": (lambda act, x, y: x * y, False), "both": (lambda act, x, y: act(x) * act(y), False),
    "square": (lambda act, x, y: (lambda z: z * z)(act(x)), False),
    "with itself": (lambda act, x, y: act(x) * x, True),
    "read again": (lambda act, x, y: (lambda z: z * y + z)(act(x)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_products_of_two_tensors(name: str) -> None:
    config = ModernBertConfig(hidden_size=24, num_attention_heads=2, intermediate_size=40, attn_implementation="sdpa")
    layer = ModernBertEncoderLayer(config, 0)
    form, known = FORMS[name]

    def forward(self: Any, hidden_states: Any) -> Any:
        return self.Wo(form(self.act, *self.Wi(hidden_states).chunk(2, dim=-1)))

    layer.mlp = type("Gate", (ModernBertMLP,), {"forward": forward})(config)
    if not known:
        with pytest.raises(UntraceableError):
            traced(layer)
        return
    (gate,) = (each for each in traced(layer).operations if each.kind == "gate")
    offsets = {"first": [0, 40], "second": [40, 0], "with itself": [0, 0]}[name]
    assert [span.offset for span in gate.inputs] == offsets
