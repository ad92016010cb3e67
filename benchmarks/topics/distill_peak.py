"""Peak memory and time of one form of the distillation loss, forward and backward, in a process of its own.

python -m benchmarks.topics.distill_peak FORM VOCABULARY TOKENS WIDTH ROUNDS, from hidden states to the gradients of
hidden states and head. The forms:
    torch    logits of both, whole; torch's cross_entropy and kl_div; autograd
    logits   logits of both, whole; distillation_loss
    fused    distillation_loss of hidden states of both
    top      distillation_loss of hidden states and a stored teacher's 64 best tokens
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear

from hf_accel.distill.losses.distillation_loss import distillation_loss
from hf_accel.distill.losses.logit_rows import Head, HeadRows, TopRows

from ..harness.peak import peak_bytes

ALPHA, TEMPERATURE = 0.5, 2.0
BEST = 64
Loss = Callable[[Tensor, Tensor], Tensor]  # of the student's hidden states and head


def loss_of(form: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> Loss:
    """hidden, weight: of the teacher."""

    def whole(x: Tensor, w: Tensor) -> Tensor:
        return torch_loss(linear(x, w), linear(hidden, weight), labels)

    def by_logits(x: Tensor, w: Tensor) -> Tensor:
        options = {"alpha": ALPHA, "temperature": TEMPERATURE}
        return distillation_loss(linear(x, w), linear(hidden, weight), labels, shift=False, **options)

    def fused(x: Tensor, w: Tensor) -> Tensor:
        options = {"alpha": ALPHA, "temperature": TEMPERATURE}
        return distillation_loss(HeadRows(x, Head(w)), rows, labels, shift=False, **options)

    rows: HeadRows | TopRows = HeadRows(hidden, Head(weight))
    if form == "top":
        rows = best_of(hidden, weight)
    return {"torch": whole, "logits": by_logits, "fused": fused, "top": fused}[form]


def torch_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """As tutorials write it, but for the square of the temperature, which some forget."""
    log_s, log_t = (torch.log_softmax(logits / TEMPERATURE, -1) for logits in (student, teacher))
    kd = kl_div(log_s, log_t, reduction="batchmean", log_target=True) * TEMPERATURE**2
    return ALPHA * cross_entropy(student, labels) + (1 - ALPHA) * kd


def best_of(hidden: Tensor, weight: Tensor) -> TopRows:
    """A few rows at a time: it is not what is measured."""
    found = [torch.log_softmax(linear(x, weight) / TEMPERATURE, -1).topk(BEST) for x in hidden.split(64)]
    return TopRows(torch.cat([x.indices for x in found]), torch.cat([x.values for x in found]), len(weight))


def main(form: str, *numbers: str) -> None:
    classes, rows, columns, rounds = map(int, numbers)
    seeded = torch.Generator().manual_seed(0)
    hidden, spoken = (torch.randn(rows, columns, generator=seeded) for _ in range(2))
    weight, speaker = (torch.randn(classes, columns, generator=seeded).div_(columns**0.5) for _ in range(2))
    labels = torch.randint(0, classes, (rows,), generator=seeded)
    with torch.no_grad():
        loss = loss_of(form, spoken, speaker, labels)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    values: list[float] = []
    seconds: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        made = loss(hidden, weight)
        found = torch.autograd.grad(made, leaves)
        seconds.append(time.perf_counter() - start)
        values[:] = [made.item(), *(gradient.norm().item() for gradient in found)]

    peak = peak_bytes(step)
    for _ in range(rounds):
        step()
    print(json.dumps({"peak_bytes": peak, "seconds": statistics.median(seconds[1:]), "values": values}))


if __name__ == "__main__":
    main(*sys.argv[1:])
