from __future__ import annotations

import random

import pytest

from hf_accel.cache.pool import BlockPool, BlockTable, PrefixIndex
from hf_accel.cache.prefixes import chain
from hf_accel.errors import OutOfBlocksError


def table_of(num_tokens: int, *, num_blocks: int = 8, block_size: int = 4) -> BlockTable:
    table = BlockTable(BlockPool(num_blocks, block_size=block_size))
    table.append(num_tokens)
    return table


def test_tokens_lie_in_order_in_the_blocks() -> None:
    table = table_of(6)
    first, second = table.blocks
    assert table.slots(0, 6) == [first * 4 + i for i in range(4)] + [second * 4, second * 4 + 1]
    assert table.slots(5, 6) == [second * 4 + 1] and table.slots(6, 6) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (-1, 2), (5, 4)])
def test_slots_that_are_not_held_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not held"):
        table_of(6).slots(start, stop)


def test_a_fork_shares_until_it_writes() -> None:
    table = table_of(6)
    fork = table.fork()
    assert fork.blocks == table.blocks and table.pool.num_used == 2
    ((source, destination),) = fork.append(1)
    assert source == table.blocks[1] and destination == fork.blocks[1] != source
    assert fork.blocks[0] == table.blocks[0] and table.pool.num_used == 3
    assert table.append(1) == []  # nobody else reads its last block any more


def test_no_copy_when_the_shared_block_is_full() -> None:
    fork = table_of(4).fork()
    assert fork.append(1) == [] and len(fork.blocks) == 2


def test_a_cropped_block_that_the_index_knows_is_copied_before_it_is_overwritten() -> None:
    table = table_of(4)
    index = PrefixIndex(table.pool)
    index.insert([b"1 2 3 4"], table.blocks)
    table.truncate(2)
    ((source, _),) = table.append(2)
    assert [index.find(b"1 2 3 4")] == [source] != table.blocks


def test_truncate_releases_whole_blocks_and_refuses_what_it_has_not() -> None:
    table = table_of(9)
    table.truncate(4)
    assert (len(table.blocks), table.num_tokens, table.pool.num_used) == (1, 4, 1)
    with pytest.raises(ValueError, match="cannot go back to 5 tokens"):
        table.truncate(5)


def test_dropping_behind_a_window_keeps_positions() -> None:
    table = table_of(10)
    last = table.slots(9, 10)
    table.drop_before(7)
    table.drop_before(7)
    assert (table.num_dropped_blocks, len(table.blocks), table.num_tokens, table.num_held_tokens) == (1, 2, 10, 6)
    assert table.slots(9, 10) == last
    with pytest.raises(ValueError, match="not held"):
        table.slots(3, 4)
    with pytest.raises(ValueError, match="cannot go back to 3 tokens"):
        table.truncate(3)


def test_running_out_of_blocks_changes_nothing() -> None:
    table = table_of(6, num_blocks=3)
    fork = table.fork()
    before = (list(fork.blocks), fork.num_tokens, table.pool.num_used, table.pool.num_free)
    with pytest.raises(OutOfBlocksError):
        fork.append(4)  # needs a copy of the last block and two new ones
    assert (list(fork.blocks), fork.num_tokens, table.pool.num_used, table.pool.num_free) == before


def test_adopt_only_into_an_empty_table() -> None:
    table = table_of(4)
    other = BlockTable(table.pool)
    other.adopt(table.blocks, 3)
    assert table.pool.reference_count(table.blocks[0]) == 2 and other.num_tokens == 3
    with pytest.raises(ValueError, match="cannot adopt 1 blocks as 4 tokens of a table of 3"):
        other.adopt(table.blocks, 4)


NUM_BLOCKS = 14


