"""The averages of the losses since they were last logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor

# These losses are no part of a step on the student's own samples.
OFF_POLICY = {"ce_loss"}


class Averages:
    """Sums over micro-batches, divided by the optimizer steps that they are from: as Trainer logs its loss."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: of what is averaged; given, since a process may have had no label and must still take part."""
        self._names, self._is_sampled = names, False
        self.clear()

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = self._sampled_steps = self._samples = self._tokens = 0

    def begin(self, sampled: bool = False) -> None:
        """Begin an optimizer step. sampled: on the student's own samples."""
        self._is_sampled = sampled
        self._steps += 1
        self._sampled_steps += sampled

    def add(self, name: str, value: Tensor, share: float) -> None:
        """Add a micro-batch's mean; `share` of it counts for the step."""
        if not (self._is_sampled and name in OFF_POLICY):
            known = self._sums.get(name)
            self._sums[name] = value.double() * share + (0.0 if known is None else known)

    def count(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Count the samples of a step."""
        self._samples += sum(len(batch["labels"]) for batch in batches)
        self._tokens += sum(int((batch["labels"] != -100).sum()) for batch in batches)

    def take(self, args: Any, is_divided: bool) -> dict[str, float]:
        """Returns the averages to log, the same on every process, and begins again.

        args: of the Trainer. is_divided: whether losses are divided by the labels of the whole step, and not by those
        of the micro-batch.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=args.device)
        steps = {name: self._steps - self._sampled_steps * (name in OFF_POLICY) for name in self._names}
        names = [name for name in self._names if steps[name]]
        counts = [torch.tensor(float(n), dtype=torch.float64) for n in (self._samples, self._tokens)]
        local = [self._sums.get(name, nothing) for name in names] + counts
        found = reduce(torch.stack([x.to(args.device) for x in local]), reduction="sum").tolist()
        # Where each process divides by the labels of all of them, their sum is the mean.
        processes = 1 if is_divided and args.average_tokens_across_devices else args.world_size
        logs = {name: found[i] / processes / steps[name] for i, name in enumerate(names)}
        samples, tokens = found[len(names) :]
        if self._sampled_steps:
            logs |= {"on_policy_steps": float(self._sampled_steps), "on_policy_tokens": tokens}
            logs["on_policy_length"] = tokens / samples
        self.clear()
        return logs
