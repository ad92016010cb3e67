"""From logits to processed scores, with what went wrong kept to its own row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import HfAccelError
from .prefix import Prefix
from .sampling import Sampling

Errors = dict[int, Exception]


def processed_scores(sampling: Sampling, logits: Tensor, prefixes: list[Prefix]) -> tuple[Tensor, Errors]:
    """Scores [n, V] float32, and the rows that failed with what went wrong; their scores are all 0.

    After a drafted token that the processors rule out, a row may well fail: nobody gets there. So the draft keeps its
    length (to cut it for its tokens' sake would change the law), and only who gets there has an error.
    """
    errors: Errors = {}
    try:
        scores = process(sampling, logits, prefixes)
    except Exception as error:
        if len(logits) == 1:
            return torch.zeros(logits.shape, device=logits.device), {0: error}
        tried = [processed_scores(sampling, logits[i : i + 1], [prefix]) for i, prefix in enumerate(prefixes)]
        return torch.cat([one for one, _ in tried]), {i: failed[0] for i, (_, failed) in enumerate(tried) if failed}
    impossible = ~(scores.amax(-1) > -torch.inf)  # of a row with NaN the largest is NaN
    if impossible.any():
        for row in impossible.nonzero()[:, 0].tolist():
            errors[row] = HfAccelError(
                f"no token can be chosen at position {len(prefixes[row])}: after {type(sampling).__name__}.process "
                "its scores hold NaN or are all -inf; look at the logits processors and at the model's dtype"
            )
        scores = scores.masked_fill(impossible[:, None], 0)
    return scores, errors


def process(sampling: Sampling, logits: Tensor, prefixes: list[Prefix]) -> Tensor:
    """Sampling.process. Raises what that raises, and HfAccelError for another shape."""
    scores = sampling.process(logits, prefixes if sampling.uses_prefix else None)
    if not isinstance(scores, Tensor) or scores.shape != logits.shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise HfAccelError(
            f"{type(sampling).__name__}.process returned {got} for logits of shape {tuple(logits.shape)}; return as "
            "many scores"
        )
    return scores.float()
