"""What happens around an Engine: forks, signals, models that are pulled away, engines that are forgotten."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel import Engine, HfAccelError, UnsupportedError
from hf_accel.generation.hf.session import Session

from .families import build
from .letters import letters
from .speculating import answers, requests, speculative, target

WAIT = 30
NEW_TOKENS = 12
LONG = 10**6  # tokens that no test waits for
PROMPTS = requests(4, seed=3)


def expected(prompt: list[int]) -> list[int]:
    return answers("llama", [prompt], NEW_TOKENS)[0]


@pytest.fixture
def model() -> Any:
    return hf_accel.patch(build("llama"), weights=None)


# -- a fork ---------------------------------------------------------------------------------------------------


def in_a_fork(check: Callable[[], None]) -> int:
    """The status of a child in which `check` runs; it is killed if it hangs."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(WAIT)
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


# Python says so of any fork beside a thread; that this one does not hang is what is tested
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_engine_in_a_fork_says_so_and_never_hangs(model: Any) -> None:
    engine = Engine(model)
    finished = engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    finished.result(WAIT)
    running = engine.submit(PROMPTS[1], max_new_tokens=LONG)
    next(iter(running))

    def child() -> None:
        for wait in (lambda: engine.submit(PROMPTS[0]), running.result, lambda: list(running)):
            with pytest.raises(HfAccelError, match=r"this process was forked .*make a new Engine here"):
                wait()
        with pytest.raises(HfAccelError, match="forked"):
            asyncio.run(running.aresult())
        assert finished.result(WAIT).tokens == expected(PROMPTS[0])
        running.cancel()
        engine.close()
        with Engine(model) as own:
            assert list(own.submit(PROMPTS[2], max_new_tokens=NEW_TOKENS)) == expected(PROMPTS[2])
        hf_accel.unpatch(model)

    assert in_a_fork(child) == 0
    assert not running.done and hf_accel.is_patched(model)
    assert engine.submit(PROMPTS[2], max_new_tokens=NEW_TOKENS).result(WAIT).tokens == expected(PROMPTS[2])
    engine.close(wait=False)


# -- a signal -------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, threading, time
import hf_accel
from tests.parity.families import build

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without

model = hf_accel.patch(build("llama"), weights=None)
engine = hf_accel.Engine(model)
request = engine.submit([1, 2, 3], max_new_tokens=10**7)
next(iter(request))

def interrupt():
    while engine.loop._refusal is None:  # close() has not begun
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    engine.close()
except KeyboardInterrupt:
    print(request.finish_reason, engine.stats["blocks_used"], flush=True)
    raise
