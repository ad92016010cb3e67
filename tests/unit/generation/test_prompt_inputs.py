"""Inputs of prompts that do not follow from token ids, and which of them a pass takes."""

from __future__ import annotations

import torch

from hf_accel.generation.prompt_inputs import PromptInputs, contents_of, contents_of_wholes

EMBEDDINGS = torch.arange(10.0).view(5, 2)


def test_rows_of_a_range_that_crosses_the_end_of_the_prompt() -> None:
    positions = torch.tensor([[0, 1, 1, 1, 2], [0, 1, 2, 3, 4]])
    inputs = PromptInputs(EMBEDDINGS, positions, (-2, 0), [1, -5, -6, -7, 2])
    prompt, later = inputs.rows(7, 3, 4)
    assert (prompt.first, prompt.count, later.first, later.count) == (7, 2, 9, 2)
    assert prompt.embeddings is not None and torch.equal(prompt.embeddings, EMBEDDINGS[3:])
    assert prompt.positions is not None and prompt.positions.tolist() == [[1, 2], [3, 4]]
    assert later.embeddings is None
    assert later.positions is not None and later.positions.tolist() == [[3, 4], [5, 6]]
    assert [each.count for each in inputs.rows(0, 0, 2)] == [2]
    assert [each.first for each in inputs.rows(4, 5, 1)] == [4]


def test_tokens_at_their_index_need_no_positions() -> None:
    inputs = PromptInputs(EMBEDDINGS, None, (0,), [1, -5, -6, -7, 2])
    assert [(each.count, each.positions) for each in inputs.rows(0, 3, 4)] == [(2, None)]
    assert list(inputs.rows(0, 5, 1)) == []


def test_contents_tell_other_embeddings_and_positions_apart() -> None:
    ids, plain = [4, 9, 9, 9, 5], [True, False, False, False, True]
    contents = contents_of(ids, plain, EMBEDDINGS, None)
    assert contents[0] == 4 and contents[4] == 5
    assert len({*contents}) == 5 and all(number < 0 for number in contents[1:4])
    other = EMBEDDINGS.clone()
    other[2, 1] += 1e-6
    changed = contents_of(ids, plain, other, None)
    assert [a == b for a, b in zip(contents, changed, strict=True)] == [True, True, False, True, True]
    moved = contents_of(ids, plain, EMBEDDINGS, torch.tensor([[0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]))
    assert moved != contents and moved[0] == 4
    equal = torch.zeros(5, 2)
    assert len({*contents_of(ids, plain, equal, None)[1:4]}) == 3  # its place is a part of what a token is


SEEN = [1, 4, 4, 4, 5, 7, 7, 8]  # tokens 1 to 3 see each other, and so do 5 and 6


def test_chunks_hold_tokens_that_see_each_other() -> None:
    inputs = PromptInputs(torch.zeros(8, 2), None, (0,), [1] * 8, SEEN)
    expected = {(0, 1): 1, (0, 2): 1, (0, 3): 1, (0, 4): 4, (0, 5): 5, (0, 6): 5, (0, 7): 7, (0, 99): 99, (1, 1): 3,
                (2, 1): 2, (3, 1): 1, (4, 1): 1, (4, 2): 1, (5, 1): 2, (6, 2): 2, (8, 1): 1}  # fmt: skip
    assert {key: inputs.chunk(*key) for key in expected} == expected
    assert inputs.seen_by(2, 3) == [4, 4, 5]
    assert inputs.seen_by(7, 3) == [8, 9, 10]
    assert inputs.seen_by(8, 1) is None


def test_contents_of_tokens_that_see_later_ones() -> None:
    """All of a whole are other ones where one is; what stands before and behind it is not."""
    contents = [3, -4, 5, -6, 7, 8, 9, 10]
    whole = contents_of_wholes(contents, SEEN)
    assert [whole[index] for index in (0, 4, 7)] == [3, 7, 10]
    assert len({*whole}) == 8 and all(whole[index] < 0 for index in (1, 2, 3, 5, 6))
    changed = contents_of_wholes([*contents[:3], -60, *contents[4:]], SEEN)
    same = [a == b for a, b in zip(whole, changed, strict=True)]
    assert same == [True, False, False, False, True, True, True, True]
