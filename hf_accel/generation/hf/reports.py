"""Reports what a call of generate() does without: in its statistics each time, and as a warning once."""

from __future__ import annotations

import warnings

from ...errors import HfAccelWarning
from .generation_state import GenerationState
from .refusals import NO_PAGES

STACK_LEVEL = 8  # the number of frames from a warning of _sample() to the line that calls generate()


def report_stock_loop(state: GenerationState, refusal: str) -> None:
    """Report that transformers' loop is used. Nothing is warned about that the plan says already, and if the user has
    chosen to have no paged cache."""
    _note(state, "loop", f"stock: {refusal}")
    if refusal not in (state.ragged_refusal, NO_PAGES):
        said = "; this is said once, and for each call in hf_accel.stats(model)['loop']"
        warn_once(state, refusal, f"generate() runs transformers' own loop, which is slower, because {refusal}{said}")


def report_no_drafts(state: GenerationState, refusal: str) -> None:
    _note(state, "drafts", f"none: {refusal}")
    said = "; this is said once, and for each call in hf_accel.stats(model)['drafts']"
    text = f"generate() decodes without drafts, because {refusal}{said}"
    warn_once(state, refusal, text, stack_level=STACK_LEVEL + 1)


def _note(state: GenerationState, name: str, text: str) -> None:
    if state.call is not None:
        state.call.statistics[name] = text


def warn_once(state: GenerationState, refusal: str, text: str, *, stack_level: int = STACK_LEVEL) -> None:
    """Warn with `text`, but only once for each reason and model."""
    if refusal not in state.warned:
        state.warned.add(refusal)
        warnings.warn(text, HfAccelWarning, stacklevel=stack_level)
