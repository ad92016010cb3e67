"""What ranks do over which a model is served: the first has the clients, the others follow it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import openai
from torch import distributed

from hf_accel.errors import HfAccelError
from hf_accel.parallel.relay import Relay
from hf_accel.serving.hf.served_model import follow, load_service

from ..serving.running import EXACT, SHIPPED, serving, until
from .tensor_jobs import message_of, used_blocks

PROMPTS = ["import re\n\ndef ", "class Error(", "x = ["]
NEW = 24
LAST = "the last one"  # which the other rank waits for with its blocks free, or at which it dies
FLOAT = EXACT | {"deterministic": False}  # which no split float linear can promise
SILENCE = 2.0  # seconds that a rank may be silent


def followed(timeout: float, at_last: Any) -> dict[str, Any]:
    """Follow the first rank. at_last: is called with the Engine when the prompt LAST arrives."""
    relay = Relay(timeout=timeout)
    engine = load_service(str(SHIPPED), engine={"relay": relay}, **FLOAT).engine
    submit, last = engine.submit, engine.tokenizer(LAST)["input_ids"]

    def noted(ids: list[int], **settings: Any) -> Any:
        if ids == last:
            at_last(engine)
        return submit(ids, **settings)

    engine.submit = noted  # type: ignore[method-assign]
    follow(engine, relay)
    stats = engine.stats
    return {name: stats[name] for name in ("requests", "finished", "cancelled", "new_tokens")}


def ask(client: openai.OpenAI, prompt: str, tokens: int = NEW, **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, **more)


def job_served() -> dict[str, Any]:
    """Answers, a client that leaves, an end while an answer is streamed; and the counts of each rank."""
    if distributed.get_rank():
        return followed(60.0, lambda engine: until(lambda: used_blocks(engine.session.pages) == 0))
    engine = {"relay": Relay(timeout=60.0)}
    with serving(engine=engine, drain_seconds=60.0, **FLOAT) as running, running.client() as client:
        found: dict[str, Any] = {"answers": [ask(client, prompt).choices[0].text for prompt in PROMPTS]}
        sampled = {"n": 2, "temperature": 0.9, "stop": ["\n\n"], "logprobs": 1}
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": NEW, **sampled}
        found["samples"] = len(client.completions.create(**body).choices)
        left = ask(client, PROMPTS[0], 1500, stream=True)
        next(iter(left))
        left.close()
        until(running.is_idle)
        found["last"] = ask(client, LAST, 4).choices[0].text
        stream = ask(client, PROMPTS[0], 200, stream=True)
        text = next(iter(stream)).choices[0].text
        running.server.handle_exit(signal.SIGTERM, None)
        found["drained"] = text + "".join(chunk.choices[0].text for chunk in stream)
        service = running.service
    stats = service.engine.stats
    return found | {name: stats[name] for name in ("requests", "finished", "cancelled", "new_tokens")}


def job_killed(tokens: int) -> dict[str, Any]:
    """The other rank is killed half a second after a request of so many tokens has begun, or a short one has ended."""
    if distributed.get_rank():

        def end_soon(engine: Any) -> None:
            if tokens < NEW:
                until(lambda: engine.stats["finished"])
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

        return followed(8.0, lambda engine: threading.Thread(target=end_soon, args=(engine,)).start())
    found: dict[str, Any] = {}

    def serve() -> None:
        with serving(engine={"relay": Relay(timeout=8.0)}, **FLOAT) as running, running.client() as client:
            try:
                ask(client, LAST, tokens)
                found["status"] = 200
            except openai.APIStatusError as error:
                found["status"] = error.status_code
            until(lambda: running.server.should_exit)
            found["blocks"] = used_blocks(running.service.engine.session.pages)

    found["message"] = message_of(serve)
    return found


# -- the relay alone -----------------------------------------------------------------------------------


def job_relay(silence: float, pause: float) -> tuple[list[Any], list[str]]:
    """Items that are sent after a pause in which nobody has anything to say."""
    relay = Relay(timeout=silence)
    if not relay.leads:
        return [item for items in relay.received() for item in items], []
    lost: list[HfAccelError] = []
    relay.start(lost.append)
    relay.send("first")
    time.sleep(pause)
    for number in range(3):
        relay.send({"number": number})
    relay.close()
    return [], [str(error) for error in lost]


def job_lost_relay(victim: int, number: int) -> tuple[str, float]:
    """What one rank sees when the other gets a signal while both have nothing to say."""
    relay = Relay(timeout=SILENCE)
    start, lost, noticed = time.monotonic(), list[HfAccelError](), threading.Event()
    if relay.leads:
        relay.start(lambda error: (lost.append(error), noticed.set()))
    if distributed.get_rank() == victim:
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    if relay.leads:
        noticed.wait(30)
        relay.close()
        return "".join(map(str, lost)), time.monotonic() - start
    return message_of(lambda: [list(items) for items in relay.received()]), time.monotonic() - start
