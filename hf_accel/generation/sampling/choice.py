"""Chooses the new tokens of each sequence from the logits of a pass, and gives their log-probabilities."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import HfAccelError
from ...kernels import cpu
from ...kernels.cpu.library import DTYPES
from ...kernels.cpu.row_kernels import argmax as native_argmax
from ...tensors import HostCopy, Unread, all_unread, integers, known, sent
from ..sequence import Draft, Sequence
from ..speculation.verifiers.verifier import Place, Verifier
from .filters import topk
from .sampling import Sampling, processed_scores
from .token_prefix import Prefix, prefix_of


@dataclass(frozen=True)
class Chosen:
    """The new tokens of a sequence: `num_accepted` drafted tokens and one more.

    error: why that one more token could not be chosen; it is then missing from `tokens`. The error counts only if the
    sequence does not end at an earlier token.
    """

    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Member:
    """A sequence with its draft. rows: the rows of logits from which its new tokens are chosen."""

    sequence: Sequence
    draft: Draft
    rows: range

    def prefixes(self) -> list[Prefix]:
        return [prefix_of(self.sequence, self.draft.prefix(row)) for row in range(len(self.rows))]

    def used(self, chosen: Chosen) -> list[int]:
        """Return the rows of logits from which the tokens were chosen."""
        return [self.rows[row] for row in self.draft.rows(chosen.tokens[: chosen.num_accepted])]

    @property
    def place(self) -> Place:
        return Place(self.sequence.seed, len(self.sequence.tokens))


def choose_tokens(
    logits: Tensor, sequences: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], verifier: Verifier,
    *, meanwhile: Callable[[Tensor], None] | None = None,
) -> list[Chosen | Exception]:  # fmt: skip
    """Choose the new tokens of each sequence. An error of one sequence is returned instead of its tokens.

    logits: [sum(len(draft) + 1), V], any floating dtype, with a row for each row of a draft (see Draft). Raises
    HfAccelError for another number of rows. meanwhile: called with what decides, on the logits' device, while it is on
    its way to the host; if all sequences take the likeliest token and have no draft, these are the tokens.
    """
    logits = logits.detach()
    members = _members(sequences, drafts)
    needed = members[-1].rows.stop if members else 0
    if needed != len(logits):
        raise HfAccelError(f"{len(logits)} rows of logits for sequences and drafts that need {needed}")
    groups: dict[Hashable, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(_group_key(sequence.settings.sampling), []).append(index)
    if len(groups) == 1:
        return _with_logprobs(logits, members, _choose_group(logits, members, verifier).read(meanwhile))
    unread = []
    for indices in groups.values():
        own = [members[index] for index in indices]
        regrouped = _members([member.sequence for member in own], [member.draft for member in own])
        unread.append(_choose_group(_rows(logits, own), regrouped, verifier))
    results: dict[int, Chosen | Exception] = {}
    for indices, chosen in zip(groups.values(), all_unread(unread).read(), strict=True):
        results.update(zip(indices, chosen, strict=True))
    return _with_logprobs(logits, members, [results[index] for index in range(len(members))])


def processed(logits: Tensor, rows: abc.Sequence[tuple[Sequence, list[int]]]) -> Tensor:
    """Return the distribution [n, V] float32 from which a draft model draws each sequence's next token.

    logits: [n, V] of the draft model. rows: for each row, the sequence and the tokens drafted for it so far. If the
    logits of a row cannot be processed, its scores count as 0, and no error is raised: any distribution may be drafted
    from, and the error is raised when the target model's logits are processed.
    """
    logits = logits.detach()
    groups: dict[Hashable, list[int]] = {}
    for row, (sequence, _) in enumerate(rows):
        groups.setdefault(_group_key(sequence.settings.sampling), []).append(row)
    distributions = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    for members in groups.values():
        sampling = rows[members[0]][0].settings.sampling
        prefixes = [prefix_of(*rows[row]) for row in members]
        own = sent(integers(members), logits)
        scores, _ = processed_scores(sampling, logits[own], prefixes)
        distributions[own] = _one_hot(scores) if sampling.greedy else scores.softmax(-1)
    return distributions


def likeliest(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row, [n] int64; the lowest index among equal logits."""
    if logits.device.type == "cpu" and logits.dtype in DTYPES and cpu.refusal() is None:
        return native_argmax(logits)
    return logits.argmax(-1)


def _group_key(sampling: Sampling) -> Hashable:
    """Sequences with equal keys are chosen for in one call; all that need only the argmax have the same key."""
    return True if sampling.plain else sampling.key


def _members(sequences: abc.Sequence[Sequence], drafts: abc.Sequence[Draft]) -> list[Member]:
    members, start = [], 0
    for sequence, draft in zip(sequences, drafts, strict=True):
        members.append(Member(sequence, draft, range(start, start + len(draft.tokens) + 1)))
        start = members[-1].rows.stop
    return members


