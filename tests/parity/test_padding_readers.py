"""Where code of others may read padding, it stands there as stock computes it: zeros stand where nobody looks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.bert.modeling_bert import BertIntermediate, BertLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.padding_readers import PaddingReaders
from tests.families.models import enliven

from .test_encoders import batch, build, counted, made

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

ROTATED: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3,
    "max_position_embeddings": 80, "pad_token_id": 1, "cls_token_id": 2, "sep_token_id": 3, "eos_token_id": 4,
    "bos_token_id": 5,
}  # fmt: skip
LAST = {"Bert": "encoder.layer.2", "DistilBert": "transformer.layer.2", "Llama": "norm", "ModernBert": "final_norm"}


def model_of(family: str) -> PreTrainedModel:
    return made(family, ROTATED) if family in ("Llama", "ModernBert") else build(family)


def padded(side: str) -> dict[str, Tensor]:
    given = batch([11, 3, 7])
    return {name: tensor.flip(1) for name, tensor in given.items()} if side == "left" else given


def next_token(out: Any) -> Any:
    first = out[0] if isinstance(out, tuple) else out
    return (first + first.roll(-1, 1), *out[1:]) if isinstance(out, tuple) else first + first.roll(-1, 1)


class Mean(nn.Module):
    """A head of the user's that reads all columns."""

    def forward(self, states: Tensor) -> Tensor:
        return states.mean(1)


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: next_token(out))


def replaced(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: next_token(forward(*args, **kwargs))  # type: ignore[method-assign]


def derived(module: nn.Module) -> None:
    class Derived(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return next_token(super().forward(*args, **kwargs))

    module.__class__ = Derived


CHANGES: dict[str, Callable[[nn.Module], None]] = {"hook": hooked, "forward": replaced, "class": derived}


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "side", "change"),
    [(family, "right", change) for family in LAST for change in CHANGES] + [("Llama", "left", "hook")],
)
@torch.no_grad()
def test_code_of_others_reads_padding_of_stock(family: str, side: str, change: str) -> None:
    stock, given = model_of(family), padded(side)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    states = ours(**given).last_hidden_state
    for model in (ours, stock):
        CHANGES[change](model.get_submodule(LAST[family]))
    near(ours(**given).last_hidden_state, stock(**given).last_hidden_state)
    assert "may read it" in " ".join(str(hf_accel.plan(stock, weights=None)).split())
    if change == "hook":
        vars(ours.get_submodule(LAST[family]))["_forward_hooks"].clear()
        assert torch.equal(ours(**given).last_hidden_state, states)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
@torch.no_grad()
def test_a_head_of_the_users_reads_padding_of_stock(family: str) -> None:
    base: Any = getattr(transformers, f"{family}PreTrainedModel")

    class Pooled(base):  # type: ignore[misc]
        def __init__(self, inner: PreTrainedModel) -> None:
            super().__init__(inner.config)
            self.model, self.head = inner, Mean()

        def forward(self, **given: Any) -> Any:
            return self.head(self.model(**given).last_hidden_state)

    stock, given = Pooled(model_of(family)).eval(), padded("right")
    near(hf_accel.patch(copy.deepcopy(stock), weights=None)(**given), stock(**given))


@torch.no_grad()
def test_copies_see_code_of_their_own_model() -> None:
    ours, stock, given = hf_accel.patch(build(), weights=None), build(), padded("right")
    zeros = ours(**given).last_hidden_state
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    hooked(stock.get_submodule(LAST["Bert"]))
    for each in copies:
        with counted() as calls:
            assert torch.equal(each(**given).last_hidden_state, zeros)
        assert calls["EncoderStackCalls"] == 1
        hooked(each.get_submodule(LAST["Bert"]))
        near(each(**given).last_hidden_state, stock(**given).last_hidden_state)
    assert torch.equal(ours(**given).last_hidden_state, zeros)
    # Nobody knows who reads what a part returns that was copied alone.
    states, mask = torch.randn(3, 11, 60), (1 - given["attention_mask"])[:, None, None] * torch.finfo().min
    near(copy.deepcopy(ours.encoder)(states, mask)[0], build().encoder(states, mask)[0])


