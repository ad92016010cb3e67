"""A patched causal model's loss in training: transformers' own values and gradients, without its large tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import hf_accel
from hf_accel.distill.model_loss import causal_loss

SIZE = 37
IGNORED = -100


def logits_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, SIZE).mul_(4).to(dtype).requires_grad_()


def labels_of(*shape: int, ignored: float = 0.4) -> Tensor:
    labels = torch.randint(0, SIZE, shape)
    return labels.masked_fill(torch.rand(shape) < ignored, IGNORED)


def tiny(**kwargs: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=SIZE, **sizes, **kwargs)).train()


def gradients(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 17), (2, 130)])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(11)], ids=["mean", "number", "tensor"])
@pytest.mark.usefixtures("way")
def test_values_and_gradients_are_those_of_transformers(shape: Any, dtype: torch.dtype, items: Any) -> None:
    logits, labels = logits_of(*shape, dtype=dtype), labels_of(*shape, ignored=0.3)
    labels[0, 1] = 3
    results = []
    for loss in (ForCausalLMLoss, causal_loss):
        value = loss(logits, labels, SIZE, num_items_in_batch=items) * 3  # a backward pass may begin with any number
        results.append((value.detach(), *torch.autograd.grad(value, logits)))
    (stock, theirs), (ours, found) = results
    assert ours.dtype == stock.dtype == torch.float32 and found.dtype == dtype
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(ForCausalLMLoss(wide, labels, SIZE, items) * 3, wide)
    for each in (
        theirs,
        found,
    ):  # ours is rounded twice: before and after it is multiplied by what backward begins with
        torch.testing.assert_close(each.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_labels_that_are_shifted_already() -> None:
    logits, labels = logits_of(2, 9), labels_of(2, 9)
    given = {"labels": None, "vocab_size": SIZE, "shift_labels": labels}
    torch.testing.assert_close(causal_loss(logits, **given), ForCausalLMLoss(logits, **given))


def test_another_number_may_mean_that_a_label_is_ignored() -> None:
    logits, labels = logits_of(2, 9), labels_of(2, 9).masked_fill(torch.rand(2, 9) < 0.3, 0)
    given = {"vocab_size": SIZE, "ignore_index": 0}
    labels[labels == IGNORED] = 1
    torch.testing.assert_close(causal_loss(logits, labels, **given), ForCausalLMLoss(logits, labels, **given))


@pytest.mark.parametrize("what", ["no labels", "no gradient", "float64", "functional"])
def test_all_else_is_what_transformers_computes_to_the_bit(what: str) -> None:
    logits, labels = logits_of(2, 9), labels_of(2, 9)
    if what == "no labels":
        labels = torch.full((2, 9), IGNORED)
    elif what == "no gradient":
        logits = logits.detach()
    elif what == "float64":
        logits = logits.detach().double().requires_grad_()
    if what == "functional":
        taken = [
            torch.func.grad(lambda x, f=loss: f(x, labels, SIZE))(logits) for loss in (ForCausalLMLoss, causal_loss)
        ]
        assert torch.equal(*taken)
        return
    assert torch.equal(
        causal_loss(logits, labels, SIZE).nan_to_num(), ForCausalLMLoss(logits, labels, SIZE).nan_to_num()
    )


def test_a_label_beyond_the_vocabulary_is_transformers_error() -> None:
    labels = labels_of(2, 9)
    labels[0, 4] = SIZE
    with pytest.raises(IndexError, match="out of bounds"):
        causal_loss(logits_of(2, 9), labels, SIZE)


@pytest.mark.usefixtures("way")
def test_second_derivatives() -> None:
    logits, labels = logits_of(2, 9), labels_of(2, 9)
    seconds = []
    for loss in (ForCausalLMLoss, causal_loss):
        (first,) = torch.autograd.grad(loss(logits, labels, SIZE, 5), logits, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), logits)[0])
    torch.testing.assert_close(*seconds)


@pytest.fixture(params=["native", "operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the loss is computed: by the library, or by operators, as where that was not built."""
    if request.param == "operators":
        monkeypatch.setattr("hf_accel.distill.model_loss._computes", lambda logits: False)
    return str(request.param)


