"""Prompts with images, sounds and embeddings run as text does: in ragged passes, with the tokens of stock's loop."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, SpeculativeConfig, UnsupportedError
from hf_accel.generation.hf.prompts import prompt_inputs

from ..families.features import MEDIA
from ..families.media import alone_with_medium, media_prompts
from ..families.models import build, family
from ..selection import seeds
from .older import by_stock_alone, skip_older_code
from .speculating import OracleDrafter

LLAVA, QWEN, GEMMA, PALI, STACK, LAYERED, UNIFIED = (
    f"{name}ForConditionalGeneration"
    for name in ("Llava", "Qwen2VL", "Gemma3", "PaliGemma", "Qwen3VL", "Gemma4", "Gemma4Unified")
)
OTHERS = [
    f"{name}ForConditionalGeneration"
    for name in (
        "LlavaNext", "Idefics3", "InternVL", "Mistral3", "Glm4v", "Granite4Vision", "Ernie4_5_VLMoe", "GotOcr2",
        "HyperCLOVAXVisionV2", "MiniCPMV4_7", "Chameleon",
    )
]  # fmt: skip
# Its decoder puts images in its embeddings by itself, marks them, and counts the tokens that do not pad.
COUNTED = "Kosmos2_5ForConditionalGeneration"
GATES = ("cross_attn_attn_gate", "cross_attn_mlp_gate")  # closed as long as a model is not trained
PARTS = [f"{name}ForConditionalGeneration" for name in ("Blip2", "Kosmos2")]  # whose generate() calls that of a part
LOUDER = {LAYERED: "model.embed_vision"} | dict.fromkeys((COUNTED, PARTS[1]), "image_to_text_projection")
FAINT = ("MiniCPMV4_7ForConditionalGeneration",)  # an image is one token, which changes the logits alone
TIED = (GEMMA, PALI, LAYERED, UNIFIED, COUNTED, PARTS[1])
# The decoder of the last two counts positions by itself, and one of them adds noise to what it hears.
VOXTRAL, HEARING, NOISY = (
    f"{name}ForConditionalGeneration" for name in ("Voxtral", "MossTranscribeDiarize", "VibeVoiceAsr")
)
SOUNDS = [VOXTRAL, HEARING, *(f"{name}ForConditionalGeneration" for name in ("Qwen2Audio", "GraniteSpeech"))]
CROSSED = "MllamaForConditionalGeneration"  # some of its layers attend to images, and to no tokens
CLASSES = [LLAVA, QWEN, GEMMA, PALI, STACK, LAYERED, UNIFIED, CROSSED, COUNTED, *OTHERS, *SOUNDS]
# Their encoders, or the code around their decoders, make the mask of what the decoder attends to.
ENCODING = [
    f"{name}ForConditionalGeneration"
    for name in ("Speech2Text", "Canary", "Whisper", "PPFormulaNet", "Udop", "Pix2Struct")
]
NEW_TOKENS = 8
WAIT = 60
_answers: dict[tuple[Any, ...], list[int]] = {}  # of stock's models


def fresh(name: str) -> Any:
    with by_stock_alone():  # there may be no such class
        model: Any = build(family(name), gain=2.0)
    if name in TIED:  # its tied and scaled embedding would only repeat the last token
        head = model.get_output_embeddings()
        numbers = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(5))
        head.weight = torch.nn.Parameter(numbers)
    for parameter in (each for key, each in model.named_parameters() if key.endswith(GATES)):
        parameter.data.fill_(1.0)
    for parameter in model.get_submodule(LOUDER[name]).parameters() if name in LOUDER else ():
        parameter.data.mul_(16)  # so that the image changes tokens, and not only logits
    return model


@cache
def stock(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model, and a batch: rows 0 and 1 say the same about different images, row 2 is shorter."""
    model = fresh(name)
    with by_stock_alone():
        given = media_prompts(model, MEDIA[family(name).kind])
    if name == CROSSED:
        skip_older_code(model, "MllamaTextModel gives its layers more than hidden states", given=given)
    return model, given


def patched(name: str, **settings: Any) -> Any:
    return hf_accel.patch(fresh(name), weights=None, **settings)


@cache
def kept(name: str) -> Any:
    """A patched model that no test changes."""
    return patched(name)


