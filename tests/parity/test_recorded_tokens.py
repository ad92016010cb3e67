"""Tokens that were recorded once: whatever is rebuilt, the same call gives them again.

Weights are a function of the parameters' names, drawn by Python's own generator, so that neither torch nor
transformers can change them. `python -m tests.parity.test_recorded_tokens` records what this tree gives.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.kernels import cpu as kernels

from .families import FAMILIES, PADDING, VOCABULARY
from .letters import LETTERS, letters

RECORDS = Path(__file__).with_name("recorded_tokens.json")
MODELS = ["llama/None", "llama/int8", "qwen2/int8", "gemma2/None", "gemma2/int8", "gpt2/None"]
NEW_TOKENS = 10
ENDS = list(range(2, 12))  # token ids that end an answer
WAIT = 60  # seconds
SEEDED = SpeculativeConfig(drafter="ngram", num_draft=4, verify="seeded")

Tokens = list[list[int]]


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """ "llama/int8": patched, and never changed."""
    family, weights = name.split("/")
    config = FAMILIES[family]()
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(values(parameter_name, parameter.shape, unit_offset=family == "gemma2"))
    cache = hf_accel.CacheConfig(block_size=4)
    return hf_accel.patch(model.eval(), weights=None if weights == "None" else weights, cache=cache)


def values(name: str, shape: torch.Size, *, unit_offset: bool) -> torch.Tensor:
    """Uniform numbers of `shape`; of a norm's weight around 1, or around 0 where the norm itself adds the 1."""
    draw = random.Random(name)
    numbers = torch.tensor([draw.uniform(-1, 1) for _ in range(shape.numel())], dtype=torch.float32).view(shape)
    if name.endswith("bias"):
        return numbers * 0.2
    if len(shape) == 1:
        return numbers * 0.1 + (0 if unit_offset else 1)
    return numbers * 0.45


def prompts() -> Tokens:
    """Eight of different lengths that begin alike; every second one repeats itself, for drafts to be found."""
    draw = random.Random(11)
    shared = [draw.randrange(1, VOCABULARY) for _ in range(5)]
    found = []
    for number in range(8):
        own = [draw.randrange(1, VOCABULARY) for _ in range(2 + 2 * number)]
        found.append(shared + (own * 3 if number % 2 else own))
    return found


PROMPTS = prompts()


# -- generate() ----------------------------------------------------------------------------------------------

GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, ends": {"eos_token_id": ENDS, "min_new_tokens": 3},
    "greedy, processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "greedy, stop strings": {"stop_strings": [LETTERS[number] for number in range(20, 35)], "tokenizer": letters()},
    "greedy, lookup": {"prompt_lookup_num_tokens": 3},
    "greedy, speculative": {"speculative": SEEDED},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True},
    "sampled, cut": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "sampled, min_p": {"do_sample": True, "temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.1},
    "sampled, returned": {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3},
    "sampled, speculative": {"do_sample": True, "temperature": 0.8, "speculative": SEEDED},
}


def generated(model: PreTrainedModel, case: str) -> Tokens:
    """New tokens of three prompts padded on the left, and of one alone."""
    columns = max(map(len, PROMPTS[:3]))
    ids = torch.tensor([[PADDING] * (columns - len(prompt)) + prompt for prompt in PROMPTS[:3]])
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **GENERATE[case]}
    found: Tokens = []
    for each in (ids, torch.tensor([PROMPTS[3]])):
        torch.manual_seed(3)
        out = model.generate(each, attention_mask=(each != PADDING).long(), **settings)
        found += out[:, each.shape[1] :].tolist()
    return found


# -- Engine --------------------------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, ends": {"stop_token_ids": ENDS, "min_new_tokens": 4},
    "greedy, stop": {"stop": [LETTERS[number] for number in range(20, 35)]},
    "greedy, penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "greedy, restricted": {"bad_token_ids": ENDS, "logit_bias": {7: 1.5, 60: -2.0}},
    "sampled": {"temperature": 1.0, "seed": 1},
    "sampled, top_k": {"temperature": 0.6, "top_k": 8, "seed": 2},
    "sampled, top_p": {"temperature": 1.2, "top_p": 0.85, "seed": 3},
    "sampled, both": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "seed": 4},
    "sampled, min_p": {"temperature": 1.3, "min_p": 0.1, "seed": 5},
    "sampled, penalties": {
        "temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.4, "seed": 6,
    },
    "sampled, restricted": {"temperature": 1.0, "allowed_token_ids": list(range(30, 60)), "seed": 7},
    "sampled, many": {"temperature": 1.0, "n": 3, "seed": 8},
}  # fmt: skip
ONE_BY_ONE = ["sampled", "sampled, both", "sampled, penalties"]  # whose tokens depend on what was drafted


