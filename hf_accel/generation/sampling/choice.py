"""From the logits of a pass to the tokens that each sequence gains."""

from __future__ import annotations

from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import HfAccelError
from ...kernels import cpu
from ...kernels.cpu.library import DTYPES
from ...kernels.cpu.logits import argmax as native_argmax
from ..sequence import Draft, Sequence
from ..speculation.verifiers.verifier import Place, Verifier
from .logprobs import TokenLogprobs, logprobs
from .sampling import Sampling, processed_scores
from .token_prefix import Prefix, prefix_of


@dataclass(frozen=True)
class Chosen:
    """What a sequence gains: its first `num_accepted` tokens were drafted; one more follows.

    error: what choosing that one met, if the sequence gets there: it may end before.
    """

    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Member:
    """A sequence with its draft. start: the row that its first new token comes from."""

    sequence: Sequence
    draft: Draft
    start: int

    @property
    def rows(self) -> range:
        return range(self.start, self.start + len(self.draft) + 1)

    def prefixes(self) -> list[Prefix]:
        return [prefix_of(self.sequence, self.draft.tokens[:j]) for j in range(len(self.rows))]

    @property
    def place(self) -> Place:
        return Place(self.sequence.seed, len(self.sequence.tokens))


def choose(
    logits: Tensor, sequences: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], verifier: Verifier
) -> list[Chosen | Exception]:
    """For each sequence the tokens it gains, or what went wrong with it alone.

    logits: [sum(len(draft) + 1), V], any floating dtype; row j of a sequence follows its first j drafted tokens.
    """
    logits = logits.detach()
    members = _lined_up(sequences, drafts)
    needed = members[-1].rows.stop if members else 0
    if needed != len(logits):
        raise HfAccelError(f"{len(logits)} rows of logits for sequences and drafts that need {needed}")
    groups: dict[Hashable, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(_kind(sequence.sampling), []).append(index)
    results: dict[int, Chosen | Exception] = {}
    for indices in groups.values():
        own = [members[index] for index in indices]
        alone = _lined_up([member.sequence for member in own], [member.draft for member in own])
        results.update(zip(indices, _decide(_rows(logits, own), alone, verifier), strict=True))
    return _with_logprobs(logits, members, [results[index] for index in range(len(members))])


def processed(logits: Tensor, rows: abc.Sequence[tuple[Sequence, list[int]]]) -> Tensor:
    """The distribution of each sequence's next token after drafted ones -> [n, V] float32, for a model that drafts.

    logits: [n, V]. What cannot be processed is left as it is, since any distribution may be drafted from. The error
    comes when the model's own logits are processed.
    """
    logits = logits.detach()
    groups: dict[Hashable, list[int]] = {}
    for row, (sequence, _) in enumerate(rows):
        groups.setdefault(_kind(sequence.sampling), []).append(row)
    distributions = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for members in groups.values():
        sampling = rows[members[0]][0].sampling
        prefixes = [prefix_of(*rows[row]) for row in members]
        scores, _ = processed_scores(sampling, logits[members], prefixes)
        distributions[members] = _one_hot(scores) if sampling.greedy else scores.softmax(-1)
    return distributions


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest, of equals the lowest -> int64 [n]."""
    if logits.device.type == "cpu" and logits.dtype in DTYPES and cpu.refusal() is None:
        return native_argmax(logits)
    return logits.argmax(-1)


def _kind(sampling: Sampling) -> Hashable:
    """What is done together: all that take the largest logit as it is, and otherwise those of one key."""
    return True if sampling.plain else sampling.key


def _lined_up(sequences: abc.Sequence[Sequence], drafts: abc.Sequence[Draft]) -> list[Member]:
    members, start = [], 0
    for sequence, draft in zip(sequences, drafts, strict=True):
        members.append(Member(sequence, draft, start))
        start = members[-1].rows.stop
    return members


def _rows(tensor: Tensor, members: list[Member]) -> Tensor:
    """The rows of these members, end to end; a view where they are the whole or one after the other."""
    indices = [row for member in members for row in member.rows]
    if indices and indices[-1] - indices[0] + 1 == len(indices):
        return tensor[indices[0] : indices[-1] + 1]
    return tensor[indices]


def _decide(logits: Tensor, members: list[Member], verifier: Verifier) -> list[Chosen | Exception]:
    """For members of one kind whose rows are all of `logits`."""
    sampling = members[0].sequence.sampling
    if sampling.plain:
        return _kept(members, argmax(logits))
    scores, errors = processed_scores(sampling, logits, [prefix for member in members for prefix in member.prefixes()])
    results = _kept(members, argmax(scores)) if sampling.greedy else _sampled(scores.softmax(-1), members, verifier)
    for at, (member, result) in enumerate(zip(members, results, strict=True)):
        if errors and isinstance(result, Chosen):
            used = member.rows[: len(result.tokens)]
            failed = next((number for number, row in enumerate(used) if row in errors), None)
            if failed is not None:
                error = errors[member.rows[failed]]
                results[at] = Chosen(result.tokens[:failed], failed, error=error) if failed else error
    return results


def _kept(members: list[Member], best: Tensor) -> list[Chosen | Exception]:
    tokens = best.tolist()
    return [_chosen(member.draft.kept(tokens[member.rows.start : member.rows.stop])) for member in members]


def _sampled(distributions: Tensor, members: list[Member], verifier: Verifier) -> list[Chosen | Exception]:
    draw = members[0].sequence.sampling.draw
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
        kept = verifier.verify(
            _rows(distributions, own), [member.draft for member in own], [member.place for member in own]
        )
        results.update((at, _chosen(tokens)) for at, tokens in zip(others, kept, strict=True))
    return [results[at] for at in range(len(members))]


def _chosen(tokens: list[int]) -> Chosen:
    return Chosen(tokens, len(tokens) - 1)


def _one_hot(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(1, argmax(scores)[:, None], 1)


def _with_logprobs(
    logits: Tensor, members: list[Member], results: list[Chosen | Exception]
) -> list[Chosen | Exception]:
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    asked: list[int] = []
    for at, (member, result) in enumerate(zip(members, results, strict=True)):
        count = member.sequence.sampling.num_logprobs
        if count is not None and isinstance(result, Chosen):
            asked.append(at)
            rows += member.rows[: len(result.tokens)]
            tokens += result.tokens
            counts += [count] * len(result.tokens)
    if asked:
        reports = iter(logprobs(logits[rows], tokens, counts))
        for at in asked:
            result = results[at]
            if isinstance(result, Chosen):
                results[at] = replace(result, logprobs=[next(reports) for _ in result.tokens])
    return results
