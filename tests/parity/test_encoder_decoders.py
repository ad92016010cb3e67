"""Encoder-decoders run as others do: the encoder once a request, its keys and values in pages, the decoder ragged."""

from __future__ import annotations

import random
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin
from transformers.models.bart.modeling_bart import BartDecoderLayer
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

import hf_accel
from hf_accel import CacheConfig, Draft, Engine, SpeculativeConfig, UnsupportedError
from hf_accel.attention import AttentionSpec
from hf_accel.attention.hf import ATTENTION_NAME
from hf_accel.attention.hf.bias import STEP
from hf_accel.cache.hf import RaggedEncoderDecoderCache, TokensBefore
from hf_accel.cache.hf.cache_argument import CACHE_NAME
from hf_accel.errors import OutOfBlocksError
from hf_accel.fused.hf.layer_calls import LayerCalls, TracedForward
from hf_accel.fused.hf.operator_models import decoder_operators, with_tried
from hf_accel.models import reading_once
from hf_accel.patching.decoder_survey import decoder_refusal, tried_operators
from hf_accel.recognition.call_form import usual_pass
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.trace import Trace
from hf_accel.undo.state import FUSED, state_of

from ..selection import seeds, some_long
from .families import VOCABULARY
from .older import IS_OLDER, check_loop, skip_older_code
from .snapshot import snapshot
from .speculating import requests

WAIT, NEW_TOKENS = 60, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_position_embeddings": 160,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_attention_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}  # fmt: skip
SPEECH = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
SPEECH2 = {"input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "max_source_positions": 40}
SUPPRESSED = {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7, 8]}
GEMMA = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8,
         "sliding_window": 6}  # fmt: skip
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 16, "patch_size": 8}  # fmt: skip
OPERATORS = {
    "LED": {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "Mvp": {},
    "BigBirdPegasus": {"block_size": 2, "num_random_blocks": 1},
    "FSMT": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0},
    "Moonshine": {"hidden_size": 40, "intermediate_size": 48, "encoder_num_hidden_layers": 2, "num_attention_heads": 2,
                  "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 2, "num_key_value_heads": 2,
                  "pad_head_dim_to_multiple_of": 8},
    "SpeechT5": {"hidden_size": 32, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8),
                 "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
    "SwitchTransformers": {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 3,
                           "num_decoder_layers": 3},
}  # fmt: skip
SOUNDS = ("Moonshine", "SpeechT5")  # of samples
TEXT = ("Marian", "Bart", "MBart", "Pegasus", "M2M100", "Blenderbot", "T5", "UMT5", "T5Gemma", "T5Gemma2", "PegasusX",
        "Bert", "GPT2", "TrOCR", "LED", "Mvp", "BigBirdPegasus", "FSMT", "SwitchTransformers")  # fmt: skip
PAIRED = {
    "Bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    # Those below are not as wide as the encoder: its output is projected for them, or they take it as it is.
    "GPT2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
    "TrOCR": {
        "d_model": 24,
        "decoder_layers": 3,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "cross_attention_hidden_size": 32,
        "use_learned_position_embeddings": False,
        "pad_token_id": 0,
    },
}  # the decoders of an EncoderDecoderModel, behind BERT's encoder
RELATIVE = ("T5", "UMT5", "LongT5", "MT5", "SwitchTransformers")
IN_ONE_CALL = ("Marian", "Bart", "MBart", "Pegasus", "M2M100", "Blenderbot", "Whisper", "T5", "UMT5", "LED",
               "Moonshine")  # fmt: skip
HEADS = {"Marian": "MarianMTModel", "SpeechT5": "SpeechT5ForSpeechToText"}
LENGTHS = (9, 4, 17, 1, 12)
OLDER = {"UMT5": "SelfAttention' is not causal", "FSMT": "does not go through transformers' AttentionInterface"}


