"""torch.compile and export of a patched model: torch's operators all the way, or stock's loop around what is compiled.

backend="eager" takes what dynamo traced as it is; what it cannot follow fails with fullgraph=True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels

from .families import DECODER, inputs, prompts


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**DECODER, "num_hidden_layers": 1})).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    given = inputs("left")
    return model(**given).logits[given["attention_mask"].bool()]


@pytest.mark.filterwarnings("error", "ignore:cpu kernels. :UserWarning")
def test_two_patched_models_are_each_one_graph() -> None:
    for seed in (0, 1):
        model = build(seed)
        expected = logits(model)
        compiled = torch.compile(hf_accel.patch(model, weights=None), backend="eager", fullgraph=True)
        torch.testing.assert_close(logits(compiled), expected)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_int8_layers_are_one_operator_each() -> None:
    model = hf_accel.patch(build())
    expected = logits(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    got = logits(torch.compile(model, backend=backend, fullgraph=True))
    assert (got - expected).norm() < 0.01 * expected.norm()  # another rounding may turn a level of an activation
    assert sum("integer_linear" in str(node.target) for node in graphs[0].graph.nodes) == 8


def whole(model: PreTrainedModel) -> None:
    model.compile(backend="eager", fullgraph=True)


def forward(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def layer_by_layer(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)


@pytest.mark.parametrize("make", [whole, layer_by_layer, pytest.param(forward, marks=pytest.mark.long)])
def test_generate_with_what_was_compiled(make: Callable[[PreTrainedModel], None]) -> None:
    model = build()
    expected = model.generate(**inputs("left"), max_new_tokens=3, do_sample=False)
    hf_accel.patch(model, weights=None)
    make(model)
    assert torch.equal(model.generate(**inputs("left"), max_new_tokens=3, do_sample=False), expected)
    assert hf_accel.stats(model)["loop"].startswith("stock: torch.compile was applied to it")


@pytest.mark.long
def test_a_compiled_generate_is_our_loop() -> None:
    """torch.compile(model.generate) has nothing to compile, alone or called by what is compiled."""
    model = build()
    given = inputs("left")
    wanted = model.generate(**given, max_new_tokens=4, do_sample=False)
    hf_accel.patch(model, weights=None)
    for compiled in (
        torch.compile(model.generate, backend="eager"),
        torch.compile(lambda **kwargs: model.generate(**kwargs), backend="eager"),
    ):
        assert torch.equal(compiled(**given, max_new_tokens=4, do_sample=False), wanted)
        assert hf_accel.stats(model)["loop"] == "ragged"
    ids = [row[mask.bool()].tolist() for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
    outputs = torch.compile(model.generate_batch, backend="eager")(ids, max_new_tokens=4, do_sample=False)
    assert [each.generated_tokens for each in outputs.values()] == wanted[:, -4:].tolist()


def test_a_paged_cache_in_a_compiled_model_hands_out_all_columns() -> None:
    model, ids = hf_accel.patch(build(), weights=None), prompts(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
        compiled, cache = torch.compile(model, backend="eager"), hf_accel.PagedCache(model.config)
        got = torch.cat([compiled(part, past_key_values=cache).logits for part in ids.split(3, dim=1)], dim=1)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_export(weights: str | None) -> None:
    model, ids = hf_accel.patch(build(), weights=weights), prompts(2, 6)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
        got = program.module()(input_ids=ids, use_cache=False).logits
    assert (got - expected).norm() < 0.01 * expected.norm()


def test_who_counts_operators_sees_all_of_them() -> None:
    model, counts = build(), []
    for patched in (False, True):
        if patched:
            hf_accel.patch(model, weights=None)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**inputs("left"))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
