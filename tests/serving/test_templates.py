"""Chat templates that do not end, or take all memory: one request fails, and nobody else waits."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import httpx
import pytest

from hf_accel.serving.api_errors import ApiError
from hf_accel.serving.hf import templates as module
from hf_accel.serving.hf.templates import TemplateError, Templates

from .running import WAIT, serving

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = "{% if 'slow' in messages[0].content %}" + LOOP + "{% endif %}{{ messages[0].content }}def "


def rendered(templates: Templates, template: str, **given: Any) -> Any:
    messages = [{"role": "user", "content": "a ü \ud800"}]
    return templates.render(conversations=[messages], chat_template=template, **given)


def test_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed in C, and when a template is compiled, is bounded too."""
    monkeypatch.setattr(module, "SECONDS", 0.3)

    async def run() -> None:
        templates = Templates(longest=1000)
        try:
            with pytest.raises(ApiError, match=r"did not end within 0\.3 seconds") as error:
                await rendered(templates, "{{ 9 ** (9 ** 9) }}")
            assert error.value.status == 400
            monkeypatch.setattr(module, "SECONDS", WAIT)
            text = await rendered(templates, "{{ messages[0].content }}{{ bos }}\n", bos="<s>", tools=None)
            assert text == "a ü \ud800<s>"
            refusals = {
                "{{ 'x' * 10**10 }}": "too much memory",
                "{{ 'x' * 1001 }}": "more than 1000 characters",
                "{{ raise_exception('no\nway') }}": "^no$",
                "{% for %}": "xpected",
            }
            for template, reason in refusals.items():
                with pytest.raises(TemplateError, match=reason):
                    await rendered(templates, template)
            assert len(templates._all) == 1
        finally:
            templates.close()

    asyncio.run(run())


def test_a_hostile_template_holds_nobody_else() -> None:
    """While it runs, others chat; a signal ends it with the server."""
    with serving(chat_template=HOSTILE, drain_seconds=1) as running:
        slow: list[httpx.Response] = []

        def chat(words: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 2}
            return httpx.post(f"{running.url}/chat/completions", json=body, timeout=WAIT)

        thread = threading.Thread(target=lambda: slow.append(chat("slow")))
        thread.start()
        assert chat("import re").status_code == 200 and not slow
        running.server.handle_exit(signal.SIGTERM, None)
        thread.join(WAIT)
        assert slow[0].status_code == 503 and "shutting down" in slow[0].text
