"""Models that attend by torch's operators (BLOOM, MPT, Falcon, GPT-J and others) run as others do, over pages."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BigBirdConfig,
    BigBirdForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    MegatronBertConfig,
    MegatronBertForCausalLM,
    MptConfig,
    MptForCausalLM,
    MvpConfig,
    MvpForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RemBertConfig,
    RemBertForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    TrOCRConfig,
    TrOCRForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.gpt_neo import modeling_gpt_neo

import hf_accel
from hf_accel import PagedCache, UnsupportedError
from hf_accel.fused.hf.operator_models import OperatorModel, PagedOperators, operator_model

from ..selection import seeds, some_long
from .families import VOCABULARY
from .older import check_loop
from .snapshot import snapshot
from .together import (
    NEW_TOKENS,
    PROMPTS,
    alone,
    check_preemption,
    check_programme,
    in_passes,
    padded,
    together,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OLDER = "BloomModel gives its layers more than hidden states"  # in generate(); an Engine serves it
GPT: dict[str, Any] = SIZES | {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
USUAL: dict[str, Any] = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT: dict[str, Any] = USUAL | {"intermediate_size": 48, "is_decoder": True}
JETMOE: dict[str, Any] = SIZES | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 24,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
DECODER: dict[str, Any] = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "forced_eos_token_id": None, "max_position_embeddings": 256,
}  # fmt: skip
ALIBI = {"alibi": True}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}

KINDS: dict[str, Callable[..., Any]] = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(**SIZES, hidden_size=36, n_layer=2, n_head=6)),
    "mpt": lambda: MptForCausalLM(
        MptConfig(**SIZES, d_model=36, n_layers=2, n_heads=6, max_seq_len=200, expansion_ratio=2, use_cache=True)
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**USUAL)),
    "falcon_new": lambda: FalconForCausalLM(FalconConfig(**USUAL, **NEW_FALCON)),
    "falcon_alibi": lambda: FalconForCausalLM(FalconConfig(**USUAL, **ALIBI, multi_query=False)),
    "falcon_new_alibi": lambda: FalconForCausalLM(FalconConfig(**USUAL, **ALIBI, **NEW_FALCON)),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(**GPT, rotary_dim=4)),
    "codegen": lambda: CodeGenForCausalLM(CodeGenConfig(**GPT, rotary_dim=4)),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            **SIZES,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=6,
            max_position_embeddings=256,
        )
    ),
    "gpt_neo_global": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            **SIZES,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global"], 2]],
            max_position_embeddings=256,
        )
    ),
    "gpt_neox_japanese": lambda: GPTNeoXJapaneseForCausalLM(GPTNeoXJapaneseConfig(**USUAL)),
    "rembert": lambda: RemBertForCausalLM(RemBertConfig(**BERT, input_embedding_size=16, output_embedding_size=16)),
    "megatron_bert": lambda: MegatronBertForCausalLM(MegatronBertConfig(**BERT)),
    "xglm": lambda: XGLMForCausalLM(
        XGLMConfig(**SIZES, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, init_std=0.25)
    ),
    "roformer": lambda: RoFormerForCausalLM(RoFormerConfig(**BERT, max_position_embeddings=256)),
    "big_bird": lambda: BigBirdForCausalLM(BigBirdConfig(**BERT, attention_type="original_full")),
    "gpt": lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**GPT)),
    # Their layers have a second attention, for an encoder's output that they are not given.
    "trocr": lambda: TrOCRForCausalLM(TrOCRConfig(**SIZES, **DECODER)),
    "mvp": lambda: MvpForCausalLM(MvpConfig(**SIZES, **DECODER)),
    "jetmoe": lambda: JetMoeForCausalLM(JetMoeConfig(**JETMOE)),
    "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**USUAL, intermediate_size=48, num_key_value_heads=2)),
}
FEW = ("bloom", "mpt", "falcon_alibi", "gptj", "gpt_neo", "roformer")  # one of each way
CHANGED = ("jetmoe", "diffllama")  # they attend to other keys and values than their cache returns
MORE = (*FEW, *CHANGED, "gpt")  # with one that takes no cache


def by_operators(kind: str) -> bool:
    """Return whether pages take the place of a cache in front of a model's own code, which attends to other keys or,
    in this release of transformers, by no attention function.
    """
    return kind in CHANGED or not hasattr(sys.modules[type(model_of(kind)).__module__], "ALL_ATTENTION_FUNCTIONS")


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    model = KINDS[kind]().eval()
    for name, parameter in model.named_parameters():  # norms and biases that are not 1 and 0
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "norm" not in name:
            parameter.data *= 0.25 / parameter.std()
    model.generation_config.pad_token_id = 0
    return model


@cache
def both(kind: str) -> tuple[Any, Any]:
    """A stock model, and the same one patched, which no test changes."""
    return model_of(kind), hf_accel.patch(model_of(kind), weights=None)


@pytest.mark.parametrize("kind", some_long(KINDS, *(kind for kind in KINDS if kind not in MORE)))
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    model, ours = both(kind)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    ids, mask = padded("left")
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    torch.manual_seed(5)
    drawn = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True)
    assert [alone(ours, prompt) for prompt in PROMPTS[:2]] == expected[:2]
    check_loop(ours, older=OLDER)
    assert together(ours) == expected
    assert torch.equal(ours.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False), whole)
    check_loop(ours, older=OLDER)
    torch.manual_seed(5)
    assert torch.equal(ours.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True), drawn)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=str)
def test_positions_that_count_padding(settings: dict[str, Any]) -> None:
    """Those of a rotation of values are no differences, so that padding in front of a prompt changes its text."""
    torch.manual_seed(3)
    config = RoFormerConfig(**BERT, max_position_embeddings=256, rotary_value=True)
    model = RoFormerForCausalLM(config).eval()
    ids, mask = padded("left")
    expected = [alone(model, prompt) for prompt in PROMPTS]
    rows = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings), rows)
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert together(model) == expected


@pytest.mark.parametrize("seed", seeds(6, 18))
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks, shared prefixes, samples, preemption and drafts change no request's tokens."""
    numbers = random.Random(seed)
    model = model_of(MORE[seed % len(MORE)])  # of each kind, one with drafts and one without
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