def _rows(tensor: Tensor, members: list[Member]) -> Tensor:
    """Return the rows of these members, end to end. It is a view if the rows are consecutive."""
    indices = [row for member in members for row in member.rows]
    if indices and indices[-1] - indices[0] + 1 == len(indices):
        return tensor[indices[0] : indices[-1] + 1]
    return tensor[sent(integers(indices), tensor)]


def _choose_group(logits: Tensor, members: list[Member], verifier: Verifier) -> Unread[list[Chosen | Exception]]:
    """Choose for members with equal keys. `logits` holds their rows and no others."""
    sampling = members[0].sequence.settings.sampling
    if sampling.plain:
        return _greedy(members, likeliest(logits))
    scores, errors = processed_scores(sampling, logits, [prefix for member in members for prefix in member.prefixes()])
    chosen = (
        _greedy(members, likeliest(scores)) if sampling.greedy else _sampled(scores.softmax(-1), members, verifier)
    )
    # The errors are read after the tokens, because the host has waited for the device by then.
    return chosen.then(lambda results: _with_errors(members, results, errors()))


def _with_errors(
    members: list[Member], results: list[Chosen | Exception], failed_rows: dict[int, Exception]
) -> list[Chosen | Exception]:
    """Return the results, with the errors of the rows that they come from."""
    for at, (member, result) in enumerate(zip(members, results, strict=True)):
        if failed_rows and isinstance(result, Chosen):
            used = member.used(result)
            failed = next((number for number, row in enumerate(used) if row in failed_rows), None)
            if failed is not None:
                error = failed_rows[used[failed]]
                results[at] = Chosen(result.tokens[:failed], failed, error=error) if failed else error
    return results


def _greedy(members: list[Member], best: Tensor) -> Unread[list[Chosen | Exception]]:
    return Unread(
        best,
        lambda tokens: [
            _chosen(member.draft.accepted(tokens[member.rows.start : member.rows.stop])) for member in members
        ],
    )


def _sampled(distributions: Tensor, members: list[Member], verifier: Verifier) -> Unread[list[Chosen | Exception]]:
    draw = members[0].sequence.settings.sampling.draw
    undrafted = [at for at, member in enumerate(members) if draw is not None and not len(member.draft)]
    others = [at for at in range(len(members)) if at not in set(undrafted)]
    results: dict[int, Chosen | Exception] = {}
    if draw is not None and undrafted:
        own = [members[at] for at in undrafted]
        try:
            tokens = draw(_rows(distributions, own), [member.sequence for member in own])
            results.update((at, _chosen([token])) for at, token in zip(undrafted, tokens, strict=True))
        except Exception as error:
            results.update((at, error) for at in undrafted)
    if others:
        own = [members[at] for at in others]
        kept = verifier.verified(
            _rows(distributions, own), [member.draft for member in own], [member.place for member in own]
        )
    else:
        kept = known([])

    def in_order(tokens: list[list[int]]) -> list[Chosen | Exception]:
        found = results | {at: _chosen(own) for at, own in zip(others, tokens, strict=True)}
        return [found[at] for at in range(len(members))]

    return kept.then(in_order)


def _chosen(tokens: list[int]) -> Chosen:
    return Chosen(tokens, len(tokens) - 1)


def _one_hot(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(1, likeliest(scores)[:, None], 1)


def _with_logprobs(
    logits: Tensor, members: list[Member], results: list[Chosen | Exception]
) -> list[Chosen | Exception]:
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    reported: list[int] = []
    for at, (member, result) in enumerate(zip(members, results, strict=True)):
        count = member.sequence.settings.sampling.num_logprobs
        if count is not None and isinstance(result, Chosen):
            reported.append(at)
            rows += member.used(result)[: len(result.tokens)]
            tokens += result.tokens
            counts += [count] * len(result.tokens)
    if reported:
        reports = iter(logprobs(logits[sent(integers(rows), logits)], tokens, counts))
        for at in reported:
            result = results[at]
            if isinstance(result, Chosen):
                results[at] = replace(result, logprobs=[next(reports) for _ in result.tokens])
    return results


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability (natural logarithm) of a token. top: the most probable token ids with theirs, descending."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs(logits: Tensor, tokens: abc.Sequence[int], counts: abc.Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [n, V], the log-probabilities of tokens[row] and of the counts[row] most probable ids."""
    logs = logits.float().log_softmax(-1)
    own = logs.gather(1, sent(integers(tokens), logs)[:, None])[:, 0]
    most = min(max(counts, default=0), logs.shape[1])
    copies = [HostCopy(tensor) for tensor in (own, *topk(logs, most))]  # the host waits for all of them at once
    chosen, values, ids = (copy.tolist() for copy in copies)
    return [
        TokenLogprobs(token, logprob, list(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, logprob, count, row_ids, row_values in zip(tokens, chosen, counts, ids, values, strict=True)
    ]
