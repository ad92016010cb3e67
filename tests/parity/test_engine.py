"""The Engine from outside: threads, coroutines, requests that go wrong or go away, and what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel import Engine, HfAccelError, OutOfBlocksError, UnsupportedError

from ..selection import some_long
from .families import VOCABULARY, build
from .letters import letters, text_of
from .speculating import answers, requests, speculative, stock, target

NEW_TOKENS = 16
PROMPTS = requests(8, seed=2)
DRAFTS = speculative("near model", "llama", 3)
LONG = 3000  # tokens that no test waits for
WAIT = 30


@pytest.fixture(params=[None, DRAFTS], ids=["plain", "drafts"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(target("llama"), speculative=request.param, tokenizer=letters())
    yield engine
    engine.close(wait=False)
    assert engine.stats["blocks_used"] == 0 and engine.stats["running"] == engine.stats["waiting"] == 0


def expected(prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    return answers("llama", [prompt], new_tokens)[0]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# -- many at once -------------------------------------------------------------------------------------------


def test_threads(engine: Engine) -> None:
    found: dict[int, list[int]] = {}

    def user(number: int) -> None:
        for _ in range(2):
            found[number] = list(engine.submit(PROMPTS[number], max_new_tokens=NEW_TOKENS))

    threads = [threading.Thread(target=user, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(PROMPTS))] == [expected(prompt) for prompt in PROMPTS]


def test_coroutines(engine: Engine) -> None:
    async def user(prompt: list[int]) -> list[int]:
        return [token async for token in engine.submit(prompt, max_new_tokens=NEW_TOKENS)]

    async def everyone() -> list[list[int]]:
        return await asyncio.gather(*map(user, PROMPTS))

    assert asyncio.run(everyone()) == [expected(prompt) for prompt in PROMPTS]


def test_requests_are_awaited() -> None:
    async def everyone() -> list[Any]:
        async with Engine(target("llama")) as engine:
            requests = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
            found = await asyncio.gather(*requests, requests[0].samples[0])
        assert not engine.is_live
        return found

    found = asyncio.run(everyone())
    assert [one.tokens for one in found] == [expected(prompt) for prompt in [*PROMPTS, PROMPTS[0]]]


def test_other_coroutines_run_while_an_engine_closes() -> None:
    async def run(*, end_of: str) -> str | None:
        async with Engine(target("llama")) as engine:
            request = engine.submit(PROMPTS[0], max_new_tokens=LONG)
            this = asyncio.current_task()
            assert this is not None
            asyncio.get_running_loop().call_later(0.01, request.cancel if end_of == "request" else this.cancel)
        return request.finish_reason

    assert asyncio.run(run(end_of="request")) == "cancelled"
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run(end_of="block"))


def test_an_error_in_the_block_cancels_requests() -> None:
    async def run() -> Any:
        with pytest.raises(ZeroDivisionError):
            async with Engine(target("llama")) as engine:
                request = engine.submit(PROMPTS[0], max_new_tokens=LONG)
                raise ZeroDivisionError
        return await request

    assert asyncio.run(run()).finish_reason == "cancelled"


def test_beside_generate(engine: Engine) -> None:
    """Both use the model at the same time."""
    handles = [engine.submit(prompt, max_new_tokens=60) for prompt in PROMPTS]
    ids = torch.tensor([PROMPTS[0]])
    for _ in range(5):
        out = target("llama").generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert out[0, ids.shape[1] :].tolist() == expected(PROMPTS[0])
    assert [handle.result(WAIT).tokens for handle in handles] == [expected(prompt, 60) for prompt in PROMPTS]


# -- those who leave ------------------------------------------------------------------------------------------


def test_cancel_at_any_time(engine: Engine) -> None:
    for number in range(12):
        handle = engine.submit(PROMPTS[1], max_new_tokens=LONG)
        other = engine.submit(PROMPTS[2], max_new_tokens=NEW_TOKENS)
        for _ in zip(range(number % 4), handle, strict=False):
            pass
        if number % 3:
            time.sleep(0.001 * number)
        handle.cancel()
        result = handle.result(WAIT)
        assert result.finish_reason == "cancelled" and result.tokens == expected(PROMPTS[1], 300)[: len(result.tokens)]
        assert other.result(WAIT).tokens == expected(PROMPTS[2])
    until(lambda: engine.stats["blocks_used"] == 0)
    assert engine.stats["cancelled"] == 12


def test_a_handle_that_is_dropped_ends_its_request(engine: Engine) -> None:
    """At once, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        handle = engine.submit(PROMPTS[0], max_new_tokens=LONG, n=2)
        next(iter(handle))
        del handle
        until(lambda: engine.stats["cancelled"] == 2)
        for _ in engine.submit(PROMPTS[0], max_new_tokens=LONG):
            break
        until(lambda: engine.stats["cancelled"] == 3 and engine.stats["blocks_used"] == 0)
    finally:
        gc.enable()


