"""The settings of a request from a GenerationConfig, and a complete config from a call's keywords."""

from __future__ import annotations

import copy
from collections import abc
from typing import Any

import torch
from transformers import GenerationConfig

from ...errors import UnsupportedError
from ...keywords import check_keywords
from ..request_settings import RequestSettings
from ..sampling.constraint import Constrained
from ..sampling.processors import Processor
from .grammars import KEYWORDS
from .processing import processors_refusal, stock_sampling, stop_rules
from .refusals import refuse_clocks
from .request_config import default_new_tokens, other_search, prompt_setting

ASKED = ("adapter", *KEYWORDS)  # keywords by which a request asks for what no config can say
# Keywords of generate() that are no fields of a config, and what serves instead.
MEANT = {
    "prefix_allowed_tokens_fn": "generate(), or Engine.submit(processors=)",
    "logits_processor": "generate(logits_processor=), or Engine.submit(processors=)",
    "stopping_criteria": "generate(stopping_criteria=), or Engine.submit(stop=)",
    "streamer": "generate(streamer=), or Engine.submit(), whose requests stream",
    "assistant_model": "speculative=",
    "input_ids": "inputs=, a list of token ids for each prompt",
    "attention_mask": "lists of token ids without padding",
    "tokenizer": "response_format=, ..., or stop strings in generate(), or Engine(tokenizer=)",
}


def complete_config(model: Any, config: GenerationConfig | None, what: str, keywords: dict[str, Any]) -> Any:
    """Return a copy of a config, or of the model's own, updated with `keywords`, with its special tokens as tensors.

    what: the name of the call for error messages. Raises UnsupportedError for keywords that a GenerationConfig does
    not have.
    """
    complete, _ = model._prepare_generation_config(config)
    fields = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    known_as = "it takes the fields of a GenerationConfig"
    check_keywords(what, complete.update(**keywords), fields, MEANT, known_as=known_as)
    model._prepare_special_tokens(complete, device=model.device)
    return complete


def settings_of_config(
    model: Any,
    config: GenerationConfig,
    prompt: abc.Sequence[int],
    asked: abc.Mapping[str, Any],
    *,
    processors: abc.Iterable[Processor] = (),
    **sampling: Any,
) -> RequestSettings:
    """Make the settings of a request from a GenerationConfig whose special tokens are prepared.

    prompt: the tokens with which its sequences begin. asked: the fields of the settings that no config has.
    processors: what is applied after the config's own processors, and before its warpers. sampling: keywords of
    stock_sampling, and encoder_ids: the tokens that an encoder reads; none without one.
    Raises UnsupportedError for settings that continuous batching cannot serve, and for values that have no meaning.
    """
    if (config.num_beams or 1) > 1:
        raise UnsupportedError(
            f"continuous batching cannot search with num_beams={config.num_beams}; set it to 1, or use generate()"
        )
    refuse_clocks(model, config)
    if (asked_for := other_search(config)) is not None:
        raise UnsupportedError(
            f"continuous batching chooses tokens by greedy search and sampling alone, and {asked_for}="
            f"{getattr(config, asked_for)!r} asks for more; set it to None, or use generate()"
        )
    config, limit = copy.copy(config), default_new_tokens(config, len(prompt))
    config.max_length = len(prompt) + limit
    read = list(sampling.pop("encoder_ids", ()) or prompt)
    constrained = [] if asked.get("constraint") is None else [Constrained()]
    try:
        all_processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([read], device=model.device) if prompt_setting(config) else None,
            logits_processor=[*processors, *constrained],
            device=model.device,
        )
        criteria = model._get_stopping_criteria(generation_config=config, stopping_criteria=[])
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"the settings of this request have no meaning: {error}") from error
    refusal = processors_refusal(all_processors)
    if refusal is not None:
        raise UnsupportedError(f"continuous batching cannot serve this generation_config: {refusal}; use generate()")
    chosen = stock_sampling(all_processors, greedy=not config.do_sample, **sampling)
    return RequestSettings(max(1, limit), chosen, stop_rules(criteria, max_length=config.max_length), **asked)
