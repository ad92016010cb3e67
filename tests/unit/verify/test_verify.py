from __future__ import annotations

import copy
import inspect
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.verify import verify as function
from hf_accel.verify.rounding import ReferenceModel

from ...parity.families import FAMILIES, build, prompts
from ...parity.letters import letters
from ...parity.snapshot import snapshot
from ...selection import some_long

PROMPTS = [prompts(1, 7)[0], prompts(1, 12, seed=2)[0].tolist()]
INT4 = hf_accel.WeightConfig(bits=4, group_size=32)
INT8_KV = hf_accel.CacheConfig(dtype="int8")
FP8_KV = hf_accel.CacheConfig(dtype="fp8")
INT4_KV = hf_accel.CacheConfig(dtype="int4")
CALLS = inspect.getmodule(function)


def tampered(model: PreTrainedModel, call: int) -> PreTrainedModel:
    """From the given call on, the best token is the worst."""

    def spoil(_: Any, args: Any, output: Any) -> None:
        if next(calls) >= call:
            best = output.logits[:, -1].argmax(-1, keepdim=True)
            output.logits[:, -1].scatter_(1, best, -100.0)

    calls = itertools.count()
    model.register_forward_hook(spoil)
    return model


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(c) - 32 for c in text]}


# -- weights as they are -------------------------------------------------------------------------------


def test_identical() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=6)
    assert (certificate.exact, certificate.explained) == (True, True)
    assert [v.tokens for v in certificate.verdicts] == [6, 6]
    assert (certificate.reference, certificate.cost, certificate.no_cost) == ("the unpatched model", None, None)
    assert str(certificate).splitlines()[0] == ("certificate: 2 of 2 prompts identical to the unpatched model, greedy")
    assert json.loads(json.dumps(certificate.to_dict()))["exact"] is True


