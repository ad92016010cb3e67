"""The choice of the next token: the processing of the logits, and then greedy search or sampling."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...errors import HfAccelError, NoTokenError, UnsupportedError
from ...kernels.cpu.draws import LIKELIEST_DRAWS, Draws
from ...tensors import HostCopy, is_remote
from .processors import Processor, Temperature, TopKTopP
from .token_prefix import Prefix

Draw = Callable[[Tensor, list[Any]], list[int]]


class Sampling:
    """Turns a model's logits into the scores of the next token.

    steps: the logits processors, in order. greedy: whether the token with the largest score is chosen; otherwise a
    token is drawn from the softmax of the scores. num_logprobs: the number of most probable tokens whose
    log-probabilities are reported next to the chosen token's; None reports none. draw: a function that draws token ids
    from probabilities [n, V] for n sequences without a draft; None lets the Verifier draw. takes_drafts: whether a
    position may be processed again, so that drafts can be verified.
    """

    def __init__(
        self,
        steps: abc.Iterable[Processor] = (),
        *,
        greedy: bool = True,
        num_logprobs: int | None = None,
        draw: Draw | None = None,
        takes_drafts: bool = True,
    ) -> None:
        self.takes_drafts = takes_drafts
        self.steps, self.greedy, self.num_logprobs, self.draw = tuple(steps), greedy, num_logprobs, draw
        self.uses_prefix = any(step.uses_prefix for step in self.steps)
        self.plain = greedy and not self.steps  # the token is the argmax of the unprocessed logits

    @property
    def key(self) -> Hashable:
        """Sequences with equal keys are processed in one call."""
        return self.greedy, self.steps, self.draw

    def native_draws(self, kind: int) -> Draws | None:
        """Return how a kernel draws drafted tokens by this kind of Draws; None if it does not know the steps."""
        if self.plain:
            return LIKELIEST_DRAWS
        steps, temperature, kept = list(self.steps), Temperature(1.0), TopKTopP()
        if steps and isinstance(steps[0], Temperature):
            temperature, steps = steps[0], steps[1:]
        if steps and isinstance(steps[0], TopKTopP):
            kept, steps = steps[0], steps[1:]
        if steps or self.greedy:
            return None
        return Draws(kind, temperature.value, kept.k or 0, 1.0 if kept.p is None else kept.p)

    def process(self, logits: Tensor, prefixes: abc.Sequence[Prefix] | None) -> Tensor:
        """Return scores [n, V] float32 of logits [n, V], which are not written to.

        prefixes: one for each row if `uses_prefix` is set, otherwise they may be None. Raises UnsupportedError if they
        are missing. This is a pure function unless `takes_drafts` is False, because a position is processed again if
        its draft was rejected.
        """
        if self.uses_prefix and (prefixes is None or len(prefixes) != len(logits)):
            raise UnsupportedError(f"{len(logits)} rows of logits need as many prefixes; Sampling.uses_prefix is set")
        scores = logits.float()
        for step in self.steps:
            scores = step(scores, prefixes or ())
        return scores


Errors = Callable[[], dict[int, Exception]]  # the errors of rows; the host may have to wait for them


def processed_scores(sampling: Sampling, logits: Tensor, prefixes: list[Prefix]) -> tuple[Tensor, Errors]:
    """Return scores [n, V] float32, and the errors of rows that failed; the scores of these rows are 0.

    A row after a drafted token that the processors exclude may fail although the sequence is correct, because this
    token will be rejected. So the caller reports an error only if all drafted tokens before its row are accepted. The
    draft is not cut at such a row: if its length depended on its tokens, the output's distribution would change.
    """
    try:
        scores = _processed(sampling, logits, prefixes)
    except Exception as error:
        failed = error
        if len(logits) == 1:
            return torch.zeros(logits.shape, device=logits.device), lambda: {0: failed}
        tried = [processed_scores(sampling, logits[i : i + 1], [prefix]) for i, prefix in enumerate(prefixes)]
        errors = {i: found[0] for i, (_, own) in enumerate(tried) if (found := own())}
        return torch.cat([row for row, _ in tried]), lambda: errors
    impossible = ~(scores.amax(-1) > -torch.inf)  # True also for NaN, because amax of a row with NaN is NaN
    if not is_remote(scores) and not impossible.any():
        return scores, dict
    copy = HostCopy(impossible)
    return scores.masked_fill(impossible[:, None], 0), lambda: _impossible(copy.tolist(), prefixes)


def _impossible(rows: list[bool], prefixes: list[Prefix]) -> dict[int, Exception]:
    return {
        row: NoTokenError(
            f"no token can be chosen at position {len(prefixes[row])}: its processed scores hold NaN or are all -inf; "
            "look at the logits processors and at the model's dtype"
        )
        for row, is_impossible in enumerate(rows)
        if is_impossible
    }


def _processed(sampling: Sampling, logits: Tensor, prefixes: list[Prefix]) -> Tensor:
    """Call Sampling.process. Raises what it raises, and HfAccelError if the scores have another shape than logits."""
    scores = sampling.process(logits, prefixes if sampling.uses_prefix else None)
    if not isinstance(scores, Tensor) or scores.shape != logits.shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise HfAccelError(
            f"the logits processors returned {got} for logits of shape {tuple(logits.shape)}; return as many scores"
        )
    return scores.float()
