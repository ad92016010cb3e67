"""Decoder layers with LayerNorms and a plain MLP as one native call: near their own code, which runs where it must."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation

import hf_accel
from hf_accel.fused import layer_programme
from hf_accel.fused.hf.layer_calls import LayerCalls
from hf_accel.fused.partial_rotation import leaves_rest
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.call_form import CallForm
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.trace import Trace
from hf_accel.undo.state import FUSED
from tests.unit.fused.test_decoder_layers import PROMPTS, counted, layers_of, logits_of

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

RANDOM: dict[str, Any] = {"initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
# 96 / 4 is no power of two: OPT scales its queries by a number that rounds.
SIZES = {"vocab_size": 101, "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, **RANDOM}
WIDE = SIZES | {"intermediate_size": 192}
# Each has something that the others lack: Conv1D and arguments by place, hidden states without their batch, heads that
# lie side by side, parts of heads that are not rotated, an MLP on the tensor that Q, K and V are made of, a gated MLP,
# one whose gate and other half are one product.
CONFIGS: dict[str, Any] = {
    "GPT2LMHeadModel": transformers.GPT2Config(vocab_size=101, n_embd=96, n_head=4, n_layer=3, **RANDOM),
    "OPTForCausalLM": transformers.OPTConfig(**SIZES, ffn_dim=192, word_embed_proj_dim=96),
    "OPTForCausalLM, norms behind": transformers.OPTConfig(
        **SIZES, ffn_dim=192, word_embed_proj_dim=96, do_layer_norm_before=False
    ),
    "GPTNeoXForCausalLM": transformers.GPTNeoXConfig(**WIDE, hidden_act="gelu"),
    "GPTNeoXForCausalLM, one after the other": transformers.GPTNeoXConfig(**WIDE, use_parallel_residual=False),
    "PhiForCausalLM": transformers.PhiConfig(**WIDE, hidden_act="gelu_new"),
    "Starcoder2ForCausalLM": transformers.Starcoder2Config(**WIDE, num_key_value_heads=2),
    "StableLmForCausalLM": transformers.StableLmConfig(**WIDE, num_key_value_heads=2),
    "BioGptForCausalLM": transformers.BioGptConfig(**WIDE),
    "Phi3ForCausalLM": transformers.Phi3Config(**WIDE, num_key_value_heads=2),
    "ModernBertDecoderForCausalLM": transformers.ModernBertDecoderConfig(
        **WIDE | {"bos_token_id": 1, "eos_token_id": 2}
    ),
    # LayerNorms without a bias, without any weight, with a weight that 1 is added to, of each head with a weight of
    # its own, or with one for all; the square of relu, also behind a gate; norms inside attention and MLP.
    "CohereForCausalLM": transformers.CohereConfig(**WIDE, num_key_value_heads=2),
    "CohereForCausalLM, norms of heads": transformers.CohereConfig(**WIDE, num_key_value_heads=2, use_qk_norm=True),
    "Cohere2ForCausalLM": transformers.Cohere2Config(
        **WIDE, num_key_value_heads=2, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "OlmoForCausalLM": transformers.OlmoConfig(**WIDE, num_key_value_heads=2),
    "NemotronForCausalLM": transformers.NemotronConfig(**WIDE, num_key_value_heads=2, head_dim=24),
    "PhiForCausalLM, norms of heads": transformers.PhiConfig(**WIDE, qk_layernorm=True),
    "ArceeForCausalLM": transformers.ArceeConfig(**WIDE, num_key_value_heads=2),
    "BitNetForCausalLM": transformers.BitNetConfig(**WIDE, num_key_value_heads=2),
    # One head of keys behind all queries; Q, K and V of each head side by side.
    "GPTBigCodeForCausalLM": transformers.GPTBigCodeConfig(vocab_size=101, n_embd=96, n_head=4, n_layer=3, **RANDOM),
    "GPTBigCodeForCausalLM, keys of each head": transformers.GPTBigCodeConfig(
        vocab_size=101, n_embd=96, n_head=4, n_layer=3, multi_query=False, **RANDOM
    ),
    "PersimmonForCausalLM": transformers.PersimmonConfig(**WIDE),
    "PersimmonForCausalLM, without norms of heads": transformers.PersimmonConfig(
        **WIDE, qk_layernorm=False, hidden_act="gelu"
    ),
}  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, name.partition(",")[0])(copy.deepcopy(CONFIGS[name])).eval()
    model.generation_config.eos_token_id = None
    return model


def near_the_modules(model: PreTrainedModel) -> int:
    """Assert that native layers give what the modules give one by one; returns how many calls were native."""
    with counted() as calls:
        got = logits_of(model)
    with counted(native=False):
        expected = logits_of(model)
    assert calls[True] > 10 * calls[False] > 0  # a pass over padding is not native
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    return calls[True]


@torch.no_grad()
def logits_in_parts(model: PreTrainedModel, ids: Tensor, *ends: int) -> Tensor:
    """The logits of ids [B, T], in one pass up to each of the ends and one for the rest."""
    cache, length = hf_accel.PagedCache(model.config), ids.shape[1]
    passes = zip((0, *ends), (*ends, length), strict=True)
    return torch.cat([model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in passes], 1)


def roughly_the_modules(model: PreTrainedModel, share: float) -> None:
    """Assert the same on average up to a share, where another rounding makes another integer of some numbers."""
    ids = torch.arange(60).view(2, 30) + 1
    with counted() as calls:
        got = logits_in_parts(model, ids, 9, 10)
    assert calls == {True: 9}
    with counted(native=False):
        expected = logits_in_parts(model, ids, 9, 10)
    assert (got - expected).abs().mean() <= share * expected.abs().mean()


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_of_the_modules_one_by_one(name: str, weights: Any) -> None:
    stock = model_of(name)
    model = hf_accel.patch(copy.deepcopy(stock), weights=weights)
    assert len(layers_of(model)) == 3
    if weights is None:
        near_the_modules(model)
        ids = torch.tensor(PROMPTS[:1])
        options = {"max_new_tokens": 8, "do_sample": False}
        assert model.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()
    else:
        roughly_the_modules(model, 0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_halves(dtype: torch.dtype) -> None:
    model = hf_accel.patch(model_of("PhiForCausalLM").to(dtype), weights="int8")
    roughly_the_modules(model, 0.1)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "PhiForCausalLM"])
@torch.no_grad()
def test_bits_do_not_depend_on_the_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_programme, "MOST_BYTES", 4)  # which other layers may use
    model = hf_accel.patch(model_of(name), weights="int8")
    ids = torch.arange(300)[None] % 100 + 1
    with counted() as calls:
        assert torch.equal(logits_in_parts(model, ids, 1, 40), logits_in_parts(model, ids))
    assert calls == {True: 12}


@torch.no_grad()
def test_changes_are_seen() -> None:
    model = hf_accel.patch(model_of("GPTNeoXForCausalLM"), weights=None)
    before, layer = logits_of(model), layers_of(model)[1]
    layer.post_attention_layernorm.weight.mul_(1.5)
    layer.input_layernorm.eps = 0.3
    layer.mlp.act = nn.ReLU()
    near_the_modules(model)
    assert not torch.allclose(logits_of(model)[0], before[0], rtol=1e-2)
    layer.mlp.act = nn.Mish()  # which has no kernel
    with counted() as calls:
        logits_of(model)
    assert calls[False] > calls[True] / 3


def test_copies() -> None:
    model = hf_accel.patch(model_of("OPTForCausalLM"), weights="int8")
    expected = logits_of(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with counted() as calls:
            assert all(map(torch.equal, logits_of(twin), expected))
        assert calls[True]
    hf_accel.unpatch(model)
    assert not layers_of(model)


def test_arguments_that_are_given_twice() -> None:
    model = hf_accel.patch(model_of("GPT2LMHeadModel"), weights="int8")
    layer = layers_of(model)[0]
    calls: LayerCalls[Any] = vars(layer)[FUSED]
    cache, x = hf_accel.PagedCache(model.config), torch.randn(1, 2, 96)
    assert calls.run(layer, (x, cache), {"past_key_values": cache}) is None
    assert calls.run(layer, (x, *[None] * 9), {"past_key_values": cache}) is None


def test_rotations_that_leave_the_rest() -> None:
    assert leaves_rest(neox_rotation)
    assert not leaves_rest(llama_rotation)  # its tables must have the size of a head

    def rotates_the_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        size = cos.shape[-1]
        parts = llama_rotation(q[..., -size:], k[..., -size:], cos, sin)
        return tuple(torch.cat((x[..., :-size], new), -1) for x, new in zip((q, k), parts, strict=True))

    assert not leaves_rest(rotates_the_last)


# -- what is not known -----------------------------------------------------------------------------------


def stand_in(code: Any, **arguments: Any) -> Any:
    """Trace a layer that attends to `code`: what it makes of Q, K and V, [B, heads, T, 8]."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 48)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Any, past_key_values: Any = None, position_embeddings: Any = None) -> Any:
            parts = self.linear(self.norm(x)).view(*x.shape[:-1], -1, 24).transpose(1, 2).chunk(3, dim=-1)
            return code(SimpleNamespace(x=x, q=parts[0], k=parts[1], v=parts[2], cache=past_key_values, layer=self))

    trace = Trace(torch.float32, **arguments)
    trace.layer(Layer(), 16, CallForm("x", frozenset({"past_key_values", "position_embeddings"})))
    return trace


