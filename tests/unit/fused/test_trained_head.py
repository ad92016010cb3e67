"""The output head in training, and the table that shares its weight: stock's gradients, for less time and memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel
from hf_accel.fused import trained_head
from hf_accel.fused.trained_head import TiedTable, TrainedHead

SIZE = 301


def llama(*, tied: bool = True, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=SIZE, **sizes, tie_word_embeddings=tied, **kwargs)
    return LlamaForCausalLM(config).to(dtype).train()


def inputs(ignored: float = 0.6) -> dict[str, Tensor]:
    ids = torch.randint(1, SIZE, (3, 40))
    ids[:, 5:15] = 7  # whose rows of the table's gradient are sums of many
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < ignored, -100)}


def gradients(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**given).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.layout is torch.strided
        torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance / 10, msg=name)


@pytest.mark.parametrize("ignored", [0.0, 0.6])
@pytest.mark.parametrize("kwargs", [{}, {"pad_token_id": 7}, {"tied": False}], ids=["tied", "padding", "apart"])
def test_gradients_are_those_of_stock(kwargs: dict[str, Any], ignored: float) -> None:
    model, given = llama(**kwargs), inputs(ignored)
    expected = gradients(model, given)
    hf_accel.patch(model, weights=None)
    assert isinstance(model.lm_head, TrainedHead)
    assert isinstance(model.get_input_embeddings(), TiedTable) is (kwargs.get("tied", True))
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(gradients(each, given), expected)
        assert_equal(gradients(each, given), expected)  # a second pass, after the first one's backward
    hf_accel.unpatch(model)
    assert type(model.lm_head) is torch.nn.Linear and type(model.get_input_embeddings()) is torch.nn.Embedding
    assert_equal(gradients(model, given), expected, 1e-7)


def test_bfloat16_is_no_farther_from_the_truth_than_stock() -> None:
    model, given = llama(dtype=torch.bfloat16), inputs()
    exact = gradients(copy.deepcopy(model).float(), given)
    stock = gradients(model, given)
    ours = gradients(hf_accel.patch(model, weights=None), given)
    for name, truth in exact.items():
        far, near = ((each[name].float() - truth).norm() / truth.norm() for each in (stock, ours))
        assert near <= 1.2 * far + 1e-3, name


def test_only_rows_with_a_gradient_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_accel.patch(llama(), weights=None)
    found: list[Tensor | None] = []
    chosen = trained_head._rows_to_multiply
    monkeypatch.setattr(trained_head, "_rows_to_multiply", lambda *a: found.append(chosen(*a)) or found[-1])
    given = inputs()
    gradients(model, given)
    labelled = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].flatten() != -100
    assert torch.equal(found[0], labelled.nonzero()[:, 0])
    gradients(model, inputs(0.0))
    assert found[1] is None  # the last token of a row alone has no label


def test_a_state_that_is_no_number_is_multiplied_as_stock_does() -> None:
    weight, x = torch.randn(SIZE, 8, requires_grad=True), torch.randn(4, 8)
    x[1, 2], grad = float("nan"), torch.zeros(4, SIZE)
    grad[0] = 1
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight), weight, grad)[0]
    found = torch.autograd.grad(trained_head._HeadProduct.apply(None, x, weight, None), weight, grad)[0]
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_sums_of_both_uses_are_made_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, places = hf_accel.patch(llama(), weights=None), [], []
    compute = trained_head._of_weight

    def watched(*args: Tensor) -> Tensor:
        made = compute(*args)
        places.append((torch.strided, made.data_ptr()))
        return made

    monkeypatch.setattr(trained_head, "_of_weight", watched)
    model.lm_head.weight.register_hook(lambda gradient: seen.append((gradient.layout, gradient.data_ptr())))
    model(**inputs()).loss.backward()
    assert seen == places and len(seen) == 1


def test_a_backward_pass_that_failed_leaves_nothing_behind() -> None:
    model, given = llama(), inputs()
    expected = gradients(model, given)
    hf_accel.patch(model, weights=None)
    loss = model(**given).loss

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    hook = model.model.norm.weight.register_hook(fail)  # behind the head, ahead of the table
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    hook.remove()
    model.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()  # once more over the same graph
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad / 2, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def embedded_alone(model: Any, given: dict[str, Tensor]) -> Tensor:
    result: Tensor = model.model(given["input_ids"]).last_hidden_state
    return result.square().mean()


def head_alone(model: Any, given: dict[str, Tensor]) -> Tensor:
    embedded_alone(model, given)  # what the table was given stays behind
    states = torch.linspace(-1, 1, 96).view(1, 3, 32)
    result: Tensor = model.lm_head(model.lm_head(states)[..., :32].contiguous())  # twice
    return result.square().mean()


def reentrant(model: Any, given: dict[str, Tensor]) -> Tensor:
    table = model.get_input_embeddings()
    one = torch.ones((), requires_grad=True)
    states = checkpoint(lambda ids, x: table(ids) * x, given["input_ids"], one, use_reentrant=True)
    return checkpoint(lambda x: model.lm_head(x).square().mean(), states, use_reentrant=False)


def twice(model: Any, given: dict[str, Tensor]) -> Tensor:
    """A penalty of the gradient: a second derivative."""
    weight = model.lm_head.weight
    (first,) = torch.autograd.grad(model(**given).loss, weight, create_graph=True)
    return first.square().sum() * 100


@pytest.mark.parametrize("use", [embedded_alone, head_alone, reentrant, twice])
def test_other_uses(use: Callable[[Any, dict[str, Tensor]], Tensor]) -> None:
    model, given = llama(attn_implementation="eager"), inputs()
    weight = model.lm_head.weight
    (expected,) = torch.autograd.grad(use(model, given), weight)
    hf_accel.patch(model, weights=None, attention=None)  # eager attention can be differentiated twice
    (found,) = torch.autograd.grad(use(model, given), weight)
    assert found.layout is torch.strided
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_stock() -> None:
    model = hf_accel.patch(llama(), weights=None)
    head, table = model.lm_head, model.get_input_embeddings()
    ids, x = torch.tensor([[3, 4]]), torch.randn(1, 2, 32)

    def kinds() -> set[str]:
        return {type(made.grad_fn).__name__ for made in (table(ids), head(x)) if made.requires_grad}

    ours = {"_LookupBackward", "_HeadProductBackward"}
    assert kinds() == ours
    with torch.autocast("cpu", torch.bfloat16):
        assert not kinds() & ours
    with torch.no_grad():
        assert not kinds()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(head(dual)).tangent is not None
    weights = dict(head.named_parameters())
    taken = torch.func.grad(lambda held: torch.func.functional_call(head, held, x).sum())(weights)
    torch.testing.assert_close(taken["weight"], x.sum((0, 1)).expand(SIZE, 32))
    head.weight.requires_grad_(False)  # adapters: the head's gradient in x alone, nothing for the table
    assert kinds() == set()
    head.weight.requires_grad_(True)
    table.max_norm = 1.0
    assert "_LookupBackward" not in kinds()
