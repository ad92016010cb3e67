"""Calls whose rows advance together, because what the user gave looks at all of them, or because each pass is kept."""

from __future__ import annotations

from typing import Any, cast

from ...cache.kinds import OnceGroup, SourceRows
from ..joint_choice import JointRows, Process, RowSettings, Stops
from ..prompt_inputs import other_input
from ..sequence import Sequence
from .generation_state import LoopCall
from .processing import needs_all_rows, processors_refusal

OF_EACH_PASS = ("output_scores", "output_logits")  # settings by which a call returns something of each pass


def why_together(call: LoopCall) -> str | None:
    """Return why the rows of a call without beams advance together, as one clause; None if each goes on alone."""
    kept = [name for name in OF_EACH_PASS if call.returns(name)]
    if kept:
        return f"{kept[0]}=True collects a tensor of each step"
    if (each_once := processors_refusal(call.processors)) is not None:
        return each_once
    count = len(call.input_ids)
    if count == 1 and call.speculative is not None:
        return None  # drafts of one row are verified position by position
    return needs_all_rows(call.processors, call.criteria, batch_size=count)


def together_refusal(call: LoopCall) -> str | None:
    """Return why a call whose rows advance together cannot run in ragged passes, as one clause; None if it can."""
    why, state = why_together(call), call.state.call
    asks_for_drafts = call.speculative is not None and state is not None and state.requires_speculation
    return why if why is not None and (asks_for_drafts or not has_room(call)) else None


def begin_rows(call: LoopCall, sequences: list[Sequence]) -> JointRows:
    """Let the rows of a call advance together."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in call.criteria)
    settings = RowSettings(
        process=cast(Process, call.processors),
        stops=cast(Stops, call.criteria),
        pad_token=call.pad_token if ends else None,
        samples=call.config.do_sample,
        keeps_scores=call.returns("output_scores"),
        keeps_logits=call.returns("output_logits"),
        hears=None if call.streams is None else call.streams.tokens,
    )
    return JointRows(sequences, call.input_ids, settings)


def kept_of_passes(rows: JointRows | None) -> dict[str, Any]:
    """Return the fields of transformers' output that hold something of each pass."""
    if rows is None:
        return {}
    fields = {}
    if rows.settings.keeps_scores:
        fields["scores"] = tuple(rows.scores)
    if rows.settings.keeps_logits:
        fields["logits"] = tuple(rows.logits)
    return fields


def has_room(call: LoopCall) -> bool:
    """Return whether the pages hold all sequences, none of which may wait until others have ended."""
    length, count = call.num_read + call.config.max_length - call.num_columns, len(call.input_ids)
    states = getattr(call.inputs.get("encoder_outputs"), "last_hidden_state", None)
    source = None if states is None else SourceRows(states[0])
    is_unread = call.attends_to_sources and source is None and other_input(call.inputs) is not None
    for group in call.cache.pages.groups:
        if is_unread and isinstance(group, OnceGroup) and not group.pool.growable:
            return False  # nobody knows how many rows its images have
        needed = count * group.num_blocks_of(length, source)
        if not group.pool.growable and needed > group.pool.num_blocks:
            return False
    return True