def attended(of: Any, k: Any) -> Any:
    k, v = of.cache.update(k, of.v, 0)
    out, _ = of.q.attended(of.layer, k, v, None)
    return out.reshape(*of.x.shape[:-1], 16) + of.x


def sliced_behind_the_cache(of: Any) -> Any:
    k, v = of.cache.update(of.k, of.v, 0)
    out, _ = of.q.attended(of.layer, k[..., :8], v, None)
    return out.reshape(*of.x.shape[:-1], 16) + of.x


def heads_of_all_tokens(of: Any) -> Any:
    return of.x.reshape(-1, 16).view(-1, 1, 2, 8)


UNKNOWN = {
    "a part of what comes from the cache": sliced_behind_the_cache,
    "heads of tokens without rows": heads_of_all_tokens,
    "parts of other heads": lambda of: torch.cat((of.q, of.x.view(*of.x.shape[:-1], 4, 4).transpose(1, 2)), dim=-1),
    "an empty part": lambda of: torch.cat((of.q, of.k[..., 8:]), dim=-1),
    "another dimension": lambda of: torch.cat((of.q, of.k), dim=1),
    "three parts": lambda of: torch.cat((of.q, of.k, of.v), dim=-1),
    "heads with numbers between them": lambda of: of.q.transpose(1, 2).reshape(*of.x.shape[:-1], 16),
    "sums with and without rows": lambda of: of.x + of.x.reshape(-1, 16),
    "parts of other sizes": lambda of: of.x.split(5, dim=2),
}  # fmt: skip


def test_parts_of_heads() -> None:
    trace = stand_in(lambda of: attended(of, torch.cat((of.k[..., :2], of.k[..., 2:]), dim=-1)))
    kinds = [operation.kind for operation in trace.operations]
    assert kinds == ["layer_norm", "linear", "join", "write", "attend", "add"]
    assert [span.head for span in trace.operations[2].inputs] == [24, 24]
    assert [span.offset for span in trace.operations[2].inputs] == [8, 10]


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_trace_does_not_know(name: str) -> None:
    with pytest.raises(UntraceableError):
        stand_in(UNKNOWN[name])


def test_the_plan_says_why_others_are_not_taken() -> None:
    torch.manual_seed(0)
    apertus = transformers.ApertusForCausalLM(transformers.ApertusConfig(**WIDE, num_key_value_heads=2)).eval()
    assert "module by module" in str(hf_accel.plan(apertus))