@pytest.mark.parametrize(
    "kind", ["gptj", "roformer", *(pytest.param(kind, marks=pytest.mark.long) for kind in (*CHANGED, "gpt", *FEW[:3]))]
)
def test_preemption_and_shared_prefixes(kind: str) -> None:
    check_preemption(model_of(kind))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [*FEW, *CHANGED, "gpt_neox_japanese"])
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_transformers_own_loops_run_over_pages(kind: str, settings: dict[str, Any]) -> None:
    model, ours = both(kind)
    ids, mask = padded("left") if "num_beams" in settings else (torch.tensor(PROMPTS[:1]), None)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    out = ours.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    assert torch.equal(out, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [*FEW, *CHANGED])
@pytest.mark.parametrize("cuts", [[40], [13, 1, 1, 25]])
@torch.no_grad()
def test_passes_over_a_paged_cache(kind: str, cuts: list[int]) -> None:
    model, ours = both(kind)
    ids = torch.randint(1, VOCABULARY, (3, 40))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    expected = in_passes(model, ids, mask, cuts, cache=None)
    found = in_passes(ours, ids, mask, cuts, cache=PagedCache(ours.config))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FEW)
def test_passes_without_a_cache_and_gradients_are_stocks(kind: str) -> None:
    model = model_of(kind)
    ids = torch.randint(1, VOCABULARY, (2, 9))

    def passed() -> tuple[Tensor, ...]:
        output = model(ids, labels=ids, output_attentions=True, use_cache=False)
        output.loss.backward()
        gradient = next(iter(model.parameters())).grad.clone()
        model.zero_grad()
        return (output.logits, gradient, *(output.attentions if by_operators(kind) else ()))

    expected = passed()
    hf_accel.patch(model, weights=None, fuse=False)
    for ours, theirs in zip(passed(), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{"cache": {"dtype": "int8"}}, {"weights": "int8"}], ids=str)