def served(model: PreTrainedModel, speculative: SpeculativeConfig | None) -> dict[str, Tokens]:
    """All requests at once, of three prompts each."""
    with hf_accel.Engine(model, tokenizer=letters(), speculative=speculative, token_budget=48) as engine:
        handles = {
            case: [engine.submit(prompt, max_new_tokens=NEW_TOKENS, **settings) for prompt in PROMPTS[::3]]
            for case, settings in REQUESTS.items()
        }
        return {
            case: [sample.result(WAIT).tokens for handle in each for sample in handle.samples]
            for case, each in handles.items()
        }


def verified(model: PreTrainedModel, verify: Any) -> dict[str, Tokens]:
    """Sampled with drafts that a uniform number accepts or rejects, one request after the other."""
    speculative = SpeculativeConfig(drafter="ngram", num_draft=3, verify=verify, ngram=(1, 3))
    with hf_accel.Engine(model, speculative=speculative) as engine:
        return {
            case: [
                engine.submit(prompt, max_new_tokens=NEW_TOKENS, **REQUESTS[case]).result(WAIT).tokens
                for prompt in PROMPTS[1::2]
            ]
            for case in ONE_BY_ONE
        }


# -- generate_batch ------------------------------------------------------------------------------------------

BATCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, ends": {"do_sample": False, "eos_token_id": ENDS, "repetition_penalty": 1.2},
    "sampled": {"do_sample": True, "top_k": 0},
    "sampled, cut": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "sampled, min_p": {"do_sample": True, "temperature": 1.4, "min_p": 0.05, "no_repeat_ngram_size": 2},
    "sampled, returned": {"do_sample": True, "top_p": 0.8, "num_return_sequences": 2},
}


def batched(model: PreTrainedModel, case: str, speculative: SpeculativeConfig | None) -> Tokens:
    torch.manual_seed(4)
    settings = BATCHES[case]
    outputs = model.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS, speculative=speculative, **settings)
    return [output.generated_tokens for output in outputs.values()]


def batched_by_configs(model: PreTrainedModel) -> Tokens:
    """A config for each prompt."""
    torch.manual_seed(5)
    configs = [
        GenerationConfig(
            max_new_tokens=4 + number, do_sample=number % 2 == 1, temperature=0.8 if number % 2 else 1.0, top_k=15,
            pad_token_id=PADDING,
        )
        for number in range(len(PROMPTS))
    ]  # fmt: skip
    return [output.generated_tokens for output in model.generate_batch(PROMPTS, configs).values()]


# -- records -------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[PreTrainedModel], dict[str, Tokens]]] = {
    "generate": lambda model: {case: generated(model, case) for case in GENERATE},
    "engine": lambda model: served(model, None),
    "engine, seeded": lambda model: served(model, SEEDED),
    "engine, token": lambda model: verified(model, "token"),
    "engine, block": lambda model: verified(model, "block"),
    "generate_batch": lambda model: {case: batched(model, case, None) for case in BATCHES},
    "generate_batch, seeded": lambda model: {case: batched(model, case, SEEDED) for case in BATCHES},
    "generate_batch, configs": lambda model: {"mixed": batched_by_configs(model)},
}


@functools.cache
def records() -> dict[str, Any]:
    return json.loads(RECORDS.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:UserWarning")
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_that_were_recorded(name: str, way: str) -> None:
    if name.endswith("int8") and kernels.refusal() is not None:
        pytest.skip(f"other backends round otherwise: {kernels.refusal()}")
    got, expected = WAYS[way](model_of(name)), records()[name][way]
    if way == "generate" and penalizes_padding():
        for case in [case for case, settings in GENERATE.items() if "repetition_penalty" in settings]:
            got.pop(case), expected.pop(case, None)
    assert got == expected


def penalizes_padding() -> bool:
    """Whether stock's repetition penalty takes the padding for tokens of the prompt, as in older transformers."""
    try:
        RepetitionPenaltyLogitsProcessor(1.1, prompt_ignore_length=torch.zeros(1, dtype=torch.int64))  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


def record() -> None:
    """A line a case, so that a difference shows where it is."""
    lines = []
    for name in MODELS:
        ways = []
        for way, run in WAYS.items():
            found = run(model_of(name)).items()
            cases = ",\n".join(f"   {json.dumps(case)}: {json.dumps(tokens)}" for case, tokens in found)
            ways.append(f"  {json.dumps(way)}: {{\n{cases}\n  }}")
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(ways) + "\n }")
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record()
