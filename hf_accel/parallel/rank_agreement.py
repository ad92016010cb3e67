"""Decisions of the ranks that run one model, and the error for a rank that is gone."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from ..errors import HfAccelError, LostRankError
from ..generation.agreement import ProcessAgreement

T = TypeVar("T")
COLLECTIVES = (
    "distributed_c10d.py",
    "_functional_collectives.py",
)  # the files of torch.distributed that all go through


class RankAgreement(ProcessAgreement):
    """Agreement over a process group by broadcasts of its first rank, which leads.

    The group is found by the mesh again in a copy: a process group cannot be copied or pickled.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size: int = distributed.get_world_size(group)
        self.rank: int = distributed.get_rank(group)
        self.leads = self.rank == 0
        self.timeout = _timeout(group, device)

    def agree(self, value: T) -> T:
        """See ProcessAgreement. Raises HfAccelError, in all ranks, for a value that cannot be pickled."""
        try:
            pickle.loads(pickle.dumps(value))  # an exception may be written and not be read
            answer: list[Any] = [(True, value)]
        except Exception as error:
            answer = [(False, repr(error))]
        with self.watching("the ranks agree on the next pass"):
            source = distributed.get_global_rank(self.group, 0)
            distributed.broadcast_object_list(answer, src=source, group=self.group, device=self.device)
        fine, agreed = answer[0]
        if not fine:
            raise HfAccelError(f"rank 0 could not send the others what it decided: {agreed}")
        return agreed

    def least(self, number: int) -> int:
        """See ProcessAgreement."""
        found = torch.tensor(number, device=self.device)
        with self.watching("the ranks agree on a number"):
            distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self.group)
        return int(found)

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """See ProcessAgreement. Errors of other calls than torch.distributed's go through as they are."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, HfAccelError) or not _comes_from_collective(error):
                raise
            raise LostRankError(
                f"rank {self.rank} of {self.size} lost another rank while {what}: it has died, did not answer within "
                "the timeout of the process group, or made another call than this one "
                f"({str(error).strip().splitlines()[0]}). Nothing can be computed with this group any more: end all "
                "ranks and start them again, with the same calls in the same order on each"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> RankAgreement:
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise pickle.PicklingError(
            "a model over several processes cannot be pickled; save it, and load it in each process"
        )


def _timeout(group: Any, device: torch.device) -> float:
    """Seconds that a collective of the group waits for a rank."""
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return distributed.constants.default_pg_timeout.total_seconds() if found is None else found.total_seconds()


def _comes_from_collective(error: BaseException) -> bool:
    """Return whether torch.distributed raised it: gloo's own errors have no type of their own."""
    if isinstance(error, distributed.DistError):
        return True
    files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    return any(file.name in COLLECTIVES and "distributed" in file.parts for file in files)
