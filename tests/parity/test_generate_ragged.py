"""generate() on the ragged loop: speculation at any batch size, caches that are passed on, and what stays stock's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, MaxTimeCriteria, StoppingCriteria, StopStringCriteria

import hf_accel
from hf_accel import OutOfBlocksError, SpeculativeConfig, UnsupportedError

from .families import FAMILIES, build, inputs, prompts
from .letters import letters, text_of
from .speculating import near, speculative, stock, target

ENDS = list(range(2, 30))


def generate(model: Any, layout: str = "left", **settings: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**inputs(layout), **{"do_sample": False, "max_new_tokens": 14} | settings)


def loop(model: Any) -> str:
    return hf_accel.stats(model)["loop"]


def assert_equal(layout: str = "left", ours: dict[str, Any] | None = None, **settings: Any) -> None:
    """ours: what only the patched model is given."""
    model = target("llama")
    expected, actual = generate(stock("llama"), layout, **settings), generate(model, layout, **settings, **ours or {})
    assert torch.equal(actual, expected) and loop(model) == "ragged"


# -- speculation, as transformers spells it ------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["single", "left"])
@pytest.mark.parametrize("settings", [{}, {"eos_token_id": ENDS}, {"repetition_penalty": 1.5}], ids=str)
def test_assistants_at_any_batch_size(layout: str, settings: dict[str, Any]) -> None:
    assert_equal(layout, {"assistant_model": near("llama")}, **settings)
    assert_equal(layout, {"prompt_lookup_num_tokens": 3}, **settings)


@pytest.mark.parametrize("ours", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": "near"}], ids=str)
def test_assistants_with_samples(ours: dict[str, Any]) -> None:
    model = target("llama")
    ours = {name: near("llama") if value == "near" else value for name, value in ours.items()}
    settings = {"do_sample": True, "num_return_sequences": 3, "top_k": 0, "return_dict_in_generate": True}
    first, again = (generate(model, **settings, **ours) for _ in range(2))
    assert first.sequences.shape == (9, 27) and len({tuple(row) for row in first.sequences.tolist()}) == 9
    if "prompt_lookup_num_tokens" in ours:  # a looked up draft does not show in what is sampled
        assert torch.equal(first.sequences, again.sequences)
    assert first.spec_stats["passes"] > 0


def test_statistics() -> None:
    model = target("llama")
    output = generate(model, speculative=speculative("near model", "llama"), return_dict_in_generate=True)
    found = output.spec_stats
    assert found["tokens"] == 3 * 14 and found["steps"] < found["tokens"]
    assert found["tokens"] == found["steps"] + found["accepted"]
    assert found["drafted"] == sum(found["drafted_at"]) and found["accepted"] == sum(found["accepted_at"])
    assert hf_accel.stats(model)["acceptance"] == found["acceptance"] == found["accepted"] / found["drafted"]
    assert not hasattr(generate(model, return_dict_in_generate=True), "spec_stats")


# -- random numbers --------------------------------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "ends": {"eos_token_id": ENDS},
    "samples": {"num_return_sequences": 2, "eos_token_id": ENDS},
    "chunks": {"prefill_chunk_size": 5},
    "filters": {"top_k": 9, "top_p": 0.8, "temperature": 1.7, "repetition_penalty": 1.4, "min_new_tokens": 5},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("layout", ["single", "left"])
def test_torchs_seed_gives_stocks_samples(layout: str, settings: dict[str, Any]) -> None:
    """And leaves torch's generator where stock leaves it."""
    after = []
    for model in (stock("llama"), target("llama")):
        after.append((generate(model, layout, do_sample=True, top_k=0) if "top_k" not in settings else None,))
        tokens = generate(model, layout, **{"do_sample": True, "top_k": 0} | settings)
        after[-1] = (tokens.tolist(), torch.rand(1).item())  # type: ignore[assignment]
    assert after[0] == after[1]


def test_samples_of_rows_that_are_preempted_are_stocks() -> None:
    model = hf_accel.patch(build("llama"), weights=None, cache=hf_accel.CacheConfig(block_size=4, max_tokens=56))
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
    assert torch.equal(generate(model, **settings), generate(stock("llama"), **settings))
    assert loop(model) == "ragged"


