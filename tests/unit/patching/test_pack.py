"""Originals go as their quantized forms come, and come back bit for bit when something fails half-way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import hf_accel
from hf_accel.linear import QuantLinear
from hf_accel.patching import pack

from ...parity.families import build
from ...parity.snapshot import snapshot

LAYERS = {"qwen2": 2 * 7 + 1, "gpt2": 2 * 4}  # those whose weight is their own; gpt2's head is tied


class Broken(RuntimeError):
    pass


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def load(family: str, folder: Path) -> PreTrainedModel:
    if not (folder / "config.json").exists():
        build(family).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def originals(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights that patch() may free."""
    embedding = model.get_input_embeddings().weight
    sites = hf_accel.plan(model).quantized
    return [p.site.parameter for p in sites if p.site.parameter is not embedding]


class Spy:
    """In the place of pack_weight: counts float originals alive at each call, and may fail at one."""

    def __init__(self, weights: list[nn.Parameter], fail_at: int | None = None, error: type = Broken) -> None:
        self.weights, self.fail_at, self.error = weights, fail_at, error
        self.alive: list[int] = []
        self.pack_weight = pack.pack_weight

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        call = len(self.alive)
        self.alive.append(sum(w.numel() > 0 for w in self.weights))
        if call == self.fail_at:
            raise self.error
        return self.pack_weight(*args, **keywords)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Spy:
        monkeypatch.setattr(pack, "pack_weight", self)
        return self


@pytest.mark.parametrize("keep", ["auto", False])
@pytest.mark.parametrize("family", LAYERS)
def test_originals_go_one_by_one(
    family: str, keep: Any, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(family, tmp_path)
    weights = originals(model)
    assert len(weights) == LAYERS[family]
    spy = Spy(weights).install(monkeypatch)
    hf_accel.patch(model, keep_original=keep)
    for index, alive in enumerate(spy.alive[: len(weights)]):
        assert alive <= len(weights) - index + threads  # at most one for each thread waits to go
    assert not any(w.numel() for w in weights)


@pytest.mark.parametrize("keep", [True, "auto"])
def test_originals_that_stay(keep: Any, threads: int) -> None:
    model = build("qwen2")
    weights, before = originals(model), snapshot(model)
    hf_accel.patch(model, keep_original=keep)
    assert all(w.numel() for w in weights)
    assert snapshot(hf_accel.unpatch(model)) == before


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("family", LAYERS)
def test_failure_at_any_layer_restores_the_model(
    family: str, error: type, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(family, tmp_path)
    before, weights = snapshot(model), originals(model)
    for layer in range(len(hf_accel.plan(model).quantized)):
        with monkeypatch.context() as patched:
            spy = Spy(weights, layer, error).install(patched)
            with pytest.raises(error) as raised:
                hf_accel.patch(model)
        assert not hasattr(raised.value, "__notes__")
        if threads == 1 and 0 < layer < len(weights):
            assert spy.alive[layer] == len(weights) - layer  # so there was something to bring back
        assert snapshot(model) == before
    assert snapshot(hf_accel.unpatch(hf_accel.patch(model))) == before


def test_failure_with_a_checkpoint_that_went_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("qwen2", tmp_path)
    Spy(originals(model), 5).install(monkeypatch)
    read, calls = pack.Source.read, []

    def gone(source: Any) -> Tensor:
        calls.append(source)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        return read(source)

    monkeypatch.setattr(pack.Source, "read", gone)
    with pytest.raises(Broken) as raised:
        hf_accel.patch(model)
    assert calls
    assert "5 original weights that patch() had freed cannot be read back" in raised.value.__notes__[0]
    assert "load the model again" in raised.value.__notes__[0]
    assert not hf_accel.is_patched(model)


def test_failure_after_originals_were_given_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2")
    Spy(originals(model), 5).install(monkeypatch)
    with pytest.raises(Broken) as raised:
        hf_accel.patch(model, keep_original=False)
    assert "freed 5 original weights, as keep_original=False asks for, and they are gone" in raised.value.__notes__[0]
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("keep", [True, "auto", False])
def test_what_cannot_be_quantized_is_named_and_nothing_is_lost(
    keep: Any, value: float, threads: int, tmp_path: Path
) -> None:
    model = build("qwen2")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    model.save_pretrained(tmp_path)
    model = load("qwen2", tmp_path)
    before = snapshot(model)
    with pytest.raises(
        hf_accel.UnsupportedError, match=r"'model.layers.1.mlp.up_proj' cannot .* NaN or infinity; rep"
    ):
        hf_accel.patch(model, keep_original=keep)
    assert snapshot(model) == before


def test_threads_do_not_change_the_weights(threads: int) -> None:
    expected = hf_accel.patch(build("gpt2")).state_dict()
    torch.set_num_threads(1)
    for name, tensor in hf_accel.patch(build("gpt2")).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


# -- the progress bar ----------------------------------------------------------------------------------


@pytest.fixture
def bars() -> Iterator[None]:
    """Progress bars are on, whatever went before."""
    were_on = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    if not were_on:
        logging.disable_progress_bar()


def test_progress_bar(bars: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hf_accel.patch(build("gpt2"))
    assert capsys.readouterr().err == ""  # it was quick
    monkeypatch.setattr(pack, "PROGRESS_SECONDS", 0)
    hf_accel.patch(build("gpt2"))
    shown = capsys.readouterr()
    assert "Quantizing weights: 100%" in shown.err
    assert "9/9" in shown.err
    assert shown.out == ""


def test_progress_bar_that_is_switched_off(
    bars: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PROGRESS_SECONDS", 0)
    logging.disable_progress_bar()
    hf_accel.patch(build("gpt2"))
    assert capsys.readouterr().err == ""
