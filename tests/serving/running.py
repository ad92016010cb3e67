"""A server in a thread of the test's process, with a socket of its own: clients are the real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch

import hf_accel
from hf_accel.checkpoints.text_encoder import encodes
from hf_accel.kernels import cpu as kernels
from hf_accel.serving.guard import Hosts
from hf_accel.serving.hf.application import make_app
from hf_accel.serving.hf.loaded_models import load_models
from hf_accel.serving.hf.served_model import leading, load_served
from hf_accel.serving.hf.transcriptions import transcribes
from hf_accel.serving.http_server import DrainingServer, bound_socket, make_server
from hf_accel.serving.limits import Limits
from hf_accel.serving.models import Models

SHIPPED = Path(__file__).parents[2] / "examples" / "stdlib-tiny"
CHAT_TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
# float32 and backends whose rows do not depend on what runs beside them: answers can be compared token by token.
# Without our kernels rows do depend on it, but in float32 by too little to change these answers.
EXACT: dict[str, Any] = {"weights": None, "deterministic": kernels.refusal() is None, "dtype": torch.float32}
WAIT = 60


class Running:
    """A server that answers at `url`. service: of its first model."""

    def __init__(self, models: Models, server: DrainingServer, port: int) -> None:
        self.models, self.server = models, server
        self.service: Any = models.services[0]
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=WAIT)

    @property
    def stats(self) -> dict[str, Any]:
        return self.service.engine.stats

    def generated(self, prompt: str | list[int], new_tokens: int, **keywords: Any) -> list[int]:
        """What generate() of the same model answers alone."""
        model, tokenizer = self.service.engine.model, self.service.tokenizer
        ids = torch.tensor([tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt])
        given = {"do_sample": False, "max_new_tokens": new_tokens, "attention_mask": torch.ones_like(ids), **keywords}
        out: list[int] = model.generate(ids, **given)[0, ids.shape[1] :].tolist()
        return out

    def text(self, prompt: str | list[int], new_tokens: int) -> str:
        tokens = self.generated(prompt, new_tokens)
        found: str = self.service.tokenizer.decode(tokens, skip_special_tokens=True)
        return found

    def is_idle(self) -> bool:
        return not any(
            service.admission.num_choices
            or any(service.engine.stats.get(name) for name in ("running", "waiting", "blocks_used"))
            for service in self.models.services
        )


@contextmanager
def serving(
    path: str | Path | Mapping[str, str | Path] = SHIPPED,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    origins: Collection[str] = (),
    drain_seconds: float = 10.0,
    **loading: Any,
) -> Iterator[Running]:
    """Serve a checkpoint, or several by their names, until the block ends; then nothing of it may be left."""
    bound = bound_socket("127.0.0.1", 0)
    given: dict[str, Any] = {**EXACT, **loading}
    models = _loaded(path, limits or Limits(), given)
    app = make_app(models, api_key=api_key, hosts=Hosts.of("127.0.0.1", origins=origins), origins=origins)
    server = make_server(app, models, drain_seconds=drain_seconds)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
    with leading(given.get("engine", {}).get("relay"), models.services[0], server):
        thread.start()
        try:
            until(lambda: server.started)
            yield Running(models, server, bound.getsockname()[1])
        finally:
            server.handle_exit(15, None)
            thread.join(WAIT)
            for service in models.services:
                hf_accel.unpatch(service.engine.model)
    assert not thread.is_alive() and not models.is_live


def _loaded(path: str | Path | Mapping[str, str | Path], limits: Limits, given: dict[str, Any]) -> Models:
    if isinstance(path, Mapping):
        if any(map(_writes, path.values())):
            given = {"chat_template": CHAT_TEMPLATE, **given}
        return load_models({name: str(one) for name, one in path.items()}, limits=limits, **given)
    given = {"name": "tiny", **given}
    if _writes(path):
        given.setdefault("chat_template", CHAT_TEMPLATE)
    return Models([load_served(str(path), limits=limits, **given)])


def _writes(path: str | Path) -> bool:
    return not encodes(str(path)) and not transcribes(str(path))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.005)
