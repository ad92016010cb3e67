"""The page at /: its files, its numbers, and the page itself in a browser without a screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hf_accel.serving.page import FILES, FOLDER, description

from .running import Running, serving, until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
# Chromium asks nobody but our server.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,800",
)  # fmt: skip


def test_files() -> None:
    with serving() as running, httpx.Client(base_url=running.root) as client:
        for path, name in FILES.items():
            answer = client.get(path)
            assert answer.content == (FOLDER / name).read_bytes()
            assert "default-src 'self'" in answer.headers["content-security-policy"]
        plan = client.get("/plan").json()
        assert plan["model"] == "tiny" and plan["chat"] is True
        assert {"topic", "what", "choice", "reason"} == plan["choices"][0].keys()
        client.post("/v1/completions", json={"prompt": "import re", "max_tokens": 5, "temperature": 0})
        assert client.get("/stats").json()["new_tokens"] == 5
        assert client.get("/page/__init__.py").status_code == 404
        assert client.get("/page/../limits.py").status_code == 404


def test_no_other_host_is_named() -> None:
    for path in (*FOLDER.glob("page.*"), *FOLDER.glob("docs.*")):
        assert not re.search(r"https?:|//[a-z]+\.", path.read_text(encoding="utf-8").replace("// ", ""))


def test_the_key_guards_what_is_not_a_file() -> None:
    with serving(api_key="secret") as running, httpx.Client(base_url=running.root) as client:
        assert [client.get(path).status_code for path in (*FILES, "/plan", "/stats")] == [200] * len(FILES) + [401] * 2
        assert client.get("/stats", headers={"Authorization": "Bearer secret"}).status_code == 200


# -- in a browser --------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def text(browser: Any, name: str) -> str:
    found: str = browser.find_element("id", name).text
    return found


def say(browser: Any, running: Running, words: str) -> list[str]:
    """Send a message and wait for the whole answer; returns all messages that are shown."""
    browser.find_element("id", "prompt").send_keys(words + "\n")
    until(lambda: browser.find_element("id", "send").is_displayed() and running.is_idle())
    return [item.text for item in browser.find_elements("css selector", "#messages li")]


def test_in_a_browser(browser: Any) -> None:
    """It chats, streams, shows the plan and the counters, asks for the key, and prints no error."""
    with serving(api_key="secret") as running:
        browser.get(f"{running.root}/")
        until(lambda: "API key" in text(browser, "status"))
        browser.find_element("id", "key").send_keys("secret")
        until(lambda: "LlamaForCausalLM" in text(browser, "model") and text(browser, "status") == "")
        browser.get_log("browser")  # the refusals before there was a key
        for name, value in {"temperature": "0", "tokens": "12"}.items():
            field = browser.find_element("id", name)
            field.clear()
            field.send_keys(value)
        asked, answered = say(browser, running, "import re")
        prompt = running.service.tokenizer.apply_chat_template(
            [{"role": "user", "content": "import re"}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert asked == "import re"
        assert answered.startswith(running.text(prompt, 12).strip()[:20])
        assert "first token after" in answered
        assert len(say(browser, running, "and then")) == 4  # with what was said before
        until(lambda: "24" in text(browser, "counters"))
        rows = browser.find_elements("css selector", "#plan tr")
        assert len(rows) == len(description(running.service)["choices"]) > 8
        browser.find_element("id", "clear").click()
        assert not browser.find_elements("css selector", "#messages li")
        assert browser.get_log("browser") == []
