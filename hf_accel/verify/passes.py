"""The passes of verify(): greedy, one sequence at a time, over the kind of cache that the model's generate() uses."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..cache.hf import PagedCache
from ..errors import HfAccelWarning
from ..patching.patch import is_patched
from ..undo.state import state_of

MARKS_END = "token_type_ids"  # how the names of these end
SCORES = {"output_scores": True, "return_dict_in_generate": True}


@dataclasses.dataclass(frozen=True)
class History:
    """The ids that a model has read and written.

    ids: [1, n], the prompt and what came after it; of an encoder-decoder, the decoder's. num_prompt: how many of them
    were there before the first was written. encoded: [1, m], what the encoder reads, where it reads token ids.
    """

    ids: Tensor
    num_prompt: int
    encoded: Tensor | None = None

    @property
    def written(self) -> int:
        return self.ids.shape[1] - self.num_prompt

    @property
    def read(self) -> Tensor:
        """Return the prompt and what was written [n]."""
        return self.ids[0] if self.encoded is None else torch.cat([self.encoded[0], self.ids[0, self.num_prompt :]])

    def before(self, position: int) -> History:
        """Return the history when it had `position` ids."""
        return dataclasses.replace(self, ids=self.ids[:, :position], num_prompt=min(self.num_prompt, position))

    def after(self, tokens: Tensor) -> History:
        """Return the history with tokens [k] behind it."""
        return dataclasses.replace(self, ids=torch.cat([self.ids, tokens[None].to(self.ids.device)], dim=1))


def started(model: PreTrainedModel, prompt: Tensor, settings: Mapping[str, Any]) -> History:
    """Return the history of a model that has prompt [1, n] before it, and has written nothing.

    An encoder that reads token ids reads the prompt, and generate() says what the decoder then starts from. Other
    encoders read what `settings` have for them, such as images or sound, and the prompt is the decoder's.
    """
    if not model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        return History(prompt, prompt.shape[1])
    output: Tensor = greedy(model, History(prompt[:, :0], 0, prompt), 1, settings)
    ids = output[:, :-1].to(prompt.device)
    return History(ids, ids.shape[1], prompt)


def greedy(model: PreTrainedModel, history: History, num_new: int, settings: Mapping[str, Any]) -> Any:
    """Run greedy generate() from a history and return its output."""
    ids = history.ids.to(model.device)
    read = ids if history.encoded is None else history.encoded.to(model.device)
    given = {name: _of_history(name, value, history) for name, value in settings.items()}
    given |= {"do_sample": False, "num_beams": 1, "max_new_tokens": num_new}
    if not model.config.is_encoder_decoder or history.encoded is not None:
        given |= {"inputs": read, "attention_mask": torch.ones_like(read)}
    if model.config.is_encoder_decoder and (history.encoded is None or history.written):
        given["decoder_input_ids"] = ids
    generate: Any = model.generate  # torch's stubs give a Module's attributes the type Tensor | Module
    return generate(**given)


def _of_history(name: str, value: Any, history: History) -> Any:
    """Return a keyword for a history in place of its prompt: what marks tokens [1, n] as text or image marks those
    written as it does the last of the prompt, which is what generate() does.
    """
    if not name.endswith(MARKS_END) or not isinstance(value, Tensor):
        return value
    marks = value[:, : history.ids.shape[1]]
    return torch.cat([marks, marks[:, -1:].expand(1, history.ids.shape[1] - marks.shape[1])], dim=1)


def continuation(model: PreTrainedModel, history: History, num_new: int, settings: Mapping[str, Any]) -> Tensor:
    """Return the tokens that greedy generate() adds to a history."""
    output: Tensor = greedy(model, history, num_new, settings)
    return output[0, history.ids.shape[1] :].to(history.ids.device)


def last_logits(model: PreTrainedModel, history: History, settings: Mapping[str, Any]) -> Tensor:
    """Return logits [V], float32 on the CPU, from which greedy generate() takes the token after a history, which it is
    given as its prompt.
    """
    return _last_scores(model, history, 1, settings)


def logits_by_steps(
    model: PreTrainedModel, history: History, settings: Mapping[str, Any], *, start: int | None = None
) -> Tensor:
    """Compute `last_logits` by a generate() that starts from the first `start` ids of a history, None for its prompt,
    and computes the others one by one, whatever it would have written.
    """
    start = history.num_prompt if start is None else start
    forced = LogitsProcessorList([*(settings.get("logits_processor") or ()), Forced(history.ids)])
    steps = history.ids.shape[1] - start + 1
    return _last_scores(model, history.before(start), steps, dict(settings) | {"logits_processor": forced})


class Forced(LogitsProcessor):
    """Makes generate() write given ids [1, n], which begin with the prompt, and leaves later logits as they are."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids[0].tolist()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if length >= len(self.ids):
            return scores
        own = torch.tensor([self.ids[length]], device=scores.device)
        return torch.full_like(scores, -torch.inf).index_fill_(-1, own, 0)


def _last_scores(model: PreTrainedModel, history: History, num_new: int, settings: Mapping[str, Any]) -> Tensor:
    with _without_warning(model):
        output = greedy(model, history, num_new, dict(settings) | SCORES)
    scores: Tensor = output.scores[-1][0]
    return scores.float().cpu()


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


def new_cache(model: PreTrainedModel) -> Any:
    """Make an empty cache for a forward pass; None where stock makes its own."""
    state = state_of(model).generation if is_patched(model) else None
    if state is None or state.cache is None:
        return None
    return PagedCache(model.config, state.cache, context=state.context)