@pytest.mark.parametrize(
    "settings",
    [{"weights": None}, {"weights": "int8"}, {"weights": None, "cache": INT8_KV}, {"weights": None, "cache": INT4_KV}],
)
def test_verify_changes_nothing(settings: dict[str, Any]) -> None:
    model = hf_accel.patch(build("llama"), **settings)
    before, drawn = snapshot(model), torch.get_rng_state()
    hf_accel.verify(model, PROMPTS, max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert snapshot(model) == before
    assert hf_accel.is_patched(model)


def test_first_difference_is_found_and_is_no_near_tie() -> None:
    model = build("llama")
    reference = build("llama")
    certificate = hf_accel.verify(tampered(model, call=2), [PROMPTS[1]], reference=reference, max_new_tokens=6)
    [verdict] = certificate.verdicts
    assert (certificate.exact, certificate.explained, verdict.identical) == (False, False, False)
    ids = torch.tensor([PROMPTS[1]])
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert (verdict.position, verdict.tokens) == (2, 2)
    assert verdict.reference_token == int(expected[0, 14])
    assert verdict.reference_logits is not None and verdict.margin is not None
    assert verdict.margin == pytest.approx(verdict.reference_logits[0] - verdict.reference_logits[1])
    assert verdict.margin > 0
    assert "beyond rounding" in str(certificate)


def nearly_tied(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel, int]:
    """Two rows of the head that are the same but for the last bits: either token may come first.

    In bfloat16 by one bit of the model's alone: more would not be the model's rounding on every CPU.
    """
    model, reference = build("llama", dtype=dtype), build("llama", dtype=dtype)
    best = int(reference(torch.tensor([PROMPTS[1]])).logits[0, -1].argmax())
    other = (best + 1) % 101
    eps = torch.finfo(dtype).eps
    below, above = (1 - eps, 1 + 2 * eps) if dtype is torch.float32 else (1, 1 + eps)
    with torch.no_grad():
        for m, factor in ((reference, below), (model, above)):
            m.lm_head.weight[other] = m.lm_head.weight[best] * factor
    return model, reference, other


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a reference is told would explain a difference."""
    judge, numbers = ReferenceModel.judge, []

    def watched(self: Any, history: Any, settings: Any, needed: Any) -> Any:
        found = judge(self, history, settings, needed)
        numbers.append(needed(found[0]))
        return found

    monkeypatch.setattr(ReferenceModel, "judge", watched)
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_tie_is_explained(dtype: torch.dtype, told: list[float]) -> None:
    model, reference, other = nearly_tied(dtype)
    certificate = hf_accel.verify(model, [PROMPTS[1]], reference=reference, max_new_tokens=1)
    assert (certificate.exact, certificate.explained) == (False, True)
    assert certificate.verdicts[0].model_token == other
    assert certificate.verdicts[0].arbiter == {torch.float32: "float64", torch.bfloat16: "float32"}[dtype]
    assert "inside rounding" in str(certificate)
    assert told == [certificate.verdicts[0].distance]


def test_a_defect_that_shows_at_a_near_tie_is_a_defect() -> None:
    model, reference, other = nearly_tied()
    with torch.no_grad():
        model.lm_head.weight[(other + 1) % 101] *= 1.01  # of a token that neither chooses
    [verdict] = hf_accel.verify(model, [PROMPTS[1]], reference=reference, max_new_tokens=1).verdicts
    assert verdict.model_token == other
    assert verdict.margin is not None and verdict.rounding is not None and verdict.margin <= verdict.rounding
    assert not verdict.explained


def perturbed_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] *= 1.5


def wrong_position(model: PreTrainedModel) -> None:
    """A token is one place further than it should be, once the prompt is over."""

    def shift(_: Any, args: Any, kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        return args, kwargs

    model.register_forward_pre_hook(shift, with_kwargs=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("break_it", [perturbed_weight, wrong_position])
def test_defects_are_beyond_rounding(break_it: Callable[[PreTrainedModel], None], dtype: torch.dtype) -> None:
    model = hf_accel.patch(build("llama", dtype=dtype), weights=None)
    sound = hf_accel.verify(model, PROMPTS, reference=build("llama", dtype=dtype), max_new_tokens=24)
    assert sound.explained
    break_it(model)
    broken = hf_accel.verify(model, PROMPTS, reference=build("llama", dtype=dtype), max_new_tokens=24)
    different = [v for v in broken.verdicts if not v.identical]
    assert different and not any(v.explained for v in different)


def test_not_a_number_is_no_rounding() -> None:
    model, reference, other = nearly_tied()
    model.lm_head.weight.data[other] = torch.nan
    [verdict] = hf_accel.verify(model, [PROMPTS[1]], reference=reference, max_new_tokens=1).verdicts
    assert verdict.model_token == other
    assert not verdict.explained


def test_one_of_the_two_ends() -> None:
    model, reference = build("llama"), build("llama")
    ids = torch.tensor([PROMPTS[1]])
    third = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)[0, -1]
    model.generation_config.eos_token_id = int(third)
    certificate = hf_accel.verify(model, [PROMPTS[1]], reference=reference, max_new_tokens=6)
    assert str(certificate.verdicts[0]) == "identical for 3 tokens, where one of the two ends"
    assert not certificate.explained


# -- quantized -----------------------------------------------------------------------------------------

QUANTIZED: list[tuple[dict[str, Any], str]] = [
    ({"weights": "int8"}, "the quantized reference"),
    ({"weights": INT4}, "the quantized reference"),
    ({"weights": None, "cache": INT8_KV}, "the quantized reference with int8 keys and values"),
    ({"weights": "int8", "cache": FP8_KV}, "the quantized reference with fp8 keys and values"),
    ({"weights": None, "cache": INT4_KV}, "the quantized reference with int4 keys and values"),
]


@pytest.mark.parametrize(
    ("family", "settings", "name"),
    some_long(
        [pytest.param(family, *QUANTIZED[0]) for family in FAMILIES]
        + [pytest.param("gemma2", *case) for case in QUANTIZED[1:]],
        *("qwen2", "mistral"),
    ),
    ids=str,
)
def test_against_the_quantized_reference(family: str, settings: dict[str, Any], name: str) -> None:
    model = hf_accel.patch(build(family), **settings)
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=12)
    assert certificate.explained, str(certificate)
    assert certificate.reference == name
    cost = certificate.cost
    assert cost is not None and certificate.no_cost is None
    assert (cost.reference, cost.tokens) == ("the unpatched model", 7 + 12 - 1 + 12 + 12 - 1)
    assert 0 < cost.kl < 1 and 0.5 < cost.same_top <= 1 and cost.perplexity != cost.reference_perplexity
    assert str(certificate).splitlines()[-3].startswith("against float: perplexity ")
    json.dumps(certificate.to_dict())


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("weights", ["int8", INT4], ids=str)
def test_a_broken_kernel_is_beyond_rounding(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_accel.patch(build("llama"), weights=weights, fuse=False)
    layer = next(m for m in model.modules() if isinstance(m, QuantLinear))
    assert layer.choice is not None
    backend = type(layer.choice.backend)
    run = backend.run
    monkeypatch.setattr(backend, "run", lambda self, x, packed, bias: run(self, x.roll(1, -1), packed, bias))
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=12)
    assert not certificate.exact and not certificate.explained


def test_a_wrong_quantized_weight_is_beyond_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed form of one layer holds other numbers than its stored form."""
    model = hf_accel.patch(build("llama"), weights="int8", fuse=False)
    layer = model.model.layers[0].mlp.down_proj
    stored, backend = layer.quantized, layer.choice.backend
    layer._packed = backend.pack(type(stored)(stored.weight.roll(1, 0), stored.weight_scale))
    wrong, unpack = layer._packed, type(backend).unpack
    monkeypatch.setattr(type(backend), "unpack", lambda self, p: stored if p is wrong else unpack(self, p))
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=12)
    assert not certificate.exact and not certificate.explained