def prompt(name: str, row: int, words: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """What a processor makes for one row: without padding, and with more words behind it."""
    given = dict(alone_with_medium(stock(name)[1], row))
    tokens = given.pop("attention_mask")[0].bool()
    for key, value in given.items():
        if value.shape == (1, len(tokens)):
            more = torch.tensor([words]) if key == "input_ids" else torch.zeros(1, len(words), dtype=torch.int64)
            given[key] = torch.cat([value[:, tokens], more.to(torch.int64)], dim=1)
    return given


def expected(name: str, given: dict[str, Tensor], count: int = NEW_TOKENS) -> list[int]:
    """The tokens of stock's loop."""
    key = name, count, tuple((key, value.numpy().tobytes()) for key, value in given.items())
    if key not in _answers:
        _answers[key] = _expected(name, given, count)
    return _answers[key]


def _expected(name: str, given: dict[str, Tensor], count: int) -> list[int]:
    mask = torch.ones_like(given["input_ids"])
    out = stock(name)[0].generate(**given, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[0, mask.shape[1] :].tolist()


def loop(model: Any) -> str:
    return str(hf_accel.stats(model)["loop"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*CLASSES, NOISY, *ENCODING])
@pytest.mark.parametrize("settings", [{}, {"num_return_sequences": 2, "do_sample": True, "top_k": 5}], ids=str)
def test_a_padded_batch(name: str, settings: dict[str, Any]) -> None:
    model, given = kept(name), stock(name)[1]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings}
    torch.manual_seed(0)
    with by_stock_alone():
        expected = stock(name)[0].generate(**given, **settings)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**given, **settings), expected)
    assert loop(model) == "ragged"
    assert settings["do_sample"] or name in FAINT or not torch.equal(expected[0], expected[1])  # the image matters


