"""Context parallel: each rank of a process group holds a share of the KV cache's blocks, and all hold the weights.

All ranks compute the same passes over the same tokens. In each layer a rank attends over its own blocks; the partial
results and the log-sum-exp of their scores go to all ranks, which merge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..attention.contract import AttentionBackend
from ..cache.group import GroupStep, SharedContext
from ..cache.pool import BlockTable
from ..config import PatchConfig
from ..errors import LostRankError, UnsupportedError
from ..kernels.layouts import KV, AttentionOptions
from ..tensors import is_sharded
from .context_attention import attend_own, merge_ranks
from .context_blocks import num_own, own_step
from .rank_agreement import RankAgreement

SHARING = "they shared out the context"


class ContextParallel(SharedContext):
    """The ranks of a process group as holders of one KV cache.

    Every rank has to run the same calls with the same inputs. A rank that dies, or that is more than the group's
    timeout behind, makes the others raise LostRankError.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """Raises UnsupportedError for what is no process group with this process in it."""
        if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
            raise UnsupportedError(
                f"context_parallel={group!r} must be a process group of torch.distributed, as "
                "torch.distributed.group.WORLD is after init_process_group()"
            )
        self.ranks = RankAgreement(group, device)
        self.rank, self.size = self.ranks.rank, self.ranks.size

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """A copy of the model shares its pages out among the same ranks."""
        return self

    # -- what ranks say to each other ------------------------------------------------------------------

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Return what each rank gave, in the order of ranks. All ranks give one shape and dtype, which may be any."""
        own = x.contiguous().view(torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self.ranks.watching(SHARING):
            distributed.all_gather(found, own, group=self.ranks.group)
        return [each.view(x.dtype) for each in found]

    def check_same(self, *inputs: Tensor | None) -> None:
        """Raise LostRankError unless all ranks give the same: otherwise the keys of different texts would be mixed."""
        device = next(x.device for x in inputs if x is not None)
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        digests = self.exchange(torch.stack([nothing if x is None else _digest(x) for x in inputs]))
        if any(not torch.equal(digests[0], other) for other in digests):
            raise LostRankError(
                "the ranks of context_parallel= do not compute the same tokens; give all of them the same inputs and, "
                "before a call that samples, the same torch.manual_seed()"
            )

    # -- blocks ----------------------------------------------------------------------------------------

    def num_own(self, num_blocks: int) -> int:
        return num_own(num_blocks, self.size)

    def narrow(
        self, step: GroupStep, tables: Sequence[BlockTable], spans: Sequence[range], window: int | None
    ) -> GroupStep:
        return own_step(step, tables, spans, window=window, rank=self.rank, size=self.size)

    def copy(self, pages: KV, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for tensor in pages:
                if tensor is not None:
                    self._copy(tensor, source, destination)

    def _copy(self, pages: Tensor, source: int, destination: int) -> None:
        holder, taker = source % self.size, destination % self.size
        block = pages[source // self.size].contiguous() if self.rank == holder else torch.empty_like(pages[0])
        if holder != taker:
            with self.ranks.watching(SHARING):
                distributed.broadcast(block.view(torch.uint8), group=self.ranks.group, group_src=holder)
        if self.rank == taker:
            pages[destination // self.size] = block

    # -- attention -------------------------------------------------------------------------------------

    def attend(
        self, backend: AttentionBackend, q: Tensor, pages: KV, *, step: GroupStep, options: AttentionOptions
    ) -> Tensor:
        own = options if self.rank == 0 else options._replace(sinks=None)  # one part only counts the sinks
        out, lse = attend_own(backend, q, pages, part=step.own, options=own)
        # One message a layer: the bytes of the results, and behind them those of the log-sum-exp.
        message = torch.cat([out.flatten().view(torch.uint8), lse.float().flatten().view(torch.uint8)])
        split = out.numel() * out.element_size()
        found = self.exchange(message)
        outs = [each[:split].view(out.dtype).view(out.shape) for each in found]
        lses = [each[split:].clone().view(torch.float32).view(lse.shape) for each in found]
        return merge_ranks(outs, lses)[0]


def context_parallel(model: nn.Module, config: PatchConfig, refusal: str | None) -> ContextParallel | None:
    """Return the ranks that share out the KV cache; None if context parallel is not asked for.

    refusal: why the model has no pages or no ragged passes, as one clause. Raises UnsupportedError for a model or an
    option that context parallel cannot serve.
    """
    if config.context_parallel is None:
        return None
    if config.weights is not None and config.weights.only_if_faster:
        refusal = refusal or "weights='auto' would be measured by each rank for itself"
    if any(is_sharded(parameter) for parameter in model.parameters()):
        refusal = refusal or "its weights are split over ranks already"
    if refusal is not None:
        raise UnsupportedError(f"context_parallel= was asked for, but {refusal}; leave one of them out")
    device: Any = model.device
    return ContextParallel(config.context_parallel, device)


def _digest(x: Tensor) -> Tensor:
    """Return a hash of the numbers and of their order."""
    numbers = x.reshape(-1)
    numbers = numbers.to(torch.int64) if not numbers.is_floating_point() else numbers.float().view(torch.int32).long()
    factors = torch.arange(1, len(numbers) + 1, device=x.device) * 2654435761 + 40503
    return (numbers * factors).sum() + len(numbers)
