"""Continues sequences whose tokens are chosen together: each gets the pages of the one that it continues, or ends."""

from __future__ import annotations

from collections import abc

from torch import Tensor

from ..cache.cached_sequence import CachedSequence
from ..tensors import integers, sent
from .agreement import ProcessAgreement
from .joint_choice import JointChoice
from .scheduling.scheduler import Scheduler
from .sequence import Sequence


def continue_joint(
    scheduler: Scheduler, sequences: abc.Sequence[Sequence], logits: Tensor, agreement: ProcessAgreement
) -> list[Sequence]:
    """Continue the sequences with a joint choice, by their rows of logits. Returns those that have ended, or failed.

    A choice of which sequences are missing in this pass keeps the logits, and its sequences wait for the others.
    """
    choices: dict[JointChoice, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.joint is not None:
            choices.setdefault(sequence.joint, []).append(row)
    ended: list[Sequence] = []
    for joint, rows in choices.items():
        own = logits if len(rows) == len(logits) else logits[sent(integers(rows), logits)]
        try:
            complete = joint.receive([sequences[row] for row in rows], own)
            if complete is None:
                continue
            moves = joint.advance(complete, agreement)
            _inherit(moves.sequences, moves.parents)
        except Exception as error:
            ended += end_joint(scheduler, joint, error)
            continue
        for each in moves.ended:
            if each.settings.keeps_pages and each.cached is not None:
                each.kept_pages = each.cached.fork()
            scheduler.remove(each, "stop")
        ended += moves.ended
    return ended


def end_joint(scheduler: Scheduler, joint: JointChoice, error: BaseException | None) -> list[Sequence]:
    """End all sequences of a joint choice because of an error of one of them; return those that had not ended."""
    going = [each for each in joint.sequences if not each.is_finished]
    for each in going:
        scheduler.remove(each, "error", error)
    return going


def _inherit(sequences: list[Sequence], parents: list[Sequence]) -> None:
    """Give each sequence the pages of its parent, for its next token. Several with one parent share them."""
    pages: list[CachedSequence] = []
    kept: set[Sequence] = set()
    for parent in parents:
        assert parent.cached is not None
        pages.append(parent.cached.fork() if parent in kept else parent.cached)
        kept.add(parent)
    for sequence in sequences:
        if sequence not in kept and sequence.cached is not None:
            sequence.cached.release()
    for sequence, cached in zip(sequences, pages, strict=True):
        sequence.cached, sequence.num_computed = cached, cached.num_tokens
