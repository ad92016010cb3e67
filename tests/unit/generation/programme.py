"""Random programmes on a Scheduler, beside a memory that says what each slot of the pages really holds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from hf_accel.cache.group import PageGroup
from hf_accel.cache.pages import Pages
from hf_accel.errors import OutOfBlocksError
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.scheduling.scheduler import Scheduler
from hf_accel.generation.sequence import PATIENCE, Chunk, Sequence, Status

VOCABULARY = 2  # so that prompts often begin alike


class Memory:
    """Stands for a layer's pages. A slot holds the digest of its token and all before it, as K and V do."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots: dict[int, int] = {}

    def grow(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        size = self.block_size
        for source, destination in pairs:
            for offset in range(size):
                self.slots[destination * size + offset] = self.slots.get(source * size + offset, 0)


def pages_of(
    *num_blocks: int, block_size: int = 4, windows: tuple[int | None, ...] = (None,), growable: bool = False
) -> Pages:
    """Pages over memories, a group for each number of blocks."""
    groups = []
    for count, window in zip(num_blocks, windows, strict=True):
        group = PageGroup(
            window=window,
            num_blocks=count,
            block_size=block_size,
            growable=growable,
            prefix_sharing=True,
            quantized=None,
        )
        group.storages[0] = Memory(count, block_size)  # type: ignore[assignment]
        groups.append(group)
    return Pages(groups)


def sequence_of(prompt: list[int], max_new_tokens: int = 8, **fields: Any) -> Sequence:
    return Sequence(prompt, RequestSettings(max_new_tokens, sampling=None, **fields))  # type: ignore[arg-type]


def digests(tokens: list[int]) -> list[int]:
    found, previous = [], 1
    for token in tokens:
        previous = hash((previous, token))
        found.append(previous)
    return found


class Pass:
    """Runs chunks (and drafts after them) on the memories: all writes first, then every read is checked."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    def run(self, chunks: list[Chunk], drafts: dict[Sequence, list[int]], verified: dict[Sequence, int]) -> None:
        """verified: how many tokens of each sequence earlier passes wrote, in slots that nobody may write now."""
        for number, group in enumerate(self.pages.groups):
            memory: Memory = group.storages[0]  # type: ignore[assignment]
            owned = {
                slot: sequence
                for sequence, count in verified.items()
                if sequence.cached is not None
                for slot in self.held(sequence.cached.tables[number], count)
            }
            written: dict[int, Sequence] = {}
            for chunk in chunks:
                sequence, (start, stop, known) = chunk.sequence, self.extent(chunk, drafts)
                assert sequence.cached is not None
                slots = sequence.cached.tables[number].slots(start, stop)
                for slot, digest in zip(slots, known[start:stop], strict=True):
                    assert slot not in written, "two rows write one slot in a pass"
                    assert slot not in owned, "a slot that others have read is written again"
                    written[slot], memory.slots[slot] = sequence, digest
            for chunk in chunks:
                start, stop, known = self.extent(chunk, drafts)
                first = 0 if group.window is None else max(0, start - group.window + 1)
                assert chunk.sequence.cached is not None
                slots = chunk.sequence.cached.tables[number].slots(first, stop)
                assert [memory.slots.get(slot) for slot in slots] == known[first:stop], "wrong K and V are read"

    @staticmethod
    def held(table: Any, count: int) -> list[int]:
        first = table.num_dropped_blocks * table.pool.block_size
        return table.slots(first, max(first, count))

    @staticmethod
    def extent(chunk: Chunk, drafts: dict[Sequence, list[int]]) -> tuple[int, int, list[int]]:
        sequence = chunk.sequence
        draft = drafts.get(sequence, [])
        start = sequence.num_computed
        return start, start + chunk.count + len(draft), digests(sequence.tokens + draft)


def check_blocks(pages: Pages, running: Iterable[Sequence]) -> None:
    """Every reference of every block is held by a row that runs."""
    for number, group in enumerate(pages.groups):
        held = [block for s in running if s.cached is not None for block in s.cached.tables[number].blocks]
        assert group.pool.num_used == len(set(held))
        assert all(group.pool.reference_count(block) == held.count(block) for block in set(held))
        assert group.pool.num_used + group.pool.num_free == group.pool.num_blocks


class Programme:
    """Plays the engine: arrivals, passes with drafts, cancels, forks and failures, in a random order."""

    def __init__(self, seed: int, pages: Pages, **options: Any) -> None:
        self.random = random.Random(seed)
        self.pages = pages
        self.scheduler = Scheduler(pages, **options)
        self.alive: list[Sequence] = []
        self.ended = self.refused = self.forked = self.restarted = self.shared = 0
        self.patience = options.get("patience", PATIENCE)
        self.overtaken: dict[Sequence, int] = {}  # while it was the oldest that waits
        self.promoted: set[Sequence] = set()

    # -- events ----------------------------------------------------------------------------------------

    def step(self, *, arrivals: bool = True) -> None:
        draw = self.random.random()
        if arrivals and draw < 0.3 and len(self.alive) < 14:
            self.arrive()
        elif arrivals and draw < 0.35 and self.alive:
            self.end(self.random.choice(self.alive), self.random.choice(["cancelled", "failed"]))
        else:
            self.run_pass(fails=arrivals and draw > 0.99)
        self.check()

    def arrive(self) -> None:
        priority = self.random.choice([0, 0, 0, 1, 2])
        length = self.random.choice([1, 4, 8, self.random.randint(1, 40)])
        prompt = [int(self.random.random() < 0.1) for _ in range(length)]
        samples = self.random.choice([1, 1, 1, 3])
        family = [sequence_of(list(prompt), self.random.randint(1, 20), priority=priority) for _ in range(samples)]
        leader = family[0]
        leader.followers = family[1:]
        capacity = self.pages.capacity
        fits = capacity is None or all(s.num_prompt + s.settings.max_new_tokens <= capacity for s in family)
        try:
            self.scheduler.add(leader)
        except OutOfBlocksError:
            assert not fits and leader.arrival == -1
            self.refused += 1
        else:
            assert fits
            self.alive += family

    def end(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.remove(sequence, reason)
        self.scheduler.remove(sequence, "a second time")
        assert sequence.status is Status.FINISHED and sequence.finish_reason == reason and sequence.cached is None
        self.alive.remove(sequence)
        self.ended += 1

    def run_pass(self, *, fails: bool = False) -> None:
        waiting, ran = self.scheduler.waiting, list(self.scheduler.running)
        verified = {s: s.num_computed for s in ran}
        chunks = self.scheduler.schedule()
        assert not self.scheduler.take_failed()
        assert bool(chunks) == bool(waiting or ran)
        self.check_chunks(chunks)
        self.check_admissions(waiting, ran, chunks)
        verified = {s: count for s, count in verified.items() if s.cached is not None and s in ran}
        if fails:
            self.scheduler.restart()
            self.restarted += 1
            assert not self.scheduler.running
            return
        drafts = {chunk.sequence: self.draft(chunk) for chunk in chunks}
        Pass(self.pages).run(chunks, drafts, verified)
        for chunk in chunks:
            self.commit(chunk, drafts[chunk.sequence])

    def draft(self, chunk: Chunk) -> list[int]:
        sequence = chunk.sequence
        if not chunk.reaches_end or sequence.followers or self.random.random() < 0.5:
            return []
        wanted = min(self.random.randint(0, 6), sequence.num_left - 1)
        assert sequence.cached is not None
        count = self.pages.room(sequence.cached, wanted, start=sequence.num_computed)
        self.pages.append(sequence.cached, count, start=sequence.num_computed)
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def commit(self, chunk: Chunk, draft: list[int]) -> None:
        sequence, cached = chunk.sequence, chunk.sequence.cached
        assert cached is not None
        if not chunk.reaches_end:
            sequence.num_computed += chunk.count
            return
        accepted = draft[: self.random.randint(0, len(draft))]
        sequence.num_computed += chunk.count + len(accepted)
        cached.truncate(sequence.num_computed)
        sequence.tokens += accepted
        self.pages.publish(cached, sequence.tokens[: sequence.num_computed])
        forked = self.scheduler.fork(sequence) if sequence.followers else []
        self.forked += len(forked)
        for each in (sequence, *forked):
            each.tokens.append(self.random.randrange(VOCABULARY))
            if not each.num_left:
                self.end(each, "length")
            elif self.random.random() < 0.05:
                self.end(each, "stop")

    # -- what must hold --------------------------------------------------------------------------------

    def check_chunks(self, chunks: list[Chunk]) -> None:
        budget = self.scheduler.token_budget
        assert budget is None or sum(chunk.count for chunk in chunks) <= budget
        counts = {chunk.sequence: chunk.count for chunk in chunks}
        assert len(counts) == len(chunks) and min(counts.values(), default=1) > 0
        assert counts.keys() <= set(self.scheduler.running)
        for sequence in self.scheduler.running:
            assert sequence.cached is not None
            assert all(t.num_tokens == sequence.num_computed + counts.get(sequence, 0) for t in sequence.cached.tables)
            assert sequence.cached.num_tokens <= len(sequence.tokens)

    def check_admissions(self, waiting: list[Sequence], ran: list[Sequence], chunks: list[Chunk]) -> None:
        """Priority, then arrival; but who is oldest and was overtaken `patience` times goes first for good."""
        entered = [chunk.sequence for chunk in chunks if chunk.sequence not in ran]
        self.shared += sum(s.num_computed for s in entered)
        self.overtaken = {s: count for s, count in self.overtaken.items() if s in waiting}
        waiting = sorted(waiting, key=lambda s: s.arrival)
        for sequence in entered:
            first = min(waiting, key=lambda s: (s not in self.promoted, -s.settings.priority, s.arrival))
            assert sequence is first
            oldest = waiting[0]
            waiting.remove(sequence)
            self.overtaken.pop(sequence, None)
            if oldest is not sequence:
                self.overtaken[oldest] = self.overtaken.get(oldest, 0) + 1
                if self.overtaken[oldest] == self.patience:
                    self.promoted.add(oldest)

    def check(self) -> None:
        check_blocks(self.pages, self.scheduler.running)
        running = self.scheduler.running
        assert all(s.status is Status.RUNNING and s.cached is not None for s in running)
        assert all(s.cached.num_tokens == s.num_computed for s in running if s.cached is not None)
        rest = set(self.alive) - set(running)
        behind = {follower for s in self.alive for follower in s.followers}
        assert set(self.scheduler.waiting) == rest - behind
        assert all(s.status is Status.WAITING and s.cached is None and s.num_computed == 0 for s in rest)

    def drain(self) -> None:
        """Everyone comes to an end without new arrivals, and gives back all blocks."""
        passes = 0
        work = sum(s.num_prompt + s.settings.max_new_tokens for s in self.alive)
        while self.alive:
            self.step(arrivals=False)
            passes += 1
            assert passes <= 20 * work, "no progress"
        assert not self.scheduler.has_work and not self.scheduler.schedule()
        assert all(group.pool.num_used == 0 for group in self.pages.groups)
