"""Ten of the models that `make families` compares, in every feature; docs/support.md has all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from .features import FAULTS, outcomes
from .models import Family, families

RAGGED = ("greedy", "sampling", "prompt lookup", "assistant", "cache asked for", "int8 greedy")
FAST = {  # and what must stay on hf_accel's own path
    Family("vision", "llava", "LlavaForConditionalGeneration"): ("forward", *RAGGED),
    Family("seq2seq", "t5", "T5ForConditionalGeneration"): ("int8 forward",),
    Family("encoder", "bert", "BertForMaskedLM"): ("forward", "int8 forward"),
}
MORE = dict.fromkeys(  # which tests/parity compares in much the same ways
    [
        Family("causal", "llama", "LlamaForCausalLM"),  # LLaVA's decoder
        Family("causal", "gpt2", "GPT2LMHeadModel"),
        Family("causal", "gemma2", "Gemma2ForCausalLM"),
        Family("causal", "qwen2", "Qwen2ForCausalLM"),
        Family("causal", "mixtral", "MixtralForCausalLM"),
    ],
    RAGGED,
) | {
    Family("causal", "diffllama", "DiffLlamaForCausalLM"): ("int8 forward",),
    Family("causal", "jamba", "JambaForCausalLM"): ("int8 forward",),
}
OLDER = {  # what the oldest supported transformers, 5.17, cannot show
    "llava": "its config does not declare its parts, so no tiny one can be made",
}


VARIED = ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM"]


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(family, marks=pytest.mark.long) for family in MORE)], ids=str
)
def test_patched_answers_as_stock(family: Family) -> None:
    if family.model_type in OLDER and transformers.__version__.startswith("5.17."):
        pytest.skip(OLDER[family.model_type])
    words = {feature: (result.word, result.reason) for feature, result in outcomes(family)}
    assert {feature: words[feature] for feature in words if words[feature][0] in (*FAULTS, "build")} == {}
    assert [feature for feature in (FAST | MORE)[family] if words[feature][0] != "fast"] == []


@pytest.mark.long
@pytest.mark.parametrize("variant", range(1, 7))
@pytest.mark.parametrize("name", VARIED)
def test_other_configurations_answer_as_stock(name: str, variant: int) -> None:
    """`python -m tests.families.run --all --variants 20` compares every class so."""
    found = outcomes(replace(families()[name], variant=variant))
    assert {feature: result for feature, result in found if result.word in (*FAULTS, "build")} == {}
