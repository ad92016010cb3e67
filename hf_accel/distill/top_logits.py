"""The best logits of each row, and what is left of the rest: a teacher in a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import HfAccelError
from .rows import DenseRows, Rows, TopRows

CHUNK_BYTES = 2**25  # of one float32 copy of logits; there are two at a time


@dataclass(frozen=True)
class TopLogits:
    """ids: [N, k], best first. logits: [N, k], less the best one of the row, in the dtype they are stored in.
    log_sums: float32 [N, number of temperatures], the logarithm of sum exp(logit / T) over all V."""

    ids: Tensor
    logits: Tensor
    log_sums: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, vocab_size: int, temperature: float, column: int) -> Rows:
        """As a loss takes them. column: of log_sums, that of `temperature`; not read where k is all there is."""
        logits, ids = self.logits.float(), self.ids.long()
        if ids.shape[-1] == vocab_size:
            return DenseRows(torch.empty_like(logits).scatter_(-1, ids, logits))
        return TopRows(ids, logits / temperature - self.log_sums[:, column, None], vocab_size)


def top_logits(logits: Tensor, k: int, temperatures: Sequence[float], dtype: torch.dtype) -> TopLogits:
    """logits: [N, V], any float dtype, on any device; what comes back is there too, with ids as int64.

    The best logit of each row is taken off first: the distribution stays, and float16 is left with numbers near 0,
    where it is fine. The sums are those of the logits *as rounded* to `dtype` and of the exact rest, so that what is
    read back sums to 1, and the rest has the odds it had.

    Raises HfAccelError for a row without a finite best logit.
    """
    rows = max(1, CHUNK_BYTES // (4 * logits.shape[-1]))
    parts = [_top(chunk.float(), k, temperatures, dtype) for chunk in torch.split(logits, rows)]
    return TopLogits(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logits", "log_sums")))


def _top(logits: Tensor, k: int, temperatures: Sequence[float], dtype: torch.dtype) -> TopLogits:
    best, ids = logits.topk(k, -1)
    if not bool(best[:, 0].isfinite().all()):
        bad = best[:, 0][~best[:, 0].isfinite()][0].item()
        raise HfAccelError(f"the teacher's best logit is {bad}; it overflows in its dtype, or its weights are broken")
    kept = (best - best[:, :1]).clamp_min(torch.finfo(dtype).min).to(dtype)
    rest = (logits - best[:, :1]).scatter_(-1, ids, -torch.inf)
    sums = [(rest / t).exp_().sum(-1) + (kept.float() / t).exp().sum(-1) for t in temperatures]
    return TopLogits(ids, kept, torch.stack(sums, -1).log())
