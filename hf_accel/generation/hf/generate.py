"""Computes one call of generate() as sequences of a Session, and streams its rows.

It needs no padding, and computes no finished rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import abc
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ...cache.cached_sequence import CachedSequence
from ...cache.hf import PagedCache
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.step import TokenRange
from ...errors import NoTokenError, NotRaggedError, UnsupportedError
from ...undo.state import state_of
from ..carried import Carried
from ..prompt_inputs import PromptInputs, RequestInputs
from ..request_settings import RequestSettings
from ..sequence import Sequence
from .beams import begin_search, search_output
from .encoder_source import sources
from .generation_state import LoopCall
from .grammars import constraint_in
from .joint_rows import begin_rows, kept_of_passes, why_together
from .kept_runners import keep_runner
from .processing import BatchDraws, stock_sampling, stop_rules
from .prompts import inputs_of_rows
from .session import Session


def run(call: LoopCall) -> tuple[Any, dict[str, Any]]:
    """Run the loop of a call. Returns what transformers' loop would return, and statistics of the speculation."""
    budget, inputs = call.config.prefill_chunk_size, inputs_of_rows(call)
    together = not call.has_beams and why_together(call) is not None
    if budget is not None and (call.has_beams or together):
        budget = max(budget, len(call.input_ids))  # these wait for each other, so a pass has room for all
    with Session(call.model, call.cache, speculative=call.speculative, token_budget=budget) as session:
        sequences = _sequences(call, inputs)
        search = begin_search(call, sequences) if call.has_beams else None
        rows = begin_rows(call, sequences) if together else None
        try:
            _loop(call, session, sequences)
            result: Any = _result(call, sequences) if search is None else search_output(call, search)
            if sequences[0].settings.keeps_pages:
                if call.config.return_dict_in_generate and search is None:
                    _compute_ends(session, sequences)
                _keep(call, sequences)
        except BaseException:
            for sequence in sequences:
                if sequence.kept_pages is not None:
                    sequence.kept_pages.release()
            raise
        statistics = {} if session.speculation is None else session.speculation.statistics.to_dict()
        graphs = session.graph_statistics()
    state = state_of(call.model).generation
    if state.call is not None and state.call.own_cache:
        keep_runner(state, session.runner, call.cache.settings)
    if search is not None:
        return result, graphs
    if call.config.return_dict_in_generate:
        # Pages with the keys of sources are gone: transformers takes no cache as one that is empty.
        kind: Any = GenerateEncoderDecoderOutput if call.has_encoder else GenerateDecoderOnlyOutput
        cache = None if call.attends_to_sources else call.cache
        result = kind(sequences=result, **{CACHE_NAME: cache}, **kept_of_passes(rows))
        if call.speculative is not None:
            result.spec_stats = statistics
    return result, {**statistics, **graphs}


def _sequences(call: LoopCall, inputs: abc.Sequence[PromptInputs | None]) -> list[Sequence]:
    """Make a sequence for each row of the input. Samples of one prompt are followers of the first of them."""
    draws = BatchDraws() if call.speculative is None else None
    settings, count = _settings(call, draws), len(call.input_ids)
    drawn = call.config.do_sample and draws is None
    seeds = torch.randint(2**62, (count,)).tolist() if drawn else [0] * count
    sequences: list[Sequence] = []
    brings = call.has_encoder or call.has_more_than_ids or any(inputs)
    attended = sources(call) if call.has_encoder else [None] * count
    for row, ids in enumerate(call.input_ids.tolist()):
        padding = 0 if call.mask is None else int((call.mask[row] == 0).sum())
        if (given := inputs[row]) is not None and given.asks:  # the padding behind it is not computed
            ids, padding = ids[: len(given.contents) - 1] + ids[-1:], 0
        hidden = call.num_learnt if ids else call.prompt_columns - padding
        sequence = Sequence(
            [0] * hidden + ids[padding:],
            settings,
            seed=seeds[row],
            padding=ids[:padding],
            index=row,
            inputs=RequestInputs(prompt=inputs[row], source=attended[row], num_hidden=hidden) if brings else None,
        )
        leader = row - row % call.repeats
        if row != leader and (call.has_beams or _is_same(inputs[leader], inputs[row])):
            sequences[leader].followers.append(sequence)
        sequences.append(sequence)
    if draws is not None:
        draws.sequences = sequences
    return sequences


def _settings(call: LoopCall, draws: BatchDraws | None) -> RequestSettings:
    """Return what a call asks for, for all of its rows. draws: draws their tokens; None if the verifier does."""
    config, alone = call.config, not call.has_beams and why_together(call) is None
    # Drafts are verified with random numbers of their own, which would not be transformers'.
    drafted = not config.do_sample or draws is None
    # If the number of pages is fixed, other sequences need the pages of those that have ended.
    keeps = call.cache.settings.max_tokens is None or config.return_dict_in_generate or len(call.input_ids) == 1
    keeps = keeps and not (call.has_beams and not config.return_dict_in_generate)
    return RequestSettings(
        max(1, config.max_length - call.num_columns),
        stock_sampling(call.processors, greedy=not config.do_sample, draw=draws, takes_drafts=drafted),
        stop_rules(call.criteria, max_length=config.max_length),
        constraint=constraint_in(call.processors) if alone else None,
        keeps_pages=keeps and not call.attends_to_sources,
    )


