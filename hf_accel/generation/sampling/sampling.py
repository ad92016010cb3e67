"""How the next token is chosen: what is done to the logits, and whether the largest is taken or one is drawn."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...errors import HfAccelError, UnsupportedError
from .processors import Processor
from .token_prefix import Prefix

Draw = Callable[[Tensor, list[Any]], list[int]]


class Sampling:
    """From a model's logits to the distribution of the next token.

    steps: what is done to the logits, in this order. greedy: the largest score is taken; otherwise one token is drawn
    from their softmax. num_logprobs: how many of the largest log-probabilities are reported beside the token's own;
    None reports none. draw: draws from probabilities [n, V] for n sequences without a draft; None leaves it to the
    Verifier.
    """

    def __init__(
        self,
        steps: abc.Iterable[Processor] = (),
        *,
        greedy: bool = True,
        num_logprobs: int | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.steps, self.greedy, self.num_logprobs, self.draw = tuple(steps), greedy, num_logprobs, draw
        self.uses_prefix = any(step.uses_prefix for step in self.steps)
        self.plain = greedy and not self.steps  # the answer is the argmax of the logits as they are

    @property
    def key(self) -> Hashable:
        """Sequences whose keys are equal are processed in one call."""
        return self.greedy, self.steps, self.draw

    def process(self, logits: Tensor, prefixes: abc.Sequence[Prefix] | None) -> Tensor:
        """Scores [n, V] float32 from logits [n, V], which are not written to.

        prefixes: one for each row, if `uses_prefix`. A pure function: a position is processed again when its draft was
        rejected.
        """
        if self.uses_prefix and (prefixes is None or len(prefixes) != len(logits)):
            raise UnsupportedError(f"{len(logits)} rows of logits need as many prefixes; Sampling.uses_prefix is set")
        scores = logits.float()
        for step in self.steps:
            scores = step(scores, prefixes or ())
        return scores


Errors = dict[int, Exception]


def processed_scores(sampling: Sampling, logits: Tensor, prefixes: list[Prefix]) -> tuple[Tensor, Errors]:
    """Scores [n, V] float32, and the rows that failed with what went wrong; their scores are all 0.

    After a drafted token that the processors rule out, a row may well fail: nobody gets there. So the draft keeps its
    length (to cut it for its tokens' sake would change the distribution), and only who gets there has an error.
    """
    errors: Errors = {}
    try:
        scores = _processed(sampling, logits, prefixes)
    except Exception as error:
        if len(logits) == 1:
            return torch.zeros(logits.shape, device=logits.device), {0: error}
        tried = [processed_scores(sampling, logits[i : i + 1], [prefix]) for i, prefix in enumerate(prefixes)]
        return torch.cat([one for one, _ in tried]), {i: failed[0] for i, (_, failed) in enumerate(tried) if failed}
    impossible = ~(scores.amax(-1) > -torch.inf)  # of a row with NaN the largest is NaN
    if impossible.any():
        for row in impossible.nonzero()[:, 0].tolist():
            errors[row] = HfAccelError(
                f"no token can be chosen at position {len(prefixes[row])}: its processed scores hold NaN or are all "
                "-inf; look at the logits processors and at the model's dtype"
            )
        scores = scores.masked_fill(impossible[:, None], 0)
    return scores, errors


def _processed(sampling: Sampling, logits: Tensor, prefixes: list[Prefix]) -> Tensor:
    """Sampling.process. Raises what that raises, and HfAccelError for another shape."""
    scores = sampling.process(logits, prefixes if sampling.uses_prefix else None)
    if not isinstance(scores, Tensor) or scores.shape != logits.shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise HfAccelError(
            f"the logits processors returned {got} for logits of shape {tuple(logits.shape)}; return as many scores"
        )
    return scores.float()
