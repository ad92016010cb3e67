"""Drafts that are trees: their branches, their blocks, and the controller's choice of their size."""

from __future__ import annotations

import random

import pytest

from hf_accel.errors import HfAccelError
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sequence import Draft, Sequence, Shape
from hf_accel.generation.speculation.acceptance import likeliest_tree
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.trees import branches, fork_branches, in_branches

from ..toy import toy_pages

#       -1
#      /  \
#     a    b
#    / \   |
#   c   d  e
BROAD = Draft([10, 20, 11, 12, 21], parents=(-1, -1, 0, 0, 1))


def random_tree(dice: random.Random, nodes: int) -> Draft:
    tokens, parents = list[int](), list[int]()
    for index in range(nodes):
        parents.append(dice.randrange(-1, index))
        used = {token for token, parent in zip(tokens, parents, strict=False) if parent == parents[-1]}
        tokens.append(dice.choice([token for token in range(40) if token not in used]))
    return Draft(tokens, parents=tuple(parents))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.prefix(row)) for row in range(len(draft) + 1)}


def test_tokens_stand_in_the_order_of_branches() -> None:
    draft = in_branches(BROAD, Shape(2, 5), "broad")
    assert draft.tokens == [10, 11, 12, 20, 21] and draft.parents == (-1, 0, 0, -1, 3)
    assert branches(draft) == [range(1, 3), range(3, 4), range(4, 6)]
    assert draft.depths == [0, 1, 2, 2, 1, 2] and draft.num_levels == 2
    assert [draft.line(row) for row in range(6)] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5]]
    assert draft.ranks == {0: {1: 0, 4: 1}, 1: {2: 0, 3: 1}, 4: {5: 0}}


def test_random_trees_stay_the_trees_that_they_are() -> None:
    dice = random.Random(0)
    for _ in range(200):
        tree = random_tree(dice, dice.randint(1, 20))
        draft = in_branches(tree, Shape(20, 20), "random")
        assert paths(draft) == paths(tree)
        rows = [row for branch in branches(draft) for row in branch]
        assert rows == list(range(1, len(draft) + 1))
        for branch in branches(draft):
            assert all(draft.line(row)[-2] == row - 1 for row in branch[1:])
        cut = draft.below(25)
        assert paths(cut) == {path for path in paths(tree) if all(token < 25 for token in path)}


def test_the_walk_follows_the_models_own_tokens() -> None:
    draft = in_branches(BROAD, Shape(2, 5), "broad")
    own = {(): 20, (10,): 1, (10, 11): 2, (10, 12): 3, (20,): 21, (20, 21): 7}
    chosen = [own[tuple(draft.prefix(row))] for row in range(6)]
    assert draft.accepted(chosen) == [20, 21, 7] and draft.rows([20, 21]) == [0, 4, 5]
    own[()], own[(10,)] = 10, 12
    chosen = [own[tuple(draft.prefix(row))] for row in range(6)]
    assert draft.accepted(chosen) == [10, 12, 3] and draft.rows([10, 12]) == [0, 1, 3]
    assert draft.rows([]) == [0] and draft.rows([99]) == [0]


def test_a_chain_with_parents_is_a_chain() -> None:
    draft = in_branches(Draft([1, 2, 3], parents=(-1, 0, 1)), Shape(3, 3), "chain")
    assert draft.parents is None and branches(draft) == [range(1, 4)]
    assert branches(Draft()) == [range(1, 1)] and in_branches(Draft([]), Shape(0, 0), "none") == Draft()


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Draft([1, 2], parents=(-1,)), r"2 tokens with parents=\(-1,\)"),
        (Draft([1, 2], parents=(-1, 1)), "the index of one before it"),
        (Draft([1, 2], parents=(-1, -2)), "or -1"),
        (Draft([1, 2, 3, 4], parents=(-1, 0, 1, 2)), "4 of them after each other where 3 were"),
        (Draft([1] * 9, parents=(-1,) * 9), "'odd' proposed 9 tokens where 8 were asked for"),
    ],
)
def test_what_is_no_tree(draft: Draft, words: str) -> None:
    with pytest.raises(HfAccelError, match=words):
        in_branches(draft, Shape(3, 8), "odd")


def test_branches_share_full_blocks_and_give_all_back() -> None:
    pages = toy_pages(12, block_size=4, window=None)
    [pool] = [group.pool for group in pages.groups]
    sequence = pages.begin()
    pages.append(sequence, 10)  # two full blocks, and a third with two tokens
    pages.append(sequence, 3, start=9)
    draft = in_branches(BROAD, Shape(2, 5), "broad")
    _, forks = fork_branches(sequence, draft, 9, pages)
    assert [(fork.copied, fork.rows) for fork in forks] == [([0, 1], range(3, 4)), ([0], range(4, 6))]
    own = [table.blocks for table in (sequence.tables[0], *(fork.cached.tables[0] for fork in forks))]
    assert len({tuple(blocks[:2]) for blocks in own}) == 1 and len({blocks[2] for blocks in own}) == 3
    sequence.take(forks[1].cached)
    assert sequence.tables[0].blocks == own[2] and sequence.num_tokens == 12
    for fork in forks:
        fork.cached.release()
    assert pool.num_used == 3
    sequence.release()
    assert pool.num_free == 12


