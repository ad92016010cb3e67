"""Peak memory and time of a distillation's loss and its gradients: torch's autograd, and ours, whole and fused."""

from __future__ import annotations

from typing import Any

from hf_accel.cli.measurement import WrongResultError

from ..harness.bench import Bench
from ..harness.processes import call
from ..harness.tables import Row, Table

FORMS = {
    "torch": "torch, whole logits, autograd",
    "logits": "ours, whole logits",
    "fused": "ours, fused",
    "top": "ours, fused, stored teacher (64 best tokens)",
}
TOLERANCE = 1e-4  # relative, of the loss and of the gradients' norms
NOTE = (
    "One step from hidden states to the gradients of hidden states and head, float32, alpha 0.5, T 2, forward "
    "KL, each form in a process of its own. The peak is resident memory above hidden states and heads, and "
    "includes the gradients that are returned; logits: it over one float32 tensor of all logits. memory ratio, "
    "ratio: torch's peak and time over the form's. Losses and gradients were equal before they were timed, but "
    "for the stored teacher's, whose tail is one class."
)


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    cases = zip(settings.distill.vocabularies, settings.distill.contexts, strict=True)
    return [table(bench, classes, contexts * settings.context) for classes, contexts in cases]


def table(bench: Bench, classes: int, tokens: int) -> Table:
    found = {}
    for form in FORMS:
        print(f"    {form}, {classes} classes, {tokens} tokens in a new process", flush=True)
        found[form] = call("distill_peak", form, classes, tokens, bench.settings.distill.width, bench.settings.rounds)
    check(found)
    rows = [row(form, found, 4 * classes * tokens) for form in FORMS]
    return Table(f"distillation loss, {classes} classes, {tokens} tokens", rows, NOTE)


def check(found: dict[str, Any]) -> None:
    """Raises unless the forms that compute the same agree."""
    for form in ("logits", "fused"):
        for ours, theirs in zip(found[form]["values"], found["torch"]["values"], strict=True):
            if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
                raise WrongResultError(f"{form}: loss and norms {found[form]['values']}, {found['torch']['values']}")


def row(form: str, found: dict[str, Any], logits_bytes: int) -> Row:
    stock, ours = found["torch"], found[form]
    peak = ours["peak_bytes"]
    return {
        "form": FORMS[form],
        "memory_ratio": None if peak is None else stock["peak_bytes"] / peak,
        "ratio": stock["seconds"] / ours["seconds"],
        "peak_bytes": peak,
        "logits": None if peak is None else peak / logits_bytes,
        "step_seconds": ours["seconds"],
    }