"""


def interrupt(engine: Engine) -> None:
    """Press Ctrl-C as soon as close() has begun."""
    while engine.loop._refusal is None:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_interrupt_of_close_cancels(model: Any) -> None:
    def child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = Engine(model)
        request = engine.submit([1, 2, 3], max_new_tokens=10**7)
        next(iter(request))
        threading.Thread(target=interrupt, args=(engine,), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        assert (request.finish_reason, engine.stats["blocks_used"]) == ("cancelled", 0)

    assert in_a_fork(child) == 0


@pytest.mark.long  # a process that imports all
@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_an_interrupt_of_close_is_a_clean_exit() -> None:
    root = Path(hf_accel.__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=root, capture_output=True, text=True, timeout=4 * WAIT, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "cancelled 0\n"), ended.stderr
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")


# -- a model that is pulled away ------------------------------------------------------------------------------


def test_unpatch_refuses_under_an_engine(model: Any) -> None:
    engine = Engine(model)
    way_out = r"unpatch\(\) while hf_accel.Engine\(.*Llama.*: 0 running, 0 waiting\) .*; call engine.close\(\) first"
    with pytest.raises(UnsupportedError, match=way_out):
        hf_accel.unpatch(model)
    running = engine.submit(PROMPTS[0], max_new_tokens=LONG)
    next(iter(running))
    with pytest.raises(UnsupportedError, match="1 running"):
        hf_accel.unpatch(model)
    assert engine.submit(PROMPTS[1], max_new_tokens=NEW_TOKENS).result(WAIT).tokens == expected(PROMPTS[1])
    engine.close(wait=False)
    assert "closed" in repr(engine)
    assert not hf_accel.is_patched(hf_accel.unpatch(model))


def test_unpatch_refuses_while_the_model_drafts_for_an_engine(model: Any) -> None:
    with Engine(target("llama"), speculative=speculative("near model", "llama", 3)) as other:
        draft = other.session.speculation.drafters[0].runner.model  # type: ignore[attr-defined]
        with pytest.raises(UnsupportedError, match=r"call engine\.close"):
            hf_accel.unpatch(draft)
    with Engine(target("llama"), speculative=model), pytest.raises(UnsupportedError, match=r"call engine\.close"):
        hf_accel.unpatch(model)
    hf_accel.unpatch(model)


def test_the_end_of_patched_refuses_under_an_engine() -> None:
    model = build("llama")
    with pytest.raises(UnsupportedError, match=r"call engine\.close"), hf_accel.patched(model, weights=None):
        engine = Engine(model)
    assert engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS).result(WAIT).tokens == expected(PROMPTS[0])
    engine.close()
    hf_accel.unpatch(model)


@pytest.mark.parametrize("method", ["generate", "generate_batch"])
def test_unpatch_refuses_within_a_call_of_generate(model: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class would change under the passes that are still to come."""
    running, go_on = threading.Event(), threading.Event()
    forward, found = Session.step, []

    def waits(session: Session) -> Any:
        running.set()
        assert go_on.wait(WAIT)
        return forward(session)

    def call() -> None:
        settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        if method == "generate":
            ids = torch.tensor(PROMPTS[:1])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist()
        else:
            out = model.generate_batch(PROMPTS[:1], **settings)["req_0"].generated_tokens
        found.append(out)

    monkeypatch.setattr(Session, "step", waits)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert running.wait(WAIT)
        with pytest.raises(UnsupportedError, match=r"unpatch\(\) while a call of generate\(\) runs the model"):
            hf_accel.unpatch(model)
    finally:
        go_on.set()
        thread.join()
    assert found == [expected(PROMPTS[0])]
    assert not hf_accel.is_patched(hf_accel.unpatch(model))


# -- those who are forgotten ----------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_is_forgotten_ends(model: Any, used: bool) -> None:
    """At once, without the garbage collector: its thread, its pages, and its hold on the model."""
    engine = Engine(model)
    loop = engine.loop
    if used:
        engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS).result(WAIT)
    del engine
    assert not used or loop._ended.wait(WAIT)
    hf_accel.unpatch(model)


def test_who_holds_a_request_holds_its_engine(model: Any) -> None:
    request = Engine(model).submit(PROMPTS[0], max_new_tokens=LONG)
    next(iter(request))
    with pytest.raises(UnsupportedError, match="1 running"):
        hf_accel.unpatch(model)
    request.cancel()
    assert list(Engine(model).submit(PROMPTS[0], max_new_tokens=NEW_TOKENS)) == expected(PROMPTS[0])