def test_costs_rise_with_fewer_bits() -> None:
    costs = [
        hf_accel.verify(hf_accel.patch(build("llama"), weights=weights), PROMPTS[:1], max_new_tokens=2, text=TEXT).cost
        for weights in ("int8", INT4)
    ]
    assert costs[0] is not None and costs[1] is not None
    assert 10 * costs[0].kl < costs[1].kl


TEXT = prompts(1, 600)[0]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (TEXT, 511 + 87),
        (TEXT.tolist()[:40], 39),
        ("def main", 7),
        (["def main", [1, 2, 3]], 7 + 2),
        (prompts(3, 20), 3 * 19),
    ],
    ids=["tensor", "list", "string", "several", "windows"],
)
def test_the_cost_on_a_text(text: Any, tokens: int) -> None:
    model = hf_accel.patch(build("llama"), weights="int8")
    certificate = hf_accel.verify(model, PROMPTS[:1], max_new_tokens=2, text=text, tokenizer=tokenizer)
    assert certificate.cost is not None
    assert (certificate.cost.tokens, certificate.cost.text) == (tokens, "the text given")


def test_originals_given_up() -> None:
    model = hf_accel.patch(build("llama"), weights="int8", keep_original=False)
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=6)
    assert certificate.explained and certificate.cost is None
    assert certificate.no_cost == "the model has no original weights to compare with; pass reference="
    with_reference = hf_accel.verify(model, PROMPTS, reference=build("llama"), max_new_tokens=6)
    assert with_reference.verdicts == certificate.verdicts
    assert with_reference.cost is not None and with_reference.cost.reference == "the given LlamaForCausalLM"
    kept = hf_accel.patch(build("llama"), weights="int8", keep_original=True)
    assert with_reference.cost.kl == pytest.approx(hf_accel.verify(kept, PROMPTS, max_new_tokens=6).cost.kl)  # type: ignore[union-attr]


