"""Code that is read: patterns in a forward, and what attention modules do with masks, keys, values and caches."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_accel.cache.hf.cache_argument import CACHE_NAME
from hf_accel.recognition.code import GatedCode, attention_code, code_of, gated_code, siblings
from tests.unit.fused.models import Attention, ClampedMLP, GatedMLP


class Reassigned(nn.Module):
    def forward(self, x):
        q = self.q_proj(x)
        x = x + 1
        return q + self.k_proj(x)


class Changed(nn.Module):
    def forward(self, x, y):
        return self.q_proj(x) + self.k_proj(y) + self.other(x, y) + self.norm(x + 1)


class Twice(nn.Module):
    def forward(self, x):
        return self.q_proj(x) + self.q_proj(x)


class Branch(nn.Module):
    def forward(self, x):
        return self.down(x) if self.training else self.up(x)


class Constant(nn.Module):
    def forward(self, x):
        return self.down(x * 2)


def test_layers_that_are_called_on_one_variable():
    assert siblings(Attention.forward) == (("q_proj", "k_proj", "v_proj"),)
    assert siblings(GatedMLP.forward) == (("gate_proj", "up_proj"),)


def test_another_variable_or_another_value_is_no_sibling():
    for other in (Reassigned, Changed, Twice):
        assert siblings(other.forward) == ()


class Stepwise(nn.Module):
    def forward(self, hidden):
        """Straight-line code with names for what it computes."""
        gated = self.act(self.gate(hidden))
        product = self.up(hidden) * gated
        return self.down(product)


class ByFunction(nn.Module):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ByUnknownFunction(nn.Module):
    def forward(self, x):
        return self.w2(torch.sigmoid(self.w1(x)) * self.w3(x))


class Scaled(nn.Module):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x) * self.scale)


class OtherInput(nn.Module):
    def forward(self, x, y=None):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Overwritten(nn.Module):
    def forward(self, x):
        x = self.norm(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_the_parts_of_a_gated_mlp():
    assert gated_code(GatedMLP.forward) == GatedCode("gate_proj", "up_proj", "down_proj", "act_fn")
    assert gated_code(Stepwise.forward) == GatedCode("gate", "up", "down", "act")
    assert gated_code(ByFunction.forward) == GatedCode("w1", "w3", "w2", F.silu)


@pytest.mark.parametrize(
    "other", [ClampedMLP, Branch, Constant, ByUnknownFunction, Scaled, OtherInput, Overwritten, nn.Linear, nn.ReLU]
)
def test_other_code_is_no_gated_mlp(other):
    assert gated_code(other.forward) is None


def test_code_without_a_source_is_left_alone():
    scope: dict = {}
    exec("def forward(self, x):\n    return self.q(x) + self.k(x)\n", scope)
    assert siblings(scope["forward"]) == ()
    assert gated_code(scope["forward"]) is None


# -- attention -----------------------------------------------------------------------------------------


def eager(*arguments: Any, **keywords: Any) -> Any: ...


class Plain(nn.Module):
    """The usual form, which the others change in one place."""

    def forward(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Any, **kwargs: Any) -> Any:
        q, k, v = x, x, x
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, scaling=1.0, **kwargs)


class OtherValues(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Any, **kwargs: Any) -> Any:
        q, k, v = x, x, x
        k, v = past_key_values.update(k, v, self.layer_idx)
        v = v * 2
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, scaling=1.0, **kwargs)


class OtherMask(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Any, **kwargs: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        own = attention_mask + x
        return attend(self, x, x, x, own, scaling=1.0, **kwargs)


class CutMask(nn.Module):
    def forward(self, x: Tensor, attention_mask: Any, past_key_values: Any, **kwargs: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :, : x.shape[-2]]
        return attend(self, x, x, x, attention_mask, scaling=1.0, **kwargs)


class OtherCut(nn.Module):
    def forward(self, x: Tensor, attention_mask: Any, past_key_values: Any, **kwargs: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :, 1:]
        return attend(self, x, x, x, attention_mask, scaling=1.0, **kwargs)


class OtherKeyword(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Any, **kwargs: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, x, x, x, attention_mask, position_bias=x, **kwargs)


class ByItself(nn.Module):
    """Its name does not say so, but SoftmaxAttention's does."""

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Any:
        return (x @ x.mT + attention_mask).softmax(-1) @ x