def test_logits_may_be_changed_after_the_loss(way: str) -> None:
    leaf, labels = logits_of(2, 9), labels_of(2, 9)
    expected = torch.autograd.grad(ForCausalLMLoss(leaf, labels, SIZE), leaf)[0]
    logits = leaf * 1
    loss = causal_loss(logits, labels, SIZE)
    logits.detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(loss, leaf, retain_graph=True)[0], expected)
    if way == "native":
        torch.testing.assert_close(torch.autograd.grad(loss, leaf, create_graph=True)[0], expected)
        return
    with pytest.raises(hf_accel.UnsupportedError, match="changed in place"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_the_gradient_takes_the_place_of_logits_that_nobody_holds() -> None:
    leaf, labels = logits_of(2, 9), labels_of(2, 9)
    expected = torch.autograd.grad(ForCausalLMLoss(leaf, labels, SIZE), leaf)[0]
    for held in (False, True):
        logits = leaf * 1
        place, numbers, seen = logits.data_ptr(), logits.detach().clone(), []
        logits.register_hook(lambda gradient, seen=seen: seen.append(gradient.data_ptr()))
        loss = causal_loss(logits, labels, SIZE)
        if not held:
            del logits
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected)
        assert (seen == [place]) is not held
        assert not held or torch.equal(logits, numbers)


@pytest.mark.usefixtures("way")
def test_a_graph_that_is_kept_gives_the_same_gradient_again() -> None:
    logits, labels = logits_of(2, 9), labels_of(2, 9)
    loss = causal_loss(logits, labels, SIZE)
    first = torch.autograd.grad(loss, logits, torch.tensor(2.0), retain_graph=True)[0].clone()
    assert torch.equal(first, torch.autograd.grad(loss, logits, torch.tensor(2.0))[0])


class Sizes(TorchDispatchMode):
    """Counts the tensors that operations return with as many numbers as the logits have, each storage once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.seen, self.kept = numel, set(), []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.numel() >= self.numel:
                self.seen.add(each.untyped_storage().data_ptr())
                self.kept.append(each)  # or its place would be given to another
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tensor_like_the_logits_is_made(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.distill.losses.row_losses.TILE_BYTES", 1 << 10)
    leaf, labels = logits_of(4, 40, dtype=dtype), labels_of(4, 40, ignored=0.0)
    made = []
    for loss in (causal_loss, ForCausalLMLoss):
        with Sizes(leaf.numel()) as sizes:
            torch.autograd.grad(loss(leaf, labels, SIZE), leaf)
        made.append(len(sizes.seen - {leaf.untyped_storage().data_ptr()}))
    assert made[0] == 1 and made[1] >= 3  # what watches operators sees them: the library does not compute then


@pytest.mark.parametrize("kwargs", [{}, {"tie_word_embeddings": True}])
def test_a_patched_model_learns_as_it_did(kwargs: dict[str, Any]) -> None:
    model = tiny(**kwargs)
    inputs = {"input_ids": torch.randint(0, SIZE, (3, 11)), "labels": labels_of(3, 11)}
    inputs["attention_mask"] = (torch.arange(11) < torch.tensor([[11], [7], [9]])).long()
    stock, theirs = gradients(model, **inputs)
    assert "a few rows at a time" in str(hf_accel.plan(model, weights=None))
    hf_accel.patch(model, weights=None)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.loss_function is causal_loss
        ours, found = gradients(each, **inputs)
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        for one, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    hf_accel.unpatch(model)
    assert "_loss_function" not in vars(model) and model.loss_function is ForCausalLMLoss


def test_a_loss_of_ones_own_stays() -> None:
    own = lambda logits, labels, vocab_size, **kwargs: logits.sum()  # noqa: E731 - any function may be given
    model = tiny()
    model.loss_function = own
    hf_accel.patch(model, weights=None)
    assert model.loss_function is own
    hf_accel.unpatch(model)
    assert model.loss_function is own


def test_who_keeps_transformers_loss() -> None:
    plain = hf_accel.patch(tiny(), weights=None, fuse=False)
    assert plain.loss_function is ForCausalLMLoss
    config = BertConfig(
        vocab_size=SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    masked = hf_accel.patch(BertForMaskedLM(config), weights=None)
    assert "_loss_function" not in vars(masked)


def test_adapters_learn_through_it() -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    inputs = {"input_ids": torch.randint(0, SIZE, (2, 9)), "labels": labels_of(2, 9)}
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(adapted(**inputs).loss, trained)
    hf_accel.patch(adapted, weights=None)
    assert model.loss_function is causal_loss
    for one, other in zip(torch.autograd.grad(adapted(**inputs).loss, trained), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