def test_originals_on_disk(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path), weights="int8")
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=4)
    assert certificate.cost is not None and certificate.cost.reference == "the unpatched model"
    by_path = hf_accel.verify(model, PROMPTS, reference=tmp_path, max_new_tokens=4).cost
    assert by_path is not None and (by_path.reference, by_path.kl) == (str(tmp_path), certificate.cost.kl)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    without = hf_accel.verify(model, PROMPTS, max_new_tokens=4)
    assert without.verdicts == certificate.verdicts
    assert without.cost is None and without.no_cost is not None and "cannot be read from" in without.no_cost


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    hf_accel.patch(build("llama"), weights="int8").save_pretrained(tmp_path)
    certificate = hf_accel.verify(AutoModelForCausalLM.from_pretrained(tmp_path), PROMPTS, max_new_tokens=4)
    assert certificate.explained
    assert certificate.no_cost == "the model has no original weights to compare with; pass reference="


def test_a_recurrent_model() -> None:
    """No cache to go step by step over; a broken one has to be judged all the same."""
    config = MambaConfig(vocab_size=101, hidden_size=64, num_hidden_layers=2, state_size=4, initializer_range=0.3)
    model, reference = MambaForCausalLM(config).eval(), MambaForCausalLM(config).eval()
    certificate = hf_accel.verify(model, PROMPTS, reference=reference, max_new_tokens=4)
    assert not certificate.explained
    reference.load_state_dict(model.state_dict())
    patched = hf_accel.patch(model, weights="int8")
    certificate = hf_accel.verify(patched, PROMPTS, max_new_tokens=4)
    assert certificate.explained
    assert certificate.cost is not None and certificate.cost.kl > 0


# -- references, prompts, keywords ---------------------------------------------------------------------


