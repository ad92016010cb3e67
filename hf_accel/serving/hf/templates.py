"""Chat templates, which come with a model and are programs: they run in a process of their own, for a limited time.

A template may never end or fill the memory, and a process can be ended. This file is also the program of that process:
a line on stdin is a JSON list of the seconds and the characters that a text may take, and the keywords of
transformers' render_jinja_template. The answer is a line on stdout: {"text": ...} or {"error": ...}.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..api_errors import ApiError, unavailable

CAN_RENDER = os.name == "posix"
SECONDS = 10.0  # for a template to render a chat; it takes milliseconds
PATIENCE = 30.0  # seconds that a request waits for a process, its start included
PROCESSES = 3  # of some 60 MB: so many hostile requests at a time delay no other one
MORE_MEMORY = 2**30  # bytes that a template may take


class TemplateError(Exception):
    """A chat template refuses a chat; the message says why."""


class TemplateProcess:
    """A process that renders one chat after the other."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__], stdin=theirs.fileno(), stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the server, which lets requests end
            )  # fmt: skip
        self._writer: asyncio.StreamWriter | None = None

    async def render(self, given: dict[str, Any]) -> str:
        """Return the text of a chat. Raises TemplateError, and ApiError (400) if the process has ended over it."""
        if self._writer is None:
            limit = 12 * self._longest + 2**16  # bytes: JSON writes a character in up to 12
            self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=limit)
        line = b""
        with suppress(ConnectionError):  # it has ended
            self._writer.write(json.dumps([SECONDS, self._longest, given], default=str).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        if not line:
            late = self._process.wait() == -signal.SIGALRM
            what = f"did not end within {SECONDS:g} seconds" if late else "broke the process that runs it"
            raise ApiError(400, f"the chat template {what}", field="messages")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(RuntimeError):  # the event loop has ended before
            (self._writer or self._socket).close()


class Templates:
    """The processes that render chat templates for a server. longest: characters of a text.

    All methods are for one event loop.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._room = asyncio.Semaphore(PROCESSES)
        self._idle: list[TemplateProcess] = []
        self._all: set[TemplateProcess] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start a process before the first request needs it, which would wait for half a second."""
        self._idle.append(self._started())

    async def render(self, **given: Any) -> str:
        """Return the text of a chat. given: the keywords of transformers' render_jinja_template.

        Raises TemplateError for a chat that the template refuses, and ApiError: 400 for one on which it does not end,
        503 if others keep all processes busy.
        """
        try:
            async with asyncio.timeout(PATIENCE), self._room:
                return await self._rendered(given)
        except TimeoutError:
            raise unavailable("the chat template is busy with other requests", int(SECONDS)) from None

    async def _rendered(self, given: dict[str, Any]) -> str:
        if self._is_closed:
            raise self._end()
        process = self._idle.pop() if self._idle else self._started()
        try:
            text = await process.render(given)
        except TemplateError:
            self._idle.append(process)
            raise
        except BaseException:  # it has ended, or nobody waits for what it does
            self._all.discard(process)
            process.end()
            if self._is_closed:
                raise self._end() from None
            raise
        self._idle.append(process)
        return text

    @staticmethod
    def _end() -> ApiError:
        return unavailable("the server is shutting down; try another one", int(PATIENCE))

    def _started(self) -> TemplateProcess:
        process = TemplateProcess(self._longest)
        self._all.add(process)
        return process

    def close(self) -> None:
        """End all processes; whoever waits for one gets an ApiError (503)."""
        self._is_closed = True
        for process in self._all:
            process.end()
        self._all.clear()


# -- the process --------------------------------------------------------------------------------------


def answer(render: Callable[..., Any], seconds: float, most: int, given: dict[str, Any]) -> dict[str, str]:
    """Return the text of a chat, or why there is none. After `seconds` this process ends, whatever it does."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        text = render(**given)[0][0]
        return {"text": text} if len(text) <= most else {"error": f"its text has more than {most} characters"}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # whatever a template raises is about what the client sent
        return {"error": (str(error).splitlines() or [""])[0][:300] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory() -> None:
    import resource  # a module of POSIX systems

    with suppress(OSError, ValueError):  # where the system does not say or limit it
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MORE_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer one line of stdin after the other, until it ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends this process, even in the middle of a computation in C
    for line in sys.stdin.buffer:
        seconds, most, given = json.loads(line)
        left = memoryview(json.dumps(answer(render_jinja_template, seconds, most, given)).encode() + b"\n")
        while left:
            left = left[answers.write(left) :]


if __name__ == "__main__":
    main()
