"""Graphs of passes, with a tape in the place of CUDA graphs: tokens are stock's, and what is no graph says why."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_accel
from hf_accel.generation.hf import graphed_runner
from hf_accel.generation.hf.graphed_runner import GraphedRunner
from hf_accel.generation.hf.session import Session
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation import costs
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.drafters import model as drafting

from ..selection import some_long
from ..unit.generation.tape import TapeMaker, install
from .families import FAMILIES, build
from .speculating import answers, by_engine, by_generate, by_generate_batch, near, requests

PROMPTS = requests(7, longest=9, seed=3, shared=2)
NEW_TOKENS = 8
LONG_PROMPTS = [(PROMPTS[i] * 20)[:length] for i, length in enumerate((40, 37, 33, 39, 40))]  # of one shape


@pytest.fixture(autouse=True)
def makers() -> Iterator[list[TapeMaker]]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch)


def patched(family: str = "llama", *, attention: str = "tape", **cache: Any) -> PreTrainedModel:
    settings = hf_accel.CacheConfig(**{"block_size": 4, **cache})
    return hf_accel.patch(build(family), weights=None, fuse=False, attention=attention, cache=settings)


def graphs(model: PreTrainedModel) -> dict[str, Any]:
    found: dict[str, Any] = hf_accel.stats(model)["graphs"]
    return found


def session_of(model: PreTrainedModel, **settings: Any) -> tuple[Session, GraphedRunner]:
    cache = settings.pop("cache", hf_accel.CacheConfig(block_size=4))
    session = Session(model, cache, **settings)
    assert isinstance(session.runner, GraphedRunner)
    return session, session.runner


def run(session: Session, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    sequences = [Sequence(list(prompt), RequestSettings(new_tokens, Sampling())) for prompt in prompts]
    for sequence in sequences:
        session.add(sequence)
    while session.has_work:
        session.step()
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


# -- what is captured --------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [by_generate, by_generate_batch, lambda *args: by_engine(*args)[0]])
def test_decode(family: str, way: Any, makers: list[TapeMaker]) -> None:
    model = patched(family)
    assert way(model, PROMPTS, NEW_TOKENS) == answers(family, PROMPTS, NEW_TOKENS)
    events = [event for maker in makers for event in maker.events]
    assert events.count("replay") >= NEW_TOKENS - 3 and events.count("capture") <= 5


def test_statistics() -> None:
    model = patched()
    by_generate_batch(model, PROMPTS, NEW_TOKENS)
    found = graphs(model)
    assert found["captures"] == 1 and found["bytes"] == 1000 and not found["dropped"]
    assert found["replays"] == NEW_TOKENS - 1
    assert found["eager"] == {"the first pass makes the pages": 1}
    assert found["ahead"] == {"launched": NEW_TOKENS - 1, "unused": 0, "failed": {}}


@pytest.mark.parametrize("family", some_long(FAMILIES, "qwen2", "mistral"))
def test_prompts_that_are_met_again(family: str, makers: list[TapeMaker]) -> None:
    """The first one of a shape runs as its graph will, the second is captured, others of that shape are replayed."""
    model, captured = patched(family), []
    by_generate(model, LONG_PROMPTS[:1], NEW_TOKENS)  # makes the pages
    for prompt, eager in zip(LONG_PROMPTS, (1, 0, 0, 0, 0), strict=True):
        assert by_generate(model, [prompt], NEW_TOKENS) == answers(family, [prompt], NEW_TOKENS)
        found = graphs(model)
        assert found["eager"] == ({graphed_runner.FIRST_PROMPT: 1} if eager else {}), found
        captured.append(found["captures"])
    assert captured[-1] == 0, captured


def test_generate_batch_keeps_its_graphs() -> None:
    """For calls that need no more pages, of generate() too; a longer one makes new pages."""
    model = patched(max_tokens=256)
    for way, new_tokens, captures in (
        (by_generate_batch, NEW_TOKENS, 1), (by_generate_batch, NEW_TOKENS, 0), (by_generate, NEW_TOKENS, 0),
        (by_generate_batch, NEW_TOKENS - 1, 0), (by_generate_batch, 40, None), (by_generate_batch, NEW_TOKENS, 0),
    ):  # fmt: skip
        assert way(model, PROMPTS, new_tokens) == answers("llama", PROMPTS, new_tokens)
        found = graphs(model)
        assert captures is None or found["captures"] == captures, (new_tokens, found)
    assert model._generation_state.runner is not None and not session_of(model)[1].groups[0].pool.num_used


def test_prompts_that_cannot_be_captured(makers: list[TapeMaker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other passes still are."""
    capture, model = GraphedRunner._capture, patched()

    def refusing(self: GraphedRunner, found: Any) -> Any:
        if found.bucket.is_of_prompts:
            raise RuntimeError("reads a number on the host")
        return capture(self, found)

    monkeypatch.setattr(GraphedRunner, "_capture", refusing)
    for prompt in LONG_PROMPTS:
        assert by_generate(model, [prompt], NEW_TOKENS) == answers("llama", [prompt], NEW_TOKENS)
    found = graphs(model)
    assert found["eager"] == {"a capture failed: reads a number on the host": 1} and found["replays"] == NEW_TOKENS - 1


