"""Beam search of a call of generate() in ragged passes: its settings, and its output as transformers returns it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList
from transformers.generation import stopping_criteria
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from ...cache.hf.cache_argument import CACHE_NAME
from ..beam_search import BeamSearch, BeamSettings
from ..sequence import Sequence
from .beam_scores import process_of
from .generation_state import LoopCall
from .joint_rows import has_room
from .processing import BY_ROW, is_limit, is_one_of, is_stock, processors_refusal

# Transformers puts continuations that it has drawn in the order of their scores, from 5.24 on.
SORTS_DRAWN = "sort" in GenerationMixin._get_top_k_continuations.__code__.co_names
# These decide for each beam alone, so that a prompt may end before others do.
BY_BEAM = (
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
)


def beams_refusal(call: LoopCall) -> str | None:
    """Return why a beam search cannot run in ragged passes, as one clause; None if it can."""
    config = call.config
    if (refusal := processors_refusal(call.processors)) is not None:
        return refusal
    if getattr(config, "low_memory", None) or config.max_length <= call.num_columns:
        return "transformers refuses its settings"
    if not has_room(call):
        return "the beams of all prompts may need more pages than max_tokens= allows"
    return None


def begin_search(call: LoopCall, sequences: list[Sequence]) -> BeamSearch:
    """Begin a search whose beams are these sequences, num_beams for each prompt."""
    config, device = call.config, call.input_ids.device
    count, ends = config.num_beams, config._eos_token_tensor
    num_ends = 0 if ends is None else ends.shape[0]
    stop_ids = [c.eos_token_id.flatten() for c in call.criteria if is_one_of(c, stopping_criteria.EosTokenCriteria)]
    others = [criterion for criterion in call.criteria if not _is_plain(call, criterion)]
    process = process_of(call.processors)
    settings = BeamSettings(
        num_beams=count,
        num_candidates=max(2, 1 + num_ends) * count,
        max_new_tokens=config.max_length - call.num_columns,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        samples=config.do_sample,
        sorts_drawn=SORTS_DRAWN,
        stop_ids=torch.cat(stop_ids).to(device) if stop_ids else torch.empty(0, dtype=torch.int64, device=device),
        process=process,
        process_keeps=process is call.processors,
        stops=_stops(others) if others else None,
        drops_ended=_drops_ended(call),
        keeps_scores=call.returns("output_scores"),
        keeps_logits=call.returns("output_logits"),
    )
    prompts = [sequences[first : first + count] for first in range(0, len(sequences), count)]
    return BeamSearch(prompts, call.input_ids, settings)


def search_output(call: LoopCall, search: BeamSearch) -> Any:
    """Return what transformers' beam search returns: token ids, or its output for the kind of model.

    That of an encoder-decoder has no cache, whose pages are gone.
    """
    config = call.config
    count = config.num_return_sequences or 1
    chosen = [found for results in search.results for found in results[:count]]
    prompts = call.input_ids[:: config.num_beams].repeat_interleave(count, dim=0)
    new = _padded([found.tokens for found in chosen], _fill(call)).to(prompts.device)
    ids = torch.cat([prompts, new], dim=1)
    if not config.return_dict_in_generate:
        return ids
    fields: dict[str, Any] = {
        "sequences": ids,
        "beam_indices": _padded([found.beams for found in chosen], -1).to(torch.int32).to(ids.device),
        CACHE_NAME: None if call.attends_to_sources else call.cache,
    }
    if config.output_scores:
        fields["sequences_scores"] = torch.tensor([found.score for found in chosen], device=ids.device)
        fields["scores"] = tuple(search.scores)
    if config.output_logits:
        fields["logits"] = tuple(search.logits)
    kind: Any = GenerateBeamEncoderDecoderOutput if call.has_encoder else GenerateBeamDecoderOnlyOutput
    return kind(**fields)


def _fill(call: LoopCall) -> int:
    """Return the token id behind a result that is shorter than others. Transformers takes a pad token 0 for none."""
    pad, ends = call.config._pad_token_tensor, call.config._eos_token_tensor
    if ends is None:
        return -1
    return int(pad if pad is not None and bool(pad) else ends[0])


def _padded(rows: list[list[int]], fill: int) -> Tensor:
    padded = torch.full((len(rows), max(map(len, rows))), fill)
    for row, numbers in enumerate(rows):
        padded[row, : len(numbers)] = torch.tensor(numbers)
    return padded


def _is_plain(call: LoopCall, criterion: Any) -> bool:
    """Return whether the search needs no call of this criterion, because it knows the length and the stop tokens."""
    return is_limit(criterion, call.config.max_length) or is_one_of(criterion, stopping_criteria.EosTokenCriteria)


def _stops(criteria: list[Any]) -> Any:
    together = StoppingCriteriaList(criteria)
    return lambda ids: together(ids, None)


def _drops_ended(call: LoopCall) -> bool:
    """Return whether nothing can tell that prompts whose results are certain are computed no longer."""
    if call.config.return_dict_in_generate or not all(is_one_of(criterion, *BY_BEAM) for criterion in call.criteria):
        return False
    return all(is_stock(each) and not _depends_on_row(each) for each in call.processors)


def _depends_on_row(processor: Any) -> bool:
    return type(processor).__name__ in BY_ROW or isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
