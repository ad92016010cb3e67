"""The best logits of each row, and a sample of the rest: a teacher in a few bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ...errors import HfAccelError, UnsupportedError
from ...keywords import one_of
from ..losses.logit_rows import DenseRows, Indexed, Rows, TopRows
from ..losses.objective import Objective

# The size of one float32 copy of logits; there are two or three at a time.
CHUNK_BYTES = 2**25
LEAST = 1e-30
NOTHING = -1e30
STORED_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SMALL_VOCABULARY = 2**16


@dataclass(frozen=True, kw_only=True)
class KeptLogits:
    """The numbers that are kept of a row of logits: those of the best ids and of `samples` others, drawn at the
    highest temperature, `top_k` in all of `vocab_size`."""

    vocab_size: int
    top_k: int
    samples: int
    temperatures: Sequence[float]
    dtype: str

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < t < math.inf for t in self.temperatures):
            raise UnsupportedError(f"temperatures={self.temperatures}: one or more finite numbers above 0")
        one_of("dtype", self.dtype, tuple(STORED_DTYPES))
        if not 0 <= self.samples < self.top_k or (self.samples and self.is_whole):
            raise UnsupportedError(
                f"samples={self.samples}: at least one of the top_k={self.top_k} ids is the best one, and nothing can "
                "be drawn where top_k is all ids"
            )

    @property
    def best(self) -> int:
        return self.top_k - self.samples

    @property
    def is_whole(self) -> bool:
        """True if the logits of all ids are kept; they serve any temperature."""
        return self.top_k == self.vocab_size

    def column(self, temperature: float) -> int | None:
        """The place of a temperature among those that are kept."""
        near = (i for i, known in enumerate(self.temperatures) if math.isclose(known, temperature, rel_tol=1e-9))
        return next(near, None)


@dataclass(frozen=True)
class TopLogits(Indexed):
    """ids: uint16 or int32 [N, k], the best ones first, and then those drawn from the rest, all different. logits:
    [N, k], less the best one of the row, in the dtype they are stored in. log_sums: float32 [N, number of
    temperatures], the logarithm of sum exp(logit / T) over all V. thresholds: float32 [N], of the draw, a logarithm as
    logit / T is."""

    ids: Tensor
    logits: Tensor
    log_sums: Tensor
    thresholds: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))

    def rows(self, kept: KeptLogits, objective: Objective) -> Rows:
        """The logits of the whole vocabulary, where all are kept. Otherwise the ids that are, and the rest as one; for
        the forward KL those that were drawn stand for all others: they share the probability of the rest, and the
        expectation of the gradient is that of all tokens.

        A token drawn stands for max(1, threshold / weight) like it (Duffield, Lund and Thorup, Priority sampling for
        estimation of arbitrary subset sums, 2007); the numbers are scaled so that all probabilities sum to 1.
        """
        logits, ids = self.logits.float(), self.ids.long()
        if kept.is_whole:
            return DenseRows(torch.empty_like(logits).scatter_(-1, ids, logits))
        log_probs = logits / objective.temperature - self.log_sums[:, kept.column(objective.temperature), None]
        if not kept.samples or objective.loss != "fkl":
            return TopRows(ids, log_probs, kept.vocab_size)
        known, drawn = log_probs[:, : kept.best], log_probs[:, kept.best :]
        drawn_at = max(kept.temperatures)
        log_counts = (self.thresholds[:, None] - logits[:, kept.best :] / drawn_at).clamp_min(0)
        rest = (1 - known.exp().sum(-1, keepdim=True)).clamp_min(LEAST).log()
        shares = torch.log_softmax(drawn + log_counts, -1) + rest
        excess = (shares.exp() * (shares - drawn)).sum(-1)
        return TopRows(ids, torch.cat((known, shares), -1), kept.vocab_size, excess)


def top_logits(logits: Tensor, kept: KeptLogits, generator: torch.Generator | None = None) -> TopLogits:
    """Choose what is kept of logits [N, V], of any float dtype, on any device; the result is there too.

    The best logit of each row is taken off first: the distribution stays, and float16 is left with numbers near 0,
    where it is fine. The sums are those of the best ones *as rounded* to the dtype and of the exact rest, so that
    what is read back sums to 1, and the rest has the odds it had.

    Raises HfAccelError for a row without a finite best logit.
    """
    rows = max(1, CHUNK_BYTES // (4 * logits.shape[-1]))
    found = TopLogits.joined([_chosen(chunk.float(), kept, generator) for chunk in torch.split(logits, rows)])
    return replace(found, ids=found.ids.to(torch.uint16 if kept.vocab_size <= SMALL_VOCABULARY else torch.int32))


def _chosen(logits: Tensor, kept: KeptLogits, generator: torch.Generator | None) -> TopLogits:
    best, ids = logits.topk(kept.best, -1)
    if not bool(best[:, 0].isfinite().all()):
        bad = best[:, 0][~best[:, 0].isfinite()][0].item()
        raise HfAccelError(f"the teacher's best logit is {bad}; it overflows in its dtype, or its weights are broken")
    stored = _rounded(best - best[:, :1], kept)
    rest = (logits - best[:, :1]).clamp_min_(NOTHING).scatter_(-1, ids, -torch.inf)  # to be chosen last, and never
    sums = [(rest / t).exp_().sum(-1) + (stored.float() / t).exp().sum(-1) for t in kept.temperatures]
    log_sums = torch.stack(sums, -1).log()
    threshold = log_sums.new_full((len(ids),), -torch.inf)
    if kept.samples:
        drawn, threshold = _draw(rest / max(kept.temperatures), kept.samples, generator)
        stored = torch.cat((stored, _rounded(rest.gather(-1, drawn), kept)), -1)
        ids = torch.cat((ids, drawn), -1)
    return TopLogits(ids, stored, log_sums, threshold)


def _draw(log_weights: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The ids of the highest priorities weight / u, u uniform, and the logarithm of the next priority below them."""
    priorities = torch.empty_like(log_weights).exponential_(generator=generator).add_(log_weights)
    found, ids = priorities.topk(count + 1, -1)
    return ids[:, :-1], found[:, -1]


def _rounded(logits: Tensor, kept: KeptLogits) -> Tensor:
    dtype = STORED_DTYPES[kept.dtype]
    return logits.clamp_min(torch.finfo(dtype).min).to(dtype)