def test_a_sample_may_leave_before_the_others(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[3], max_new_tokens=NEW_TOKENS, n=3)
    handle.samples[0].cancel()  # the one that computes the prompt for all
    assert [sample.result(WAIT).tokens for sample in handle.samples[1:]] == [expected(PROMPTS[3])] * 2


# -- what goes wrong ------------------------------------------------------------------------------------------


def failing(at: int) -> Callable[[Tensor, Tensor], Tensor]:
    def process(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == at:
            raise RuntimeError("a bad processor")
        return scores

    return process


def test_a_bad_processor_fails_its_request_alone(engine: Engine) -> None:
    prompt = PROMPTS[0]
    others = [engine.submit(other, max_new_tokens=NEW_TOKENS) for other in PROMPTS]
    bad = engine.submit(prompt, max_new_tokens=NEW_TOKENS, processors=(failing(len(prompt) + 5),))
    seen = []
    with pytest.raises(RuntimeError, match="a bad processor"):
        for token in bad:
            seen.append(token)
    assert seen == expected(prompt)[:5]
    assert [other.result(WAIT).tokens for other in others] == [expected(other) for other in PROMPTS]
    with pytest.raises(HfAccelError, match="all -inf"):
        engine.submit(prompt, processors=(lambda ids, scores: scores - torch.inf,)).result(WAIT)
    with pytest.raises(UnsupportedError, match="return as many scores"):
        engine.submit(prompt, processors=(lambda ids, scores: scores[:, :5],)).result(WAIT)
    assert engine.stats["failed"] == 3


class Undecodable:
    """A tokenizer that fails at its sixth call."""

    calls = 0

    def decode(self, tokens: list[int]) -> str:
        self.calls += 1
        if self.calls == 6:
            raise ValueError("cannot decode")
        return ""


def test_a_stop_rule_that_raises_fails_its_request_alone() -> None:
    with Engine(target("llama"), tokenizer=Undecodable(), speculative=DRAFTS) as engine:
        fine = engine.submit(PROMPTS[1], max_new_tokens=NEW_TOKENS)
        bad = engine.submit([5, 6, 7], max_new_tokens=NEW_TOKENS, stop="never")
        with pytest.raises(ValueError, match="cannot decode"):
            bad.result(WAIT)
        assert list(fine) == expected(PROMPTS[1])
    assert engine.stats["failed"] == 1 and engine.stats["blocks_used"] == 0


class Faulty:
    """A runner that fails in one pass, or in every pass that meets a token."""

    def __init__(self, runner: Any, *, call: int | None = None, token: int | None = None) -> None:
        self.runner, self.call, self.token = runner, call, token
        self.device, self.calls = runner.device, 0

    def __call__(self, ids: list[int], *rest: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.call or self.token in ids:
            raise RuntimeError("the model broke")
        return self.runner(ids, *rest)


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["plain", "drafts"])
def test_a_pass_that_fails_once_is_computed_again(drafts: Any, call: int) -> None:
    with Engine(target("llama"), speculative=drafts, max_running=2) as engine:
        engine.loop.batcher.runner = Faulty(engine.loop.batcher.runner, call=call)
        handles = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        failed = 0
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            try:
                assert handle.result(WAIT).tokens == expected(prompt)
            except RuntimeError as error:  # it was alone in that pass
                assert str(error) == "the model broke"
                failed += 1
        assert failed <= 1
    assert engine.stats["blocks_used"] == 0 and engine.stats["failed"] == failed


def test_who_makes_every_pass_fail_fails_alone() -> None:
    unseen = next(t for t in range(1, VOCABULARY) if all(t not in prompt + expected(prompt) for prompt in PROMPTS))
    with Engine(target("llama")) as engine:
        engine.loop.batcher.runner = Faulty(engine.loop.batcher.runner, token=unseen)
        handles = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        bad = [engine.submit([*prompt, unseen], max_new_tokens=NEW_TOKENS, n=2) for prompt in PROMPTS[:2]]
        assert [handle.result(WAIT).tokens for handle in handles] == [expected(prompt) for prompt in PROMPTS]
        for sample in [sample for handle in bad for sample in handle.samples]:
            with pytest.raises(RuntimeError, match="the model broke"):
                sample.result(WAIT)
    assert engine.stats["blocks_used"] == 0 and engine.stats["failed"] == 4


def test_an_engine_that_breaks_leaves_nobody_waiting() -> None:
    """What is not of a pass at all."""
    with Engine(target("llama")) as engine:

        def broken() -> None:
            raise SystemError("cannot go on")

        engine.loop._step = broken  # type: ignore[method-assign]
        handle = engine.submit(PROMPTS[0])
        with pytest.raises(SystemError, match="cannot go on"):
            handle.result(WAIT)
        with pytest.raises(HfAccelError, match=r"the engine broke.*make a new one"):
            engine.submit(PROMPTS[0])


def test_what_can_never_fit_is_refused_at_once() -> None:
    with Engine(target("llama", 16), max_tokens=32) as engine:
        with pytest.raises(
            OutOfBlocksError,
            match="make 33 tokens, the cache holds 32; lower max_new_tokens, shorten the prompt, or raise max_tokens",
        ):
            engine.submit([1, 2, 3], max_new_tokens=30)
        assert len(engine.submit([1, 2, 3], max_new_tokens=29).result(WAIT).tokens) == 29


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "at least one token id"),
        ({"prompt": [VOCABULARY]}, f"the model has 0 to {VOCABULARY - 1}"),
        ({"prompt": [-1]}, "from -1"),
        ({"prompt": [1.5]}, "at least one token id"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=True must be an integer of at least 1"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"priority": "high"}, "priority='high' must be an integer"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer of at least 1"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"max_tokens": 1}, "did you mean 'max_new_tokens'"),
        ({"prompt": [True, False]}, "at least one token id"),
        ({"prompt": torch.ones(1, 3, dtype=torch.bool)}, "at least one token id"),
        (
            {"prompt": torch.ones(2, 3, dtype=torch.int64)},
            r"the shape \(2, 3\); give each row of token ids",
        ),
        ({"prompt": [[1, 2], [3]]}, "at least one token id"),
        ({"prompt": None}, "at least one token id, not None"),
        ({"prompt": 5}, "at least one token id, not 5"),
        ({"prompt": ["a", "b"]}, "a list of texts; give each by itself"),
        (
            {"prompt": [{"role": "user", "content": "?"}]},
            r"tokenizer.apply_chat_template\(messages, .*=False\)",
        ),
        ({"temperature": -1}, "temperature=-1"),
        ({"stop": ""}, "empty string"),
    ],
    ids=str,
)
def test_bad_requests(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        engine.submit(**{"prompt": [1, 2]} | arguments)
    assert engine.stats["requests"] == 0


# -- the end --------------------------------------------------------------------------------------------------


def test_close_waits_or_cancels() -> None:
    engine = Engine(target("llama"))
    handles = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    engine.close()
    assert all(handle.done for handle in handles)
    assert [handle.result().tokens for handle in handles] == [expected(prompt) for prompt in PROMPTS]
    with pytest.raises(HfAccelError, match="closed; make a new one"):
        engine.submit(PROMPTS[0])
    engine.close()

    engine = Engine(target("llama"), max_running=1)
    handles = [engine.submit(prompt, max_new_tokens=LONG) for prompt in PROMPTS]
    next(iter(handles[0]))
    engine.close(wait=False)
    assert all(handle.result().finish_reason == "cancelled" for handle in handles)
    assert engine.stats["blocks_used"] == 0


def test_an_error_in_the_with_block_does_not_wait() -> None:
    with pytest.raises(ZeroDivisionError), Engine(target("llama")) as engine:
        handle = engine.submit(PROMPTS[0], max_new_tokens=10**9)
        raise ZeroDivisionError
    assert handle.result(WAIT).finish_reason == "cancelled"


@pytest.mark.long
def test_an_engine_that_is_never_closed_does_not_hold_up_the_interpreter() -> None:
    script = """
import hf_accel
from tests.parity.families import build
engine = hf_accel.Engine(hf_accel.patch(build("llama"), weights=None))
busy = engine.submit([1, 2, 3], max_new_tokens=10**7)
print(engine.submit([1, 2, 3], max_new_tokens=4).result(60).finish_reason, flush=True)
"""
    root = Path(hf_accel.__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "length\n"), ended.stderr


# -- what a request can ask for ----------------------------------------------------------------------------


def test_text(engine: Engine) -> None:
    prompt = text_of(PROMPTS[0])
    answer = text_of(expected(PROMPTS[0]))
    result = engine.submit(prompt, max_new_tokens=NEW_TOKENS).result(WAIT)
    assert result.text == answer and result.finish_reason == "length"
    stopped = engine.submit(prompt, max_new_tokens=NEW_TOKENS, stop=[answer[6:8], "never"]).result(WAIT)
    assert stopped.finish_reason == "stop"
    end = answer.index(answer[6:8]) + 2
    assert stopped.tokens == expected(PROMPTS[0])[:end] and stopped.text == answer[: end - 2]


KINDS = [list, tuple, iter, torch.tensor, np.array, lambda ids: [np.int32(i) for i in ids], lambda ids: [ids]]


@pytest.mark.parametrize("kind", KINDS, ids=["list", "tuple", "iterator", "tensor", "array", "numpy", "batch of one"])
def test_prompts_of_any_kind(kind: Any) -> None:
    with Engine(target("llama")) as engine:
        wanted = engine.submit(kind(PROMPTS[0]), max_new_tokens=np.int64(NEW_TOKENS), seed=np.uint8(1), n=np.int64(1))
        assert list(wanted) == expected(PROMPTS[0])


def test_stop_tokens_inside_an_accepted_run(engine: Engine) -> None:
    for prompt in PROMPTS:
        answer = expected(prompt)
        for place in (0, 4, 5, 6):
            result = engine.submit(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=[answer[place]]).result(WAIT)
            assert result.tokens == answer[: answer.index(answer[place]) + 1] and result.finish_reason == "stop"


def test_fewest_new_tokens(engine: Engine) -> None:
    """Also of tokens that follow accepted drafts: an end that would come earlier is impossible."""
    ends = list(range(2, 40))
    for prompt in PROMPTS[:4]:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 0}
        out = stock("llama").generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
        result = engine.submit(prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=9, stop_token_ids=ends).result(WAIT)
        assert result.tokens == out[0, len(prompt) :].tolist() and len(result.tokens) >= 9


