"""The page at /: its files, its numbers, and in a browser without a screen the page itself and one of another site."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from hf_accel.serving.page import FILES, FOLDER, description

from .encoders import save_encoder
from .running import SHIPPED, Running, serving, until

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


def test_the_model_is_chosen(browser: Any, tmp_path: Path) -> None:
    save_encoder(tmp_path / "embed")
    with serving({"code": SHIPPED, "embed": tmp_path / "embed"}) as running:
        browser.get(f"{running.root}/")
        until(lambda: "LlamaForCausalLM" in text(browser, "model"))
        choice = browser.find_element("id", "served")
        assert [each.text for each in choice.find_elements("css selector", "option")] == ["code", "embed"]
        choice.find_elements("css selector", "option")[1].click()
        until(lambda: "BertModel" in text(browser, "model") and "Blocks used\n0" not in text(browser, "counters"))
        choice.find_elements("css selector", "option")[0].click()
        until(lambda: "LlamaForCausalLM" in text(browser, "model") and "Blocks used\n0" in text(browser, "counters"))
        assert len(say(browser, running, "import re")) == 2
        assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


# -- a page of another site ----------------------------------------------------------------------------

OTHER_PAGE = """<!doctype html><link rel="icon" href="data:,"><pre id="said"></pre><p id="state">waiting</p><script>
const at = (id) => document.getElementById(id);
async function ask() {
  const answer = await fetch(new URLSearchParams(location.search).get("api") + "/chat/completions", {
    method: "POST",
    headers: {"Content-Type": "application/json", Authorization: "Bearer secret"},
    body: JSON.stringify({
      model: "tiny", messages: [{role: "user", content: "import re"}], stream: true, temperature: 0, max_tokens: 40,
    }),
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let [rest, parts] = ["", 0];
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return `done: ${answer.status}, ${parts > 1}, ${answer.headers.get("x-request-id").length > 9}`;
    const lines = (rest + value).split("\\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const piece = JSON.parse(line.slice(6)).choices[0].delta.content ?? "";
      at("said").append(piece);
      parts += piece ? 1 : 0;
    }
  }
}
ask().catch((error) => `failed: ${error.message}`).then((state) => { at("state").textContent = state; });
</script>"""


@pytest.fixture
def site() -> Iterator[str]:
    """The origin of another server, which has one page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(OTHER_PAGE.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_page_of_another_site(browser: Any, site: str) -> None:
    """It streams a chat's answer if its site was allowed; else the browser asks for permission, and for nothing."""
    with serving(api_key="secret", origins=[site]) as running:
        browser.get(f"{site}/?api={running.url}")
        until(lambda: text(browser, "state") != "waiting")
        assert text(browser, "state") == "done: 200, true, true"
        messages = [{"role": "user", "content": "import re"}]
        prompt = running.service.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        shown = browser.find_element("id", "said").get_property("textContent")
        assert shown == running.text(prompt, 40) != ""
        assert browser.get_log("browser") == []
    with serving(api_key="secret", origins=["https://chat.example"]) as running:
        browser.get(f"{site}/?api={running.url}")
        until(lambda: text(browser, "state") != "waiting")
        assert text(browser, "state") == "failed: Failed to fetch" and text(browser, "said") == ""
        assert running.stats["requests"] == 0
        assert any("CORS policy" in entry["message"] for entry in browser.get_log("browser"))
