"""The keywords and defaults of Engine.submit as transformers has them: a GenerationConfig and logits processors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig

from ...errors import UnsupportedError
from ...keywords import check_keywords, positive_int
from ..sampling.processors import FrequencyPenalty, OneByOne, OnlyTokens, Processor
from .vocabulary import check_ids

# These fields of a GenerationConfig choose the tokens of a request and its end. Others have no meaning for it.
SERVED = (
    "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
    "watermarking_config", "sequence_bias", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "remove_invalid_values", "renormalize_logits", "min_length", "min_new_tokens", "max_time", "eos_token_id",
    "num_beams",
)  # fmt: skip
# These are in OpenAI's API and in vLLM as well.
OWN = (
    "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids",
    "processors", "logprobs",
)  # fmt: skip
MEANT = {
    "max_length": "max_new_tokens=",
    "num_return_sequences": "n=",
    "stop_strings": "stop=",
    "logits_processor": "processors=",
    "prefix_allowed_tokens_fn": "processors=",
}
SYNONYMS = {"stop_token_ids": "eos_token_id", "logit_bias": "sequence_bias"}
ALL = "None keeps every token"


def request_config(
    model: Any, given: Mapping[str, Any], other_keywords: Iterable[str]
) -> tuple[GenerationConfig, list[Processor]]:
    """Return a copy of model.generation_config with the given keywords of submit(), and the processors they add.

    None is transformers' own None for a field of a GenerationConfig; another keyword that is None counts as left out.
    A setting that neither gives stays None: complete_config would add transformers' global defaults, such as top_k=50.
    other_keywords: the keywords that submit() has besides these, for the error messages. The eos_token_id of the copy
    is None if there are no stop tokens. Raises UnsupportedError for keywords and values that have no meaning here.
    """
    check_keywords("submit()", given, {*SERVED, *OWN, *other_keywords}, MEANT)
    given = {name: value for name, value in given.items() if value is not None or name in SERVED}
    for ours, theirs in SYNONYMS.items():
        if ours in given and theirs in given:
            raise UnsupportedError(f"{ours} and {theirs} say the same; give one of them")
    if given.get("num_beams") is not None:
        positive_int("num_beams", given["num_beams"])
    config = copy.deepcopy(model.generation_config)
    for name in set(SERVED).intersection(given):
        setattr(config, name, given[name])
    _choose_search(config, given)
    _check_numbers(config, given)
    if "stop_token_ids" in given:
        config.eos_token_id = given["stop_token_ids"]
    ends = config.eos_token_id
    config.eos_token_id = _ids("stop_token_ids", () if ends is None else ends) or None
    if "logit_bias" in given:
        config.sequence_bias = _biases(model, given["logit_bias"])
    if "bad_token_ids" in given:
        bad = _ids("bad_token_ids", given["bad_token_ids"], model)
        config.suppress_tokens = [*(config.suppress_tokens or ()), *bad] or None
    return config, list(_added(model, given))


def _choose_search(config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """Set do_sample by the temperature. 0 is greedy search; a GenerationConfig has no such temperature."""
    if "temperature" not in given:
        return
    temperature = _number("temperature", given["temperature"], "0 is greedy search, 1 samples as is", low=0)
    if bool(given.get("do_sample", temperature > 0)) != (temperature > 0):
        raise UnsupportedError(
            f"do_sample={given['do_sample']} contradicts temperature={temperature}; 0 is greedy search, so leave "
            "do_sample out"
        )
    config.do_sample = temperature > 0
    config.temperature = temperature or None


def _check_numbers(config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """Check the numbers that transformers would leave unchecked, or of which it would refuse an integer."""
    for name, high, hint in (("top_p", 1.0, ALL), ("min_p", 1.0, ALL), ("repetition_penalty", math.inf, "1 is none")):
        if given.get(name) is not None:
            setattr(config, name, _number(name, given[name], hint, low=0, high=high))
    if given.get("repetition_penalty") == 0:
        raise UnsupportedError("repetition_penalty=0 would divide by it; 1 is none")
    for name, hint in (("top_k", ALL), ("min_new_tokens", "0 asks for none"), ("min_length", "0 asks for none")):
        if given.get(name) is not None:
            _integer(name, given[name], hint)


def _added(model: Any, given: Mapping[str, Any]) -> Iterable[Processor]:
    """Make the processors that transformers does not have."""
    frequency, presence = (
        _number(name, given.get(name, 0.0), "0 is none") for name in ("frequency_penalty", "presence_penalty")
    )
    if frequency or presence:
        yield FrequencyPenalty(frequency, presence)
    if "allowed_token_ids" in given:
        allowed = _ids("allowed_token_ids", given["allowed_token_ids"], model)
        if not allowed:
            raise UnsupportedError("allowed_token_ids=() allows no token at all; None allows every one")
        yield OnlyTokens(tuple(allowed))
    functions = tuple(given.get("processors", ()))
    for function in functions:
        if not callable(function):
            raise UnsupportedError(f"processors holds {function!r}; give functions of (input_ids, scores)")
    if functions:
        yield OneByOne(functions)
    if "logprobs" in given:
        _integer("logprobs", given["logprobs"], "None reports none")


def _biases(model: Any, given: Any) -> dict[tuple[int, ...], float] | None:
    """Return logit_bias as sequence_bias: the bias of each sequence of one token."""
    biases = dict(given)
    for token, bias in zip(_ids("logit_bias", biases, model), biases.values(), strict=True):
        if not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
            raise UnsupportedError(f"logit_bias of token {token} is {bias}; give a number, or -inf to rule it out")
    return {(token,): float(bias) for token, bias in biases.items()} or None


def _ids(name: str, given: Any, model: Any = None) -> list[int]:
    """Return one token id or several as a list. They must be in the vocabulary of `model`, if it is given."""
    ids = [given] if isinstance(given, int) else list(given)
    for token in ids:
        _integer(name, token, "token ids are not negative")
    if ids and model is not None:
        check_ids(model, ids, name)
    return ids


def _number(name: str, value: Any, hint: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    bounds = " from 0 to 1" if high == 1 else " of at least 0" if low == 0 else ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or abs(value) == math.inf:
        raise UnsupportedError(f"{name}={value!r} must be a finite number{bounds}; {hint}")
    return float(value)


def _integer(name: str, value: Any, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnsupportedError(f"{name}={value!r} must be an integer of at least 0; {hint}")


NEW_TOKENS = 20  # the default of transformers


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """The end-of-sequence token ids of the model."""
    return end_ids(model.generation_config)


def end_ids(config: Any) -> tuple[int, ...]:
    """The end-of-sequence token ids of a GenerationConfig."""
    ends = config.eos_token_id
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def default_new_tokens(config: Any, num_prompt: int) -> int:
    """The number of new tokens that a GenerationConfig allows after a prompt of `num_prompt` tokens."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return NEW_TOKENS if config.max_length is None else max(1, config.max_length - num_prompt)


def prompt_setting(config: Any) -> str | None:
    """Return the name of a setting of a GenerationConfig that reads what the encoder does, or else the prompt."""
    plain = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
    return next((name for name, value in plain.items() if getattr(config, name, None) not in (None, value)), None)


def other_search(config: Any) -> str | None:
    """Return the name of a setting of a GenerationConfig that asks for more than greedy search, sampling and beams do;
    None if there is none.
    """
    names: tuple[str, ...] = ("constraints", "force_words_ids", "dola_layers", "token_healing")
    if not config.do_sample and config.top_k != 1:
        names = (*names, "penalty_alpha")  # contrastive search; transformers' own default of top_k is 50
    return next((name for name in names if getattr(config, name, None)), None)