def test_processing_at_draft_positions(engine: Engine) -> None:
    bias = {5: 4.0, 7: -9.0}

    def pure(ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (ids.sum(1) % 5)[:, None] * torch.linspace(0, 2, scores.shape[1])

    for prompt in PROMPTS[:4]:
        ids = torch.tensor([prompt])
        out = stock("llama").generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
            repetition_penalty=1.5, sequence_bias={(token,): value for token, value in bias.items()},
        )  # fmt: skip
        result = engine.submit(prompt, max_new_tokens=NEW_TOKENS, repetition_penalty=1.5).result(WAIT)
        assert len(result.tokens) == NEW_TOKENS
        both = engine.submit(prompt, max_new_tokens=NEW_TOKENS, processors=(pure,), logit_bias=bias).result(WAIT)
        alone = sequential(prompt, lambda ids, scores: pure(ids, with_bias(scores, bias)))
        assert both.tokens == alone and out.shape[1] == len(prompt) + NEW_TOKENS


def with_bias(scores: Tensor, bias: dict[int, float]) -> Tensor:
    scores = scores.clone()
    for token, value in bias.items():
        scores[:, token] += value
    return scores


@torch.no_grad()
def sequential(prompt: list[int], process: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        ids = torch.tensor([tokens])
        tokens.append(int(process(ids, stock("llama")(ids).logits[:, -1]).argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_logprobs_are_of_stocks_logits(engine: Engine) -> None:
    prompt = PROMPTS[1]
    result = engine.submit(prompt, max_new_tokens=NEW_TOKENS, logprobs=3, repetition_penalty=1.3).result(WAIT)
    assert result.logprobs is not None and len(result.logprobs) == NEW_TOKENS
    logits = stock("llama")(torch.tensor([prompt + result.tokens])).logits[0, len(prompt) - 1 : -1]
    for token, report, row in zip(result.tokens, result.logprobs, logits.log_softmax(-1), strict=True):
        assert report.token == token
        assert report.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, ids = row.topk(3)
        assert [i for i, _ in report.top] == ids.tolist()
        assert [v for _, v in report.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_samples_of_one_prompt(engine: Engine) -> None:
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "seed": 11}
    results = engine.submit(PROMPTS[3], n=4, **settings).results(WAIT)
    assert len({tuple(result.tokens) for result in results}) == 4
    if engine.session.speculation is None:
        assert engine.submit(PROMPTS[3], **settings).result(WAIT).tokens == results[0].tokens


def test_higher_priority_goes_first() -> None:
    with Engine(target("llama"), max_running=1) as engine:
        first = engine.submit(PROMPTS[0], max_new_tokens=150)
        next(iter(first))
        low = engine.submit(PROMPTS[1], max_new_tokens=NEW_TOKENS, priority=0)
        high = engine.submit(PROMPTS[2], max_new_tokens=NEW_TOKENS, priority=1)
        assert high.result(WAIT).tokens == expected(PROMPTS[2])
        assert first.done and not low.done
        assert low.result(WAIT).tokens == expected(PROMPTS[1])


# -- random numbers --------------------------------------------------------------------------------------------

COMPANY: dict[str, dict[str, Any]] = {
    "crowded": {},
    "scarce": {"max_tokens": 128},
    "seven a pass": {"token_budget": 7},
    "two at once": {"max_running": 2},
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_p": 0.8, "frequency_penalty": 0.4},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5},
]


def sampled(engine: Engine, indices: list[int], **settings: Any) -> list[list[int]]:
    handles = [
        engine.submit(PROMPTS[i], max_new_tokens=24, seed=i, **SAMPLING[i % len(SAMPLING)], **settings)
        for i in indices
    ]
    return [handle.result(WAIT).tokens for handle in handles]


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    with Engine(target("llama")) as engine:
        alone = [sampled(engine, [i])[0] for i in range(len(PROMPTS))]
    for settings in COMPANY.values():
        with Engine(target("llama"), **settings) as engine:
            assert sampled(engine, list(range(len(PROMPTS)))) == alone
            assert "max_tokens" not in settings or engine.stats["preemptions"] > 0


@pytest.mark.parametrize("drafter", some_long(["near model", "self-int4", "free cascade"], "self-int4"))
def test_seeded_tokens_do_not_depend_on_drafter_company_or_preemption(drafter: str) -> None:
    reference = speculative("random", "llama", 1, verify="seeded")
    with Engine(target("llama"), speculative=reference) as engine:
        alone = [sampled(engine, [i])[0] for i in range(len(PROMPTS))]
    for number, settings in enumerate(COMPANY.values()):
        config = speculative(drafter, "llama", [4, 2, "auto", 7][number], verify="seeded")
        with Engine(target("llama"), speculative=config, **settings) as engine:
            assert sampled(engine, list(range(len(PROMPTS)))) == alone


def test_looked_up_drafts_do_not_show_in_samples() -> None:
    with Engine(target("llama")) as engine:
        plain = sampled(engine, list(range(len(PROMPTS))))
    for verify in ("token", "block"):
        config = speculative("free cascade", "llama", 4, verify=verify)
        with Engine(target("llama"), speculative=config) as engine:
            assert sampled(engine, list(range(len(PROMPTS)))) == plain
            assert engine.stats["speculation"]["drafted"] > 0


def test_other_weights_forget_prefixes() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    prompt = list(range(1, 40))
    with Engine(model) as engine:
        first = engine.submit(prompt, max_new_tokens=8).result(WAIT).tokens
        assert engine.submit(prompt, max_new_tokens=8).result(WAIT).tokens == first
        assert engine.stats["prefix_hits"] > 0
        until(lambda: engine.stats["running"] == 0)
        time.sleep(0.05)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.neg_()
        ids = torch.tensor([prompt])
        changed = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert engine.submit(prompt, max_new_tokens=8).result(WAIT).tokens == changed[0, len(prompt) :].tolist()