def _is_same(first: PromptInputs | None, second: PromptInputs | None) -> bool:
    """Return whether two rows of one prompt are given the same: a tower may add noise to what it hears.

    Of beams, all go on from the first row.
    """
    return first is second or (first is not None and second is not None and first.contents == second.contents)


def _loop(call: LoopCall, session: Session, sequences: list[Sequence]) -> None:
    cached = _beginning(call, session, sequences)
    if cached is not None:
        if len(sequences[0].tokens) - cached.num_tokens == 1:  # which transformers computes as a generated one
            sequences[0].num_prefilled = cached.num_tokens
        session.add(sequences[0], cached)
    else:
        followers = {each for leader in sequences for each in leader.followers}
        for leader in sequences:
            if leader not in followers:
                session.add(leader)
    while session.has_work:
        for progress in session.step():
            if progress.error is not None:
                _fail(call, progress.error)
            if call.streams is not None:
                finished = progress.sequence.is_finished
                call.streams.tokens(progress.sequence.index, progress.tokens, finished)
        if call.streams is not None:
            call.streams.flush()
    if call.streams is not None:
        call.streams.end()


def _fail(call: LoopCall, error: BaseException) -> NoReturn:
    """Raise the error of a row, or NotRaggedError where the greedy search of transformers has a token for it."""
    streamed = call.streams is not None and call.streams.has_streamed
    if isinstance(error, NoTokenError) and not (call.config.do_sample or streamed):
        raise NotRaggedError("the scores of a token hold NaN or are all -inf") from error
    raise error


def _beginning(call: LoopCall, session: Session, sequences: list[Sequence]) -> CachedSequence | None:
    """Return the tokens of the only sequence that the user's cache holds; None if it has none that can be used."""
    past = call.cache.padded.sequences
    if not past:
        return None
    session.scheduler.require_room(sequences[0])  # this may raise, so it comes before the fork, which holds blocks
    count = min(past[0].num_tokens, len(sequences[0].tokens) - 1)
    if session.pages.missing(past[0], count) is not None:
        return None  # the cache is past this token, and layers no longer have what it needs
    cached = past[0].fork()
    try:
        cached.truncate(count)
        _leave_last_block(call.cache, cached)
    except BaseException:
        cached.release()
        raise
    return cached


def _leave_last_block(cache: PagedCache, cached: CachedSequence) -> None:
    """Remove a partly filled last block from the cache, so that the sequence can write to it without a copy.

    This is done if the number of blocks is fixed, because there may be no block for a copy.
    """
    extra = cached.num_tokens % cache.settings.block_size
    if extra and cache.settings.max_tokens is not None:
        with contextlib.suppress(UnsupportedError):  # crop() raises if a sliding window has released blocks
            cache.crop(cached.num_tokens - extra - cache.padded.sequences[0].num_tokens)