@pytest.mark.parametrize("name", CLASSES)
def test_requests_together_with_and_without_media(name: str) -> None:
    """The last two are texts, as a list and as a dict."""
    prompts = [prompt(name, row) for row in (0, 1, 2, 0)] + [{"input_ids": torch.tensor([[5, 9, 7, 11, 6]])}]
    wanted = [expected(name, each) for each in prompts]
    found = kept(name).generate_batch([*prompts, [5, 9, 7, 11, 6]], max_new_tokens=NEW_TOKENS, do_sample=False)
    assert [output.error for output in found.values()] == [None] * 6
    assert [output.generated_tokens for output in found.values()] == [*wanted, wanted[-1]]
    assert wanted[0] != wanted[1] or name in FAINT


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in (LLAVA, QWEN, GEMMA)),  # test_programmes plays one
        *(PALI, STACK, LAYERED, UNIFIED, CROSSED, COUNTED, VOXTRAL, HEARING),
    ],
)
@pytest.mark.parametrize("seed", seeds(1, 40))
def test_random_programmes_of_requests(name: str, seed: int) -> None:
    """Chunks of prompts, preemption, shared prefixes, samples and drafts change no request's tokens."""
    numbers = random.Random(seed)
    prompts = []
    for _ in range(7):
        words = tuple(numbers.choices(range(3, 30), k=numbers.randint(0, 12)))
        text = {"input_ids": torch.tensor([numbers.choices(range(3, 30), k=numbers.randint(1, 20))])}
        prompts.append(numbers.choice([text, *(prompt(name, row, words) for row in (0, 1, 1, 2))]))
    lengths = [numbers.randint(1, 14) for _ in prompts]
    wanted = [expected(name, *pair) for pair in zip(prompts, lengths, strict=True)]
    ids = [each["input_ids"][0].tolist() for each in prompts]
    model = patched(name, cache=CacheConfig(block_size=numbers.choice([1, 4]), max_tokens=numbers.choice([68, 400])))
    drafter = OracleDrafter(ids, wanted, right=numbers.choice([0, 2, 5])) if seed % 2 and name != LLAVA else "ngram"
    speculative = SpeculativeConfig(drafter=drafter, num_draft=3) if seed % 2 else None
    with Engine(model, token_budget=numbers.choice([2, 7, 64]), speculative=speculative) as engine:
        jobs = [engine.submit(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        engine.submit(prompts[0], max_new_tokens=8).cancel()
        assert [job.result(WAIT).tokens for job in jobs] == wanted
        samples = engine.submit(prompts[1], max_new_tokens=lengths[1], n=3)
        assert [sample.tokens for sample in samples.results(WAIT)] == [wanted[1]] * 3
    assert engine.stats["blocks_used"] == 0


@pytest.mark.parametrize("name", [LLAVA, "Glm4vForConditionalGeneration", STACK, VOXTRAL, HEARING])
def test_prompts_share_pages_as_far_as_words_and_media_are_equal(name: str) -> None:
    """The same words behind another image or sound share nothing but what stands before it."""
    model = patched(name, cache=CacheConfig(block_size=1))
    first, second = prompt(name, 0), prompt(name, 1)
    assert torch.equal(first["input_ids"], second["input_ids"])
    ids = first["input_ids"][0].tolist()
    medium = MEDIA[family(name).kind]
    token = next(t for key in medium.tokens if (t := getattr(model.config, key, None)) is not None)
    before, length = ids.index(token), len(ids)
    numbers = next(key for key in first if key in ("pixel_values", "input_features"))
    with Engine(model) as engine:
        engine.submit({**first, numbers: -first[numbers]}, max_new_tokens=2).result(WAIT)  # it is traced
        engine.session.pages.clear_prefixes()
        hits = [engine.stats["prefix_hits"]]
        for given in (first, second, first, second):
            engine.submit(given, max_new_tokens=2).result(WAIT)
            hits.append(engine.stats["prefix_hits"])
    found = [now - last for last, now in itertools.pairwise(hits)]
    assert found == [0, before, length - 1, length - 1]


def test_tokens_that_pad_are_not_counted() -> None:
    """Kosmos counts the tokens of a prompt without those that pad, and of later ones all; one that pads has a place of
    its own, also where it is written.
    """
    (plain, _), model = stock(COUNTED), patched(COUNTED, cache=CacheConfig(block_size=2))
    ids = torch.tensor([[0, 0, 5, 9, 0, 7], [11, 0, 3, 5, 0, 9], [0, 0, 0, 0, 5, 0]])
    written = 0
    for hidden, bias in ((0, 8.0), (1, 14.0), (2, 20.0)):
        mask = (torch.arange(6) >= torch.tensor([[hidden], [0], [2 * hidden]])).long()
        settings = {"max_new_tokens": 12, "do_sample": False, "sequence_bias": [[[0], bias]]}
        with by_stock_alone():  # older transformers biases no token 0
            wanted = plain.generate(input_ids=ids, attention_mask=mask, **settings)
        assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **settings), wanted)
        assert loop(model) == "ragged"
        written += int((wanted[:, 6:-1] == 0).sum())
    assert written > 10
    mask = (torch.arange(6) >= torch.tensor([[2], [0]])).long()
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    short, whole = prompt_inputs(model, torch.tensor([[0, 0, 5, 9, 7, 3], [5, 9, 7, 3, 8, 4]]), mask, given)
    assert short is not None and whole is not None and short.positions is not None
    assert short.positions.tolist() == [[1, 2, 3, 4]] and short.shifts == (3,) and whole.shifts == (1,)
    assert not {*short.contents} & {*whole.contents}  # tokens behind them stand elsewhere: they share nothing
    rows = [ids[0].tolist(), [*ids[0].tolist(), 0], ids[1].tolist()]
    found = model.generate_batch(rows, max_new_tokens=NEW_TOKENS, do_sample=False).values()
    texts = [expected(COUNTED, {"input_ids": torch.tensor([row])}) for row in rows]
    assert [output.generated_tokens for output in found] == texts


def test_an_engine_reads_patches() -> None:
    """Pix2Struct's settings leave out a cache, which a call is given all the same: no token changes."""
    name = "Pix2StructForConditionalGeneration"
    (plain, given), model = stock(name), patched(name)
    rows = [alone_with_medium(given, row) for row in range(3)]
    wanted = [plain.generate(**row, max_new_tokens=NEW_TOKENS, do_sample=False)[0, 1:].tolist() for row in rows]
    assert plain.generation_config.use_cache is False and model.generation_config.use_cache is False
    with Engine(model) as engine:
        jobs = [engine.submit(row, max_new_tokens=NEW_TOKENS, temperature=0) for row in rows]
        assert [job.result(WAIT).tokens for job in jobs] == wanted
    found = model.generate_batch(rows, max_new_tokens=NEW_TOKENS, do_sample=False).values()
    assert [output.generated_tokens for output in found] == wanted


