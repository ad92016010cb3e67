"""A calibration goes on where it was killed, and not from what another run has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accel
from hf_accel.patching.calibration import streaming

from ....parity.families import build, prompts

IDS = prompts(8, 40)


class Killed(BaseException):
    pass


def weights(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"bits": 4, "group_size": 32, "method": "gptq", "calibration": IDS, "resume": folder, **settings}


def logits(**settings: Any) -> torch.Tensor:
    return hf_accel.patch(build("llama"), weights=settings)(IDS).logits


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_killed_anywhere_and_gone_on(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(**{**weights(tmp_path, method=method), "resume": None})
    calls: list[int] = []
    quantize = streaming.quantize

    def counted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) % 4 == 0:
            raise Killed
        return quantize(*args)

    monkeypatch.setattr(streaming, "quantize", counted)
    for _ in range(4):
        with pytest.raises(Killed):
            logits(**weights(tmp_path, method=method))
    assert torch.equal(logits(**weights(tmp_path, method=method)), expected)
    assert len(calls) == 14 + 4  # nothing was made twice but what was interrupted
    assert torch.equal(logits(**weights(tmp_path, method=method)), expected)
    assert len(calls) == 14 + 4
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"calibration": IDS.flip(0)}, "the calibration data differs"),
        ({"method": "awq"}, "the settings of the weights differs"),
        ({"symmetric": False}, "the settings of the weights differs"),
    ],
)
def test_layers_of_another_run_are_refused(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    logits(**weights(tmp_path))
    with pytest.raises(hf_accel.UnsupportedError, match=what):
        logits(**weights(tmp_path, **change))


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    logits(**weights(tmp_path))
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1
    with pytest.raises(hf_accel.UnsupportedError, match="the model differs; choose another folder"):
        hf_accel.patch(model, weights=weights(tmp_path))
    assert not hf_accel.is_patched(model)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    logits(**weights(tmp_path))
    (tmp_path / "00003.safetensors").write_bytes(b"nothing")
    with pytest.raises(hf_accel.UnsupportedError, match=r"resume: .*00003.safetensors cannot be read: .*; delete it"):
        logits(**weights(tmp_path))
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(hf_accel.UnsupportedError, match=r"calibration.json cannot be read: .*; choose another folder"):
        logits(**weights(tmp_path))
