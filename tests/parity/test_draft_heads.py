"""Draft heads: what they draft is what their own code says, and a head that does not fit is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_accel
from hf_accel import SpeculativeConfig, UnsupportedError
from hf_accel.distill.drafts.heads import DraftHead, head_logits, target_states
from hf_accel.generation.speculation.drafters.target_states import HeadDrafter

from .families import VOCABULARY, build
from .speculating import answers, by_engine, by_generate, head, requests, target

PROMPTS = requests(7, shared=9, seed=4)


@torch.no_grad()
def chain(made: Any, model: Any, tokens: list[int], count: int) -> list[int]:
    """Draft greedily after these tokens, each token by the head's whole text."""
    states, _ = target_states(model, made.target_layers, torch.tensor([tokens[:-1]]))
    read, ids = made.narrow(states), torch.tensor([tokens[1:]])
    drafted: list[int] = []
    for _ in range(count):
        logits, own = made(read, ids)
        drafted.append(int(logits[0, -1].argmax()))
        read = torch.cat([read, own[:, -1:]], dim=1)
        ids = torch.cat([ids, torch.tensor([drafted[-1:]])], dim=1)
    return drafted


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_drafts_are_what_the_head_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After accepted and rejected drafts, in a batch, with prompts of which a part is in the pages already."""
    model, made, seen = target(family), head(family), 0
    made.weights = None
    propose = HeadDrafter.propose

    def checked(self: Any, sequences: Any, lengths: Any) -> Any:
        nonlocal seen
        drafts = propose(self, sequences, lengths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if self.book._unread[sequence].first == 0:
                seen += len(draft)
                assert draft.tokens == chain(made, build(family), sequence.tokens, len(draft))
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", checked)
    config = SpeculativeConfig(drafter=made, num_draft=3)
    alone = requests(4, seed=6)
    assert by_generate(model, alone, 12, speculative=config) == answers(family, alone, 12)
    assert seen > 60
    tokens, stats = by_engine(model, PROMPTS, 12, speculative=config, token_budget=7, max_tokens=96)
    assert tokens == answers(family, PROMPTS, 12) and stats["prefix_hits"] + stats["preemptions"] > 0


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.generation.speculation.drafters.target_states.MAX_CHUNK", 5)
    made, prompts = head("llama"), requests(3, shared=20, seed=5)
    config = SpeculativeConfig(drafter=made, num_draft=2)
    assert by_generate(target("llama"), prompts, 8, speculative=config) == answers("llama", prompts, 8)


def test_states_that_wait_too_long_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.generation.speculation.drafters.unread_states.MOST_WAITING", 8)
    config = SpeculativeConfig(drafter=head("llama"), num_draft=2)
    assert by_generate(target("llama"), PROMPTS, 12, speculative=config) == answers("llama", PROMPTS, 12)


def test_seeded_samples_are_those_without_a_draft() -> None:
    model, ids = target("llama"), torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "attention_mask": torch.ones_like(ids)}
    made = []
    for drafter in (head("llama"), "ngram"):
        torch.manual_seed(3)
        config = SpeculativeConfig(drafter=drafter, num_draft=3, verify="seeded")
        made.append(model.generate(ids, speculative=config, **options))
    assert torch.equal(*made)


def test_nothing_is_left_on_the_target() -> None:
    model = hf_accel.patch(build("llama"), weights="int8")
    hooks = [len(module._forward_hooks) for module in model.modules()]
    by_generate(model, PROMPTS[:2], 6, speculative=SpeculativeConfig(drafter=DraftHead.of(model), num_draft=2))
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_a_head_is_saved_and_loaded(tmp_path: Any) -> None:
    model, made = build("llama"), head("llama")
    made.save_pretrained(tmp_path)
    loaded = DraftHead.from_pretrained(tmp_path, model)
    ids = torch.tensor([PROMPTS[0]])
    assert torch.equal(head_logits(loaded, model, ids)[0], head_logits(made, model, ids)[0])
    assert loaded.decoder.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    with pytest.raises(UnsupportedError, match="was made for another model"):
        DraftHead.from_pretrained(tmp_path, build("gpt2"))
    with pytest.raises(UnsupportedError, match=r"holds no draft_head\.json"):
        DraftHead.from_pretrained(tmp_path / "other", model)


def test_a_head_of_another_model_is_an_error() -> None:
    config = SpeculativeConfig(drafter=head("gpt2"), num_draft=2)
    with pytest.raises(UnsupportedError, match="is a head of GPT2LMHeadModel"):
        by_generate(target("llama"), PROMPTS[:1], 4, speculative=config)
    made = head("llama")
    made.narrow = nn.Linear(7, made.narrow.out_features)
    with pytest.raises(UnsupportedError, match="reads states of 7 numbers"):
        by_generate(target("llama"), PROMPTS[:1], 4, speculative=SpeculativeConfig(drafter=made))
    with pytest.raises(UnsupportedError, match=r"target_layers=\[0, 9\]"):
        DraftHead.of(build("llama"), [0, 9])


def test_a_head_learns_what_its_target_writes() -> None:
    model = build("llama")
    rows = torch.randint(1, VOCABULARY, (120, 24), generator=torch.Generator().manual_seed(1)).tolist()
    made = hf_accel.distill_draft(
        model, rows, kind="eagle", max_steps=40, batch_size=8, max_length=24, prompt_tokens=4, progress_bar=False,
        measure={"max_tokens": 200, "max_draft": 2},
    )  # fmt: skip
    assert made.before is not None and made.after is not None
    assert made.after.text_acceptance > made.before.text_acceptance
    with pytest.raises(UnsupportedError, match="leave num_layers out"):
        hf_accel.distill_draft(model, rows, kind="eagle", num_layers=1)
    with pytest.raises(UnsupportedError, match="share_embeddings=False"):
        hf_accel.distill_draft(model, rows, kind="eagle", share_embeddings=False)