def test_images_among_rows() -> None:
    """Two images in one row, one in the next, and none in the last."""
    model, given = stock(LLAVA)[0], stock(LLAVA)[1]
    ids = prompt(LLAVA, 0)["input_ids"][0]
    rows = [torch.cat([ids, ids]), ids, torch.tensor([5, 9, 7])]
    columns = max(map(len, rows))
    padded = torch.stack([torch.cat([torch.zeros(columns - len(row), dtype=torch.int64), row]) for row in rows])
    mask = torch.arange(columns) >= columns - torch.tensor([[len(row)] for row in rows])
    inputs = {"input_ids": padded, "attention_mask": mask.long(), "pixel_values": given["pixel_values"]}
    ours = patched(LLAVA)
    results = [each.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False) for each in (model, ours)]
    assert torch.equal(*results)
    assert loop(ours) == "ragged"


@pytest.mark.parametrize(("name", "tower"), [(LLAVA, "vision_tower"), (VOXTRAL, "audio_tower")])
def test_the_tower_runs_once_for_each_call(name: str, tower: str) -> None:
    model, given = patched(name), stock(name)[1]
    calls = []
    getattr(model.model, tower).register_forward_pre_hook(lambda module, args: calls.append(1))
    model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert loop(model) == "ragged" and len(calls) == 1
    with Engine(model) as engine:
        engine.submit(prompt(name, 0), max_new_tokens=4, n=3).results(WAIT)
    assert len(calls) == 2