# -- more than one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "int8"])
def test_two_engines_and_generate_over_one_model(weights: Any) -> None:
    model = hf_accel.patch(build("llama"), weights=weights)
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    settings = {"do_sample": False, "max_new_tokens": 40}
    alone = [model.generate(one, attention_mask=torch.ones_like(one), **settings)[0, len(one[0]) :] for one in ids]
    with Engine(model) as first, Engine(model, speculative="suffix") as second:
        handles = [engine.submit(prompt, max_new_tokens=40) for prompt in PROMPTS for engine in (first, second)]
        for one, tokens in zip(ids, alone, strict=True):
            out = model.generate(one, attention_mask=torch.ones_like(one), **settings)
            assert out[0, len(one[0]) :].tolist() == tokens.tolist()
        for number, handle in enumerate(handles):
            assert handle.result(WAIT).tokens == alone[number // 2].tolist()


def test_a_processor_may_wait_for_another_engine(model: Any) -> None:
    with Engine(model) as inner, Engine(model) as outer:

        def process(ids: Tensor, scores: Tensor) -> Tensor:
            assert inner.submit(PROMPTS[1], max_new_tokens=3).result(WAIT).tokens == expected(PROMPTS[1])[:3]
            return scores

        request = outer.submit(PROMPTS[0], max_new_tokens=4, processors=(process,))
        assert request.result(WAIT).tokens == expected(PROMPTS[0])[:4]


def test_cancel_during_a_long_prompt(model: Any) -> None:
    """Its chunks are computed over many passes; it ends between two of them."""
    with Engine(model, token_budget=4) as engine:
        passes = threading.Event()
        runner = engine.loop.batcher.runner

        def watched(*given: Any) -> Tensor:
            passes.set()
            return runner(*given)

        watched.device = runner.device  # type: ignore[attr-defined]
        engine.loop.batcher.runner = watched  # type: ignore[assignment]
        bad = engine.submit([1, 2, 3] * 300, max_new_tokens=4)
        assert passes.wait(WAIT)
        bad.cancel()
        assert bad.result(WAIT).tokens == [] and bad.finish_reason == "cancelled"
        assert list(engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS)) == expected(PROMPTS[0])
    assert engine.stats["blocks_used"] == 0 and engine.stats["cancelled"] == 1


def test_coroutines_that_fail_or_are_cancelled_harm_nobody(model: Any) -> None:
    engine = Engine(model)

    async def fails() -> None:
        async for _ in engine.submit(PROMPTS[0], max_new_tokens=LONG):
            raise ZeroDivisionError

    async def hurries() -> None:
        await asyncio.wait_for(engine.submit(PROMPTS[1], max_new_tokens=LONG).aresult(), 0.01)

    async def reads() -> list[int]:
        return [token async for token in engine.submit(PROMPTS[2], max_new_tokens=NEW_TOKENS)]

    async def everyone() -> list[Any]:
        return await asyncio.gather(fails(), hurries(), reads(), return_exceptions=True)

    failed, hurried, tokens = asyncio.run(everyone())
    assert isinstance(failed, ZeroDivisionError) and isinstance(hurried, TimeoutError)
    assert tokens == expected(PROMPTS[2])
    del failed, hurried  # their tracebacks hold what was submitted
    gc.collect()
    engine.close()  # waits for what anybody still holds
    assert engine.stats["cancelled"] == 2 and engine.stats["blocks_used"] == 0


# -- what an Engine is asked ----------------------------------------------------------------------------------


def test_text_without_a_tokenizer_says_what_to_give(model: Any) -> None:
    with Engine(model) as engine, pytest.raises(UnsupportedError, match="give the Engine a tokenizer="):
        engine.submit("text")


def test_a_path_says_what_to_give() -> None:
    with pytest.raises(UnsupportedError, match=r"takes a patched model, not a path; pass hf_accel.load\('folder'\)"):
        Engine("folder")


def test_a_tokenizer_needs_no_name(model: Any) -> None:
    with Engine(model, letters()) as engine:
        ids = letters()("abc")["input_ids"]
        assert list(engine.submit("abc", max_new_tokens=3)) == list(engine.submit(ids, max_new_tokens=3))


def test_chat_messages_as_the_message_says(model: Any) -> None:
    tokenizer = letters()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "abc"}]
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with Engine(model, tokenizer=tokenizer) as engine:
            assert list(engine.submit(ids, max_new_tokens=3)) == list(engine.submit("abc", max_new_tokens=3))
    finally:
        tokenizer.chat_template = None
