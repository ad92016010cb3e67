"""The passes of verify(): greedy, one sequence at a time, over the kind of cache that the model's generate() uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.hf import PagedCache
from ..errors import HfAccelWarning
from ..patching.patch import is_patched
from ..undo.state import state_of

SCORES = {"output_scores": True, "return_dict_in_generate": True}


def greedy(model: PreTrainedModel, prompt: Tensor, num_new: int, **settings: Any) -> Any:
    """Run greedy generate() on prompt [1, n] and return its output."""
    prompt = prompt.to(model.device)
    generate: Any = model.generate  # torch's stubs give a Module's attributes the type Tensor | Module
    fixed = {"do_sample": False, "num_beams": 1, "max_new_tokens": num_new}
    return generate(prompt, attention_mask=torch.ones_like(prompt), **fixed, **settings)


def continuation(model: PreTrainedModel, prompt: Tensor, num_new: int, settings: dict[str, Any]) -> Tensor:
    """Return the tokens that greedy generate() adds to prompt [1, n]."""
    output: Tensor = greedy(model, prompt, num_new, **settings)
    return output[0, prompt.shape[1] :].to(prompt.device)


def last_logits(model: PreTrainedModel, history: Tensor, **settings: Any) -> Tensor:
    """Return logits [V], float32 on the CPU, from which greedy generate() takes the token after history [1, n]."""
    with _without_warning(model):
        return _drawn_from(greedy(model, history, 1, **SCORES, **settings))


def logits_of_the_run(model: PreTrainedModel, history: Tensor, num_prompt: int, settings: dict[str, Any]) -> Tensor:
    """Compute `last_logits` by a generate() that starts from the prompt, which is the first num_prompt tokens of
    history.
    """
    with _without_warning(model):
        output = greedy(model, history[:, :num_prompt], history.shape[1] - num_prompt + 1, **SCORES, **settings)
    if torch.equal(output.sequences[:, :-1].to(history.device), history):
        return _drawn_from(output)
    return last_logits(model, history, **settings)  # a model patched to speculate, which may round otherwise without


@contextmanager
def _without_warning(model: PreTrainedModel) -> Iterator[None]:
    """Suppress the warning that scores need transformers' loop: here verify() asks for scores, and not the user."""
    warned = state_of(model).generation.warned if is_patched(model) else set()
    before = set(warned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HfAccelWarning)
            yield
    finally:
        warned.intersection_update(before)


def _drawn_from(output: Any) -> Tensor:
    scores: Tensor = output.scores[-1][0]
    return scores.float().cpu()


def new_cache(model: PreTrainedModel) -> Any:
    """Make an empty cache for a forward pass; None where stock makes its own."""
    state = state_of(model).generation if is_patched(model) else None
    if state is None or state.cache is None:
        return None
    return PagedCache(model.config, state.cache, context=state.context)