@pytest.mark.parametrize("drafter", some_long(["ngram", "self-int4", "near model", "two"], "self-int4"))
def test_verification(drafter: str, makers: list[TapeMaker]) -> None:
    """Sequences of a pass have drafts of different lengths. Draft models have graphs of their own."""
    model = patched()
    made: dict[str, Any] = {"near model": near("llama"), "two": ["ngram", near("llama")]}
    config = hf_accel.SpeculativeConfig(drafter=made.get(drafter, drafter), num_draft=3)
    assert by_generate_batch(model, PROMPTS, 2 * NEW_TOKENS, speculative=config) == answers(
        "llama", PROMPTS, 2 * NEW_TOKENS
    )
    found = graphs(model)
    assert found["replays"] > 5
    assert len(makers) == (1 if drafter == "ngram" else 2)
    assert all("replay" in maker.events for maker in makers)


def test_what_drafts_cost_leaves_out_captures(makers: list[TapeMaker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the first pass of each shape would look as slow as many, and drafts as dear."""
    late, seconds = [0.0], []
    capture, observe = TapeMaker.capture, Controller.observe_pass
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0]))

    def slow(maker: TapeMaker, function: Any) -> Any:
        late[0] += 1000.0
        return capture(maker, function)

    def observed(self: Controller, rows: int, taken: float) -> None:
        seconds.append(taken)
        observe(self, rows, taken)

    monkeypatch.setattr(TapeMaker, "capture", slow)
    monkeypatch.setattr(Controller, "observe_pass", observed)
    by_generate_batch(patched(), PROMPTS, 2 * NEW_TOKENS, speculative="ngram")
    assert late[0] > 0 and seconds and max(seconds) < 1000.0


@pytest.mark.parametrize("graphed", [True, False], ids=["graphed", "eager"])
@pytest.mark.parametrize("drafter", ["self-int4", "near model"])
def test_tokens_that_the_host_has_not_read(
    drafter: str, graphed: bool, makers: list[TapeMaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a pass of a draft model takes the tokens of the one before, by a graph and without one."""
    monkeypatch.setattr(drafting, "is_remote", lambda tensor: True)
    if not graphed:
        monkeypatch.setattr(graphed_runner, "MOST_BYTES", 0)
    taken: list[int] = []
    make_pass = drafting.ModelDrafter._pass

    def watched(self: Any, drafts: Any, counts: Any, last: Any = None) -> Any:
        taken.append(0 if last is None else len(drafts))
        return make_pass(self, drafts, counts, last)

    monkeypatch.setattr(drafting.ModelDrafter, "_pass", watched)
    model = patched()
    made: dict[str, Any] = {"near model": near("llama")}
    config = hf_accel.SpeculativeConfig(drafter=made.get(drafter, drafter), num_draft=3)
    expected = answers("llama", PROMPTS, 2 * NEW_TOKENS)
    assert by_generate_batch(model, PROMPTS, 2 * NEW_TOKENS, speculative=config) == expected
    assert max(taken) > 3 and len([count for count in taken if count]) > 5
    assert all(("replay" in maker.events) == graphed for maker in makers)


def test_preemption_and_batches_that_shrink_and_grow() -> None:
    model = patched(max_tokens=60)
    prompts = requests(12, longest=10, seed=5)
    assert by_generate_batch(model, prompts, 20) == answers("llama", prompts, 20)
    stats = hf_accel.stats(model)
    assert stats["preemptions"] > 0
    assert stats["graphs"]["replays"] > 10 and stats["graphs"]["captures"] > 1
    assert not stats["graphs"]["dropped"]


def test_pages_that_grow() -> None:
    """They move, and so all graphs are captured again."""
    model = patched()
    cache = hf_accel.PagedCache(model.config, model._hf_accel.config.cache, capacity=32)
    session, runner = session_of(model, cache=cache)
    assert run(session, PROMPTS, 30) == answers("llama", PROMPTS, 30)
    assert runner.statistics.dropped["the pages have moved"] > 0
    assert runner.statistics.captures > runner.statistics.dropped["the pages have moved"]


def test_addresses_stay() -> None:
    model = patched()
    session, runner = session_of(model)
    run(session, PROMPTS)
    before = {bucket: (each.static.data_ptr(), each.logits.data_ptr()) for bucket, each in runner._graphs.items()}
    assert run(session, PROMPTS[:3]) == answers("llama", PROMPTS[:3], NEW_TOKENS)
    after = {bucket: (each.static.data_ptr(), each.logits.data_ptr()) for bucket, each in runner._graphs.items()}
    assert before.items() <= after.items() and len(after) > len(before)


def test_calls_of_generate_share_graphs(makers: list[TapeMaker]) -> None:
    """The pages of a call are kept with the graphs over them, and nothing of what they held."""
    model = patched()
    for number in range(4):
        assert by_generate(model, PROMPTS, NEW_TOKENS) == answers("llama", PROMPTS, NEW_TOKENS)
        assert graphs(model)["captures"] == (number == 0) and graphs(model)["replays"] == NEW_TOKENS - 1
        assert graphs(model)["bytes"] == 1000
        assert hf_accel.stats(model)["prefix_hits"] == 0
    assert len(makers) == 1
    written(model, "replaced")
    again = patched()
    written(again, "replaced")
    assert by_generate(model, PROMPTS, NEW_TOKENS) == by_generate(again, PROMPTS, NEW_TOKENS)
    assert graphs(model)["dropped"] == {"the model has changed": 1}


def test_pages_that_are_still_used_are_not_shared(makers: list[TapeMaker]) -> None:
    """A cache that was returned keeps its pages; a longer call, and one with other pages, needs its own."""
    model, prompts = patched(), PROMPTS[:3]
    ids = torch.tensor(prompts[:1])
    settings = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
    # Long, so that its pages would be enough for the next call.
    first = model.generate(ids, attention_mask=torch.ones_like(ids), **{**settings, "max_new_tokens": 80})
    assert by_generate(model, prompts, NEW_TOKENS) == answers("llama", prompts, NEW_TOKENS)
    assert len(makers) == 2
    turn = torch.cat([first.sequences, torch.tensor([[5, 6]])], 1)
    out = model.generate(turn, attention_mask=torch.ones_like(turn), past_key_values=first.past_key_values, **settings)
    assert out.sequences[0, turn.shape[1] :].tolist() == answers("llama", turn.tolist(), NEW_TOKENS)[0]
    longer = [prompt * 5 for prompt in prompts]
    assert by_generate(model, longer, NEW_TOKENS) == answers("llama", longer, NEW_TOKENS)
    assert by_generate(model, longer, NEW_TOKENS) == answers("llama", longer, NEW_TOKENS)
    assert len(makers) == 4


def test_a_kept_runner_does_not_keep_its_model() -> None:
    model = patched()
    by_generate(model, PROMPTS, NEW_TOKENS)
    kept = model._hf_accel.generation.runner
    assert kept is not None and kept.model is None
    assert copy.deepcopy(model)._hf_accel.generation.runner is None


def test_logits_are_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass does not write to them."""
    session, runner = session_of(patched())
    replay, kept = runner._replay, []

    def watched(*args: Any) -> Any:
        logits = replay(*args)
        kept.append((logits, logits.clone()))
        return logits

    monkeypatch.setattr(runner, "_replay", watched)
    run(session, PROMPTS)
    assert len(kept) == NEW_TOKENS - 1 and all(logits.equal(copied) for logits, copied in kept)


# -- what changes between sessions -------------------------------------------------------------------------


def written(model: PreTrainedModel, how: str) -> None:
    other = build("llama", seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = other.get_parameter(name).detach().clone()
            if how == "in place":
                parameter.copy_(value)
            elif how == "moved":
                parameter.data = value
            else:
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, torch.nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize("how", ["in place", "moved", "replaced"])
def test_other_weights(how: str) -> None:
    model = patched()
    session, runner = session_of(model)
    assert run(session, PROMPTS) == answers("llama", PROMPTS, NEW_TOKENS)
    written(model, how)
    again = patched()
    written(again, "replaced")
    assert run(session, PROMPTS) == by_generate_batch(again, PROMPTS, NEW_TOKENS)
    assert runner.statistics.dropped == ({} if how == "in place" else {"the model has changed": 1})


def test_unpatched_and_patched_again() -> None:
    model = patched()
    assert by_generate_batch(model, PROMPTS, NEW_TOKENS) == answers("llama", PROMPTS, NEW_TOKENS)
    hf_accel.unpatch(model)
    keywords: dict[str, Any] = {"weights": "int8", "fuse": False, "attention": "tape"}
    hf_accel.patch(model, **keywords)
    again = by_generate_batch(model, PROMPTS, NEW_TOKENS)
    assert graphs(model)["replays"] == NEW_TOKENS - 1
    assert again == by_generate_batch(hf_accel.patch(build("llama"), **keywords), PROMPTS, NEW_TOKENS)


def test_plain_values_of_modules() -> None:
    """Such as the switch of an adapter: what Python decided by them is in the graph."""
    model, again = patched(), patched()
    session, runner = session_of(model, cache=hf_accel.CacheConfig(block_size=4, prefix_sharing=False))
    run(session, PROMPTS)
    model.model.layers[0].self_attn.scaling *= 2
    again.model.layers[0].self_attn.scaling *= 2
    assert run(session, PROMPTS) == by_generate_batch(again, PROMPTS, NEW_TOKENS)
    assert runner.statistics.dropped == {"the model has changed": 1}


# -- what is no graph --------------------------------------------------------------------------------------


def eager_reasons(model: PreTrainedModel) -> set[str]:
    assert by_generate_batch(model, PROMPTS, NEW_TOKENS) == answers("llama", PROMPTS, NEW_TOKENS)
    return set(graphs(model)["eager"]) - {"the first pass makes the pages"}


def test_attention_that_reads_on_the_host() -> None:
    assert eager_reasons(patched(attention="sdpa")) == {
        "the attention backend 'sdpa' reads the lengths of sequences on the host"
    }


def test_hooks() -> None:
    """A hook that comes while a session runs sees every pass from then on."""
    model = patched()
    session, runner = session_of(model)
    run(session, PROMPTS)
    calls: list[int] = []
    handle = model.model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    passes, replays = session.num_passes, runner.statistics.replays
    assert run(session, PROMPTS) == answers("llama", PROMPTS, NEW_TOKENS)
    assert len(calls) == session.num_passes - passes and runner.statistics.replays == replays
    assert runner.statistics.eager["a hook wants to see a module"] == len(calls)
    handle.remove()
    run(session, PROMPTS)
    assert runner.statistics.replays > replays and not runner.statistics.dropped


def test_forward_of_a_module() -> None:
    model = patched()
    layer = model.model.layers[0]
    layer.forward = layer.forward
    assert eager_reasons(model) == {"the forward of model.layers.0 was replaced on the module itself"}


def test_waiting_for_the_device() -> None:
    """A module that reads a number on the host ends the capture, and the pass runs without a graph."""
    model = patched()

    class Reading(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden: Any) -> Any:
            assert hidden.sum().item() == hidden.sum().item()
            return super().forward(hidden)

    model.model.norm.__class__ = Reading
    assert eager_reasons(model) == {"a capture failed: the host waits for aten._local_scalar_dense.default"}


def test_memory(monkeypatch: pytest.MonkeyPatch, makers: list[TapeMaker]) -> None:
    model = patched()
    session, runner = session_of(model)
    run(session, PROMPTS[:1])
    makers[0].free = runner.least_free_bytes - 1
    assert run(session, PROMPTS) == answers("llama", PROMPTS, NEW_TOKENS)
    assert runner.statistics.eager["too little memory is free for one more graph"] > 5
    replays = runner.statistics.replays
    run(session, PROMPTS[:1])
    assert runner.statistics.replays > replays  # what is captured still runs
    monkeypatch.setattr(graphed_runner, "MOST_BYTES", 1500)
    assert by_generate_batch(model, PROMPTS, 20) == answers("llama", PROMPTS, 20)
    session, runner = session_of(model)
    for count in (1, 2, 3, 7):
        run(session, PROMPTS[:count])
    assert runner.statistics.captures == 2 and runner.statistics.eager["graphs take 2,000 bytes already"] > 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("no"), "there was no memory for one more graph"),
        (RuntimeError("capture\nand more"), "a capture failed: capture"),
        (ValueError(), "a capture failed: ValueError"),
    ],
)
def test_captures_that_fail(error: Exception, reason: str, makers: list[TapeMaker]) -> None:
    session, runner = session_of(patched())
    makers[0].fails = error
    assert run(session, PROMPTS) == answers("llama", PROMPTS, NEW_TOKENS)
    assert runner.statistics.replays == 0 and runner.statistics.eager[reason] == NEW_TOKENS - 1


def test_autocast() -> None:
    model = patched()
    with torch.autocast("cpu", torch.bfloat16):
        by_generate_batch(model, PROMPTS, NEW_TOKENS)
    assert graphs(model)["eager"]["torch.autocast is on"] == NEW_TOKENS
    assert graphs(model)["replays"] == 0


def test_memory_of_graphs_is_freed_for_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    session, runner = session_of(patched())
    run(session, PROMPTS)
    replay = runner._replay

    def once(*args: Any) -> Any:
        monkeypatch.setattr(runner, "_replay", replay)
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(runner, "_replay", once)
    assert run(session, PROMPTS) == answers("llama", PROMPTS, NEW_TOKENS)
    assert runner.statistics.dropped == {"their memory was needed": 1} and not runner._graphs
    assert runner.statistics.eager["the memory of graphs was needed for passes"] > 5
    assert session.token_budget is None and session.num_out_of_memory == 1
