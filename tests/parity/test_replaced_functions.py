"""Functions and methods that others replace, before patch() or after it: the model computes what stock does then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.generation import GenerationMixin
from transformers.integrations import sdpa_attention
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.llama import modeling_llama
from transformers.models.mamba import modeling_mamba
from transformers.models.mixtral import modeling_mixtral
from transformers.pytorch_utils import Conv1D

import hf_accel

IDS = torch.tensor([[5, 17, 3, 44, 9, 21, 30], [11, 4, 60, 2, 8, 33, 7]])
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


def small(kind: Any, config: Any, **settings: Any) -> Any:
    """A decoder of two layers that attend with fewer heads of keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(config(vocab_size=70, num_hidden_layers=2, **sizes, **settings)).eval()


def llama() -> Any:
    return small(LlamaForCausalLM, LlamaConfig)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=70, n_embd=32, n_layer=2, n_head=4)).eval()


def bert() -> Any:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=70, num_hidden_layers=2, **sizes)).eval()


def mixtral() -> Any:
    return small(MixtralForCausalLM, MixtralConfig, num_local_experts=4, num_experts_per_tok=2)


def mamba() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=70, hidden_size=32, num_hidden_layers=2, state_size=4)).eval()


def lfm2() -> Any:
    kinds = ["conv", "full_attention"]
    return small(Lfm2ForCausalLM, Lfm2Config, layer_types=kinds, initializer_range=0.2)


PLACES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "linear": (llama, nn.Linear, "forward"),
    "torch's linear": (llama, F, "linear"),
    "rotation": (llama, modeling_llama, "apply_rotary_pos_emb"),
    "within the rotation": (llama, modeling_llama, "rotate_half"),
    "norm": (llama, modeling_llama.LlamaRMSNorm, "forward"),
    "within the norm": (llama, torch, "rsqrt"),
    "MLP": (llama, modeling_llama.LlamaMLP, "__call__"),
    "activation": (llama, F, "silu"),
    "torch's attention": (llama, F, "scaled_dot_product_attention"),
    "the attention's function": (llama, sdpa_attention, "repeat_kv"),
    "all modules": (llama, nn.Module, "_call_impl"),
    "GPT-2's linear": (gpt2, Conv1D, "forward"),
    "GPT-2's product": (gpt2, torch, "addmm"),
    "GPT-2's layer": (gpt2, modeling_gpt2.GPT2Block, "forward"),
    "the experts' activation": (mixtral, F, "silu"),
    "the router": (mixtral, modeling_mixtral.MixtralSparseMoeBlock, "forward"),
    "a recurrence": (mamba, modeling_mamba.MambaMixer, "forward"),
    "within a recurrence": (mamba, F, "softplus"),
    "a recurrence's convolution": (mamba, F, "conv1d"),
    "a gated convolution": (lfm2, modeling_lfm2.Lfm2ShortConv, "forward"),
    "BERT's linear": (bert, F, "linear"),
    "BERT's norm": (bert, F, "layer_norm"),
    "BERT's output": (bert, modeling_bert.BertSelfOutput, "forward"),
}


def larger(function: Any) -> Callable[..., Any]:
    """Return a function whose first result is larger, by less than what overflows in a few layers."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return 1.25 * result
        return (1.25 * result[0], *result[1:]) if isinstance(result, tuple) else result

    return replaced


@torch.no_grad()
def results(model: Any) -> list[Tensor]:
    """The states of a padded batch; of a decoder also the scores of generated tokens."""
    if isinstance(model, BertModel):
        return [model(IDS, attention_mask=MASK).last_hidden_state[MASK.bool()]]
    out = model.generate(IDS, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return [model(IDS).logits, torch.stack(out.logits)]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", PLACES)
def test_what_others_replace_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, owner, attribute = PLACES[name]
    stock, patched, later = make(), make(), make()
    hf_accel.patch(patched, weights=None)
    plain = results(patched)  # by now, all that is kept of its code is kept
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, larger(getattr(owner, attribute)))
        wanted = results(stock)
        assert name == "the attention's function" or not equal(plain, wanted), "the replacement changes something"
        assert equal(results(patched), wanted), "replaced after patch()"
        hf_accel.patch(later, weights=None)
        assert equal(results(later), wanted), "replaced before patch()"
    assert equal(results(patched), plain)
    assert equal(results(hf_accel.unpatch(later)), plain)


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_sample"])
def test_what_others_replace_in_the_loop_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = llama(), llama()
    hf_accel.patch(patched, weights=None)
    plain, own = results(patched), getattr(GenerationMixin, name)
    monkeypatch.setattr(GenerationMixin, name, lambda self, ids, **given: own(self, (ids + 1) % 70, **given))
    wanted = results(stock)
    assert not equal(plain, wanted)
    assert equal(results(patched), wanted)
    monkeypatch.undo()
    assert equal(results(patched), plain)
