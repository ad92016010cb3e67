"""generate() of a patched model against stock: float32 tokens equal, bfloat16 tokens equal up to near-ties."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel

from .audit import Audit, sampling_noise
from .families import FAMILIES, VOCABULARY, build, inputs

NEW_TOKENS = 16
SEED = 3
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "n-best": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "chunked": {"prefill_chunk_size": 5},
}
LAYOUTS = ["single", "left", "right"]
SMALL_BLOCKS = hf_accel.CacheConfig(block_size=4)  # many block boundaries in few tokens


@functools.cache
def pair(
    family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model stock and patched; never changed."""
    patched = build(family, dtype=dtype, seed=seed)
    hf_accel.patch(patched, weights=None, attention=attention, cache=SMALL_BLOCKS)
    return build(family, dtype=dtype, seed=seed), patched


def generate(model: PreTrainedModel, layout: str, **settings: Any) -> Any:
    torch.manual_seed(SEED)
    defaults = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    return model.generate(**inputs(layout), **defaults | settings)


def assert_tokens_equal(stock: PreTrainedModel, patched: PreTrainedModel, layout: str, **settings: Any) -> None:
    expected = generate(stock, layout, **settings)
    actual = generate(patched, layout, **settings)
    assert isinstance(actual.past_key_values, hf_accel.PagedCache)
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_equal_stock(family: str, mode: str, layout: str) -> None:
    assert_tokens_equal(*pair(family), layout, **MODES[mode])


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_attention(family: str, mode: str) -> None:
    assert_tokens_equal(*pair(family, attention="reference"), "left", **MODES[mode])


