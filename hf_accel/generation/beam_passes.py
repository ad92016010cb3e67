"""Continues the beams of searches after a pass: each gets the pages of the beam that it continues, or ends."""

from __future__ import annotations

from collections import abc

from torch import Tensor

from ..cache.cached_sequence import CachedSequence
from ..tensors import integers, sent
from .agreement import ProcessAgreement
from .beam_search import BeamSearch
from .scheduling.scheduler import Scheduler
from .sequence import Sequence


def continue_beams(
    scheduler: Scheduler, sequences: abc.Sequence[Sequence], logits: Tensor, agreement: ProcessAgreement
) -> list[Sequence]:
    """Continue the beams among some sequences by their rows of logits. Returns the beams that have ended, or failed.

    A search of which beams are missing in this pass keeps the logits, and its beams wait for the others.
    """
    searches: dict[BeamSearch, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.search is not None:
            searches.setdefault(sequence.search, []).append(row)
    ended: list[Sequence] = []
    for search, rows in searches.items():
        own = logits if len(rows) == len(logits) else logits[sent(integers(rows), logits)]
        try:
            complete = search.receive([sequences[row] for row in rows], own)
            if complete is None:
                continue
            moves = search.advance(complete, agreement)
            _inherit(moves.beams, moves.parents)
        except Exception as error:
            ended += end_search(scheduler, search, error)
            continue
        for beam in moves.ended:
            if beam.keeps_pages and beam.cached is not None:
                beam.kept_pages = beam.cached.fork()
            scheduler.remove(beam, "stop")
        ended += moves.ended
    return ended


def end_search(scheduler: Scheduler, search: BeamSearch, error: BaseException | None) -> list[Sequence]:
    """End all beams of a search because of an error of one of them, and return those that had not ended."""
    beams = [beam for beam in search.beams if not beam.is_finished]
    for beam in beams:
        scheduler.remove(beam, "error", error)
    return beams


def _inherit(beams: list[Sequence], parents: list[Sequence]) -> None:
    """Give each beam the pages of its parent, for its next token. Several beams with one parent share them."""
    pages: list[CachedSequence] = []
    kept: set[Sequence] = set()
    for parent in parents:
        assert parent.cached is not None
        pages.append(parent.cached.fork() if parent in kept else parent.cached)
        kept.add(parent)
    for beam in beams:
        if beam not in kept and beam.cached is not None:
            beam.cached.release()
    for beam, cached in zip(beams, pages, strict=True):
        beam.cached, beam.num_computed = cached, cached.num_tokens