def test_against_a_checkpoint(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = hf_accel.patch(build("llama"), weights=None)
    certificate = hf_accel.verify(model, PROMPTS, reference=tmp_path, max_new_tokens=4)
    assert certificate.exact
    assert certificate.reference == str(tmp_path)


def test_text_prompt() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    assert hf_accel.verify(model, ["def main"], tokenizer=tokenizer, max_new_tokens=2).exact
    with pytest.raises(hf_accel.UnsupportedError, match="prompt 0 is a text; pass tokenizer= to verify"):
        hf_accel.verify(model, ["def main"])


def test_speculation_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assisted decoding may not change a token, and the reference goes without."""
    used = []
    generate = CALLS.continuation  # type: ignore[union-attr]

    def watched(model: Any, history: Any, num_new: int, settings: dict[str, Any]) -> Any:
        used.append((hf_accel.is_patched(model), sorted(settings)))
        return generate(model, history, num_new, settings)

    monkeypatch.setattr(CALLS, "continuation", watched)
    model = hf_accel.patch(build("llama"), weights=None)
    settings = {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.3}
    certificate = hf_accel.verify(model, PROMPTS[:1], max_new_tokens=12, **settings)
    assert certificate.exact
    assert used == [(False, ["repetition_penalty"]), (True, ["prompt_lookup_num_tokens", "repetition_penalty"])]


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 3}, {"speculative": "ngram"}], ids=str)
def test_a_difference_with_speculation_is_judged(settings: dict[str, Any]) -> None:
    model, reference, other = nearly_tied()
    hf_accel.patch(model, weights=None)
    [verdict] = hf_accel.verify(model, [PROMPTS[1]], reference=reference, max_new_tokens=2, **settings).verdicts
    assert verdict.model_token == other and verdict.explained


def test_a_token_that_should_not_have_been_accepted(monkeypatch: pytest.MonkeyPatch, told: list[float]) -> None:
    """The logits are sound, and still the token is wrong."""
    generate = CALLS.continuation  # type: ignore[union-attr]

    def wrong(model: Any, history: Any, num_new: int, settings: dict[str, Any]) -> Any:
        tokens = generate(model, history, num_new, settings)
        tokens[2] += hf_accel.is_patched(model)
        return tokens

    monkeypatch.setattr(CALLS, "continuation", wrong)
    model = hf_accel.patch(build("llama"), weights=None)
    [verdict] = hf_accel.verify(model, PROMPTS[:1], max_new_tokens=4, speculative="ngram").verdicts
    assert verdict.distance is not None and verdict.rounding is not None and verdict.distance <= verdict.rounding
    assert not verdict.explained and told == [verdict.margin]


def test_keywords_of_generate_reach_both() -> None:
    """With repetition punished, margins are those of the punished logits."""
    model = hf_accel.patch(build("llama"), weights=None)
    plain = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=12, do_sample=False)
    punished = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=12, do_sample=False, repetition_penalty=5.0)
    assert not torch.equal(plain, punished)
    assert hf_accel.verify(model, PROMPTS, max_new_tokens=12, repetition_penalty=5.0).exact


@pytest.mark.parametrize("keyword", ["do_sample", "num_beams", "num_return_sequences", "output_scores"])
def test_what_verify_sets_itself_is_refused(keyword: str) -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    with pytest.raises(hf_accel.UnsupportedError, match=f"leave {keyword}= out"):
        hf_accel.verify(model, PROMPTS, **{keyword: 2})


def test_bad_input() -> None:
    with pytest.raises(hf_accel.UnsupportedError, match="not patched; patch it, or pass reference="):
        hf_accel.verify(build("llama"), PROMPTS)
    model = hf_accel.patch(build("llama"), weights=None)
    with pytest.raises(hf_accel.UnsupportedError, match="at least one prompt"):
        hf_accel.verify(model, [])
    with pytest.raises(hf_accel.UnsupportedError, match="prompt 0 must be a list of at least one token id"):
        hf_accel.verify(model, [[]])
    with pytest.raises(hf_accel.UnsupportedError, match="no two tokens in a row"):
        hf_accel.verify(model, PROMPTS, text=[[1]])
    with pytest.raises(hf_accel.UnsupportedError, match=r"verify\(\) .*; did you mean 'max_new_tokens'"):
        hf_accel.verify(model, PROMPTS, max_new_token=3)
    with pytest.raises(hf_accel.UnsupportedError, match="reference= is the model itself; leave it out"):
        hf_accel.verify(model, PROMPTS, reference=model)
    with pytest.raises(hf_accel.UnsupportedError, match="max_new_tokens=0 must be an integer of at least 1"):
        hf_accel.verify(model, PROMPTS, max_new_tokens=0)


@pytest.mark.parametrize("one", ["ab", [65, 66], torch.tensor([65, 66])], ids=["text", "list", "tensor"])
def test_one_prompt_by_itself_is_one_prompt(one: Any) -> None:
    """Not one for each character or token."""
    model = hf_accel.patch(build("llama"), weights=None)
    alone = hf_accel.verify(model, one, tokenizer=tokenizer, max_new_tokens=2)
    assert len(alone.verdicts) == 1
    assert alone == hf_accel.verify(model, [one], tokenizer=tokenizer, max_new_tokens=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            None,
            "which generates text; pass texts and tokenizer=, or lists of token ids",
        ),
        ({"input_ids": [[1, 2]]}, "verify() got a dict as prompt; pass texts and tokenizer=, or lists of token ids"),
        ([[1.5, 2.0]], "prompt 0 must be a list of at least one token id, not [1.5, 2.0]"),
        ([[1], [[2], [3]]], "prompt 1 must be a list of at least one token id"),
        ([[101]], "prompt 0 holds token ids from 101 to 101; the model has 0 to 100"),
        ([[{"role": "user", "content": "a"}]], "prompt 0 is a list of chat messages; give the token ids of the whole"),
    ],
    ids=str,
)
def test_what_is_no_prompt(given: Any, message: str) -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    with pytest.raises(hf_accel.UnsupportedError, match=re.escape(message)):
        hf_accel.verify(model, given)


def test_a_chat_as_the_error_says_it() -> None:
    model, own = hf_accel.patch(build("llama"), weights=None), copy.deepcopy(letters())
    own.chat_template = "{{ messages[0].content }}"
    ids = own.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=True, return_dict=False)
    assert hf_accel.verify(model, ids, max_new_tokens=2).exact


def test_a_path_that_leads_nowhere_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CALLS, "continuation", None)
    model = hf_accel.patch(build("llama"), weights="int8")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        hf_accel.verify(model, PROMPTS, reference=tmp_path, max_new_tokens=1)