class SoftmaxAttention(ByItself):
    pass


class ReadsLayers(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any) -> Any:
        return self.helper(past_key_values)

    def helper(self, past_key_values: Any) -> Any:
        held = past_key_values
        return held.layers[0].keys


class WithoutEncoder(nn.Module):
    """What it does with an encoder's output never happens in a model without one."""

    def forward(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Any, encoded: Any = None) -> Any:
        is_cross_attention = encoded is not None
        held = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            held = (
                past_key_values.cross_attention_cache if is_cross_attention else past_key_values.self_attention_cache
            )
        if is_cross_attention and held is not None:
            k, v = held.layers[0].keys, held.layers[0].values
        else:
            k, v = x, x
        if not is_cross_attention or held is None:
            k, v = held.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, x, k, v, attention_mask, scaling=1.0)


class WithIndexer(nn.Module):
    """An indexer chooses what is seen, in layers that have one."""

    def __init__(self, indexer: nn.Module | None) -> None:
        super().__init__()
        self.indexer = indexer

    def forward(self, x: Tensor, attention_mask: Tensor | None, past_key_values: Any, **kwargs: Any) -> Any:
        q, k, v = x, x, x
        k, v = past_key_values.update(k, v, self.layer_idx)
        indices = None
        if self.indexer is not None:
            indices = self.indexer(x)
            attention_mask = attention_mask & indices
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, indices=indices, **kwargs)


@pytest.mark.parametrize(
    ("kind", "refusal", "unpaged"),
    [
        (Plain, None, None),
        (WithoutEncoder, None, None),
        (OtherValues, None, "changes K or V"),
        (OtherMask, "changes the mask", None),
        (CutMask, None, None),
        (OtherCut, "changes the mask", None),
        (OtherKeyword, "passes position_bias=", None),
        (ByItself, None, None),
        (SoftmaxAttention, "computes attention by itself", None),
        (ReadsLayers, None, "uses held.layers"),
    ],
)
def test_forms(kind: type, refusal: str | None, unpaged: str | None) -> None:
    code = attention_code(kind)
    for found, expected in ((code.refusal, refusal), (code.unpaged, unpaged)):
        assert (found is None) == (expected is None) and (expected or "") in (found or "")
    assert code.attends == (kind not in (ByItself, SoftmaxAttention, ReadsLayers))
    assert code.eager == ("eager" if code.attends else None)


def test_a_part_that_is_none_is_never_used() -> None:
    assert code_of(WithIndexer(None)).refusal is None
    assert "changes the mask" in str(code_of(WithIndexer(nn.Identity())).refusal) or "passes indices=" in str(
        code_of(WithIndexer(nn.Identity())).refusal
    )


def test_code_that_cannot_be_read_is_not_known() -> None:
    space: dict[str, Any] = {"nn": nn, "__name__": "typed_at_a_prompt"}
    exec("class Typed(nn.Module):\n def forward(self, x, attention_mask): return x", space)
    exec("class Harmless(nn.Module):\n def forward(self, x): return x", space)
    assert attention_code(space["Typed"]).refusal == "the source of Typed cannot be read"
    assert attention_code(space["Harmless"]).refusal is None


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        ("llama", "LlamaAttention", None),
        ("gpt2", "GPT2Attention", None),
        ("bart", "BartAttention", None),
        ("bert", "BertSelfAttention", None),
        ("gpt_oss", "GptOssAttention", None),
        ("diffllama", "DiffLlamaAttention", "more than once"),
        ("jetmoe", "JetMoeAttention", "changes K or V"),
        ("doge", "DogeAttention", "changes the mask"),
        ("inkling", "InklingAttention", "passes position_bias="),
        ("hy_v4", "HYV4Attention", None),
        ("pix2struct", "Pix2StructTextAttention", "passes position_bias="),
        ("git", "GitSelfAttention", "computes attention by itself"),
        ("mllama", "MllamaTextCrossAttention", f"uses {CACHE_NAME}.layers"),
        ("deepseek_v3", "DeepseekV3Attention", None),
    ],
)
def test_transformers_own(model: str, kind: str, reason: str | None) -> None:
    try:
        file = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {model}")
    code = attention_code(getattr(file, kind))
    found = code.refusal or code.unpaged
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
