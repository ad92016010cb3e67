"""Two processes, each with half of the texts, give what one gives with all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[4]
SCRIPT = "tests.unit.distill.trainer.train_apart"


KINDS = ("callback", "trainer", "sampled")


def launch(folder: Path, processes: int) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """The log and the weights of a training of each kind."""
    command = [sys.executable, "-m"]
    if processes > 1:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        command += [
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(processes),
            "--num_machines",
            "1",
        ]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
        command += ["--main_process_port", str(port), "-m"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [*command, SCRIPT, str(folder), str(4 // processes), *KINDS],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        kind: (json.loads((folder / kind / "log.json").read_text()), load_file(folder / kind / "weights.safetensors"))
        for kind in KINDS
    }


@pytest.mark.long
def test_two_processes_are_one(tmp_path: Path) -> None:
    alone, together = (launch(tmp_path / str(count), count) for count in (1, 2))
    for kind in KINDS:
        one, two = alone[kind], together[kind]
        assert (one[0]["processes"], two[0]["processes"]) == (1, 2)
        for name, value in one[1].items():
            torch.testing.assert_close(two[1][name], value, rtol=1e-4, atol=1e-6)
        for line, other in zip(one[0]["lines"], two[0]["lines"], strict=True):
            assert other == pytest.approx(line, rel=1e-4), kind
        assert two[0]["metrics"] == pytest.approx(one[0]["metrics"], rel=1e-4)
    assert any("on_policy_tokens" in line for line in alone["sampled"][0]["lines"])