def test_branches_for_which_there_are_no_blocks_are_left_out() -> None:
    pages = toy_pages(5, block_size=4, window=None)
    [pool] = [group.pool for group in pages.groups]
    sequence = pages.begin()
    pages.append(sequence, 10)
    draft, forks = fork_branches(sequence, in_branches(BROAD, Shape(2, 5), "broad"), 9, pages)
    assert pool.num_free == 0 and len(forks) == 2 and len(draft) == 5
    for fork in forks[1:]:
        fork.cached.release()
    draft, more = fork_branches(sequence, in_branches(BROAD, Shape(2, 5), "broad"), 9, pages)
    assert len(more) == 1 and draft.tokens == [10, 11, 12] and draft.parents == (-1, 0, 0)


# -- the controller ---------------------------------------------------------------------------------------


RATES = [[0.6] * 8, [0.15] * 8, [0.07] * 8]


def tree_of(shape: Shape) -> Draft:
    """The likeliest tokens of a shape. A token is the rank among its siblings."""
    waiting, tokens, parents = [(-1.0, -1, 0, 1)], list[int](), list[int]()
    while waiting and len(tokens) < shape.nodes:
        waiting.sort()
        minus, parent, rank, depth = waiting.pop(0)
        if rank == 0:
            minus *= RATES[0][0]
        tokens.append(rank)
        parents.append(parent)
        if depth < shape.depth:
            waiting.append((minus, len(tokens) - 1, 0, depth + 1))
        if rank + 1 < len(RATES):
            waiting.append((minus * RATES[rank + 1][0] / RATES[rank][0], parent, rank + 1, depth))
    return Draft(tokens, parents=tuple(parents))


def speed(controller: Controller, steps: int, row: float, *, is_free: bool = True, drafting: float = 0.0) -> float:
    """Return the tokens per second where a row more costs `row` passes."""
    dice, sequence, tokens, time = random.Random(0), Sequence([1], RequestSettings(10**9, sampling=None)), 0, 0.0  # type: ignore
    for _ in range(steps):
        [shape] = controller.shapes([sequence], [100], is_free=is_free, trees=True)
        draft = tree_of(shape)
        if drafting and shape.depth:
            controller.observe_drafting(len(draft), shape.depth, drafting * shape.depth)
            time += drafting * shape.depth
        rows, own = [0], {}
        while True:
            draw, rank = dice.random(), 0
            while rank < len(RATES) and draw >= RATES[rank][0]:
                draw, rank = draw - RATES[rank][0], rank + 1
            own = {draft.tokens[child - 1]: child for child in draft.ranks.get(rows[-1], {})}
            if rank not in own:
                break
            rows.append(own[rank])
        if len(draft):
            controller.observe_tree(sequence, draft, rows)
        seconds = 1 + row * len(draft)
        controller.observe_pass(1 + len(draft), seconds * dice.uniform(0.95, 1.05))
        tokens, time = tokens + len(rows), time + seconds
    return tokens / time


def expected_speed(row: float, drafting: float = 0.0) -> float:
    """The speed of the best tree of all sizes and depths."""
    best = 1.0
    for depth in range(1, 9):
        tree = likeliest_tree([rates[:depth] for rates in RATES], 16)
        for count in range(1, len(tree) + 1):
            gain = sum(each for each, _ in tree[:count])
            best = max(best, (1 + gain) / (1 + row * count + drafting * (1 + max(d for _, d in tree[:count]))))
    return best


@pytest.mark.parametrize(("row", "drafting"), [(0.02, 0.0), (0.2, 0.0), (0.05, 0.1), (0.3, 0.0), (0.9, 0.1)])
def test_the_controller_finds_the_size_that_pays(row: float, drafting: float) -> None:
    controller = Controller()
    found, best = speed(controller, 1500, row, is_free=not drafting, drafting=drafting), expected_speed(row, drafting)
    assert best * 0.93 < found < best * 1.02
    shape = controller.shapes([Sequence([1], RequestSettings(10**9, sampling=None))], [100], trees=True)[0]  # type: ignore[arg-type]
    assert (shape.nodes > shape.depth) is (row < 0.1), "siblings where rows are cheap"


def test_the_likeliest_tree_is_the_one_of_which_most_is_accepted() -> None:
    tree = likeliest_tree(RATES, 6)
    assert [round(gain, 4) for gain, _ in tree] == [0.6, 0.36, 0.216, 0.15, 0.1296, 0.09]
    assert [depth for _, depth in tree] == [0, 1, 2, 0, 3, 1]
    assert likeliest_tree([[]], 6) == [] and likeliest_tree(RATES, 0) == []
    assert len(likeliest_tree([[0.5, 0.5]], 6)) == 2