def model_of(kind: str, **other: Any) -> Any:
    torch.manual_seed(3)
    sizes = SIZES | (SPEECH | SUPPRESSED if kind == "Whisper" else T5 if kind in RELATIVE else {})
    sizes |= (SPEECH2 if kind == "Speech2Text" else {}) | OPERATORS.get(kind, {}) | other
    if kind.startswith("T5Gemma"):
        sizes = {name: sizes[name] for name in sizes if name.endswith("_token_id") or name == "vocab_size"} | other
        sizes |= {"encoder": GEMMA, "decoder": GEMMA, "tie_word_embeddings": False}
        if kind == "T5Gemma":  # older transformers takes sdpa, which does not cap
            sizes["attn_implementation"] = "eager"
    if kind == "T5Gemma2":
        decoder = GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        encoder = {"text_config": decoder, "vision_config": SMALL_VISION, "mm_tokens_per_image": 4}
        sizes |= {"encoder": encoder, "decoder": decoder, "eoi_token_index": 60, "image_token_index": 61}
    if kind in PAIRED:
        model = paired(kind)
    else:
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, HEADS.get(kind, f"{kind}ForConditionalGeneration"))(config).eval()
    model.generation_config.num_beams = 1  # FSMT's config says 5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.normal_(0, 0.3)
    if kind in OLDER:
        skip_older_code(model, OLDER[kind])
    return model


def paired(kind: str) -> Any:
    parts = [
        getattr(transformers, f"{name}Config")(**PAIRED[name], vocab_size=VOCABULARY, add_cross_attention=name == kind)
        for name in ("Bert", kind)
    ]
    if kind == "Bert":
        parts = [transformers.BertConfig(**PAIRED["Bert"], vocab_size=VOCABULARY) for _ in "ed"]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 2
    return transformers.EncoderDecoderModel(config=config).eval()


def reader_of_images(**other: Any) -> Any:
    """Make a VisionEncoderDecoderModel of ViT and TrOCR, as models that read handwriting are."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    parts = [
        transformers.ViTConfig(**sizes, image_size=16, patch_size=8),
        transformers.TrOCRConfig(**PAIRED["TrOCR"] | {"cross_attention_hidden_size": 16}, vocab_size=VOCABULARY),
    ]
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, None
    model = transformers.VisionEncoderDecoderModel(config=config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def prompts() -> list[list[int]]:
    numbers = random.Random(5)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def alone(model: Any, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
    """The tokens that generate() writes for one prompt."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, 1:].tolist()


@cache
def stocks_answers(kind: str, count: int) -> list[list[int]]:
    """What transformers' model of a kind writes for each of prompts()."""
    model = model_of(kind)
    return [alone(model, row, count) for row in prompts()]


@pytest.mark.parametrize("kind", some_long(TEXT, "Marian", "MBart", "Pegasus", "Mvp", "UMT5"))  # as Bart, and as T5
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    model, rows = model_of(kind), prompts()
    batch = padded(rows)
    expected = [alone(model, row) for row in rows]
    whole = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    assert [alone(model, row) for row in rows[1:3]] == expected[1:3]
    assert hf_accel.stats(model)["loop"] == "ragged"
    torch.testing.assert_close(model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False), whole)
    assert hf_accel.stats(model)["loop"] == "ragged"
    outputs = list(model.generate_batch(rows, max_new_tokens=NEW_TOKENS, do_sample=False).values())
    assert [output.generated_tokens for output in outputs] == expected
    assert [output.prompt_ids for output in outputs] == rows


def given_to(model: Any, kind: str) -> dict[str, Tensor]:
    """What five prompts are to a model of this kind."""
    if kind == "Whisper":
        return {"input_features": torch.randn(5, 8, 40)}
    if kind == "Speech2Text":
        mask = torch.arange(64) < torch.tensor([64, 40, 61, 64, 33])[:, None]
        return {"input_features": torch.randn(5, 64, 8), "attention_mask": mask.long()}
    if kind not in SOUNDS:
        return padded(prompts())
    mask = torch.ones(5, 1600, dtype=torch.long)
    mask[1, 900:] = 0
    return {"input_values": torch.randn(5, 1600), "attention_mask": mask}


CALLS: list[dict[str, Any]] = [
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    {"decoder_input_ids": torch.tensor([[2, 9, 0, 7]] * 5)},
    {"output_scores": True, "return_dict_in_generate": True},
    {"repetition_penalty": 1.5},
]