def _result(call: LoopCall, sequences: list[Sequence]) -> Tensor:
    """Return the token ids [B, T + longest], padded on the right, and int64 behind a prompt of int32, as in
    transformers.
    """
    longest = max(sequence.num_new for sequence in sequences)
    new = torch.full((len(sequences), longest), call.pad_token, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        new[row, : sequence.num_new] = torch.tensor(sequence.tokens[sequence.num_prompt :])
    return torch.cat([call.input_ids, new.to(call.input_ids.device)], dim=1)


@torch.inference_mode()
def _compute_ends(session: Session, sequences: list[Sequence]) -> None:
    """Compute K and V of the last token of sequences that ended early.

    A next turn over the same cache attends to this token; its mask hides the padding after it.
    """
    longest, pages = max(sequence.num_new for sequence in sequences), session.pages
    ranges: list[TokenRange] = []
    ids: list[int] = []
    going: list[Sequence] = []
    for sequence in sequences:
        cached = sequence.kept_pages
        if cached is not None and sequence.num_new < longest and pages.can_append(cached, 1):
            ranges.append(TokenRange(cached, cached.num_tokens, 1, num_prompt=sequence.num_prompt))
            going.append(sequence)
            ids.append(sequence.tokens[-1])
            pages.append(cached, 1)
    if ranges:
        carried = Carried.of(going, ranges)
        session.runner(ids, [each.start for each in ranges], pages.step(ranges), [], carried=carried)


def _keep(call: LoopCall, sequences: list[Sequence]) -> None:
    """Store in the cache what transformers would store: all columns but the last, padded for rows that ended early."""
    kept = [(sequence, sequence.kept_pages) for sequence in sequences if sequence.kept_pages is not None]
    for sequence, cached in kept:
        cached.token_ids = sequence.tokens[: cached.num_tokens]
        if sequence.prompt_inputs is not None:
            cached.epoch = None  # its K and V do not follow from these ids
    longest = max(sequence.num_new for sequence in sequences) - 1
    ends = [cached.num_tokens - sequence.num_prompt for sequence, cached in kept]
    token_mask = None
    if call.mask is not None or min(ends) < longest:
        before = torch.ones(len(kept), call.prompt_columns) if call.mask is None else call.mask
        before = F.pad(before, (call.num_learnt, 0), value=1)
        after = torch.arange(longest)[None] < torch.tensor(ends)[:, None]
        token_mask = torch.cat([before.bool().cpu(), after], dim=1)
        token_mask = None if bool(token_mask.all()) else token_mask
    call.cache.replace_sequences([cached for _, cached in kept], token_mask, call.num_read + longest)


# -- streamers ---------------------------------------------------------------------------------------------


class RowStreams:
    """A streamer for transformers' generate() that passes each row's tokens on to the user's streamers.

    streamer: a list with a streamer for each row; or a streamer whose `put` takes `row`, which gets each row's tokens
    with the row's index; or any other streamer. The last gets what transformers' loop would give it: the tokens of a
    single row, or a column [B] as soon as every row has a token for it.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamers: list[Any] | None = list(streamer) if isinstance(streamer, list | tuple) else None
        self.streamer: Any = streamer
        self.takes_row = self.streamers is None and "row" in inspect.signature(self.streamer.put).parameters
        self.columns: list[list[int]] = []  # the new tokens of each row, for a streamer that gets columns
        self.finished: set[int] = set()
        self.num_put = 0
        self.num_tokens = 0
        self.padding = 0
        self.ends: frozenset[int] = frozenset()
        self.prompted = False

    @property
    def has_streamed(self) -> bool:
        """True if a new token was streamed."""
        return self.num_tokens > 0

    def expect(self, generation_config: Any) -> None:
        """Read from the config which tokens end a row, and which token pads it."""
        pad, ends = generation_config._pad_token_tensor, generation_config._eos_token_tensor
        self.padding = 0 if pad is None else int(pad)
        self.ends = frozenset() if ends is None else frozenset(ends.flatten().tolist())

    def put(self, value: Tensor) -> None:
        """Stream what transformers' loop passes: the prompt [B, T], then columns [B], or in assisted decoding the
        tokens of one row."""
        if not self.prompted:
            self.prompt(value)
        elif self.streamers is None and not self.takes_row:
            self.streamer.put(value)
        elif len(self.columns) == 1:
            self.tokens(0, value.flatten().tolist(), finished=False)
        else:
            for row, token in enumerate(value.flatten().tolist()):
                if row not in self.finished:
                    self.tokens(row, [token], finished=token in self.ends)

    def prompt(self, ids: Tensor) -> None:
        """Stream the prompt [B, T]. Raises UnsupportedError for a list of another number of streamers."""
        self.prompted = True
        if self.streamers is not None and len(self.streamers) != len(ids):
            raise UnsupportedError(
                f"streamer= has {len(self.streamers)} streamers for {len(ids)} rows; give one for each"
            )
        self.columns = [[] for _ in ids]
        if self.streamers is None and not self.takes_row:
            self.streamer.put(ids)
        else:
            for row, tokens in enumerate(ids):
                self._to_row(row, tokens)

    def tokens(self, row: int, tokens: abc.Sequence[int], finished: bool) -> None:
        """Stream the new tokens of one row. In ragged passes, rows may have different numbers of new tokens."""
        self.num_tokens += len(tokens)
        if self.streamers is not None or self.takes_row:
            for token in tokens:
                self._to_row(row, torch.tensor([token]))
            if finished:
                self._end(row)
            return
        self.columns[row] += tokens
        if finished:
            self.finished.add(row)

    def flush(self) -> None:
        """Stream the columns that are complete after a pass, with padding for rows that have ended."""
        number = self.num_put
        while any(len(column) > number for column in self.columns):
            if any(len(column) <= number and row not in self.finished for row, column in enumerate(self.columns)):
                break
            column = [ids[number] if len(ids) > number else self.padding for ids in self.columns]
            self.streamer.put(torch.tensor(column))
            number += 1
        self.num_put = number

    def _to_row(self, row: int, tokens: Tensor) -> None:
        if self.streamers is not None:
            self.streamers[row].put(tokens)
        elif self.takes_row:
            self.streamer.put(tokens, row=row)

    def _end(self, row: int) -> None:
        if row not in self.finished:
            self.finished.add(row)
            if self.streamers is not None:
                self.streamers[row].end()

    def end(self) -> None:
        if self.streamers is None:
            self.streamer.end()
        else:
            for row in range(len(self.streamers)):
                self._end(row)