@pytest.mark.long
@pytest.mark.parametrize(("attention", "seed"), [("sdpa", 1), ("reference", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_equal_stock_on_more_models(
    family: str, mode: str, layout: str, attention: str, seed: int
) -> None:
    assert_tokens_equal(*pair(family, attention=attention, seed=seed), layout, **MODES[mode], max_new_tokens=40)


# -- bfloat16 ------------------------------------------------------------------------------------------


def audit_bfloat16(family: str, mode: str, layout: str, attention: str) -> None:
    stock, patched = pair(family, torch.bfloat16, attention)
    expected, actual = (generate(model, layout, **MODES[mode]).sequences for model in (stock, patched))
    audit = Audit(stock, patched, expected, inputs(layout)["attention_mask"])
    audit.assert_rounds_as_well_as_stock()
    noise = sampling_noise(SEED, NEW_TOKENS, len(expected), VOCABULARY) if MODES[mode].get("do_sample") else None
    audit.assert_near_ties(actual, noise)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("mode", "layout"), [("greedy", "single"), ("n-best", "left"), ("sampling", "right")])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_differs_only_at_near_ties(family: str, mode: str, layout: str) -> None:
    audit_bfloat16(family, mode, layout, "sdpa")


@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["greedy", "sampling", "n-best", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_differs_only_at_near_ties_everywhere(family: str, mode: str, layout: str, attention: str) -> None:
    audit_bfloat16(family, mode, layout, attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_beams_score_what_they_claim(family: str) -> None:
    """One early near-tie can change all later beams; but each must have the probability that the search saw."""
    stock, patched = pair(family, torch.bfloat16)
    output = generate(patched, "left", **MODES["beam"], output_scores=True, length_penalty=1.0)
    audit = Audit(stock, patched, output.sequences, inputs("left")["attention_mask"])
    audit.assert_rounds_as_well_as_stock()
    # a mean of log-probabilities is off by no more than twice the worst logit
    torch.testing.assert_close(
        output.sequences_scores, audit.mean_log_probabilities(), rtol=0, atol=2 * audit.rounding
    )


# -- what else generate takes and gives ----------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(2, 12))},
        {"num_beams": 4, "length_penalty": -1.0, "eos_token_id": list(range(2, 12))},
        {"num_beams": 2, "do_sample": True},
        {"eos_token_id": list(range(2, 22))},  # rows end at different times
        {"repetition_penalty": 3.0, "min_new_tokens": 4, "eos_token_id": list(range(2, 22))},
        {"no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["single", "left"])
def test_settings(layout: str, settings: dict[str, Any]) -> None:
    stock, patched = pair("qwen2")
    expected, actual = (generate(model, layout, **settings) for model in (stock, patched))
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup(family: str) -> None:
    """A draft that is rejected is cropped from the cache again. The prompt repeats, so that there are drafts."""
    stock, patched = pair(family)
    ids = inputs("single")["input_ids"][:, :6].repeat(1, 3)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24}
    greedy = stock.generate(**prompt)
    with_lookup = patched.generate(**prompt, prompt_lookup_num_tokens=3)
    assert torch.equal(with_lookup, greedy)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_assistant_model(family: str) -> None:
    stock, patched = pair(family)
    assistant, _ = pair(family, seed=1)
    expected, actual = (generate(model, "single", assistant_model=assistant) for model in (stock, patched))
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beam", "n-best"])
def test_outputs(mode: str) -> None:
    """Same keys, same structure, same numbers."""
    stock, patched = pair("mistral")
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    expected, actual = (generate(model, "left", **MODES[mode], **wanted) for model in (stock, patched))
    assert type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    for name in ("scores", "logits"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)
    hidden = "decoder_hidden_states" if "decoder_hidden_states" in expected else "hidden_states"
    real = inputs("left")["attention_mask"].bool()
    for theirs, ours in zip(expected[hidden], actual[hidden], strict=True):
        for a, b in zip(theirs, ours, strict=True):
            assert a.shape == b.shape
            tokens = real.repeat_interleave(len(a) // len(real), 0) if a.shape[1] > 1 else ...
            torch.testing.assert_close(b[tokens], a[tokens], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_attention_weights_are_those_of_eager(family: str) -> None:
    """Also where stock's sdpa would return none; gpt2 does not tell its attention that they are asked for."""
    stock, (_, patched) = build(family), pair(family)
    stock.set_attn_implementation("eager")
    settings = {"output_attentions": True, "return_dict_in_generate": True}
    expected, actual = (generate(model, "left", **settings).attentions for model in (stock, patched))
    assert [len(step) for step in actual] == [len(step) for step in expected]
    for ours, theirs in zip(chain(*actual), chain(*expected), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)


class Recorder:
    """A streamer, a stopping criterion and a logits processor that keep what they are shown."""

    def __init__(self) -> None:
        self.streamed: list[list[int]] = []
        self.stopped: list[tuple[int, ...]] = []
        self.processed: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.streamed.append(value.flatten().tolist())

    def end(self) -> None:
        self.streamed.append([-1])

    def stop(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.stopped.append(tuple(ids.shape))
        return torch.full((len(ids),), ids.shape[1] >= 20)

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.processed.append(ids[:, -1].tolist())
        return scores + torch.linspace(0, 3, scores.shape[1])


def test_callbacks_see_what_they_see_in_stock() -> None:
    stock, patched = pair("llama")
    seen = []
    for model in (stock, patched):
        recorder = Recorder()
        output = generate(
            model,
            "single",
            streamer=recorder,
            stopping_criteria=[recorder.stop],
            logits_processor=[recorder.process],
        )
        seen.append((output.sequences.tolist(), vars(recorder)))
    assert seen[0] == seen[1]
    assert len(seen[0][0][0]) == 20


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_embeds(family: str) -> None:
    results = []
    for model in pair(family):
        given = inputs("left")
        embeddings = model.get_input_embeddings()(given["input_ids"]).detach()
        results.append(
            model.generate(
                inputs_embeds=embeddings, attention_mask=given["attention_mask"], max_new_tokens=12, do_sample=False
            )
        )
    assert torch.equal(*results)


def test_static_cache_stays_stock() -> None:
    stock, patched = pair("llama")
    expected, actual = (generate(model, "left", cache_implementation="static") for model in (stock, patched))
    assert type(actual.past_key_values) is type(expected.past_key_values)
    assert torch.equal(actual.sequences, expected.sequences)


def test_stock_cache() -> None:
    """cache=None: our attention over stock's cache."""
    patched = hf_accel.patch(build("mistral"), weights=None, cache=None)
    for layout in LAYOUTS:
        expected, actual = (generate(model, layout, **MODES["n-best"]) for model in (pair("mistral")[0], patched))
        assert type(actual.past_key_values) is type(expected.past_key_values)
        assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_is_stored_once(family: str) -> None:
    """Beams and n-best fork block tables: the tokens held are one prompt and what each row wrote itself."""
    _, patched = pair(family)
    generate(patched, "single", **MODES["n-best"] | {"num_return_sequences": 5}, max_new_tokens=1)
    shared = hf_accel.stats(patched)["blocks_used"]
    generate(patched, "single", max_new_tokens=1)
    assert shared == hf_accel.stats(patched)["blocks_used"]


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"return_dict_in_generate": True, "output_scores": True}])
def test_tokens_behind_a_prompt_of_int32_are_int64(settings: dict[str, Any]) -> None:
    ids, found = inputs("single")["input_ids"].int(), []
    for model in pair("llama"):
        output = model.generate(ids, **{"max_new_tokens": 4, "do_sample": False, **settings})
        found.append(output.sequences if settings.get("return_dict_in_generate") else output)
    assert found[0].dtype is found[1].dtype and torch.equal(*found)