@pytest.mark.parametrize("kind", ["M2M100", "Whisper", "T5", "LED", "FSMT", *SOUNDS])
@pytest.mark.filterwarnings("ignore:generate\\(\\) runs transformers' own loop")
def test_other_calls_give_stocks_tokens(kind: str) -> None:
    model = model_of(kind, max_length=20)
    given = given_to(model, kind)

    def tokens(settings: dict[str, Any]) -> Any:
        torch.manual_seed(4)
        out = model.generate(**given, max_new_tokens=NEW_TOKENS, **settings)
        return getattr(out, "sequences", out)

    expected = [tokens(settings) for settings in CALLS]
    hf_accel.patch(model, weights=None)
    for settings, own in zip(CALLS, expected, strict=True):
        torch.testing.assert_close(tokens(settings), own, msg=lambda text, settings=settings: f"{settings}: {text}")


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache": CacheConfig(dtype="int8")}], ids=str)
def test_images_for_a_decoder_that_attends_by_operators(settings: dict[str, Any]) -> None:
    model, pixels = reader_of_images(), torch.randn(3, 3, 16, 16)
    before = [(type(module), *vars(module)) for module in model.modules()]
    cache = settings.get("cache")
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": settings.get("num_beams", 1)}
    expected = model.generate(pixels, **given)
    hf_accel.patch(model, weights=None, **({} if cache is None else {"cache": cache}))
    assert len(calls_of(model)) == 3
    if cache is not None:  # its numbers are rounded, and an image alone has the same ones
        expected = torch.cat([model.generate(each[None], **given) for each in pixels])
    torch.testing.assert_close(model.generate(pixels, **given), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert [(type(module), *vars(module)) for module in hf_accel.unpatch(model).modules()] == before


def test_sounds_for_a_decoder_of_its_own() -> None:
    """The encoder has a convolution with weight norm, which torch does not let copy, and makes its mask of frames."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_conv_pos_embeddings": 8}
    encoder = transformers.Wav2Vec2Config(
        **sizes, **convolutions, num_feat_extract_layers=2, num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    decoder = transformers.GPT2Config(**PAIRED["GPT2"], vocab_size=VOCABULARY)
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 2
    model, sounds = transformers.SpeechEncoderDecoderModel(config=config).eval(), torch.randn(3, 400)
    mask = torch.arange(400) < torch.tensor([[400], [250], [330]])
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    given = {"attention_mask": mask.long(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(sounds, **given)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(sounds, **given), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"
    with Engine(model) as engine:  # the model itself calls what it hears "inputs", and no processor does
        asked = [{"input_values": sounds[row, None], "attention_mask": mask[row, None].long()} for row in range(3)]
        answers = [engine.submit(each, max_new_tokens=NEW_TOKENS, temperature=0) for each in asked]
        found = [request.result(WAIT).tokens for request in answers]
        with pytest.raises(UnsupportedError, match="no 'input_values', which the encoder of SpeechEncoderDecoder"):
            engine.submit([5, 6, 7])
    assert [row[1 : 1 + len(tokens)] for row, tokens in zip(expected.tolist(), found, strict=True)] == found


@pytest.mark.parametrize("part", ["self_attn", "encoder_attn"])
@pytest.mark.parametrize("layer", [0, 2])  # the last one is not in the trial of the first layers
def test_operators_that_compute_something_else_stay_stock(part: str, layer: int) -> None:
    model, pixels = reader_of_images(), torch.randn(3, 3, 16, 16)
    attention = getattr(model.decoder.model.decoder.layers[layer], part)

    class Sharper(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(hidden_states, *args, **kwargs)
            return out * (kwargs[CACHE_NAME].get_seq_length() + 1), weights

    attention.__class__ = Sharper
    expected = model.generate(pixels, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(pixels, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
    assert hf_accel.stats(model)["loop"].startswith("stock")


@pytest.mark.parametrize("layer", [0, 2])
def test_joined_keys_of_code_that_computes_something_else_stay_stock(layer: int) -> None:
    model, batch = model_of("T5Gemma2"), padded(prompts())
    attention = model.model.decoder.layers[layer].self_attn

    class Louder(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, *weights = super().forward(hidden_states, *args, **kwargs)
            return out * hidden_states.shape[1], *weights

    attention.__class__ = Louder
    given = {**batch, "decoder_input_ids": torch.tensor([[2, 9, 7]] * len(LENGTHS)), "max_new_tokens": NEW_TOKENS}
    expected = model.generate(**given, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_accel.HfAccelWarning)
        hf_accel.patch(model, weights=None)
        assert torch.equal(model.generate(**given, do_sample=False), expected)
    assert hf_accel.stats(model)["loop"] != "ragged"


def test_a_layer_with_other_settings_than_those_that_were_tried() -> None:
    """Settings may choose another branch of the code."""
    model, known = reader_of_images(), reading_once(tried_operators)
    assert known(model) is not None
    model.decoder.model.decoder.layers[2].encoder_attn.scaling = 0.3
    assert known(model) is None
    pixels = torch.randn(3, 3, 16, 16)
    expected = model.generate(pixels, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(pixels, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
    assert hf_accel.stats(model)["loop"].startswith("stock")


def test_a_module_in_another_place_of_its_layer_than_that_which_was_tried() -> None:
    """One trial does not stand for attention to tokens and for attention to an encoder's output."""
    model = reader_of_images()
    known = decoder_operators(model)
    assert known is not None
    spec = AttentionSpec(
        dtype=torch.float32, device_type="cpu", head_dim=6, value_dim=6, num_heads=4, num_kv_heads=4
    )  # fmt: skip
    for name, site in known.sites.items():
        site.spec = spec if name.endswith("self_attn") else None
        vars(model.get_submodule(name)).update(kdim=24, vdim=24)  # the same settings
    assert with_tried(model, known) is None


def test_experts_that_take_few_tokens_of_a_pass() -> None:
    """No pass of ours has more tokens, of which each would take the place of another one, of another request."""
    model, rows = model_of("SwitchTransformers", expert_capacity=3), prompts()
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    calls: list[dict[str, Any]] = [padded(rows[:3]), padded(rows), padded(rows[:1]) | {"num_beams": 3}]
    calls += [
        padded(rows[:2]) | {"decoder_input_ids": torch.tensor([[2, 9]] * 2)},
        padded(rows[:2]) | {"num_beams": 2},
    ]
    expected = [alone(model, row) for row in rows], [model.generate(**call, **settings) for call in calls]
    hf_accel.patch(model, weights=None)
    if IS_OLDER and state_of(model).generation.form.most_tokens is None:
        assert [alone(model, row) for row in rows] == expected[0]
        for call, own in zip(calls, expected[1], strict=True):
            assert torch.equal(model.generate(**call, **settings), own)
            check_loop(model)
        pytest.skip("the experts of this older transformers leave no token out")
    with pytest.warns(hf_accel.HfAccelWarning, match="its experts leave out tokens where a pass has more than 3"):
        found = [(model.generate(**call, **settings), hf_accel.stats(model)["loop"] == "ragged") for call in calls]
    assert [is_ragged for _, is_ragged in found] == [True, False, True, False, False]
    assert all(torch.equal(tokens, own) for (tokens, _), own in zip(found, expected[1], strict=True))
    outputs = model.generate_batch(rows, **settings).values()
    assert [output.generated_tokens for output in outputs] == expected[0]
    with Engine(model, speculative="ngram") as engine:
        jobs = [engine.submit(row, max_new_tokens=NEW_TOKENS) for row in rows]
        assert [job.result(WAIT).tokens for job in jobs] == expected[0]
        with pytest.raises(UnsupportedError, match=r"decoder_input_ids of 4 tokens, of which .* take 3"):
            engine.submit({"input_ids": rows[0], "decoder_input_ids": [2, 5, 6, 7]})


def test_experts_that_leave_out_tokens_by_other_tokens_stay_stock() -> None:
    model = model_of("NllbMoe", num_experts=4, moe_eval_capacity_token_fraction=0.25, decoder_sparse_step=1)
    assert "leave out tokens by what other tokens" in (decoder_refusal(model) or "")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["Bart", "Whisper"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_dict_holds_what_stocks_does_but_the_cache(kind: str, beams: int) -> None:
    model = model_of(kind, max_length=20)
    given = {"input_features": torch.randn(5, 8, 40)} if kind == "Whisper" else padded(prompts())
    scores = {"output_scores": True, "output_logits": True} if beams > 1 and kind == "Bart" else {}
    settings = {"max_new_tokens": NEW_TOKENS, "num_beams": beams, "return_dict_in_generate": True, "do_sample": False}
    expected = model.generate(**given, **settings, **scores)
    hf_accel.patch(model, weights=None)
    actual = model.generate(**given, **settings, **scores)
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert type(actual) is type(expected)
    if kind == "Bart":  # Whisper's own generate() takes the cache apart
        assert {*actual} == {*expected} - {CACHE_NAME}
    for name in {*actual} - {CACHE_NAME}:
        torch.testing.assert_close(actual[name], expected[name], atol=2e-4, rtol=1e-4)


def test_rows_are_processed_by_their_own_prompts() -> None:
    """Blenderbot's config forbids the triples of the prompt."""
    numbers = random.Random(6)
    rows = [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in (80, 150, 110)]
    for settings in ({"encoder_no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 0.2}):
        model, batch = model_of("Bart"), padded(rows)
        settings |= {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        expected = model.generate(**batch, **settings)
        assert not torch.equal(expected, model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False))
        hf_accel.patch(model, weights=None)
        torch.testing.assert_close(model.generate(**batch, **settings), expected)
        assert hf_accel.stats(model)["loop"] == "ragged"
        model.generation_config.update(**settings)
        with Engine(model) as engine:
            answers = [engine.submit(row).result(WAIT).tokens for row in rows]
        outputs = [output.generated_tokens for output in model.generate_batch(rows).values()]
        assert answers == outputs
        assert [row[1 : 1 + len(answer)] for row, answer in zip(expected.tolist(), answers, strict=True)] == answers


# -- layers in one call ----------------------------------------------------------------------------------------------


def calls_of(model: Any) -> list[LayerCalls[Any]]:
    return [vars(module)[FUSED] for module in model.modules() if isinstance(module, TracedForward)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", IN_ONE_CALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoder_layer_is_one_call(kind: str, dtype: torch.dtype) -> None:
    """Also in the pass that computes keys of the encoder's output."""
    model, apart = (model_of(kind, max_length=20).to(dtype) for _ in range(2))
    given = {"input_features": torch.randn(5, 8, 40, dtype=dtype)} if kind == "Whisper" else padded(prompts())
    if kind == "Moonshine":
        given = {"input_values": torch.randn(5, 4000, dtype=dtype)}
    hf_accel.patch(model, weights=None)
    hf_accel.patch(apart, weights=None, fuse=False)
    assert len(calls_of(model)) == 3 and not calls_of(apart)
    for beams in (1, 3):
        settings = {"max_new_tokens": NEW_TOKENS, "num_beams": beams, "do_sample": False}
        actual, expected = model.generate(**given, **settings), apart.generate(**given, **settings)
        if dtype is torch.float32:
            torch.testing.assert_close(actual, expected)
        assert hf_accel.stats(model)["loop"] == "ragged"
    assert all(calls.programme is not None and calls.programme.source is not None for calls in calls_of(model))


@pytest.mark.parametrize(("kind", "name"), [("Marian", "layers.1.fc1"), ("T5", "block.1.layer.2.layer_norm")])
def test_a_layer_that_a_hook_sees_finds_what_calls_have_left(kind: str, name: str) -> None:
    """It finds the keys that a call has written, and the bias of positions that the first layer hands on."""
    model, batch = model_of(kind), padded(prompts())
    expected = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    inner, seen = model.get_decoder().get_submodule(name), list[int]()

    def watch(*args: Any) -> None:
        seen.append(1)

    def begin(*args: Any) -> None:  # from the second pass on
        if len(seen) == 0:
            seen.append(0)
        elif len(inner._forward_hooks) == 0:
            inner.register_forward_hook(watch)

    model.get_decoder().register_forward_pre_hook(begin)
    torch.testing.assert_close(model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
    assert sum(seen) > 3


@pytest.mark.parametrize("kind", ["Bart", "Moonshine"])  # Moonshine's config keeps some values under other names
def test_layers_are_traced_once_for_all_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, traced = model_of(kind, max_length=20), list[Any]()
    given, trace_layer = given_to(model, kind), Trace.decoder_layer

    def counted(self: Trace, layer: Any, *rest: Any) -> None:
        traced.append(layer)
        trace_layer(self, layer, *rest)

    monkeypatch.setattr(Trace, "decoder_layer", counted)
    hf_accel.patch(model, weights=None)
    for _ in range(2):
        traced.clear()
        model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert hf_accel.stats(model)["loop"] == "ragged"
    assert traced == []


class OddLayer(BartDecoderLayer):
    """It computes something else after the first pass."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Any = None, encoder_hidden_states: Any = None, **kwargs: Any
    ) -> Any:
        cache = kwargs.get(CACHE_NAME)
        if cache is not None and cache.is_updated.get(self.self_attn.layer_idx):
            hidden_states = hidden_states + hidden_states
        return BartDecoderLayer.forward(self, hidden_states, attention_mask, encoder_hidden_states, **kwargs)


def test_the_trace_of_a_layer_is_that_of_later_passes_too() -> None:
    layer = model_of("Bart").model.decoder.layers[1]

    def trace() -> Trace:
        trace = Trace(torch.float32, ATTENTION_NAME)
        trace.cache_class = RaggedEncoderDecoderCache
        trace.decoder_layer(layer, 32, usual_pass(BartDecoderLayer, has_encoder=True))
        return trace

    assert [operation.kind for operation in trace().operations].count("attend_source") == 1
    layer.__class__ = OddLayer
    with pytest.raises(UntraceableError, match="something else where the cache has keys"):
        trace()


def test_changes_of_a_bias_are_noticed() -> None:
    model, other, batch = model_of("T5"), model_of("T5"), padded(prompts())
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    hf_accel.patch(model, weights=None)
    first = model.generate(**batch, **given)
    for each in (model, other):
        with torch.no_grad():
            each.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(-20)
    expected = other.generate(**batch, **given)
    assert not torch.equal(first, expected)
    torch.testing.assert_close(model.generate(**batch, **given), expected)
    for each in (model, other):
        each.decoder.block[1].layer[0].SelfAttention.scaling = 0.3
    torch.testing.assert_close(model.generate(**batch, **given), other.generate(**batch, **given))


def test_changes_of_a_cross_attention_are_noticed() -> None:
    model, other = model_of("Bart"), model_of("Bart")
    hf_accel.patch(model, weights=None)
    batch = padded(prompts())
    model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    for own, others in zip(model.model.decoder.layers, other.model.decoder.layers, strict=True):
        torch.nn.init.normal_(others.encoder_attn.k_proj.weight)
        own.encoder_attn.k_proj.weight = others.encoder_attn.k_proj.weight
        own.encoder_attn.scaling = others.encoder_attn.scaling = 0.7
    expected = other.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    torch.testing.assert_close(model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False), expected)


def test_whisper_runs_ragged_with_its_own_processors() -> None:
    model, features = model_of("Whisper", max_length=20), torch.randn(4, 8, 40)
    expected = model.generate(input_features=features, do_sample=False)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(input_features=features, do_sample=False), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


def row_of(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """What a processor makes for one of several prompts by itself, without columns that are padding alone."""
    alone = {name: value[row : row + 1] for name, value in batch.items()}
    count = int(alone["attention_mask"].sum()) if "attention_mask" in alone else None
    return {name: value[:, :count] if value.ndim == 2 else value for name, value in alone.items()}


@pytest.mark.parametrize("kind", ["Whisper", "Speech2Text", *SOUNDS, "LED"])
def test_an_engine_takes_what_a_processor_makes(kind: str) -> None:
    """Sounds, what the decoder begins with, and what the encoder reads besides token ids."""
    model = model_of(kind, max_length=20)
    batch = given_to(model, kind)
    if kind == "LED":
        batch["global_attention_mask"] = torch.zeros_like(batch["input_ids"])
        batch["global_attention_mask"][:, 0] = 1
    given = [row_of(batch, row) for row in range(5)]
    given[3] |= {"decoder_input_ids": torch.tensor([[2, 9, 7]])}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    stock = GenerationMixin.generate  # Whisper's own writes more tokens ahead of the text
    expected = [stock(model, **each, **settings)[0].tolist() for each in given]
    whole = model.generate(**batch, **settings)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(**batch, **settings), whole)
    assert hf_accel.stats(model)["loop"] == "ragged"
    with Engine(model) as engine:
        jobs = [engine.submit(each, max_new_tokens=NEW_TOKENS, temperature=0) for each in given]
        found = [job.result(WAIT).tokens for job in jobs]
    starts = [1, 1, 1, 3, 1]
    assert found == [tokens[start:] for tokens, start in zip(expected, starts, strict=True)]
    outputs = model.generate_batch(given, **settings).values()
    assert [output.generated_tokens for output in outputs] == found


def test_an_engine_says_what_an_encoder_needs() -> None:
    model = model_of("Whisper", max_length=20)
    hf_accel.patch(model, weights=None)
    features = torch.randn(2, 8, 40)
    with Engine(model) as engine:
        with pytest.raises(UnsupportedError, match="no 'input_features', which the encoder of Whisper"):
            engine.submit([5, 6, 7])
        with pytest.raises(UnsupportedError, match="input_features has 2 rows"):
            engine.submit({"input_features": features}).result(WAIT)
        with pytest.raises(UnsupportedError, match="the encoder of WhisperForConditionalGeneration takes no 'labels'"):
            engine.submit({"input_features": features[:1], "labels": torch.tensor([[5]])})
        with pytest.raises(UnsupportedError, match="decoder_input_ids of 2 tokens"):
            engine.submit({"input_features": features[:1], "decoder_input_ids": [2, 0]})


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of recomputed tokens, samples and preemption change no request's tokens."""
    numbers = random.Random(seed)
    model = model_of(TEXT[seed + 2])
    rows = requests(7, longest=30, seed=seed, shared=0)
    lengths = [numbers.randint(1, 24) for _ in rows]
    expected = [alone(model, row, count) for row, count in zip(rows, lengths, strict=True)]
    cache = CacheConfig(block_size=numbers.choice([1, 4, 16]), max_tokens=numbers.choice([64, 96]))
    hf_accel.patch(model, weights=None, cache=cache)
    with Engine(model, token_budget=numbers.choice([None, 5, 64])) as engine:
        jobs = [engine.submit(row, max_new_tokens=count) for row, count in zip(rows, lengths, strict=True)]
        engine.submit(rows[0], max_new_tokens=40).cancel()
        assert [job.result(WAIT).tokens for job in jobs] == expected
        samples = engine.submit(rows[1], max_new_tokens=lengths[1], n=3)
        assert [sample.tokens for sample in samples.results(WAIT)] == [expected[1]] * 3
    assert engine.stats["blocks_used"] == 0


def test_preempted_requests_read_the_encoders_output_again() -> None:
    model, rows = model_of("Bart"), requests(6, longest=20, seed=2, shared=0)
    expected = [alone(model, row, 40) for row in rows]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=4, max_tokens=64))
    with Engine(model) as engine:
        jobs = [engine.submit(row, max_new_tokens=40) for row in rows]
        assert [job.result(WAIT).tokens for job in jobs] == expected
        assert engine.stats["preemptions"] > 0
        with pytest.raises(OutOfBlocksError, match="encoder's output has 65 rows, and the cache holds 64"):
            engine.submit([5] * 65, max_new_tokens=2).result(WAIT)


def test_int8_tokens_do_not_depend_on_other_requests() -> None:
    model, rows = model_of("Marian", d_model=64), prompts()
    hf_accel.patch(model, weights="int8", deterministic=True)
    expected = [alone(model, row) for row in rows]
    outputs = model.generate_batch(rows, max_new_tokens=NEW_TOKENS, do_sample=False).values()
    assert [output.generated_tokens for output in outputs] == expected
    out = model.generate(**padded(rows), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert out[:, 1:].tolist() == expected


def test_int8_pages_hold_the_encoders_output() -> None:
    model = model_of("Bart")
    hf_accel.patch(model, weights=None, cache=CacheConfig(dtype="int8"))
    rows = prompts()
    expected = [alone(model, row) for row in rows]
    outputs = model.generate_batch(rows, max_new_tokens=NEW_TOKENS, do_sample=False).values()
    assert [output.generated_tokens for output in outputs] == expected


class WholePositions(MarianSinusoidalPositionalEmbedding):
    """Positions that are the same for all tokens of a pass."""

    def forward(self, shape: Any, past_key_values_length: Any = 0, position_ids: Tensor | None = None) -> Tensor:
        assert position_ids is not None
        return super().forward(shape, past_key_values_length, position_ids.max().expand_as(position_ids))


def test_a_decoder_that_counts_otherwise_stays_stock() -> None:
    model = model_of("Marian")
    model.model.decoder.embed_positions.__class__ = WholePositions
    batch = padded(prompts())
    expected = model.generate(**batch, max_new_tokens=NEW_TOKENS)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(**batch, max_new_tokens=NEW_TOKENS), expected)
    assert "computes something else over pages" in hf_accel.stats(model)["loop"]
    with pytest.raises(UnsupportedError, match="computes something else over pages"):
        Engine(model)


def test_padding_that_a_decoder_writes_counts_as_in_stock() -> None:
    """M2M100's positions leave padding out, in a pass over several sequences too."""
    model, batch = model_of("M2M100"), padded(prompts())
    settings = {"max_new_tokens": NEW_TOKENS, "suppress_tokens": [i for i in range(1, VOCABULARY) if i not in (5, 9)]}
    expected = model.generate(**batch, **settings)
    assert (expected[:, 1:-1] == 0).any() and (expected[:, 1:] != 0).any()
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(**batch, **settings), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


def test_a_count_of_tokens_that_are_no_padding_begins_anywhere() -> None:
    """M2M100 counts from 0, and FSMT from the id that pads, at which padding stands too."""
    places = torch.tensor([4, 7, 0, 9])
    for pads, own in ([0, 0, 0, 0], 1), ([0, 1, 0, 0], 1), ([1, 0, 0, 1], 1), ([1, 1, 0, 0], 1):
        shown = 1 - torch.tensor([pads])
        plain, shifted = shown.cumsum(1), shown.cumsum(1) * shown + own
        before = TokensBefore(places, first_counts=not pads[0])
        assert torch.equal((plain + before)[shown == 1], (1 + places[None])[shown == 1])
        assert torch.equal(shifted + before, shown + own + places)


def test_a_table_of_biases_grows() -> None:
    model, rows = model_of("T5", num_layers=1, decoder_layers=1), prompts()[:1]
    expected = alone(model, rows[0], STEP + 3)
    hf_accel.patch(model, weights=None)
    assert alone(model, rows[0], STEP + 3) == expected


def test_a_mask_with_holes_and_one_that_hides_all() -> None:
    model, batch = model_of("Bart"), padded([[5] * 9, [6] * 9])
    batch["attention_mask"][0, [0, 4]] = 0
    expected = model.generate(**batch, max_new_tokens=NEW_TOKENS)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(model.generate(**batch, max_new_tokens=NEW_TOKENS), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"
    batch["attention_mask"][0] = 0
    with pytest.warns(hf_accel.HfAccelWarning, match="hides all of the encoder's output"):
        model.generate(**batch, max_new_tokens=2)


def test_unpatch_leaves_nothing() -> None:
    model, given = model_of("M2M100"), {**padded(prompts()), "decoder_input_ids": torch.tensor([[2, 5]] * 5)}
    before = snapshot(model, given)
    hf_accel.patch(model, weights=None)
    model.generate(**padded(prompts()), max_new_tokens=4)
    hf_accel.unpatch(model)
    assert snapshot(model, given) == before


class Wrong(hf_accel.Drafter):
    """Proposes tokens that are mostly wrong."""

    name = "wrong"

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        return [
            Draft([(3 * s.tokens[-1] + i) % 7 + 3 for i in range(n)]) for s, n in zip(sequences, lengths, strict=True)
        ]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["Bart", "M2M100", "T5", "T5Gemma"])
@pytest.mark.parametrize("drafter", ["ngram", Wrong()], ids=["ngram", "wrong"])
def test_drafts_change_no_tokens(kind: str, drafter: Any) -> None:
    model, rows, expected = model_of(kind), prompts(), stocks_answers(kind, 16)
    drafts = SpeculativeConfig(drafter=drafter, num_draft=3)
    hf_accel.patch(model, weights=None, speculative=drafts)
    out = model.generate(**padded(rows), max_new_tokens=16, do_sample=False)
    for row, tokens in zip(out[:, 1:].tolist(), expected, strict=True):
        assert row[: len(tokens)] == tokens
    assert hf_accel.stats(model)["loop"] == "ragged" and hf_accel.stats(model)["drafted"] > 0
    with Engine(model, speculative=drafts, token_budget=9) as engine:
        jobs = [engine.submit(row, max_new_tokens=16) for row in rows]
        assert [job.result(WAIT).tokens for job in jobs] == expected


def test_no_model_drafts() -> None:
    with pytest.raises(UnsupportedError, match="no model drafts for an encoder-decoder"):
        hf_accel.patch(model_of("Bart"), weights=None, speculative="self-int4")
    model = model_of("Bart")
    hf_accel.patch(model, weights=None)
    with pytest.raises(UnsupportedError, match="no model drafts for an encoder-decoder"):
        model.generate(**padded(prompts()), speculative=model_of("Bart"), max_new_tokens=4)
