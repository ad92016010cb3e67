"""Renders chat templates, in a process of its own: a template may never end or fill the memory, and this can be ended.

templates.py runs this file. A line on stdin is a JSON object: the keywords of transformers' render_jinja_template, and
the seconds and characters that a text may take. The answer is a line on stdout: {"text": ...} or {"error": ...}.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

MORE_MEMORY = 2**30  # bytes that a template may take


def answer(seconds: float, most: int, given: dict[str, Any]) -> dict[str, str]:
    """Return the text of a chat, or why there is none. After `seconds` this process ends, whatever it does."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        text = render_jinja_template(**given)[0][0]
        return {"text": text} if len(text) <= most else {"error": f"its text has more than {most} characters"}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # whatever a template raises is about what the client sent
        return {"error": (str(error).splitlines() or [""])[0][:300] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory() -> None:
    with suppress(OSError, ValueError):  # where the system does not say or limit it
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MORE_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends this process, even in the middle of a computation in C
    for line in sys.stdin.buffer:
        seconds, most, given = json.loads(line)
        left = memoryview(json.dumps(answer(seconds, most, given)).encode() + b"\n")
        while left:
            left = left[answers.write(left) :]


if __name__ == "__main__":
    main()