class Simulation:
    """Tables over a small pool beside plain lists of tokens; `memory` is what the slots hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.index = PrefixIndex(self.pool)
        self.memory: dict[int, int] = {}
        self.tables: list[BlockTable] = []
        self.tokens: list[list[int]] = []
        self.out_of_blocks = self.copies = self.adopted = 0

    def step(self) -> None:
        actions = [self.arrive, self.append, self.append, self.append, self.fork, self.crop, self.leave, self.slide]
        if len(self.tables) > 8:
            actions = [self.leave]
        if not self.tables:
            actions = [self.arrive]
        try:
            self.random.choice(actions)()
        except OutOfBlocksError:
            self.out_of_blocks += 1
            self.leave()

    def pick(self) -> int:
        return self.random.randrange(len(self.tables))

    def arrive(self) -> None:
        table, tokens = BlockTable(self.pool), []
        self.tables.append(table)
        self.tokens.append(tokens)
        prompt = [self.random.randrange(2) for _ in range(self.random.randrange(1, 14))]
        found = [self.index.find(digest) for digest in chain(prompt, 4)]
        shared = [block for block in found[: found.index(None) if None in found else None] if block is not None]
        table.adopt(shared, len(shared) * 4)
        self.adopted += len(shared)
        tokens += prompt[: len(shared) * 4]
        self.write(table, tokens, prompt[len(tokens) :])

    def append(self) -> None:
        row = self.pick()
        new = [self.random.randrange(2) for _ in range(self.random.choice([1, 1, 1, 5]))]
        self.write(self.tables[row], self.tokens[row], new)

    def write(self, table: BlockTable, tokens: list[int], new: list[int]) -> None:
        copies = table.append(len(new))
        self.copies += len(copies)
        for source, destination in copies:
            for offset in range(4):
                if source * 4 + offset in self.memory:
                    self.memory[destination * 4 + offset] = self.memory[source * 4 + offset]
        for slot, token in zip(table.slots(len(tokens), len(tokens) + len(new)), new, strict=True):
            assert self.pool.is_writable(slot // 4), "a write into a block that others read"
            self.memory[slot] = token
        tokens += new
        if not table.num_dropped_blocks:
            digests = list(chain(tokens, 4))
            self.index.insert(digests, table.blocks[: len(digests)])

    def fork(self) -> None:
        row = self.pick()
        self.tables.append(self.tables[row].fork())
        self.tokens.append(list(self.tokens[row]))

    def crop(self) -> None:
        row = self.pick()
        keep = self.random.randint(self.tables[row].num_dropped_blocks * 4, len(self.tokens[row]))
        self.tables[row].truncate(keep)
        del self.tokens[row][keep:]

    def slide(self) -> None:
        row = self.pick()
        self.tables[row].drop_before(len(self.tokens[row]) - 10)

    def leave(self) -> None:
        if self.tables:
            row = self.pick()
            self.tables.pop(row).release()
            self.tokens.pop(row)

    def check(self) -> None:
        references: dict[int, int] = {}
        for table, tokens in zip(self.tables, self.tokens, strict=True):
            first = table.num_dropped_blocks * 4
            assert table.num_tokens == len(tokens)
            assert [self.memory[s] for s in table.slots(first, len(tokens))] == tokens[first:]
            for block in table.blocks:
                references[block] = references.get(block, 0) + 1
        assert references == {
            b: self.pool.reference_count(b) for b in range(NUM_BLOCKS) if self.pool.reference_count(b)
        }
        assert self.pool.num_used == len(references) and self.pool.num_used + self.pool.num_free == NUM_BLOCKS


def test_a_hundred_thousand_random_operations_against_plain_lists() -> None:
    simulation = Simulation(seed=0)
    for number in range(100_000):
        simulation.step()
        if number % 100 == 0:
            simulation.check()
    assert min(simulation.out_of_blocks, simulation.copies, simulation.adopted) > 1000, "the programme met every case"
    while simulation.tables:
        simulation.leave()
    assert simulation.pool.num_used == 0 and simulation.pool.num_free == NUM_BLOCKS