@pytest.mark.parametrize("name", [QWEN, VOXTRAL, HEARING])
def test_int8_answers_a_request_alone_as_among_others(name: str) -> None:
    model = hf_accel.patch(fresh(name))
    prompts = [prompt(name, row, (7, 9, 11)[:row]) for row in (0, 1, 2)]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    alone = [next(iter(model.generate_batch([each], **settings).values())).generated_tokens for each in prompts]
    together = [output.generated_tokens for output in model.generate_batch(prompts, **settings).values()]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_a_sound_that_fills_a_part_of_its_spectrogram() -> None:
    """Sounds of several lengths stand for as many tokens as they fill, and for one window more than one each."""
    name = "Qwen2AudioForConditionalGeneration"
    model, ours = stock(name)[0], patched(name)
    generator, lengths = torch.Generator().manual_seed(4), (128, 60, 21)
    counts = [((length - 1) // 2 + 1 - 2) // 2 + 1 for length in lengths]
    rows = [[5, *[120] * counts[0], 7, *[120] * counts[1], 9], [6, *[120] * counts[2], 8]]
    columns = len(rows[0])
    padded = torch.tensor([[0] * (columns - len(row)) + row for row in rows])
    inputs = {
        "input_ids": padded,
        "attention_mask": (padded != 0).long(),
        "input_features": torch.randn(3, 16, 128, generator=generator),
        "feature_attention_mask": (torch.arange(128) < torch.tensor(lengths)[:, None]).long(),
    }
    results = [each.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False) for each in (model, ours)]
    assert torch.equal(*results)
    assert loop(ours) == "ragged"


def test_adapters_that_a_sound_turns_on() -> None:
    """generate() turns them on and off as stock's does; an Engine serves both kinds of prompts, and cannot."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    name, models = "GraniteSpeechForConditionalGeneration", []
    for _ in range(2):
        models.append(fresh(name))
        torch.manual_seed(3)
        models[-1].add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    given, ours = stock(name)[1], hf_accel.patch(models[1].eval(), weights=None)
    text = {"input_ids": torch.tensor([[5, 9, 7, 11, 6]])}
    for each in (given, text, given):
        results = [model.generate(**each, max_new_tokens=4, do_sample=False) for model in (models[0].eval(), ours)]
        assert torch.equal(*results)
        assert loop(ours) == "ragged"
    with pytest.raises(UnsupportedError, match="turns its adapters on and off"):
        Engine(ours)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")  # it is what is tested
@pytest.mark.parametrize("name", [LLAVA, "LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.4}, {"do_sample": True, "top_k": 4, "num_return_sequences": 2}, {"with_ids": True}],
    ids=str,
)
def test_embeddings_as_prompts(name: str, rows: int, settings: dict[str, Any]) -> None:
    model = fresh(name)
    ids = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(1))[:rows]
    embeddings = model.get_input_embeddings()(ids).detach()
    embeddings = embeddings + embeddings.std() * torch.randn(
        embeddings.shape, generator=torch.Generator().manual_seed(2)
    )
    mask = torch.ones_like(ids)
    mask[rows - 1, :2] = int(rows == 1)
    given = {"inputs_embeds": embeddings, "attention_mask": mask, "do_sample": False, **settings}
    if given.pop("with_ids", False):
        given["input_ids"] = ids
    ours = patched(name)
    results = []
    for each in (model, ours):
        torch.manual_seed(0)
        results.append(each.generate(**given, max_new_tokens=NEW_TOKENS))
    assert torch.equal(*results)
    assert loop(ours) == "ragged"


@pytest.mark.parametrize("name", [LLAVA, QWEN])
def test_a_conversation_goes_on_over_its_cache(name: str) -> None:
    """The second turn has words alone; the cache holds the image."""
    results = []
    for model in (stock(name)[0], patched(name)):
        given = prompt(name, 0)
        past: Any = {} if model is stock(name)[0] else {"past_key_values": PagedCache(model.config)}
        out = model.generate(**given, **past, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        ids = torch.cat([out.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        more = {"past_key_values": out.past_key_values, "attention_mask": torch.ones_like(ids)}
        results.append(model.generate(ids, **more, max_new_tokens=NEW_TOKENS, do_sample=False))
    assert torch.equal(*results)


def test_what_is_not_known_goes_to_stocks_loop() -> None:
    """A hook on the model may change what it is given."""
    plain, model, given = fresh(LLAVA), patched(LLAVA), stock(LLAVA)[1]
    before = plain.generate(**given, max_new_tokens=4)

    def other_words(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ids = kwargs["input_ids"]
        return args, kwargs | {"input_ids": torch.where(ids < 30, (ids + 7) % 30, ids)}

    hooks = [each.model.register_forward_pre_hook(other_words, with_kwargs=True) for each in (plain, model)]
    wanted = plain.generate(**given, max_new_tokens=4)
    assert not torch.equal(wanted, before)
    with pytest.warns(hf_accel.HfAccelWarning, match="a hook on a LlavaModel"):
        assert torch.equal(model.generate(**given, max_new_tokens=4), wanted)
    hooks[1].remove()
    assert torch.equal(model.generate(**given, max_new_tokens=4), before)
    assert loop(model) == "ragged"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 1]]}, "leaves tokens out"),
        ({"input_ids": [[1, 2]], "pixel_valeus": [1]}, "'pixel_valeus', which LlavaForConditionalGeneration does not"),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids"),
        ({"pixel_values": [1]}, "is a dict"),
    ],
)
def test_prompts_that_say_nothing_clear(given: dict[str, Any], message: str) -> None:
    with Engine(patched(LLAVA)) as engine, pytest.raises(UnsupportedError, match=message):
        engine.submit(given)


def test_another_number_of_images_than_the_words_say_is_an_error_of_the_request() -> None:
    given = prompt(LLAVA, 0)
    wrong = {**given, "pixel_values": given["pixel_values"].repeat(2, 1, 1, 1)}
    with Engine(patched(LLAVA)) as engine:
        bad, good = engine.submit(wrong, max_new_tokens=4), engine.submit(given, max_new_tokens=4)
        with pytest.raises(UnsupportedError, match=r"refuses this prompt: .*do not match"):
            bad.result(WAIT)
        assert good.result(WAIT).tokens == expected(LLAVA, given, 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "part"),
    [("Blip2ForConditionalGeneration", "language_model"), ("Kosmos2ForConditionalGeneration", "text_model")],
)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=str)
def test_a_model_whose_generate_calls_that_of_a_part(name: str, part: str, settings: dict[str, Any]) -> None:
    """BLIP-2 hands embeddings to the generate() of its language model, and Kosmos-2 what its projection has made of an
    image: that runs ragged; and all is taken back.
    """
    (plain, given), model = stock(name), patched(name)
    wanted = plain.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False, **settings)
    assert torch.equal(model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False, **settings), wanted)
    assert loop(model) == "ragged" and hf_accel.stats(model)["new_tokens"] == wanted.shape[0] * NEW_TOKENS
    for refused in (hf_accel.patch, hf_accel.unpatch):
        with pytest.raises(UnsupportedError, match=f"a part of a patched {name}"):
            refused(model.get_submodule(part))
    with pytest.raises(UnsupportedError, match="calls that of a part of it"):
        model.generate(**given, speculative="ngram")
    hf_accel.unpatch(model)
    for own, other in zip(model.get_submodule(part).modules(), plain.get_submodule(part).modules(), strict=True):
        assert type(own) is type(other) and vars(own).keys() == vars(other).keys()


def takes_texts(name: str) -> bool:
    """Return whether the model takes a text without an image: Kosmos-2 does from transformers 5.24 on."""
    try:
        stock(name)[0].generate(input_ids=torch.tensor([[5, 9, 7]]), max_new_tokens=1)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", PARTS)
def test_an_engine_for_a_model_whose_generate_calls_that_of_a_part(name: str) -> None:
    """The part computes the tokens. Two images behind the same words share no pages, and equal ones do."""
    given = [prompt(name, row, words) for row, words in ((0, ()), (1, ()), (0, (7, 9)), (1, (7, 9)), (0, ()))]
    model = patched(name, cache=CacheConfig(block_size=2))
    with Engine(model) as engine:
        first = [engine.submit(each, max_new_tokens=NEW_TOKENS, temperature=0) for each in given[:2]]
        found = [request.result(WAIT).tokens for request in first]
        before = engine.stats["prefix_hits"]
        later = [engine.submit(each, max_new_tokens=NEW_TOKENS, temperature=0) for each in given[2:]]
        found += [request.result(WAIT).tokens for request in later]
        assert engine.stats["prefix_hits"] > before and found == [expected(name, each) for each in given]
        assert found[0] != found[1]
        batch = model.generate_batch(given[:2], max_new_tokens=NEW_TOKENS, do_sample=False)
        assert [output.generated_tokens for output in batch.values()] == found[:2]
        with pytest.raises(UnsupportedError, match="runs the model; call engine"):
            hf_accel.unpatch(model)
        if takes_texts(name):
            text = engine.submit([5, 9, 7], max_new_tokens=NEW_TOKENS, temperature=0).result(WAIT)
            assert text.tokens == expected(name, {"input_ids": torch.tensor([[5, 9, 7]])})
        else:
            with pytest.raises(UnsupportedError, match="refuses this prompt: "):
                engine.submit([5, 9, 7])
        for wrong, message in (
            ({**given[0], "pixels": 1}, "holds 'pixels', which"),
            ({**given[0], "attention_mask": 0 * given[0]["input_ids"]}, "leaves tokens out"),
            ({key: torch.cat([value, value]) for key, value in given[0].items()}, "input_ids"),
        ):  # fmt: skip
            with pytest.raises(UnsupportedError, match=message):
                engine.submit(wrong)
        with pytest.raises(UnsupportedError, match="calls that of a part of it"):
            engine.load_adapter("own", "nowhere")
    with pytest.raises(UnsupportedError, match="speculative= was asked for, but its generate"):
        Engine(model, speculative="ngram")
    with pytest.raises(UnsupportedError, match="calls that of a part of it"):
        model.generate_batch(given[:1], speculative="ngram")
    model.generate = model.generate
    with pytest.raises(UnsupportedError, match="was replaced on the model itself"):
        Engine(model)


def test_special_tokens_beside_a_prompt_with_an_image() -> None:
    """Gemma 4 embeds the token of an image as padding; so it must in a pass that holds the image of another prompt."""
    special = stock(LAYERED)[0].config.audio_token_id
    text = {"input_ids": torch.tensor([[5, 9, special, 11, special, 7]])}
    wanted = [expected(LAYERED, each) for each in (text, prompt(LAYERED, 0))]
    found = patched(LAYERED).generate_batch(
        [text["input_ids"][0].tolist(), prompt(LAYERED, 0)], max_new_tokens=NEW_TOKENS
    )
    assert [output.generated_tokens for output in found.values()] == wanted
