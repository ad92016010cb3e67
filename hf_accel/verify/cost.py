"""What quantization costs in quality: perplexity and divergence from the float model, teacher-forced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import UnsupportedError
from ..pack import PATIENCE
from .certificate import Cost
from .passes import new_cache

WINDOW = 512  # tokens that are predicted from one another
CHUNK = 64  # tokens of a pass, so that what attention reads has been through the cache


def windows_of(texts: Sequence[Tensor]) -> list[Tensor]:
    """Token ids [n] of each text as windows [1, length] of at most WINDOW tokens.

    Raises UnsupportedError if none has two tokens: the first of a window is not predicted.
    """
    windows = [window[None] for text in texts for window in text.split(WINDOW) if len(window) > 1]
    if not windows:
        raise UnsupportedError("text= has no two tokens in a row; the first of a text is not predicted, give more")
    return windows


@torch.no_grad()
def measure_cost(
    model: PreTrainedModel, reference: PreTrainedModel, windows: Sequence[Tensor], *, name: str, text: str
) -> Cost:
    """Both models side by side; logits of one chunk of one window at a time are held."""
    total = CostSums()
    with logging.tqdm(total=len(windows), desc="Measuring the cost", unit=" windows", delay=PATIENCE) as bar:
        for window in windows:
            targets = window[0, 1:].to(model.device)
            pairs = zip(predictions(model, window), predictions(reference, window), strict=True)
            for actual, expected in pairs:
                chunk, targets = targets[: len(actual)], targets[len(actual) :]
                total.add(actual, expected.to(actual.device), chunk)
            bar.update()
    return total.cost(name, text)


def predictions(model: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
    """Log-probabilities [chunk, V], float32, of the token after each of ids [1, T] but the last."""
    ids = ids[:, :-1].to(model.device)
    if getattr(model, "_is_stateful", False):  # recurrent: not in parts
        yield model(input_ids=ids).logits[0].float().log_softmax(-1)
        return
    cache = new_cache(model)
    for chunk in ids.split(CHUNK, dim=1):
        output: Any = model(input_ids=chunk, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        yield output.logits[0].float().log_softmax(-1)


class CostSums:
    """Sums over tokens, in double precision."""

    def __init__(self) -> None:
        self.tokens = 0
        self.loss = self.reference_loss = self.squares = self.kl = self.same_top = 0.0

    def add(self, actual: Tensor, expected: Tensor, targets: Tensor) -> None:
        """Log-probabilities [T, V] of the model and of the reference, and the tokens [T] that came."""
        loss, reference_loss = (-x.gather(-1, targets[:, None]).double() for x in (actual, expected))
        self.tokens += len(targets)
        self.loss += float(loss.sum())
        self.reference_loss += float(reference_loss.sum())
        self.squares += float((loss - reference_loss).square().sum())
        self.same_top += float((actual.argmax(-1) == expected.argmax(-1)).sum())
        divergence = (expected - actual).mul_(expected.exp()).masked_fill_(expected == -torch.inf, 0)  # 0 log 0 is 0
        self.kl += float(divergence.sum(dtype=torch.float64))

    def cost(self, name: str, text: str) -> Cost:
        n = self.tokens
        change = (self.loss - self.reference_loss) / n
        variance = max(0.0, self.squares / n - change**2)
        return Cost(
            reference=name,
            text=text,
            tokens=n,
            reference_loss=self.reference_loss / n,
            loss=self.loss / n,
            error=math.sqrt(variance / max(1, n - 1)),
            kl=self.kl / n,
            same_top=self.same_top / n,
        )
