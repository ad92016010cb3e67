"""A model that is nothing but what it reads: its next token is a hash of all tokens that it finds in the pages.

It keeps token and position of everything it computes in the slots it is told to write, and sees of a sequence what
the block table shows it. So a wrong slot, a stale draft, a block that was given away or copied too late changes what
it says next. `sequential` says the same without pages, batches or drafts.
"""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_accel.cache.group import PageGroup
from hf_accel.cache.pages import Pages
from hf_accel.cache.step import Step
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.token_prefix import Prefix
from hf_accel.generation.sequence import Draft, Sequence, Shape
from hf_accel.generation.speculation.drafters.drafter import Drafter
from hf_accel.generation.speculation.verifiers.verifier import Place, Verifier

VOCABULARY = 12
LAWS = torch.randn(4099, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2  # one for each hash


def law_number(tokens: abc.Sequence[int], recent: abc.Sequence[int]) -> int:
    return hash((tuple(tokens), tuple(recent))) % len(LAWS)


class Slots:
    """Stands for a layer's pages: (position, token) by slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.held: dict[int, tuple[int, int]] = {}

    def grow(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for offset in range(self.block_size):
                held = self.held.get(source * self.block_size + offset, (-1, -1))
                self.held[destination * self.block_size + offset] = held

    def of_block(self, block: int) -> list[tuple[int, int]]:
        first = block * self.block_size
        return [self.held.get(slot, (-1, -1)) for slot in range(first, first + self.block_size)]


def toy_pages(num_blocks: int, *, block_size: int, window: int | None, growable: bool = False) -> Pages:
    """A group that sees everything, and, with a window, one that sees the last tokens."""
    groups = []
    for each in [None] if window is None else [None, window]:
        group = PageGroup(
            window=each, num_blocks=num_blocks, block_size=block_size, growable=growable,
            prefix_sharing=window is None, quantized=None,
        )  # fmt: skip
        group.storages[0] = Slots(num_blocks, block_size)  # type: ignore[assignment]
        groups.append(group)
    return Pages(groups)


class ToyRunner:
    """raises: called before and after the pages are written; an exception of it is one of the model."""

    device = torch.device("cpu")

    def __init__(self, pages: Pages, raises: Any = lambda when: None) -> None:
        self.pages, self.raises = pages, raises
        self.num_rows = self.num_calls = 0

    def __call__(self, ids: list[int], positions: list[int], step: Step, keep: list[int]) -> Tensor:
        self.num_calls, self.num_rows = self.num_calls + 1, self.num_rows + len(ids)
        self.raises("before")
        ends = step.groups[0].ragged.cu_q.tolist()
        seen = [self._group(number, ids, positions, step, ends=ends) for number in range(len(self.pages.groups))]
        self.raises("after")
        numbers = [law_number(seen[0][row], seen[-1][row][-self._window :]) for row in keep]
        return LAWS[numbers]

    @property
    def _window(self) -> int:
        return self.pages.groups[-1].window or 1

    def _group(
        self, number: int, ids: list[int], positions: list[int], step: Step, *, ends: list[int]
    ) -> list[list[int]]:
        """For each token what it sees of its sequence, itself included; all are written first."""
        group, part = self.pages.groups[number], step.groups[number]
        slots: Slots = group.storages[0]  # type: ignore[assignment]
        written = part.slots.tolist()
        places = list(range(len(ids))) if part.written is None else part.written.tolist()
        assert len(written) == len(set(written)) == len(places), "two tokens in one slot"
        assert set(places) == set(range(len(ids))) and len(ids) == len(positions)
        assert max(written) < group.pool.num_blocks * group.pool.block_size
        for slot, place in zip(written, places, strict=True):
            slots.held[slot] = (positions[place], ids[place])
        seen: list[list[int]] = []
        for row, (start, end) in enumerate(pairwise(ends)):
            held = int(part.ragged.kv_len[row])
            first = positions[end - 1] + 1 - held
            blocks = part.ragged.block_table[row].tolist()
            size = group.pool.block_size
            read = [slots.held.get(blocks[k // size] * size + k % size, (-1, -1)) for k in range(held)]
            assert positions[start:end] == list(range(positions[start], positions[end - 1] + 1))
            for position in positions[start:end]:
                begin = 0 if group.window is None else max(0, position + 1 - group.window)
                visible = read[begin - first : position + 1 - first]
                assert begin >= first, "what is in the window was given away"
                assert [p for p, _ in visible] == list(range(begin, position + 1)), "another place's K and V"
                seen.append([token for _, token in visible])
        return seen


def next_logits(tokens: list[int], window: int | None) -> Tensor:
    return LAWS[law_number(tokens, tokens[-(window or 1) :])]


def sequential(
    prompt: list[int], settings: RequestSettings, *, seed: int, verifier: Verifier, window: int | None
) -> tuple[list[int], Exception | None]:
    """What a request generates alone, token by token, and what it fails with."""
    sequence = Sequence(list(prompt), settings, seed=seed)
    error = None
    try:
        _generate(sequence, verifier, window)
    except Exception as raised:
        error = raised
    return sequence.tokens[len(prompt) :], error


def _generate(sequence: Sequence, verifier: Verifier, window: int | None) -> None:
    sampling = sequence.settings.sampling
    while sequence.num_left > 0:
        prefix = Prefix(list(sequence.tokens), sequence.num_prompt, (), None)
        scores = sampling.process(next_logits(sequence.tokens, window)[None], [prefix])
        if sampling.greedy:
            token = int(scores.argmax())
        else:
            place = Place(sequence.seed, len(sequence.tokens))
            [[token]] = verifier.verify(scores.softmax(-1), [Draft()], [place])
        sequence.tokens.append(token)
        try:
            if sequence.stop_reason() is not None:
                break
        except Exception:
            sequence.tokens.pop()
            raise


class ToyDrafter(Drafter):
    """Often right, sometimes wrong, sometimes silent; drawn: its tokens come with the law they were drawn from."""

    name = "toy"

    def __init__(self, seed: int, verifier: Verifier, window: int | None, *, drawn: bool, trees: bool = False) -> None:
        self.trees = trees
        self.random = random.Random(seed)
        self.verifier, self.window, self.drawn = verifier, window, drawn
        self.known: set[Sequence] = set()
        self.fails = False

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        if self.fails:
            self.fails = False
            raise RuntimeError("the drafter broke")
        self.known |= set(sequences)
        return [self._one(*each) for each in zip(sequences, lengths, strict=True)]

    def propose_trees(self, sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape]) -> list[Draft]:
        drafts = self.propose(sequences, [shape.depth for shape in shapes])
        return [self._tree(*each) for each in zip(sequences, drafts, shapes, strict=True)]

    def _tree(self, sequence: Sequence, chain: Draft, shape: Shape) -> Draft:
        """Add tokens after some of those of a chain, the true one among them at times, in a random order."""
        tokens, laws = list(chain.tokens), [] if chain.probabilities is None else list(chain.probabilities)
        parents = list(range(-1, len(tokens) - 1))
        while len(tokens) < shape.nodes and self.random.random() < 0.9:
            parent = self.random.randrange(-1, len(tokens))
            path = Draft(tokens, None, "", tuple(parents)).prefix(parent + 1)
            if len(path) == shape.depth:
                break
            logits = next_logits(sequence.tokens + path, self.window)
            tokens.append(int(logits.topk(3).indices[self.random.randrange(3)]))
            laws.append(torch.ones(VOCABULARY) / VOCABULARY)
            parents.append(parent)
        probabilities = torch.stack(laws) if chain.probabilities is not None else None
        return Draft(tokens, probabilities, parents=tuple(parents))

    def _one(self, sequence: Sequence, most: int) -> Draft:
        count = self.random.choice([0, 1, most, most])
        count = min(count, most)
        draws = self.drawn and not sequence.settings.sampling.greedy
        tokens: list[int] = []
        laws: list[Tensor] = []
        for number in range(count):
            logits = next_logits(sequence.tokens + tokens, self.window)
            if draws:
                law = (logits / self.random.choice([0.5, 1.0, 3.0])).softmax(-1)
                place = Place(sequence.seed, len(sequence.tokens)).next(number)
                tokens += self.verifier.draw(law[None], [place])
                laws.append(law)
            else:
                wrong = self.random.random() < 0.3
                tokens.append(self.random.randrange(VOCABULARY) if wrong else int(logits.argmax()))
        return Draft(tokens, torch.stack(laws) if laws else None)

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)
