"""Up to how many rows float products are native on this CPU: what is measured, kept, and taken instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_accel
from hf_accel import HfAccelWarning
from hf_accel.fused import measured_rows as module
from hf_accel.fused.measured_rows import most_rows, rows_here
from hf_accel.hardware import UNLIMITED, measured
from hf_accel.hardware.atomic import locked
from hf_accel.kernels import cpu as kernels

from ...parity.families import build

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
FOUND = {16: 2.0, 32: 1.5, 64: 0.97, 96: 0.96}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.dtype]:
    """The dtypes that were measured, with a folder of its own and as if nothing had been asked before."""
    dtypes: list[torch.dtype] = []
    monkeypatch.setenv(measured.SWITCH, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(module, "native_rows", lambda dtype, *, by_inputs: 128)
    monkeypatch.setattr(module, "busy_cores", lambda seconds: 0.0)
    monkeypatch.setattr(module, "ratios_by_rows", lambda dtype, *, by_inputs: (dtypes.append(dtype), FOUND)[1])
    return dtypes


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_found", {})


@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        ({"16": 2.0, "32": 0.97}, 32),
        ({"16": 2.0, "32": 0.96}, 16),
        ({"16": 2.0, "64": 1.1, "32": 0.9}, 16),
        ({"16": 2.0, "64": 1.1, "128": 1.2, "512": 0.1}, 128),
        ({"16": 0.5}, 4),
        ({"16": 2.0, "384": 1.1, "512": 1.0}, UNLIMITED),
    ],
)
def test_the_most_rows_are_those_up_to_which_torch_is_never_surely_faster(ratios: dict[str, float], most: int) -> None:
    assert most_rows(ratios) == most


def test_each_dtype_is_measured_once(asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_here(torch.float32, measure=True) == 64
    assert rows_here(torch.bfloat16, measure=True) == 64
    another_process(monkeypatch)
    assert rows_here(torch.float32, measure=True) == rows_here(torch.bfloat16) == 64
    assert asked == [torch.float32, torch.bfloat16]
    assert set(measured.read(module.rows_file())[module.this_cpu()]) == {"float32", "bfloat16"}


def test_weights_by_inputs_are_measured_by_themselves(asked: list[torch.dtype]) -> None:
    assert rows_here(torch.float32, measure=True) == rows_here(torch.float32, by_inputs=True, measure=True) == 64
    assert asked == [torch.float32] * 2
    assert set(measured.read(module.rows_file())[module.this_cpu()]) == {"float32", "float32 [in, out]"}


def test_another_number_of_threads_is_measured_by_itself(asked: list[torch.dtype]) -> None:
    assert rows_here(torch.float32, measure=True) == 64
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert rows_here(torch.float32) == 128
        assert rows_here(torch.float32, measure=True) == 64
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == 2


def test_what_nobody_measured_is_as_on_cpus_like_this_one(
    asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_here(torch.float32) == 128
    monkeypatch.setenv(measured.SWITCH, "0")
    assert rows_here(torch.float32, measure=True) == 128
    assert not asked and not module.rows_file().exists()


@pytest.mark.parametrize("usual", [0, UNLIMITED])
def test_what_torch_lacks_and_what_we_lack_is_not_measured(
    usual: int, asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "native_rows", lambda dtype, *, by_inputs: usual)
    assert rows_here(torch.float32, measure=True) == usual
    assert not asked


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": {"float32": {"16": "x"}}}'])
def test_a_damaged_file_is_written_anew(
    content: str, asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    module.rows_file().parent.mkdir()
    module.rows_file().write_text(content)
    assert rows_here(torch.float32, measure=True) == 64
    another_process(monkeypatch)
    assert rows_here(torch.float32, measure=True) == 64
    assert len(asked) == 1


def test_a_folder_that_cannot_be_written_to_is_told_once(
    asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(HfAccelWarning, match="the measured rows of float linears were not kept, .* XDG_CACHE_HOME"):
        assert rows_here(torch.float32, measure=True) == 64
    assert rows_here(torch.float32, measure=True) == 64
    assert len(asked) == 1


def test_a_process_that_measures_is_waited_for(asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it takes too long, this one measures too."""
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    module.rows_file().parent.mkdir()
    with locked(module.rows_file().with_suffix(".lock")):
        assert rows_here(torch.float32, measure=True) == 64
    assert len(asked) == 1

    def meanwhile(file: Path, *, timeout: float) -> object:
        measured.keep(file.with_suffix(".json"), {module.this_cpu(): {"bfloat16": {"16": 1.0}}}, "rows")
        return locked(file, timeout=timeout)

    monkeypatch.setattr(module, "locked", meanwhile)
    assert rows_here(torch.bfloat16, measure=True) == 16
    assert len(asked) == 1


@pytest.mark.parametrize(("busy", "rows"), [(0.1, 64), (0.5, 128), (None, 64)])
def test_a_busy_machine_is_not_measured(
    busy: float | None, rows: int, asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process tries again."""
    monkeypatch.setattr(module, "busy_cores", lambda seconds: busy)
    assert rows_here(torch.float32, measure=True) == rows_here(torch.float32, measure=True) == rows
    assert module.rows_file().exists() == (rows == 64)
    monkeypatch.setattr(module, "busy_cores", lambda seconds: 0.0)
    another_process(monkeypatch)
    assert rows_here(torch.float32, measure=True) == 64
    assert len(asked) == 1


def test_a_plan_takes_what_was_measured(asked: list[torch.dtype]) -> None:
    """Quantized weights need no measurement: their few float linears take what is known."""
    assert hf_accel.plan(build("llama"))
    assert not asked
    line = next(
        c for c in hf_accel.plan(build("llama"), weights=None).to_dict()["choices"] if c["topic"] == "exactness"
    )
    assert "float linears of more than 64 rows go to torch" in line["reason"]
    assert asked == [torch.float32]
    assert hf_accel.plan(build("llama"), weights=None, deterministic=True)
    assert len(asked) == 1


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_are_timed_until_torch_is_surely_faster(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, by_inputs: bool
) -> None:
    """Whatever device, autocast and kind of gradients are the rule where a plan is made."""
    monkeypatch.setattr(module, "SHAPES", ((64, 96), (32, 32)))
    monkeypatch.setattr(module, "COLD_BYTES", 0)
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        found = module.ratios_by_rows(dtype, by_inputs=by_inputs)
    assert list(found) == list(module.CANDIDATE_ROWS[: len(found)])
    assert all(ratio > 0 for ratio in found.values())
    assert all(ratio >= module.LEAST_RATIO for ratio in list(found.values())[:-1])


@pytest.mark.parametrize(
    ("timed", "expected"),
    [
        ([2.0, 0.5, 0.5, 1.5, 0.5, 0.5, 0.5], {8: 2.0, 16: 1.5, 32: 0.5}),  # noise at 16 rows, and torch from 32 on
        ([0.5, 0.6, 0.4], {8: 0.6}),
        ([0.97] * 10, dict.fromkeys(module.CANDIDATE_ROWS, 0.97)),
    ],
)
def test_a_ratio_that_noise_made_is_measured_again(
    timed: list[float], expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHAPES", ((8, 8),))
    monkeypatch.setattr(module, "COLD_BYTES", 0)
    monkeypatch.setattr(module, "speed_ratio", lambda *arguments: timed.pop(0))
    assert module.ratios_by_rows(torch.float32, by_inputs=False) == pytest.approx(expected)
    assert not timed
