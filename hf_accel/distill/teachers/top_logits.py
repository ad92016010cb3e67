"""The best logits of each row, and a sample of the rest: a teacher in a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import HfAccelError
from ..losses.logit_rows import DenseRows, Rows, TopRows

# The size of one float32 copy of logits; there are two or three at a time.
CHUNK_BYTES = 2**25
LEAST = 1e-30
NOTHING = -1e30


@dataclass(frozen=True)
class TopLogits:
    """ids: [N, k], the best ones first, and then those drawn from the rest, all different. logits: [N, k], less the
    best one of the row, in the dtype they are stored in. log_sums: float32 [N, number of temperatures], the logarithm
    of sum exp(logit / T) over all V. thresholds: float32 [N], of the draw, a logarithm as logit / T is."""

    ids: Tensor
    logits: Tensor
    log_sums: Tensor
    thresholds: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice | Tensor) -> TopLogits:
        return TopLogits(*(tensor[index] for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ids, self.logits, self.log_sums, self.thresholds

    def dense(self) -> DenseRows:
        """The logits of the whole vocabulary, where k is as large; they serve any temperature."""
        logits = self.logits.float()
        return DenseRows(torch.empty_like(logits).scatter_(-1, self.ids.long(), logits))

    def top(self, temperature: float, column: int, vocab_size: int) -> Rows:
        """All stored ids, and the rest as one. column: the place of `temperature` in log_sums."""
        log_probs = self.logits.float() / temperature - self.log_sums[:, column, None]
        return TopRows(self.ids.long(), log_probs, vocab_size)

    def sampled(self, best: int, temperature: float, column: int, *, drawn_at: float, vocab_size: int) -> Rows:
        """All stored ids, where those that were drawn stand for all others: they share the probability of the rest,
        and the expectation of the forward KL's gradient is that of all tokens. drawn_at: the temperature of the draw.

        A token drawn stands for max(1, threshold / weight) like it (Duffield, Lund and Thorup, Priority sampling for
        estimation of arbitrary subset sums, 2007); the numbers are scaled so that all probabilities sum to 1.
        """
        logits = self.logits.float()
        log_probs = logits / temperature - self.log_sums[:, column, None]
        known, drawn = log_probs[:, :best], log_probs[:, best:]
        log_counts = (self.thresholds[:, None] - logits[:, best:] / drawn_at).clamp_min(0)
        rest = (1 - known.exp().sum(-1, keepdim=True)).clamp_min(LEAST).log()
        shares = torch.log_softmax(drawn + log_counts, -1) + rest
        excess = (shares.exp() * (shares - drawn)).sum(-1)
        return TopRows(self.ids.long(), torch.cat((known, shares), -1), vocab_size, excess)


@dataclass(frozen=True)
class KeptLogits:
    """The numbers that are kept of a row of logits: the `best` tokens, and `drawn` others, drawn at the highest
    temperature.
    """

    best: int
    drawn: int
    temperatures: Sequence[float]
    dtype: torch.dtype


def top_logits(logits: Tensor, choice: KeptLogits, generator: torch.Generator | None = None) -> TopLogits:
    """logits: [N, V], any float dtype, on any device; what comes back is there too, with ids as int64.

    The best logit of each row is taken off first: the distribution stays, and float16 is left with numbers near 0,
    where it is fine. The sums are those of the best ones *as rounded* to the dtype and of the exact rest, so that
    what is read back sums to 1, and the rest has the odds it had.

    Raises HfAccelError for a row without a finite best logit.
    """
    rows = max(1, CHUNK_BYTES // (4 * logits.shape[-1]))
    parts = [_chosen(chunk.float(), choice, generator) for chunk in torch.split(logits, rows)]
    return TopLogits(*(torch.cat(same) for same in zip(*(part.tensors() for part in parts), strict=True)))


def _chosen(logits: Tensor, choice: KeptLogits, generator: torch.Generator | None) -> TopLogits:
    best, ids = logits.topk(choice.best, -1)
    if not bool(best[:, 0].isfinite().all()):
        bad = best[:, 0][~best[:, 0].isfinite()][0].item()
        raise HfAccelError(f"the teacher's best logit is {bad}; it overflows in its dtype, or its weights are broken")
    kept = _rounded(best - best[:, :1], choice.dtype)
    rest = (logits - best[:, :1]).clamp_min_(NOTHING).scatter_(-1, ids, -torch.inf)  # to be chosen last, and never
    sums = [(rest / t).exp_().sum(-1) + (kept.float() / t).exp().sum(-1) for t in choice.temperatures]
    log_sums = torch.stack(sums, -1).log()
    if not choice.drawn:
        return TopLogits(ids, kept, log_sums, log_sums.new_full((len(ids),), -torch.inf))
    drawn, threshold = _draw(rest / max(choice.temperatures), choice.drawn, generator)
    kept = torch.cat((kept, _rounded(rest.gather(-1, drawn), choice.dtype)), -1)
    return TopLogits(torch.cat((ids, drawn), -1), kept, log_sums, threshold)


def _draw(log_weights: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The ids of the highest priorities weight / u, u uniform, and the logarithm of the next priority below them."""
    priorities = torch.empty_like(log_weights).exponential_(generator=generator).add_(log_weights)
    found, ids = priorities.topk(count + 1, -1)
    return ids[:, :-1], found[:, -1]


def _rounded(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.clamp_min(torch.finfo(dtype).min).to(dtype)