@pytest.mark.covering(1)
@pytest.mark.parametrize("verify", ["token", "block", "seeded"])
@pytest.mark.parametrize("drafter", ["near model", "self-int4", "suffix"])
def test_sampling_with_drafts_repeats_with_torchs_seed(drafter: str, verify: Any) -> None:
    """With a number of tokens to draft: "auto" goes by measured time, and what is drawn then shows in the tokens."""
    settings = {"do_sample": True, "top_k": 0, "speculative": speculative(drafter, "llama", 3, verify=verify)}
    first, again = (generate(target("llama"), **settings) for _ in range(2))
    assert torch.equal(first, again)


def test_seeded_samples_do_not_depend_on_the_drafter() -> None:
    drafters = ["near model", "self-int4", "suffix", "random", "far model"]
    outputs = [
        generate(
            target("llama"), do_sample=True, top_k=0, speculative=speculative(name, "llama", number, verify="seeded")
        )
        for name in drafters
        for number in (1, 4, "auto")
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("settings", [{"weights": None}, {"weights": "int8", "fuse": False}], ids=str)
def test_patching_takes_no_random_numbers(settings: dict[str, Any]) -> None:
    model = build("llama")
    before = torch.get_rng_state()
    hf_accel.patch(model, **settings)
    generate_state = torch.get_rng_state()
    assert torch.equal(generate_state, before)


# -- a cache that goes on ------------------------------------------------------------------------------------


def talk(family: str, *, rows: int, turns: int, speculative_turns: int, drafts: Any) -> None:
    """Each turn goes on from the last one's cache, with early ends, and is compared to stock's without any cache."""
    model, plain = target(family), stock(family)
    ids = prompts(rows, 9)
    mask = torch.ones_like(ids)
    cache = None
    for turn in range(turns):
        settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6, "eos_token_id": ENDS}
        expected = plain.generate(ids, **settings)
        config = drafts if turn < speculative_turns else None
        output = model.generate(
            ids, **settings, past_key_values=cache, return_dict_in_generate=True, speculative=config
        )
        assert torch.equal(output.sequences, expected)
        cache = output.past_key_values
        assert isinstance(cache, hf_accel.PagedCache) and cache.get_seq_length() == expected.shape[1] - 1
        new = expected[:, ids.shape[1] :]
        over = torch.isin(new, torch.tensor(ENDS))
        said = (over.cumsum(1) - over.long() == 0).long()  # up to the end-of-sequence token
        user = prompts(rows, 3, seed=turn + 5)
        ids = torch.cat([expected, user], 1)
        mask = torch.cat([mask, said, torch.ones_like(user)], 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", ["suffix", "near model", "self-int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_turns_of_one_row(family: str, drafter: str) -> None:
    talk(family, rows=1, turns=4, speculative_turns=4, drafts=speculative(drafter, family, 3))


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafter", [None, "near model", "self-int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_goes_on_after_rows_ended_early(family: str, drafter: str | None) -> None:
    drafts = None if drafter is None else speculative(drafter, family, 3)
    talk(family, rows=3, turns=2, speculative_turns=1, drafts=drafts)


def test_blocks_of_a_failed_turn_are_free_again() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    cache = hf_accel.PagedCache(model.config, block_size=4, max_tokens=64)
    ids = prompts(1, 20)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    pool = cache.pages.groups[0].pool
    used = pool.num_used
    with pytest.raises(OutOfBlocksError):
        model.generate(first, past_key_values=cache, max_new_tokens=50, do_sample=False)

    def fail(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        model.generate(first, past_key_values=cache, max_new_tokens=8, do_sample=False, logits_processor=[fail])
    assert used - 1 <= pool.num_used <= used  # the last block was given to the turn that failed
    again = model.generate(first, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(again, stock("llama").generate(first, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_fill_a_cache_to_its_last_slot(family: str) -> None:
    model = hf_accel.patch(build(family), weights=None)
    cache = hf_accel.PagedCache(model.config, block_size=4, max_tokens=24)
    ids = prompts(1, 10)
    for new_tokens in (4, 7, 3):
        expected = stock(family).generate(ids, max_new_tokens=new_tokens, do_sample=False)
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False)
        assert torch.equal(ids, expected)
    assert ids.shape == (1, 24)


def test_a_family_that_does_not_fit_says_so() -> None:
    model = hf_accel.patch(build("llama"), weights=None, cache=hf_accel.CacheConfig(max_tokens=16))
    with pytest.raises(OutOfBlocksError, match="make 40 tokens, the cache holds 16"):
        model.generate(prompts(1, 10), max_new_tokens=30, num_return_sequences=2, do_sample=True)


# -- processors and criteria ---------------------------------------------------------------------------------


class Pure(LogitsProcessor):
    """Depends on everything before."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (input_ids.sum(1) % 5)[:, None] * torch.linspace(0, 2, scores.shape[1])


class Stateful(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[1]) % 7


class Collector(LogitsProcessor):
    """Keeps every prefix that it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += [tuple(row) for row in input_ids.tolist()]
        return scores


class Long(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), bool(input_ids[0, -4:].sum() > 250))


DRAFTS = speculative("near model", "llama", 4)


def test_a_pure_processor_of_ones_own() -> None:
    for ours in ({}, {"speculative": DRAFTS}, {"prompt_lookup_num_tokens": 2}):
        assert_equal("single", ours, logits_processor=[Pure()])
    model = target("llama")
    expected = generate(stock("llama"), logits_processor=[Pure()])
    assert torch.equal(generate(model, logits_processor=[Pure()]), expected) and loop(model) == "ragged"


def test_a_processor_sees_each_prefix_of_the_answer() -> None:
    """Of a draft too, whether it stays or not; but always behind tokens that are final."""
    collector = Collector()
    tokens = generate(target("llama"), "single", logits_processor=[collector], speculative=DRAFTS)[0].tolist()
    assert {tuple(tokens[:end]) for end in range(13, 27)} <= set(collector.seen)
    assert max(map(len, collector.seen)) == 26


def test_a_stateful_processor() -> None:
    """Each step is processed once. Drafts are left out; see test_grammars.py."""
    assert_equal("single", {}, logits_processor=[Stateful()])


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [
    {"repetition_penalty": 1.6}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9, "eos_token_id": ENDS},
    {"bad_words_ids": [[5], [7, 8]]}, {"suppress_tokens": [5, 6, 7, 46]}, {"forced_eos_token_id": 3},
    {"sequence_bias": {(5,): 3.0, (7, 8): -4.0}}, {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 2},
    {"begin_suppress_tokens": [46, 54]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", ["single", "left"])
def test_stocks_processors_at_draft_positions(layout: str, settings: dict[str, Any]) -> None:
    model = target("llama")
    expected = generate(stock("llama"), layout, **settings)
    for ours in ({"speculative": DRAFTS}, {"speculative": speculative("suffix", "llama")}):
        actual = generate(model, layout, **settings, **ours)
        assert torch.equal(actual, expected) and loop(model) == "ragged"


def test_settings_by_row() -> None:
    for settings in ({"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}):
        model = target("llama")
        assert torch.equal(generate(model, **settings), generate(stock("llama"), **settings))
        assert loop(model) == "ragged"
        actual = generate(model, "single", **settings, speculative=DRAFTS)
        assert torch.equal(actual, generate(stock("llama"), "single", **settings)) and loop(model) == "ragged"


def test_stopping_criteria() -> None:
    for ours in ({}, {"speculative": DRAFTS}):
        assert_equal("single", ours, stopping_criteria=[Long()], max_new_tokens=40)
        assert_equal("left", ours, stopping_criteria=[MaxTimeCriteria(1000)])
    cut = generate(target("llama"), "left", stopping_criteria=[MaxTimeCriteria(0)], speculative=DRAFTS)
    assert cut.shape == (3, 14)


@pytest.mark.parametrize("layout", ["single", "left"])
def test_stop_strings(layout: str) -> None:
    text = generate(stock("llama"), layout)[0, 13:].tolist()
    criteria = [StopStringCriteria(letters(), [text_of(text[5:7])])]
    settings = {"stopping_criteria": criteria, "pad_token_id": 0}
    assert (generate(stock("llama"), layout, **settings, eos_token_id=1)[0] == 0).sum() >= (layout == "left")
    for ours in ({}, {"speculative": DRAFTS}):
        assert_equal(layout, ours, **settings, eos_token_id=1)


def test_stop_strings_without_an_end_of_sequence() -> None:
    """Stock then lets rows that have stopped go on until all have."""
    text = generate(stock("llama"))[0, 13:].tolist()
    criteria = [StopStringCriteria(letters(), [text_of(text[5:7])])]
    model = target("llama")
    expected = generate(stock("llama"), stopping_criteria=criteria)
    assert torch.equal(generate(model, stopping_criteria=criteria), expected) and loop(model) == "ragged"


# -- positions of a user --------------------------------------------------------------------------------------

PLACES: dict[str, Any] = {
    "columns": lambda counted: torch.arange(counted.shape[1]).expand(len(counted), -1),
    "others in each row": lambda counted: counted + 3 * torch.arange(len(counted))[:, None],
    "gaps": lambda counted: 2 * counted + 1,
    "backwards": lambda counted: counted.flip(1),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", PLACES)
def test_positions_that_do_not_count_tokens(family: str, name: str) -> None:
    given = inputs("left")
    given["position_ids"] = PLACES[name]((given["attention_mask"].cumsum(1) - 1).clamp(min=0))
    model = target(family)
    for way in ({}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
        found = []
        for each in (stock(family), model):
            torch.manual_seed(0)
            found.append(each.generate(**given, **{"max_new_tokens": 9, "do_sample": False} | way))
        assert torch.equal(*found) and loop(model) == "ragged"
    plain = stock(family).generate(**inputs("left"), max_new_tokens=9, do_sample=False)
    drafted = model.generate(**given, max_new_tokens=9, do_sample=False, speculative=DRAFTS)
    assert torch.equal(drafted, stock(family).generate(**given, max_new_tokens=9, do_sample=False))
    assert torch.equal(drafted, plain) == (
        family == "llama" and name not in ("gaps", "backwards")
    )  # it sees distances


# -- what cannot be ------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True collects"),
    "beams": ({"num_beams": 2}, "this call is beam_search"),
    "both": ({"prompt_lookup_num_tokens": 2}, "this call is assisted_generation"),
    "no cache": ({"use_cache": False}, "no paged cache"),
    "static": ({"cache_implementation": "static"}, "no paged cache"),
    "processor": ({"logits_processor": [Pure()]}, "Pure may depend on the batch"),
    "criterion": ({"stopping_criteria": [Long()]}, "Long may depend on the batch"),
}


@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_speculation_on_request_is_never_left_out(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{reason}.*leave"):
        generate(target("llama"), **settings, speculative="suffix")


def test_speculation_by_default_gives_way_and_says_so() -> None:
    model = hf_accel.patch(build("llama"), weights=None, speculative="suffix")
    generate(model)
    assert "passes" in hf_accel.stats(model)
    expected = generate(stock("llama"), output_scores=True, return_dict_in_generate=True)
    with pytest.warns(hf_accel.HfAccelWarning, match="without drafts, because output_scores=True collects"):
        actual = generate(model, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(actual.sequences, expected.sequences) and len(actual.scores) == 14
    assert loop(model) == "ragged"
    assert hf_accel.stats(model)["drafts"] == "none: output_scores=True collects a tensor of each step"
    assert torch.equal(generate(model, num_beams=2), generate(stock("llama"), num_beams=2))


def test_a_model_cannot_draft_for_itself() -> None:
    model = target("llama")
    with pytest.raises(UnsupportedError, match="use drafter='self-int4'"):
        generate(model, speculative=model)
    int8 = target("llama", 4, "auto", "int8")
    with pytest.raises(UnsupportedError, match="patch it with weights=None"):
        generate(int8, speculative="self-int4")


# -- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["self-int4", "suffix"])
def test_copies_of_a_model_that_has_speculated(drafter: str) -> None:
    model = hf_accel.patch(build("llama"), weights=None, speculative=SpeculativeConfig(drafter=drafter, num_draft=2))
    expected = generate(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generate(other), expected) and hf_accel.stats(other)["drafted"] >= 0
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert torch.equal(generate(model), expected)
        assert not torch.equal(generate(other), expected)
        hf_accel.unpatch(other)
    hf_accel.unpatch(model)
    assert torch.equal(generate(model), expected)


def test_adapters() -> None:
    """A PEFT model generates with its adapter, drafts included, and its INT4 drafts are only ever drafts."""
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(build("llama"), settings)
    expected = generate(wrapped)
    hf_accel.patch(wrapped, weights=None)
    for drafter in ("suffix", "self-int4"):
        assert torch.equal(generate(wrapped, speculative=drafter), expected)
