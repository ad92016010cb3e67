"""Plain `transformers serve` with a checkpoint that we saved: all that it needs is `import hf_accel`."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serve import Serve

import hf_accel

from .running import CHAT_TEMPLATE, SHIPPED, until

MESSAGES = [{"role": "user", "content": "class Reader:\n    def "}]


class Threaded(Serve):
    """In a thread that closes its event loop, which that of `non_blocking` leaves open."""

    def start_server(self) -> None:
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()


@pytest.mark.parametrize("continuous", [False, True], ids=["generate", "continuous batching"])
def test_a_checkpoint_of_ours(tmp_path: Path, continuous: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    model.generation_config.max_new_tokens = None
    hf_accel.patch(model, weights="int4").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=16)
    expected = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    server = Threaded(
        str(tmp_path), continuous_batching=continuous, device="cpu", host="127.0.0.1", port=port, non_blocking=True
    )
    try:
        until(lambda: server.server.started)
        name = server._model_manager.process_model_name(str(tmp_path))
        served, _ = server._model_manager.load_model_and_processor(name)
        assert hf_accel.is_patched(served) and served.model.layers[0].mlp.up_proj.layout.bits == 4
        body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == expected
        if continuous:
            assert "ContinuousManager" in repr(server._generation_state.get_manager(name, True)._cb)
    finally:
        server.kill_server()
        server._thread.join(30)