def test_only_the_first_layer_of_a_pass_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = build(), [torch.ones(1) for _ in range(2)]
    readers, looks = PaddingReaders(model), []
    look = PaddingReaders._look
    monkeypatch.setattr(PaddingReaders, "_look", lambda self: looks.append(1) or look(self))
    layers = list(model.encoder.layer)
    assert not any(readers.may_read(layer, mask) for layer in layers for mask in masks)
    assert len(looks) == 2
    hooked(model.embeddings)
    assert all(readers.may_read(layer, masks[0]) for layer in layers)  # a mask of the caller's may come again
    model.embeddings._forward_hooks.clear()
    assert not any(readers.may_read(layer, None) for layer in layers)


# -- a forward that is replaced on a class of transformers -----------------------------------------------

CLASSES: list[tuple[str, type[nn.Module]]] = [
    ("Llama", LlamaMLP), ("Llama", LlamaRMSNorm), ("Llama", LlamaAttention), ("Llama", LlamaDecoderLayer),
    ("Llama", SiLUActivation), ("Bert", BertIntermediate), ("Bert", BertLayer), ("Bert", nn.LayerNorm),
]  # fmt: skip


@pytest.fixture(params=CLASSES, ids=lambda param: param[1].__name__)
def changing(request: pytest.FixtureRequest) -> Iterator[tuple[PreTrainedModel, type[nn.Module]]]:
    """A model, and a class of its parts, of which the forward comes back."""
    family, kind = request.param
    forward = vars(kind)["forward"]
    if family == "Llama":
        torch.manual_seed(0)
        model: PreTrainedModel = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ROTATED)).eval()
        enliven(model)
    else:
        model = build(family)
    yield model, kind
    kind.forward = forward  # type: ignore[method-assign]


@torch.no_grad()
def test_a_forward_that_is_replaced_on_a_class(changing: tuple[PreTrainedModel, type[nn.Module]]) -> None:
    """Native calls of its layer, made before, must not go on; and may again once it is back."""
    stock, kind = changing
    ours, given = hf_accel.patch(copy.deepcopy(stock), weights=None), batch([6, 6])

    def result(model: PreTrainedModel) -> Tensor:
        if model.can_generate():
            tokens: Any = model.generate(**given, max_new_tokens=8, do_sample=False)
            return tokens
        states: Tensor = model(**given)[0]
        return states

    before, forward = result(ours), kind.forward

    def other(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return (out[0] * -1.5, *out[1:]) if isinstance(out, tuple) else out * -1.5

    kind.forward = other  # type: ignore[method-assign]
    expected = result(stock)
    near(result(ours), expected)
    assert expected.shape != before.shape or not torch.allclose(expected.double(), before.double(), atol=1e-2)
    if ours.can_generate():
        near(ours(**given).logits, stock(**given).logits)
    kind.forward = forward  # type: ignore[method-assign]
    with counted() as calls:
        assert torch.equal(result(ours), before)
    assert ours.can_generate() or calls["layers"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family, kind", [("Bert", "BertLMHeadModel"), ("Roberta", "RobertaForCausalLM")])
@torch.no_grad()
def test_an_encoder_that_writes_text_has_stocks_numbers_at_padding(family: str, kind: str, side: str) -> None:
    """Though its tokens see all others, the next token is chosen, and the loss taken, from what stands at padding."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**ROTATED, type_vocab_size=2)
    stock = getattr(transformers, kind)(config).eval()
    enliven(stock)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    given = padded(side)
    with counted() as calls:
        found, expected = ours(**given).logits, stock(**given).logits
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": False}
    assert torch.equal(ours.generate(**given, **options), stock.generate(**given, **options))
