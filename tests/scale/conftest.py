"""The examples on the path, an environment for their processes, and what generate() alone answers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from transformers import AutoTokenizer

import hf_accel

from ..serving.running import SHIPPED
from .processes import EXAMPLES, ROOT, processes_of, until


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(scope="package")
def alone() -> Callable[[str, int], str]:
    """The text of generate() of one prompt, greedy, in INT8 as the examples have it."""
    model, tokenizer = hf_accel.load(SHIPPED), AutoTokenizer.from_pretrained(SHIPPED)

    @cache
    def text(prompt: str, new_tokens: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0, inputs.input_ids.shape[1] :]
        found: str = tokenizer.decode(ids, skip_special_tokens=True)
        return found

    return text


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For processes of an example. Ray's files lie in a folder of their own; no process and no file is left."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # the paths of Ray's sockets must be short
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HF_ACCEL_API"))}
    own = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",  # not 15, at which its workers starve beside other processes
    }
    yield {**kept, **own}
    until(lambda: not processes_of(folder))
    shutil.rmtree(folder)
