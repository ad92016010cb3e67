"""Drafts do not take a pass to where the model rounds otherwise."""

from __future__ import annotations

import pytest
import torch

import hf_accel
from hf_accel import Draft, Drafter
from hf_accel.undo.state import state_of
from tests.parity.families import build, prompts


class Eager(Drafter):
    """Wrong drafts of any length."""

    name = "eager"
    is_free = True

    def propose(self, sequences, lengths):  # type: ignore[no-untyped-def]
        return [Draft([1] * length) for length in lengths]


@pytest.mark.parametrize(("batch", "widest"), [(1, 6), (4, 16), (10, 16), (20, 120)])
def test_a_pass_stays_within_the_rows_that_round_alike(batch: int, widest: int) -> None:
    model = hf_accel.patch(build("llama", dtype=torch.bfloat16), weights=None)
    state = state_of(model).generation
    state.invariant_rows = 16  # also where no kernels are built
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[-2]))
    config = hf_accel.SpeculativeConfig(drafter=Eager(), num_draft=5)
    model.generate_batch(prompts(batch, 9).tolist(), max_new_tokens=12, speculative=config)
    assert batch < max(rows[1:]) <= max(widest, batch)
