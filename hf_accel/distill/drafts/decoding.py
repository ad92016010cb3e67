"""A model's own continuations, sampled at a temperature and nothing else, with a draft or without."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from ...cache.hf import fixed_settings
from ...config import CacheConfig, SpeculativeConfig
from ...errors import UnsupportedError
from ...generation import sequence as generated
from ...generation.hf.refusals import ragged_refusal
from ...generation.hf.request_config import stop_token_ids
from ...generation.hf.session import Session
from ...generation.request_settings import RequestSettings, StopRules
from ...generation.sampling.processors import Temperature
from ...generation.sampling.sampling import Sampling
from ...generation.speculation.controller import Controller
from ...patching.patch import is_patched, make_draft
from ...tensors import model_device

# The tokens of a pass: many, since a prompt delays nobody here.
TOKEN_BUDGET = 2048
# Tokens that a sequence may need besides its own: the rest of a block that is not full, and its draft.
SPARE_TOKENS = 64


def as_patched(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if it is patched, or a patched one over the same Parameters with the same weights.

    Raises UnsupportedError for a model that cannot run ragged, and so neither speculate nor be a draft.
    """
    patched = model if is_patched(model) else make_draft(model, None)
    refusal = ragged_refusal(patched)
    if refusal is not None:
        raise UnsupportedError(f"{type(model).__name__} cannot decode in ragged rows, as speculation needs: {refusal}")
    return patched


class Decoder:
    """Continues prompts with a model that is patched. Nothing of it is written to, torch's generators included."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, seed: int, draft: Any = None) -> None:
        self.model, self.temperature = model, temperature
        self._seeds = random.Random(seed)
        self._config = None if draft is None else SpeculativeConfig(drafter=draft)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        at_once: int | None = None,
        controller: Controller | None = None,
        progress: Callable[[int], bool] = lambda tokens: True,
    ) -> list[list[int]]:
        """The new tokens of each prompt, up to an end-of-sequence token or as many as are wanted.

        at_once: prompts that are under way together; None for all. controller: of what is drafted. progress: called
        after each pass with the tokens it brought; ends the run by returning False, which leaves continuations short.
        """
        temperature = [Temperature(self.temperature)] if self.temperature else []
        sampling = Sampling(temperature, greedy=not temperature)
        stop = StopRules(frozenset(stop_token_ids(self.model)))
        sequences = [
            generated.Sequence(list(prompt), RequestSettings(count, sampling, stop), seed=self._seeds.getrandbits(62))
            for prompt, count in zip(prompts, max_new_tokens, strict=True)
        ]
        session = Session(
            self.model,
            self._cache([len(prompt) + count for prompt, count in zip(prompts, max_new_tokens, strict=True)], at_once),
            speculative=self._config,
            token_budget=TOKEN_BUDGET,
            max_running=at_once,
            controller=controller,
        )
        with session:
            for sequence in sequences:
                session.add(sequence)
            while session.has_work:
                brought = session.step()
                for one in brought:
                    if one.error is not None:
                        raise one.error
                if not progress(sum(len(one.tokens) for one in brought)):
                    break
        return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]

    def _cache(self, lengths: Sequence[int], at_once: int | None) -> CacheConfig:
        """Leave a GPU's memory to the training, except for pages of the longest sequences that can be under way
        together.

        lengths: the tokens of each sequence at its end.
        """
        drafts = [] if self._config is None else self._config.drafters
        device = model_device(self.model)
        cache = fixed_settings(self.model, CacheConfig(prefix_sharing=False), device, rows=TOKEN_BUDGET, drafts=drafts)
        if cache.max_tokens is None:  # pages grow as they are needed
            return cache
        needed = sum(length + SPARE_TOKENS for length in sorted(lengths, reverse=True)[:at_once])
        return dataclasses.replace(cache, max_tokens=min(cache.max_tokens, needed))
