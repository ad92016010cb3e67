"""Draft heads: what they draft is what their own code says, and a head that does not fit is an error."""

from __future__ import annotations

import dataclasses
import functools
from math import log
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hf_accel
from hf_accel import Draft, SpeculativeConfig, UnsupportedError
from hf_accel.distill.drafts.heads import DraftHead, head_logits, target_states
from hf_accel.fused.draft_programme import DraftProgramme
from hf_accel.generation.hf.head_runner import HeadRunner
from hf_accel.generation.sequence import Shape
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.drafters.model import MAX_CHUNK
from hf_accel.generation.speculation.drafters.target_states import BRANCHES, CALLS_TO_KNOW, HeadDrafter
from hf_accel.generation.speculation.verifiers import noise

from ..selection import some_long
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
        drafted.append(int(made.over_vocabulary(logits[0, -1], VOCABULARY).argmax()))
        read = torch.cat([read, own[:, -1:]], dim=1)
        ids = torch.cat([ids, torch.tensor([drafted[-1:]])], dim=1)
    return drafted


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Note the results of a method."""
    results: list[Any] = []
    method = getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        results.append(method(*arguments))
        return results[-1]

    monkeypatch.setattr(owner, name, noted)
    return results


def checked_drafts(monkeypatch: pytest.MonkeyPatch, family: str, made: DraftHead) -> list[int]:
    """Compare each draft with what the head's own code drafts; returns the tokens that were compared."""
    propose, seen, stock = HeadDrafter.propose, list[int](), build(family)

    def checked(self: Any, sequences: Any, lengths: Any) -> Any:
        drafts = propose(self, sequences, lengths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if self.book._unread[sequence].first == 0:
                seen.extend(draft.tokens)
                assert draft.tokens == chain(made, stock, sequence.tokens, len(draft))
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", checked)
    return seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", some_long(["llama", "mistral", "gpt2", "gemma2"], "mistral", "gpt2"))
@pytest.mark.parametrize("tokens", [None, range(3, VOCABULARY, 2)])
def test_drafts_are_what_the_head_says(family: str, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After accepted and rejected drafts, in a batch, with prompts of which a part is in the pages already."""
    monkeypatch.setattr("hf_accel.generation.hf.head_runner.POSITIONS_AT_ONCE", 8)
    model, made = target(family), head(family, tokens)
    made.weights = None
    called = counted(monkeypatch, DraftProgramme, "__call__")
    seen = checked_drafts(monkeypatch, family, made)
    config = SpeculativeConfig(drafter=made, num_draft=3, max_nodes=1)
    alone = requests(4, seed=6)
    assert by_generate(model, alone, 12, speculative=config) == answers(family, alone, 12)
    assert len(seen) > 60
    # By modules: GPT-2 adds the embeddings of positions, and Gemma 2's own head caps logits, which a trial finds.
    steps = {"gpt2": 0, "gemma2": 1 if tokens is None else 3}.get(family, 3)
    assert max((len(own) for drafted in called for own in drafted.tokens), default=0) == steps
    made_tokens, stats = by_engine(model, PROMPTS, 12, speculative=config, token_budget=7, max_tokens=96)
    assert made_tokens == answers(family, PROMPTS, 12) and stats["prefix_hits"] + stats["preemptions"] > 0


@torch.no_grad()
def tree(made: Any, model: Any, tokens: list[int], *, shape: Shape, width: int, weigh: Any) -> list[tuple[int, ...]]:
    """Draft a tree after these tokens by EAGLE-2, each token by the head's whole text; returns its paths.

    weigh: returns how likely each token is to be the next, of its logits and the number of drafted tokens before it.
    """
    states, _ = target_states(model, made.target_layers, torch.tensor([tokens[:-1]]))
    found, open_paths = dict[tuple[int, ...], float](), {(): 0.0}
    reads = {(): made.narrow(states)}  # what the head reads at the end of a path
    for depth in range(shape.depth):
        newest: dict[tuple[int, ...], float] = {}
        for path, before in open_paths.items():
            logits, own = made(reads[path], torch.tensor([[*tokens[1:], *path]]))
            values, best = weigh(made.over_vocabulary(logits[0, -1], VOCABULARY), depth).topk(width)
            behind = torch.cat([reads[path], own[:, -1:]], dim=1)
            reads |= {(*path, token): behind for token in best.tolist()}
            pairs = zip(best.tolist(), values.tolist(), strict=True)
            newest |= {(*path, token): before + log(value) for token, value in pairs if value > 0}
        found |= newest
        open_paths = dict(sorted(newest.items(), key=lambda each: -each[1])[:width])
    return sorted(found, key=lambda path: -found[path])[: shape.nodes]


def checked_trees(monkeypatch: pytest.MonkeyPatch, family: str, made: DraftHead, weigh: Any) -> list[int]:
    """Compare each tree with what the head's own code drafts; returns how many tokens each one had."""
    propose, seen, stock = HeadDrafter.propose_trees, list[int](), build(family)

    def checked(self: Any, sequences: Any, shapes: Any) -> Any:
        drafts = propose(self, sequences, shapes)
        width = min(max(BRANCHES, -(-7 // max(shape.depth for shape in shapes))), 7)
        for sequence, draft, shape in zip(sequences, drafts, shapes, strict=True):
            if self.book._unread[sequence].first == 0 and shape.nodes > 1:
                own = functools.partial(weigh, sequence)
                expected = tree(made, stock, sequence.tokens, shape=shape, width=width, weigh=own)
                assert {tuple(draft.prefix(row)) for row in range(1, len(draft) + 1)} == set(expected)
                assert len(draft) == len(expected) and draft.parents is not None
                seen.append(len(draft))
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose_trees", checked)
    return seen


def raced(sequence: Any, logits: torch.Tensor, depth: int) -> torch.Tensor:
    """Weigh tokens for a race at a temperature of 0.8, among the likeliest 16 tokens that are compared."""
    own = logits.float().div(0.8).softmax(-1)
    key = torch.tensor(noise.race_key(sequence.seed, len(sequence.tokens) + depth))
    speeds = own / noise.exponentials(key, torch.arange(len(own)))
    return speeds / speeds.topk(min(16, int((own > 0).sum()))).values.sum()


def likely(sequence: Any, logits: torch.Tensor, depth: int) -> torch.Tensor:
    return logits.float().softmax(-1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("tokens", [None, range(3, VOCABULARY, 2)])
@pytest.mark.parametrize("sampled", [False, True])
def test_trees_are_those_of_the_head(family: str, tokens: Any, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and raced, in batches, over the ends of blocks and behind windows of attention."""
    model, made = target(family), head(family, tokens)
    made.weights = None
    seen = checked_trees(monkeypatch, family, made, raced if sampled else likely)
    config = SpeculativeConfig(drafter=made, num_draft=3, max_nodes=7, verify="seeded")
    alone, settings = requests(4, seed=6), {"do_sample": True, "temperature": 0.8, "top_k": 0} if sampled else {}
    torch.manual_seed(0)
    first = by_generate(model, alone, 12, speculative=config, **settings)
    assert len(seen) > 10 and max(seen) == 7
    assert hf_accel.stats(model)["branched"] > 0 or sampled
    torch.manual_seed(0)
    chains = dataclasses.replace(config, max_nodes=1)
    assert first == by_generate(model, alone, 12, speculative=chains, **settings)
    if not sampled:
        assert first == answers(family, alone, 12)
        made_tokens, _ = by_engine(model, PROMPTS, 12, speculative=config, token_budget=7, max_tokens=96)
        assert made_tokens == answers(family, PROMPTS, 12)


def test_a_native_draft_that_fails_its_trial_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    call, calls = DraftProgramme.__call__, 0

    def wrong(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        drafted = call(self, *arguments)
        return drafted._replace(out=drafted.out + 1)

    monkeypatch.setattr(DraftProgramme, "__call__", wrong)
    config = SpeculativeConfig(drafter=head("llama"), num_draft=2)
    assert by_generate(target("llama"), PROMPTS, 8, speculative=config) == answers("llama", PROMPTS, 8)
    assert calls == 1


def test_a_change_of_the_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = target("llama"), head("llama")
    made.weights = None
    seen, called = checked_drafts(monkeypatch, "llama", made), counted(monkeypatch, DraftProgramme, "__call__")
    config = SpeculativeConfig(drafter=made, num_draft=2, max_nodes=1)
    for change in (lambda: made.fuse.weight.mul_(-1), lambda: made.fuse.weight.set_(made.fuse.weight * -1)):
        by_generate(model, PROMPTS[:2], 8, speculative=config)
        with torch.no_grad():
            change()
    hook = made.fuse.register_forward_hook(lambda layer, inputs, output: output * 2)
    called.clear()
    by_generate(model, PROMPTS[:2], 8, speculative=config)
    hook.remove()
    assert seen and not called


def test_a_head_in_int8_drafts_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made, drafts, called = head("llama"), [], counted(monkeypatch, DraftProgramme, "__call__")
    for weights in (None, "int8"):
        made.weights = weights
        proposed = counted(monkeypatch, HeadDrafter, "propose")
        config = SpeculativeConfig(drafter=made, num_draft=1, max_nodes=1)
        assert by_generate(target("llama"), PROMPTS, 12, speculative=config) == answers("llama", PROMPTS, 12)
        drafts.append([draft.tokens for each in proposed for draft in each])
    same = sum(first == second for first, second in zip(*drafts, strict=False))
    assert called and 0.6 * len(drafts[0]) < same < len(drafts[0])


def test_prompts_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = counted(monkeypatch, HeadRunner, "read")
    monkeypatch.setattr(HeadDrafter, "propose", lambda self, sequences, lengths: [Draft() for _ in sequences])
    prompts = [prompt * 20 for prompt in requests(3, seed=5)]
    config = SpeculativeConfig(drafter=head("llama"), num_draft=2, max_nodes=1)
    by_generate(target("llama"), prompts, 3, speculative=config)
    assert 1 <= len(passes) - CALLS_TO_KNOW <= 1 + sum(map(len, prompts)) // MAX_CHUNK


def test_what_many_sequences_have_to_read_is_read_ahead_of_their_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of all of them would else be no native call, and take as long as a prompt."""
    rows = counted(monkeypatch, HeadRunner, "read")
    monkeypatch.setattr("hf_accel.generation.speculation.drafters.target_states.TOGETHER", 12)
    drafted, propose = list[int](), HeadDrafter._proposed

    def noted(self: HeadDrafter, sequences: Any, shapes: Any) -> Any:
        drafted.extend(self.book.ready(each).count for each in sequences)  # type: ignore[union-attr]
        return propose(self, sequences, shapes)

    monkeypatch.setattr(HeadDrafter, "_proposed", noted)
    config = SpeculativeConfig(drafter=head("llama"), num_draft=2, max_nodes=1)
    prompts = [prompt[:8] for prompt in requests(4, seed=5)]
    by_generate(target("llama"), prompts, 8, speculative=config)
    assert len(rows) > CALLS_TO_KNOW and 0 < max(drafted) <= 3


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


def test_the_time_to_keep_states_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    told, observe = dict[str, list[float]](), Controller.observe_keeping

    def noted(self: Controller, seconds: float, source: str = "") -> None:
        told.setdefault(source, []).append(seconds)
        observe(self, seconds, source)

    monkeypatch.setattr(Controller, "observe_keeping", noted)
    config = SpeculativeConfig(drafter=["ngram", head("llama")], num_draft=2)  # "auto" may soon rest on a busy machine
    by_generate(target("llama"), PROMPTS[:2], 16, speculative=config)
    assert len(told["draft head"]) > 3 and min(told["draft head"]) > 0


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


def test_the_tokens_of_a_head_are_those_that_it_was_saved_with(tmp_path: Any) -> None:
    model, tokens = build("llama"), [5, 7, 30]
    DraftHead.of(model, tokens=tokens).save_pretrained(tmp_path)
    loaded = DraftHead.from_pretrained(tmp_path, model)
    assert loaded.known is not None and loaded.known.tolist() == tokens
    assert head_logits(loaded, model, torch.tensor([PROMPTS[0]]))[0].isfinite().sum(-1).unique().tolist() == [3]
    weights = load_file(tmp_path / "draft_head.safetensors")
    for other in ([7, 5, 30], [5, 7, 31]):
        save_file({**weights, "known": torch.tensor(other)}, tmp_path / "draft_head.safetensors")
        with pytest.raises(UnsupportedError, match="is not the one of draft_head"):
            DraftHead.from_pretrained(tmp_path, model)
    for wrong in ([], [7, 5], [5, 5], [1, VOCABULARY]):
        with pytest.raises(UnsupportedError, match="rise from 0 on"):
            DraftHead.of(model, tokens=wrong)


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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_new_head_has_weights_of_its_own(family: str) -> None:
    """They are drawn by its seed alone. The target's are a bad beginning: sure of the token that was read last."""
    model, state = build(family), torch.get_rng_state()
    made, again, other = DraftHead.of(model), DraftHead.of(model), DraftHead.of(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    last = hf_accel.init_student(model, layers=[max(made.target_layers) - 1])
    theirs = {f"decoder.{name}": parameter for name, parameter in last.named_parameters()}
    kept = "wpe"  # embeddings of positions
    drawn = {name: own for name, own in made.own_parameters().items() if own.dim() > 1 and kept not in name}
    assert {"narrow.weight", "fuse.weight"} < drawn.keys() and len(drawn.keys() & theirs.keys()) > 3
    for name, own in drawn.items():
        assert torch.equal(own, again.own_parameters()[name])
        for different in (other.own_parameters()[name], theirs.get(name)):
            assert different is None or torch.isclose(own, different).float().mean() < 0.1


@pytest.mark.parametrize("head_tokens", some_long([None, VOCABULARY // 2], None))
def test_a_head_learns_what_its_target_writes(head_tokens: int | None) -> None:
    model = build("llama")
    rows = torch.randint(1, VOCABULARY, (120, 24), generator=torch.Generator().manual_seed(1)).tolist()
    made = hf_accel.distill_draft(
        model, rows, kind="eagle", max_steps=40, batch_size=8, max_length=24, prompt_tokens=4, progress_bar=False,
        measure={"max_tokens": 200, "max_draft": 2}, head_tokens=head_tokens,
    )  # fmt: skip
    assert made.before is not None and made.after is not None
    assert made.after.text_acceptance > made.before.text_acceptance
    if head_tokens is not None:
        counts = torch.bincount(torch.tensor(rows[:-12]).flatten(), minlength=VOCABULARY)
        assert made.draft.known is not None and len(made.draft.known) == head_tokens
        assert counts[made.draft.known].min() >= counts.sort(descending=True).values[head_tokens - 1]


def test_settings_that_a_head_does_not_take() -> None:
    model, rows = build("llama"), [[1, 2, 3]] * 8
    with pytest.raises(UnsupportedError, match="leave num_layers out"):
        hf_accel.distill_draft(model, rows, kind="eagle", num_layers=1)
    with pytest.raises(UnsupportedError, match="leave head_tokens= out"):
        hf_accel.distill_draft(model, rows, head_tokens=4)
    with pytest.raises(UnsupportedError, match="share_embeddings=False"):
        hf_accel.distill_draft(model, rows, kind="eagle", share_embeddings=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_acceptance_of_a_head_is_measured(temperature: float) -> None:
    """Chains of each length, also greedy, where a head of a patched target drafts trees."""
    patched = hf_accel.patch(build("llama"), weights=None)
    rows = torch.randint(1, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()
    found = hf_accel.measure_acceptance(
        patched, head("llama"), rows, temperature=temperature, max_draft=2, max_tokens=200, progress_bar=False
    )
    assert (
        len(found.acceptances) == 2 and len(found.verify_costs) == len(found.draft_costs) == 3 and found.draft_cost > 0
    )
