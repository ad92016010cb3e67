"""One model over two ranks that is served: what clients get, and what each rank does when another is lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import psutil
import pytest

from hf_accel.serving.hf.served_model import join_ranks

from ..serving.processes import Process
from ..serving.running import SHIPPED, Running, serving, until
from ..serving.test_process import ready
from . import serving_jobs as jobs
from .ranks import Ranks

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def alone() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_served(ranks: Ranks, alone: Running) -> None:
    first, other = ranks.run(jobs.job_served)
    assert first["answers"] == [alone.text(prompt, jobs.NEW) for prompt in jobs.PROMPTS]
    assert first["drained"] == alone.text(jobs.PROMPTS[0], 200)
    assert first["last"] == alone.text(jobs.LAST, 4) and first["samples"] == 2
    assert {name: first[name] for name in other} == other
    assert (other["requests"], other["finished"], other["cancelled"]) == (8, 7, 1)


@pytest.mark.parametrize(
    ("tokens", "status"), [(1500, 503), pytest.param(4, 200, marks=pytest.mark.long)], ids=["busy", "idle"]
)
def test_a_killed_rank_ends_the_server(tokens: int, status: int, ranks: Ranks) -> None:
    """Who waits for an answer gets 503. Where nothing is computed, it ends too."""
    outcomes = ranks.outcomes(ranks.send(jobs.job_killed, tokens))
    assert outcomes[1] == (False, "the process ended, exit code -9")
    fine, seen = outcomes[0]
    assert fine, seen
    assert (seen["status"], seen["blocks"]) == (status, 0)
    assert seen["message"].startswith("LostRankError: rank 0 of 2 lost another rank while")


def test_silence_is_no_loss(ranks: Ranks) -> None:
    """Ranks with nothing to say for longer than the timeout hear each other all the same."""
    (_, lost), (items, _) = ranks.run(jobs.job_relay, 3.0, 4.5)
    assert lost == [] and items == ["first", *({"number": number} for number in range(3))]


@pytest.mark.long
@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "silent"])
@pytest.mark.parametrize("victim", [0, 1], ids=["first", "other"])
def test_a_rank_that_is_lost_while_nothing_is_said(victim: int, number: int, ranks: Ranks) -> None:
    ranks.send(jobs.job_lost_relay, victim, number)
    fine, (message, seconds) = ranks.outcomes([1 - victim])[1 - victim]
    ranks.kill()
    assert fine and "lost another rank while" in message
    assert seconds < 30
    if number == STOP:
        assert seconds > jobs.SILENCE / 2


@pytest.mark.parametrize(
    ("size", "started"), [(2, None), (2, "3"), (1, "2")], ids=["no-launcher", "another-number", "not-asked-for"]
)
def test_other_numbers_of_processes(size: int, started: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", started)
        monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="torchrun --nproc-per-node N -m hf_accel serve"):
        join_ranks(size, timeout=1.0)


@contextmanager
def launched() -> Iterator[tuple[Process, list[psutil.Process]]]:
    """`hf-accel serve` by torchrun, and its ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--weights", "none", "--dtype", "float32", "--name", "tiny", "--port", "0", "--tensor-parallel", "2"]
    server = Process([SHIPPED, *options], launcher=launcher)
    children = psutil.Process(server.process.pid).children()
    try:
        until(lambda: ready(server.root))
        yield server, sorted(children, key=lambda child: child.environ()["RANK"])
    finally:
        for process in (*children, server.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ValueError):  # its pipes were read to the end before
            server.process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("end", ["terminated", "killed"])
def test_command(end: str, alone: Running) -> None:
    """torchrun and `hf-accel serve`: SIGTERM lets an answer be completed, and a rank that is killed ends it."""
    with launched() as (server, ranks), server.client() as client:
        stream = jobs.ask(client, jobs.PROMPTS[0], 400, stream=True)
        text = next(iter(stream)).choices[0].text
        if end == "terminated":
            server.terminate()
            text += "".join(chunk.choices[0].text for chunk in stream)
            assert text == alone.text(jobs.PROMPTS[0], 400)
        else:
            ranks[1].kill()
            with pytest.raises(openai.APIError):
                list(stream)
        code, written = server.end()
        assert code != 0, written  # also at SIGTERM: torchrun's own
        assert ("hf-accel: rank 0 of 2 lost another rank" in written) == (end == "killed"), written
