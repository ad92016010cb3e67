"""Applies logits processors to the scores of beams. Those that change few scores write them in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from .processing import is_stock

Process = Callable[[Tensor, Tensor], Tensor]  # token ids [N, L] int64, scores [N, V] float32 -> scores


def process_of(processors: LogitsProcessorList) -> Process | None:
    """Return a function that applies all of these processors, and may write to the scores; None if there is none.

    Transformers' own copy all scores, though most of them change only those of a few tokens.
    """
    if not len(processors):
        return None
    if not all(is_stock(processor) for processor in processors):
        return processors  # a user's processor may keep the scores that it has seen
    steps = [_in_place(processor) or processor for processor in processors]

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process


def _in_place(processor: Any) -> Process | None:
    """Return a function that changes scores as a processor does; None if this one is not known."""
    kind = type(processor)
    if kind is logits_process.MinLengthLogitsProcessor:
        return _excluded(processor.eos_token_id, until=processor.min_length)
    if kind is logits_process.MinNewTokensLengthLogitsProcessor:
        until = processor.prompt_length_to_skip + processor.min_new_tokens
        return _excluded(processor.eos_token_id, until=until)
    if kind is logits_process.SuppressTokensLogitsProcessor:
        return _excluded(processor.suppress_tokens)
    if kind in (logits_process.SequenceBiasLogitsProcessor, logits_process.NoBadWordsLogitsProcessor):
        return _biased(processor)
    if kind is logits_process.NoRepeatNGramLogitsProcessor:
        return _without_repeats(processor.ngram_size)
    return None


def _excluded(tokens: Tensor, *, until: float = math.inf) -> Process:
    """Exclude these tokens from texts of less than `until` tokens."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] < until:
            places = tokens.flatten().to(scores.device)
            scores[:, places[(places >= 0) & (places < scores.shape[1])]] = -torch.inf
        return scores

    return process


def _biased(processor: Any) -> Process | None:
    """Add biases to the scores of single tokens. Those of longer sequences are left to transformers."""
    biases = processor.sequence_bias
    if any(len(sequence) != 1 for sequence in biases):
        return None
    tokens, added = [sequence[0] for sequence in biases], torch.tensor(list(biases.values()), dtype=torch.float32)

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        if max(tokens) >= scores.shape[1]:
            return processor(ids, scores)  # which raises an error
        scores[:, tokens] += added.to(scores.device)
        return scores

    return process


def _without_repeats(size: int) -> Process:
    """Exclude tokens that would end a sequence of `size` tokens which the text holds already."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        length = ids.shape[1]
        if length < size:
            return scores
        windows, latest = ids.unfold(1, size, 1), ids[:, length + 1 - size :]
        rows, places = (windows[..., :-1] == latest[:, None]).all(-1).nonzero(as_tuple=True)
        tokens = windows[rows, places, -1]
        known = tokens < scores.shape[1]
        scores[rows[known], tokens[known]] = -torch.inf
        return scores

    return process