@pytest.mark.parametrize("kind", MORE)
def test_what_is_quantized_batches_exactly(kind: str, settings: dict[str, Any]) -> None:
    model = hf_accel.patch(model_of(kind), **{"weights": None, **settings})
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]
    check_loop(model, older=OLDER)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_other_backends(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch take the place of the kernels where there are none."""
    backend = next(each for each in hf_accel.attention.BACKENDS if each.name == attention)
    monkeypatch.setattr(hf_accel.attention, "BACKENDS", (backend,))
    for kind in ("bloom", "mpt", "gpt_neo"):
        model = model_of(kind)
        expected = [alone(model, prompt) for prompt in PROMPTS]
        hf_accel.patch(model, weights=None)
        assert together(model) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fuse", [True, False])
def test_patch_is_undone_exactly(kind: str, fuse: bool) -> None:
    model = model_of(kind)
    before = snapshot(model)
    hf_accel.patch(model, weights=None, fuse=fuse)
    assert sum(isinstance(module, PagedOperators) for module in model.modules()) == 2 * by_operators(kind)
    alone(model, PROMPTS[0])
    assert snapshot(hf_accel.unpatch(model)) == before


@pytest.mark.parametrize("kind", ["bloom", "gpt_neo"])
def test_copies_run_as_well(kind: str) -> None:
    model = model_of(kind)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert together(copy.deepcopy(model)) == expected
    assert together(model.to(torch.bfloat16).to(torch.float32)) is not None


def test_a_scale_that_is_changed_in_use_counts() -> None:
    model, other = model_of("gptj"), model_of("gptj")
    hf_accel.patch(model, weights=None)
    assert alone(model, PROMPTS[0]) == alone(other, PROMPTS[0])
    for each in (model, other):
        for layer in each.transformer.h:
            layer.attn.scale_attn = 0.2
    assert alone(model, PROMPTS[0]) == alone(other, PROMPTS[0])
    assert hf_accel.stats(model)["loop"] == "ragged"


def test_a_window_that_is_changed_in_use_counts() -> None:
    model, other = model_of("gpt_neo"), model_of("gpt_neo")
    hf_accel.patch(model, weights=None)
    assert alone(model, PROMPTS[0]) == alone(other, PROMPTS[0])
    for each in (model, other):
        bias = each.transformer.h[1].attn.attention.bias
        bias[..., :, :] = torch.ones_like(bias).tril() & torch.ones_like(bias).triu(-2)
    assert alone(model, PROMPTS[0]) == alone(other, PROMPTS[0])
    assert hf_accel.stats(model)["loop"] == "ragged"
    for each in (model, other):
        each.transformer.h[1].attn.attention.bias[..., 3] = False
    assert alone(model, PROMPTS[0]) == alone(other, PROMPTS[0])
    assert hf_accel.stats(model)["loop"].startswith("stock")


def test_a_bias_is_made_again_for_longer_sequences() -> None:
    model = model_of("bloom")
    known = operator_model(model)
    assert isinstance(known, OperatorModel) and known.bias is not None and not known.bias.by_distance
    longer = known.bias_for(model, 3000)
    assert longer is not None and longer.table.shape[1] >= 3000
    slopes = longer.table[:, 1:2]
    torch.testing.assert_close(longer.table, slopes * torch.arange(longer.table.shape[1]))


def test_a_bias_that_ends_says_so() -> None:
    model = model_of("mpt")
    known = operator_model(model)
    assert isinstance(known, OperatorModel) and known.bias is not None and known.bias.by_distance
    assert known.bias_for(model, 200) is not None
    with pytest.raises(UnsupportedError, match="is for 200 tokens, and a sequence has 201"):
        known.bias_for(model, 201)


def test_a_table_of_positions_that_grows_in_transformers_loop() -> None:
    model = model_of("xglm")
    positions = model.model.embed_positions
    positions.make_weights(30, positions.embedding_dim, positions.padding_idx)
    other = copy.deepcopy(model)
    hf_accel.patch(model, weights=None)
    assert len(positions.weights) == 30, "a trial leaves it as it is"
    assert alone(model, PROMPTS[0][:5], 40) == alone(other, PROMPTS[0][:5], 40)
    assert hf_accel.stats(model)["loop"].startswith("stock")


def test_other_code_is_not_known() -> None:
    model = model_of("gpt_neo_global")
    kind: Any = type(model.transformer.h[0].attn.attention)

    class OtherAttention(kind):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            weights = torch.softmax(query @ key.transpose(-1, -2) + attention_mask, dim=-1)
            return weights @ value * 1.01, weights

    class SharperAttention(kind):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            weights = torch.softmax((query @ key.transpose(-1, -2) + attention_mask) ** 3, dim=-1)
            return weights @ value, weights

    class LongerAttention(kind):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            weights = torch.softmax(query @ key.transpose(-1, -2) / key.size(-2) + attention_mask, dim=-1)
            return weights @ value, weights

    assert isinstance(operator_model(model), OperatorModel)
    model.transformer.h[0].attn.attention.__class__ = LongerAttention  # known, and depends on columns
    assert isinstance(operator_model(model), str)
    model.transformer.h[0].attn.attention.__class__ = OtherAttention  # something else by what is known
    assert isinstance(operator_model(model), OperatorModel)
    model.transformer.h[1].attn.attention.__class__ = SharperAttention
    assert isinstance(operator_model(model), str)
    expected = alone(model, PROMPTS[0])
    hf_accel.patch(model, weights=None)
    assert alone(model, PROMPTS[0]) == expected
    assert hf_accel.stats(model)["loop"].startswith("stock")


def test_positions_that_count_no_padding_token_are_not_known() -> None:
    """A prompt may hold such a token, and pages have the position of each from the number of tokens before it."""
    torch.manual_seed(3)
    config = TrOCRConfig(**SIZES | DECODER, use_learned_position_embeddings=False)
    assert isinstance(operator_model(TrOCRForCausalLM(config).eval()), str)


def test_an_encoders_output_is_for_stock() -> None:
    model, ids = model_of("trocr"), torch.tensor(PROMPTS[:1])
    given = {"encoder_hidden_states": torch.randn(1, 5, 32), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **given)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, **given), expected)
    assert hf_accel.stats(model)["loop"].startswith("stock")


def test_a_window_in_the_models_masks_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt_neo_global")
    assert isinstance(operator_model(model), OperatorModel)

    def within_a_window(**given: Any) -> Tensor:
        given["config"] = copy.deepcopy(given["config"])
        given["config"].sliding_window = 50
        mask: Tensor = create_sliding_window_causal_mask(**given)
        return mask

    monkeypatch.setattr(modeling_gpt_neo, "create_causal_mask", within_a_window)
    assert isinstance(operator_model(model), str)


def test_a_model_whose_generated_tokens_see_padding() -> None:
    """As those of GIT do without an image: its pages hold no padding that they could see."""

    class SeesPadding(GPTNeoForCausalLM):
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
        ) -> Any:
            if attention_mask is not None and input_ids.shape[1] < attention_mask.shape[1]:
                attention_mask = torch.ones_like(attention_mask)
            return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)

    model = model_of("gpt_neo_global")
    assert isinstance(operator_model(model), OperatorModel)
    model.__class__ = SeesPadding
    assert isinstance(operator_model(model), str)


def test_scores_without_a_mask_are_not_known() -> None:
    """A pass may have one token of each sequence alone, where a mask would hide nothing."""
    model = hf_accel.patch(model_of("gpt_neo_global"), weights=None)
    for layer in model.transformer.h:
        attention = layer.attn.attention
        attention._attn = MethodType(without_mask, attention)
    alone(model, PROMPTS[0])
    assert hf_accel.stats(model)["loop"].startswith("stock")


def without_mask(module: Any, query: Tensor, key: Any, *given: Any) -> Any:
    weights = torch.softmax(torch.matmul(query, key.transpose(-1, -2)) / 2.0, dim=-1)
    return torch.matmul(weights, given[0]), weights


@pytest.mark.parametrize("kind", ["rembert", "megatron_bert"])
def test_a_model_that_sees_both_sides_is_known_as_one(kind: str) -> None:
    model = model_of(kind)
    config = copy.deepcopy(model.config)
    config.is_decoder = False
    model = type(model)(config).eval()
    assert isinstance(operator_model(model), str) and isinstance(operator_model(model, True), OperatorModel)
