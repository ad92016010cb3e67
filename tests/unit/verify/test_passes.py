"""What verify() runs: from a prompt, from a history in one pass or step by step, of decoders and encoder-decoders."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel.verify import passes
from hf_accel.verify.passes import Forced, History, continuation, last_logits, logits_by_steps, started
from hf_accel.verify.rounding import ReferenceModel

from ...families.features import MEDIA
from ...families.media import alone_with_medium, media_prompts
from ...families.models import build as built
from ...families.models import family
from ...parity.families import build, prompts
from ...parity.test_encoder_decoders import model_of, reader_of_images

LONG, NEW = list(range(3, 23)), 6  # a prompt that is longer than what is written after it
WHISPER = "WhisperForConditionalGeneration"
SEEING = [f"{name}ForConditionalGeneration" for name in ("Llava", "Qwen2VL", "Gemma3", "PaliGemma", "Mllama")]


def with_medium(name: str) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """A model, a prompt, and the image or sound that generate() takes besides."""
    model = built(family(name), gain=2.0)
    given = alone_with_medium(media_prompts(model, MEDIA[family(name).kind]), 0)
    ids = given["input_ids"] if name != WHISPER else torch.tensor([[model.config.decoder_start_token_id, 5, 9]])
    return model, ids, {key: value for key, value in given.items() if key not in ("input_ids", "attention_mask")}


def tampered(model: Any, call: int) -> Any:
    """From the given step of each run on, the best token is the worst."""
    inner, steps = model.generate, itertools.count()

    def spoil(_: Any, args: Any, output: Any) -> None:
        if next(steps) >= call:
            best = output.logits[:, -1].argmax(-1, keepdim=True)
            output.logits[:, -1].scatter_(1, best, -100.0)

    def generate(*args: Any, **keywords: Any) -> Any:
        nonlocal steps
        steps = itertools.count()
        return inner(*args, **keywords)

    model.generate = generate
    model.register_forward_hook(spoil)
    return model


# -- histories -----------------------------------------------------------------------------------------


def test_a_decoders_history_is_its_prompt_and_what_it_wrote() -> None:
    prompt = prompts(1, 5)
    start = started(build("llama"), prompt, {})
    assert (start.num_prompt, start.written, start.encoded) == (5, 0, None)
    later = start.after(torch.tensor([7, 8]))
    assert (later.num_prompt, later.written, later.ids.shape) == (5, 2, (1, 7))
    assert torch.equal(later.read, torch.cat([prompt[0], torch.tensor([7, 8])]))
    assert (later.before(6).written, later.before(3).num_prompt) == (1, 3)


@pytest.mark.parametrize("begins", [[2], [2, 9, 4]])
def test_what_a_decoder_starts_from_is_what_generate_says(begins: list[int]) -> None:
    settings = {"decoder_input_ids": torch.tensor([begins])} if len(begins) > 1 else {}
    start = started(model_of("Bart"), torch.tensor([LONG]), settings)
    assert start.ids.tolist() == [begins] and start.num_prompt == len(begins)
    assert start.after(torch.tensor([7])).read.tolist() == [*LONG, 7]


def test_forced_ids_are_written_and_what_follows_is_free() -> None:
    forced, scores = Forced(torch.tensor([[3, 1, 2]])), torch.randn(1, 5)
    assert forced(torch.tensor([[3]]), scores).argmax() == 1
    assert forced(torch.tensor([[3, 1]]), torch.full((1, 5), -torch.inf)).argmax() == 2
    assert forced(torch.tensor([[3, 1, 2]]), scores) is scores


@pytest.mark.parametrize("kind", ["llama", "Bart", "T5"])
def test_steps_and_one_pass_see_the_same_history(kind: str) -> None:
    """Whatever the model would have written; and not the history without its last token."""
    model = build("llama") if kind == "llama" else model_of(kind)
    start = started(model, torch.tensor([LONG]), {})
    own = continuation(model, start, 4, {})
    history = start.after((own + 1) % 50)
    at_once, by_steps = last_logits(model, history, {}), logits_by_steps(model, history, {})
    torch.testing.assert_close(by_steps, at_once, rtol=1e-4, atol=1e-4)
    assert (at_once - last_logits(model, start.after(own), {})).abs().max() > 1e-2
    assert torch.equal(own[:1], last_logits(model, start, {}).argmax()[None])


# -- encoder-decoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_all_that_an_encoder_decoder_writes_is_compared(kind: str, weights: Any) -> None:
    """Its output does not begin with the prompt, which may be longer than it."""
    model = hf_accel.patch(model_of(kind, eos_token_id=None), weights=weights)
    certificate = hf_accel.verify(model, [LONG, LONG[:3]], max_new_tokens=NEW)
    assert certificate.explained
    assert all(v.tokens == NEW for v in certificate.verdicts if v.identical)
    if weights is None:
        assert certificate.exact
    else:
        assert certificate.cost is not None and certificate.cost.tokens == 2 * NEW + len(LONG) + 3 - 2


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_a_difference_of_an_encoder_decoder_is_judged(kind: str) -> None:
    model, reference = model_of(kind, eos_token_id=None), model_of(kind, eos_token_id=None)
    [verdict] = hf_accel.verify(tampered(model, call=2), [LONG], reference=reference, max_new_tokens=NEW).verdicts
    assert (verdict.position, verdict.explained) == (2, False)
    assert verdict.rounding is not None and verdict.margin is not None and verdict.rounding < verdict.margin


def test_rounding_of_an_encoder_decoder_is_small() -> None:
    model = model_of("T5")
    history = started(model, torch.tensor([LONG]), {}).after(torch.tensor([5, 6, 7]))
    logits, rounding, dtype = ReferenceModel(model, "r").judge(history, {})
    assert dtype == "float64"
    assert 0 < rounding < 1e-3 * float(logits.abs().max())


# -- images and sound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SEEING, WHISPER])
def test_prompts_with_images_or_sound(name: str) -> None:
    model, ids, given = with_medium(name)
    hf_accel.patch(model, weights=None)
    certificate = hf_accel.verify(model, [ids[0]], max_new_tokens=NEW, **given)
    assert certificate.exact and certificate.verdicts[0].tokens > 1


@pytest.mark.parametrize("name", [*SEEING, WHISPER])
def test_every_way_of_the_reference_sees_the_image(name: str) -> None:
    """One that did not would make rounding so large that it explained any difference."""
    model, ids, given = with_medium(name)
    history = started(model, ids, given).after(torch.tensor([5, 6, 7]))
    logits, rounding, _ = ReferenceModel(model, "r").judge(history, given)
    assert 0 < rounding < 1e-3 * float(logits.abs().max())


def test_marks_of_tokens_are_as_many_as_the_tokens() -> None:
    """Of text alone, whose prompt is cut where little was written."""
    model, given = with_medium("Gemma3ForConditionalGeneration")[0], {"token_type_ids": torch.zeros(1, 7).long()}
    history = started(model, torch.arange(3, 10)[None], given).after(torch.tensor([5, 6]))
    torch.testing.assert_close(logits_by_steps(model, history, given, start=1), last_logits(model, history, given))


def test_what_lower_bits_cost_is_not_measured_on_sound() -> None:
    model, ids, given = with_medium(WHISPER)
    certificate = hf_accel.verify(hf_accel.patch(model, weights="int8"), [ids[0]], max_new_tokens=3, **given)
    assert certificate.explained and certificate.cost is None
    assert certificate.no_cost == "it is measured on texts, and the encoder reads input_features"


def test_a_picture_is_read_by_an_encoder_and_the_prompt_by_the_decoder() -> None:
    model = hf_accel.patch(reader_of_images(), weights=None)
    picture = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    certificate = hf_accel.verify(model, [[2, 5, 9]], max_new_tokens=NEW, pixel_values=picture)
    assert certificate.exact and certificate.verdicts[0].tokens == NEW


# -- warnings ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::hf_accel.HfAccelWarning")
def test_scores_that_verify_asks_for_are_no_warning() -> None:
    """With drafts they go to transformers' own loop, and the user hears of it only in a call of their own."""
    model, history = hf_accel.patch(build("llama"), weights=None, speculative="suffix"), prompts(1, 6)
    last_logits(model, History(history, 6), {})
    logits_by_steps(model, History(history, 3), {})
    with pytest.warns(hf_accel.HfAccelWarning, match="output_scores=True"):
        model.generate(history, max_new_tokens=1, **passes.SCORES)
