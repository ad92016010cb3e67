"""The loss of quality by quantization: perplexity and divergence from the float model, teacher-forced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.hf.cache_argument import cache_name
from ..errors import UnsupportedError
from ..patching.pack import PROGRESS_SECONDS
from .certificate import Cost
from .passes import new_cache

WINDOW = 512  # tokens that are predicted from one another
CHUNK_TOKENS = 64  # tokens of a pass, so that what attention reads has been through the cache


def text_windows(texts: Sequence[Tensor]) -> list[Tensor]:
    """Cut token ids [n] of each text into windows [1, length] of at most WINDOW tokens.

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
    """Run both models over the windows. Only the logits of one chunk of one window are in memory at a time."""
    found = []
    for window in logging.tqdm(windows, desc="Measuring the cost", unit=" windows", delay=PROGRESS_SECONDS):
        targets = window[0, 1:].to(model.device)
        for actual, expected in zip(predictions(model, window), predictions(reference, window), strict=True):
            chunk, targets = targets[: len(actual)], targets[len(actual) :]
            found.append(differences(actual, expected.to(actual.device), chunk))
    tokens = torch.cat(found)
    loss, reference_loss, kl, same_top = tokens.mean(0).tolist()
    change = tokens[:, 0] - tokens[:, 1]
    return Cost(
        reference=name,
        text=text,
        tokens=len(tokens),
        reference_loss=reference_loss,
        loss=loss,
        error=float(change.std(correction=0)) / math.sqrt(max(1, len(tokens) - 1)),
        kl=kl,
        same_top=same_top,
    )


def predictions(model: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
    """Yield log-probabilities [chunk, V], float32, of the token after each of ids [1, T] but the last.

    An encoder, where there is one, reads them too.
    """
    ids = ids[:, :-1].to(model.device)
    if getattr(model, "_is_stateful", False):  # recurrent: not in parts
        yield model(input_ids=ids).logits[0].float().log_softmax(-1)
        return
    more, own, cache = {}, "input_ids", None
    if model.config.is_encoder_decoder:
        more, own = {"encoder_outputs": model.get_encoder()(input_ids=ids)}, "decoder_input_ids"
    else:
        cache = new_cache(model)
    name = cache_name(model)
    for chunk in ids.split(CHUNK_TOKENS, dim=1):
        output: Any = model(**{own: chunk}, **more, **{name: cache}, use_cache=True)
        cache = output[name]
        yield output.logits[0].float().log_softmax(-1)


def differences(actual: Tensor, expected: Tensor, targets: Tensor) -> Tensor:
    """Return, of T tokens, [T, 4] in float64: the model's loss, the reference's, KL(reference || model), and whether
    both find the same token likeliest.

    actual, expected: log-probabilities [T, V] of the model and of the reference. targets: the tokens [T] that came.
    """
    loss, reference_loss = (-x.gather(-1, targets[:, None])[:, 0].double() for x in (actual, expected))
    divergence = (expected - actual).mul_(expected.exp()).masked_fill_(expected == -torch.inf, 0)  # 0 log 0 is 0
    kl = divergence.sum(-1, dtype=torch.float64)
    same_top = (actual.argmax(-1) == expected.argmax(-1)).double()
    return torch.stack((loss, reference_loss, kl, same_top), dim=1)
