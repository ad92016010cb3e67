"""Beam search in ragged passes: transformers' tokens, scores and beam indices."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

import hf_accel
from hf_accel import CacheConfig
from hf_accel.generation.hf.model_runner import ModelRunner

from .families import VOCABULARY
from .families import build as decoder_of
from .test_encoder_decoders import model_of

DECODERS = ("llama", "mistral", "gpt2", "mamba")
ENCODER_DECODERS = ("Marian", "T5", "Bart")
SCORED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
FEW, MANY = [5, 6], list(range(2, 40))  # stop tokens; of many, several end beams in each pass


def build(kind: str) -> PreTrainedModel:
    if kind in ENCODER_DECODERS:
        model: PreTrainedModel = model_of(kind)
        return model
    if kind != "mamba":
        return decoder_of(kind, dtype=torch.float32, seed=0)
    torch.manual_seed(3)
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0, initializer_range=0.3
    )
    return transformers.MambaForCausalLM(config).eval()


def prompts(kind: str, lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Random prompts, padded on the side where the model has padding."""
    numbers = random.Random(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        text = torch.tensor([numbers.randrange(3, VOCABULARY) for _ in range(length)])
        row[slice(length) if kind in ENCODER_DECODERS else slice(len(row) - length, None)] = text
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def searched(model: Any, inputs: dict[str, Tensor], **settings: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(**inputs, **{"max_new_tokens": 12, "num_beams": 3, "do_sample": False, **settings})


def check(stock: Any, patched: Any, inputs: dict[str, Tensor], **settings: Any) -> None:
    expected, found = searched(stock, inputs, **settings), searched(patched, inputs, **settings)
    assert hf_accel.stats(patched)["loop"] == "ragged"
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.beam_indices, expected.beam_indices)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        (*found.scores, *found.logits), (*expected.scores, *expected.logits), rtol=1e-3, atol=1e-3
    )
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def random_settings(numbers: random.Random, kind: str) -> dict[str, Any]:
    beams = numbers.randint(2, 5)
    settings = {
        "num_beams": beams,
        "num_return_sequences": numbers.randint(1, beams),
        "max_new_tokens": numbers.choice([1, 2, 9, 20]),
        "length_penalty": numbers.choice([1.0, 0.0, 2.0, -1.0, 0.3]),
        "early_stopping": numbers.choice([True, False, "never"]),
        "eos_token_id": numbers.choice([2, FEW, MANY]),
        "pad_token_id": numbers.choice([0, 4]),
    }
    others: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "top_k": 15, "temperature": 1.5},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 5, "bad_words_ids": [[4], [7]], "suppress_tokens": [8, 9]},
        {"bad_words_ids": [[4], [7, 8]], "forced_eos_token_id": 2, "min_length": 8},
        {"sequence_bias": [[[9], 3.0], [[10], -2.0]], "renormalize_logits": True},
        {"logits_processor": LogitsProcessorList([_dislikes_its_sum])},
        {"stopping_criteria": StoppingCriteriaList([_ends_after_even_tokens])},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row + 1, VOCABULARY, 3))},
    ]
    settings |= numbers.choice(others)
    if kind not in (*ENCODER_DECODERS, "mamba"):  # stock takes neither
        settings |= numbers.choice([{}, {"prefill_chunk_size": 3}])
        settings |= numbers.choice([{}, SCORED])
    return settings


def _dislikes_its_sum(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that looks at all rows together."""
    return scores.index_fill(1, ids.sum().reshape(1) % scores.shape[1], -5.0)


def _ends_after_even_tokens(ids: Tensor, scores: Any, **_: Any) -> Tensor:
    return (ids[:, -1] % 4 == 0) & (ids[:, -1] > 10)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", DECODERS + ENCODER_DECODERS)
def test_random_searches(kind: str, seed: int) -> None:
    numbers, stock = random.Random(f"{kind} {seed}"), build(kind)
    cache = CacheConfig(block_size=numbers.choice([1, 4, 16]), max_tokens=numbers.choice([None, 4096]))
    patched = hf_accel.patch(copy.deepcopy(stock), weights=None, cache=cache)
    for number in range(4):
        lengths = [numbers.randint(1, 14) for _ in range(numbers.choice([1, 2, 4]))]
        check(stock, patched, prompts(kind, lengths, number), **random_settings(numbers, kind))


@pytest.mark.parametrize("penalty", [2.0, 5.0])
def test_what_is_certain_stays_while_other_prompts_go_on(penalty: float) -> None:
    """With a length penalty, what a prompt's beams may reach grows again after it was too little."""
    stock = build("llama")
    patched = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for seed in range(4):
        inputs = prompts("llama", [7, 3, 5, 4, 9, 2], seed)
        check(stock, patched, inputs, eos_token_id=MANY, length_penalty=penalty, max_new_tokens=20, **SCORED)


@pytest.mark.parametrize("kind", ["llama", "mistral", "mamba", "Marian"])
def test_prompts_together_give_the_beams_of_each_alone(kind: str) -> None:
    model, lengths = hf_accel.patch(build(kind), weights=None), [9, 2, 5]
    inputs = prompts(kind, lengths)
    settings = {"eos_token_id": MANY, "num_return_sequences": 3, "pad_token_id": 4}
    together = searched(model, inputs, **settings)
    for row, length in enumerate(lengths):
        ids = inputs["input_ids"][row : row + 1]
        alone = searched(model, {"input_ids": ids[ids != 0][None]}, **settings)
        columns = 1 if kind in ENCODER_DECODERS else length
        new = together[3 * row : 3 * row + 3, 1 if kind in ENCODER_DECODERS else max(lengths) :]
        width = alone.shape[1] - columns
        assert torch.equal(new[:, :width], alone[:, columns:])
        assert not bool((new[:, width:] != 4).any())


@pytest.mark.parametrize("kind", ["llama", "mistral", "mamba", "Marian"])
def test_a_pass_that_does_not_fit_lets_beams_take_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are computed again then, and each waits with its logits until the others have theirs."""
    stock, inputs = build(kind), prompts(kind, [7, 3])
    patched = hf_accel.patch(copy.deepcopy(stock), weights=None)
    calls, compute = [0], ModelRunner.__call__

    def fits_few(self: ModelRunner, ids: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        if calls[0] > 3 and len(ids) > 4:
            raise torch.OutOfMemoryError("there is no room")
        return compute(self, ids, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "__call__", fits_few)
    with pytest.warns(hf_accel.HfAccelWarning, match="does not fit into the memory"):
        check(stock, patched, inputs, num_return_sequences=2)


def test_an_error_of_a_processor_ends_the_call_and_holds_no_pages() -> None:
    model = hf_accel.patch(build("llama"), weights=None, cache=CacheConfig(max_tokens=4096))
    calls = []

    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(ids)
        if len(calls) == 4:
            raise KeyError("mine")
        return scores

    with pytest.raises(KeyError, match="mine"):
        searched(model, prompts("llama", [5, 3]), logits_processor=LogitsProcessorList([fails]))
    searched(model, prompts("llama", [5, 3]))
    assert hf_accel.stats(model)["loop"] == "ragged" and hf_accel.stats(model)["blocks_used"] == 0


@pytest.mark.filterwarnings("ignore:generate\\(\\) runs transformers' own loop")
def test_beams_for_which_there_may_be_no_room_run_stocks_loop() -> None:
    stock = build("llama")
    model = hf_accel.patch(copy.deepcopy(stock), weights=None, cache=CacheConfig(block_size=16, max_tokens=112))
    inputs = prompts("llama", [20])
    assert torch.equal(searched(model, inputs), searched(stock, inputs))
    assert (
        hf_accel.stats(model)["loop"] == "stock: the beams of all prompts may need more pages than max_tokens= allows"
    )


def test_beams_share_the_pages_of_their_prompt() -> None:
    model = hf_accel.patch(build("llama"), weights=None, cache=CacheConfig(block_size=4))
    output = searched(model, prompts("llama", [41]), num_beams=4, max_new_tokens=5, **SCORED)
    sequences = output.past_key_values.padded.sequences
    shared = set.intersection(*(set(sequence.tables[0].blocks) for sequence in sequences))
    assert len(shared) >= 10 and hf_accel.stats(model)["blocks_used"] <= 10 + 4 * 2


def test_a_plan_says_that_beams_are_ragged() -> None:
    lines = str(hf_accel.plan(build("Marian"), weights=None))
    assert "beams" in lines and "pages shared until they differ" in lines
    assert GenerationConfig().num_beams in (None, 1)
