"""The programme of measuring tiles, with stand-ins for the GPU and its clock: what is timed, kept, taken and told."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from hf_accel.errors import HfAccelWarning
from hf_accel.hardware import measured
from hf_accel.kernels import triton
from hf_accel.linear.backends import measured_tiles as module
from hf_accel.linear.backends.backend import FEW_ROWS
from hf_accel.linear.backends.measured_tiles import ROWS, Measuring
from hf_accel.linear.backends.registry import BackendChoice
from hf_accel.linear.backends.triton import Triton

from ..specs import changed, linear_spec

pytest.importorskip("triton")
from hf_accel.linear.backends import tiles

SPEC = linear_spec(in_features=2048, out_features=512, bits=4, dtype=torch.bfloat16)
MEASURED_ROWS = ROWS[1:]  # one row has the tile of eight
BACKENDS = {rounding: Triton(row_invariant=False, rounding=rounding) for rounding in ("never", "many rows")}


class Gpu:
    """Takes a second for each tile, which `seconds` says otherwise by name."""

    def __init__(self) -> None:
        self.now, self.seconds, self.calls = 0.0, {}, Counter()

    def clock(self) -> float:
        return self.now

    def seconds_of(self, rows, weight, tile, dtype):
        assert weight.integers.device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)
        self.calls[rows, str(tile)] += 1
        self.now += 0.01
        found = self.seconds.get(str(tile), 1.0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    made = Gpu()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "MEASURED", {})
    monkeypatch.setattr(module, "place", lambda: "a GPU")
    monkeypatch.setattr(module, "is_measured", lambda device_type: True)
    monkeypatch.setattr(module, "seconds_of", made.seconds_of)
    return made


def choice(rounding="never", spec=SPEC):
    return BackendChoice(spec, BACKENDS[rounding], ())


def weight_of(spec=SPEC):
    return BACKENDS["never"].pack(module.example(spec, spec.out_features))


def names(rows, rounding="never"):
    return [str(tile) for tile in tiles.candidates(rows, weight_of(), torch.bfloat16, rounding)]


def test_each_candidate_is_timed_once_and_the_best_is_taken(gpu):
    best = {8: names(8)[-1], 2048: names(2048)[-1]}
    gpu.seconds = {best[8]: 0.5, best[2048]: 0.4}
    measuring = Measuring(gpu.clock)
    words = measuring.measure(choice())
    assert gpu.calls == {(rows, name): 1 for rows in MEASURED_ROWS for name in names(rows)}
    assert measuring.measure(choice()) == words and max(gpu.calls.values()) == 1
    for rows, expected in ((1, best[8]), (8, best[8]), (1025, best[2048]), (2048, best[2048]), (10**5, best[2048])):
        assert str(tiles.tile_for(rows, weight_of(), torch.bfloat16)) == expected
    assert words.startswith(f"measured: {best[8].partition(',')[0]} up to 8 rows, ") and words.endswith(" beyond")
    other = linear_spec(in_features=2048, out_features=256, bits=4, dtype=torch.bfloat16)
    assert tiles.tile_for(1, weight_of(other), torch.bfloat16) == tiles.by_rule(
        1, weight_of(other), torch.bfloat16, "never"
    )


def test_one_row_has_the_tile_of_eight(gpu):
    """So it has the same bits. Rows of float32, which no such tile takes, are measured one by one."""
    for spec, least in (
        (SPEC, 8),
        (changed(SPEC, {"group_size": 32}), 8),
        (changed(SPEC, {"dtype": torch.float32}), 1),
    ):
        gpu.calls.clear()
        Measuring(gpu.clock).measure(choice(spec=spec))
        assert min(rows for rows, _ in gpu.calls) == least


def test_only_many_rows_may_be_rounded(gpu):
    gpu.seconds = {name: 0.5 for rows in MEASURED_ROWS for name in names(rows, "many rows") if name.startswith("int8")}
    Measuring(gpu.clock).measure(choice("many rows"))
    weight = weight_of()
    for rows in (1, 64, FEW_ROWS, FEW_ROWS + 1, 5000):
        assert bool(tiles.tile_for(rows, weight, torch.bfloat16, "many rows").rounded) == (rows > FEW_ROWS)
        assert not tiles.tile_for(rows, weight, torch.bfloat16).rounded, "measured for another backend"
    assert not any(name.startswith("int8") for rows in MEASURED_ROWS for name in names(rows))


def test_torchs_product_is_measured_beside_the_tiles(gpu, monkeypatch):
    """For many rows in FP8, on a GPU that has one of the same meaning, and not for experts."""
    monkeypatch.setattr(triton, "capability", lambda: (9, 0))
    spec = linear_spec(in_features=2048, out_features=512, bits=8, dtype=torch.bfloat16, format="fp8")
    backend = Triton(row_invariant=False, rounding="many rows", rounded_to="fp8")
    gpu.seconds = {"torch._scaled_mm": 0.1}
    measuring = Measuring(gpu.clock)
    words = measuring.measure(BackendChoice(spec, backend, ()))
    assert {rows for rows, name in gpu.calls if name == "torch._scaled_mm"} == {512, 2048}
    assert words.endswith(" up to 256 rows, torch._scaled_mm beyond")
    weight = backend.pack(module.example(spec, 512))
    assert str(tiles.tile_for(FEW_ROWS + 1, weight, torch.bfloat16, "many rows")) == "torch._scaled_mm"
    assert "torch" not in str(tiles.tile_for(FEW_ROWS, weight, torch.bfloat16, "many rows"))
    of_experts = measuring.measure(BackendChoice(spec, backend, ()), of_experts=True)
    assert "torch" not in of_experts and gpu.calls[2048, "torch._scaled_mm"] == 1
    measuring.finish()
    assert "torch._scaled_mm" in module.file().read_text()
    gpu.calls.clear()
    tiles.MEASURED.clear()
    assert Measuring(gpu.clock).measure(BackendChoice(spec, backend, ())) == words and not gpu.calls


def test_of_a_wide_weight_some_outputs_are_taken():
    """In a multiple that each candidate takes."""
    spec = linear_spec(in_features=28672, out_features=8192, bits=8, dtype=torch.bfloat16, format="fp8")
    timing = module._Timing(Measuring(), Triton(row_invariant=False), spec)
    assert timing.packed.out_features == 4672 and timing.packed.in_features == 28672


def test_the_next_process_reads_the_file(gpu, monkeypatch):
    first = Measuring(gpu.clock)
    words = first.measure(choice())
    first.finish()
    assert not list(module.file().parent.glob(".*")), "an unfinished file was left"
    gpu.calls.clear()
    tiles.MEASURED.clear()
    assert Measuring(gpu.clock).measure(choice()) == words
    assert not gpu.calls
    assert tiles.MEASURED
    for change in ({"dtype": torch.float16}, {"group_size": 64}, {"symmetric": False}, {"out_features": 256}):
        spec = changed(SPEC, change)
        monkeypatch.setattr(module, "seconds_of", lambda rows, weight, tile, dtype: gpu.calls.update([1]) or 1.0)
        gpu.calls.clear()
        Measuring(gpu.clock).measure(choice(spec=spec))
        assert gpu.calls, f"{change} is not told apart"


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", "3", '{"a": {"b": {"c": "d"}}}', '{"a": 1}', '{"a": {"b": [1]}}', "\x00\xff"]
)
def test_a_damaged_file_is_measured_again(gpu, damaged):
    module.file().parent.mkdir(parents=True)
    module.file().write_text(damaged, encoding="latin-1")
    measuring = Measuring(gpu.clock)
    measuring.measure(choice())
    assert gpu.calls
    measuring.finish()
    assert next(iter(json.loads(module.file().read_text()))).startswith("a GPU; out_features 512")


def test_impossible_seconds_are_not_believed(gpu):
    measuring = Measuring(gpu.clock)
    measuring.measure(choice())
    measuring.finish()
    stored = json.loads(module.file().read_text())
    timed = next(iter(stored.values()))["8"]
    timed.update({names(8)[0]: -1.0, names(8)[1]: float("inf")})
    module.file().write_text(json.dumps(stored))
    gpu.calls.clear()
    Measuring(gpu.clock).measure(choice())
    assert set(gpu.calls) == {(8, names(8)[0]), (8, names(8)[1])}


def test_a_tile_that_fails_is_left_out_and_named(gpu):
    broken = names(8)[0]
    gpu.seconds = {broken: RuntimeError("out of resource: shared memory\nmore"), names(8)[1]: 0.5}
    words = Measuring(gpu.clock).measure(choice())
    assert f"left out: {broken} (RuntimeError: out of resource: shared memory)" in words
    assert str(tiles.tile_for(1, weight_of(), torch.bfloat16)) == names(8)[1]
    assert gpu.calls[8, broken] == 1
    gpu.seconds = {name: RuntimeError("") for rows in MEASURED_ROWS for name in names(rows)}
    tiles.MEASURED.clear()
    words = Measuring(gpu.clock).measure(choice(spec=changed(SPEC, {"out_features": 256})))
    assert words.startswith("measured: as the rule says beyond; left out: ")
    assert tiles.tile_for(7, weight_of(), torch.bfloat16) == tiles.by_rule(7, weight_of(), torch.bfloat16, "never")


def test_when_time_is_over_the_rule_holds_and_the_next_process_goes_on(gpu, monkeypatch):
    wanted = [(rows, name) for rows in MEASURED_ROWS for name in names(rows)]
    before = [name for rows in MEASURED_ROWS if rows < 64 for name in names(rows)]
    monkeypatch.setattr(module, "SECONDS", 0.01 * (len(before) + 1.5))
    gpu.seconds = {names(8)[-1]: 0.5, names(64)[0]: 0.6, names(64)[-1]: 0.4}
    first = Measuring(gpu.clock)
    words = first.measure(choice())
    first.finish()
    begun = len(before) + 2
    assert f"; {len(wanted) - begun} tiles are left for the next process" in words
    assert list(gpu.calls) == wanted[:begun]
    weight = weight_of()
    assert str(tiles.tile_for(1, weight, torch.bfloat16)) == names(8)[-1]
    assert tiles.tile_for(64, weight, torch.bfloat16) == tiles.by_rule(64, weight, torch.bfloat16, "never")
    monkeypatch.setattr(module, "SECONDS", 100.0)
    gpu.calls.clear()
    assert "left" not in Measuring(gpu.clock).measure(choice())
    assert list(gpu.calls) == wanted[begun:]
    assert str(tiles.tile_for(64, weight, torch.bfloat16)) == names(64)[-1]


def test_two_processes_keep_each_others_measurements(gpu):
    first, second = Measuring(gpu.clock), Measuring(gpu.clock)
    first.measure(choice())
    second.measure(choice("many rows"))
    first.finish()
    second.finish()
    assert len(module.read(module.file())) == 2


def test_a_folder_that_cannot_be_written_to_is_told(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measuring = Measuring(gpu.clock)
    measuring.measure(choice())
    with pytest.warns(
        HfAccelWarning, match="XDG_CACHE_HOME to a folder that can be written to, or HF_ACCEL_MEASURE=0"
    ):
        measuring.finish()
    measuring.finish()


def test_nothing_is_measured_on_a_cpu_in_a_capture_or_when_it_is_switched_off(monkeypatch):
    assert not module.is_measured("cpu")
    monkeypatch.setenv(measured.SWITCH, "1")
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert module.is_measured("cuda") and not module.is_measured("cpu")
    capturing = True
    assert not module.is_measured("cuda")
    capturing = False
    monkeypatch.setenv(measured.SWITCH, "0")
    assert not module.is_measured("cuda")
    assert Measuring().measure(choice()) is None


@pytest.mark.gpu
@pytest.mark.skipif(triton.refusal("cuda") is not None, reason=str(triton.refusal("cuda")))
def test_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv(measured.SWITCH, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "MEASURED", {})
    monkeypatch.setattr(module, "SECONDS", 60.0)
    spec = changed(SPEC, {"device_type": "cuda"})
    measuring = Measuring()
    words = measuring.measure(choice("many rows", spec))
    measuring.finish()
    assert "left" not in words and "the rule" not in words
    (by_rows,) = module.read(module.file()).values()
    assert {int(rows): set(timed) for rows, timed in by_rows.items()} == {
        rows: set(names(rows, "many rows")) for rows in MEASURED_ROWS
    }


def test_each_candidate_is_one_that_is_compiled_for_every_gpu():
    """By the tests of machine code, which know those of `tiles_of`."""
    for dtype in (torch.bfloat16, torch.float32):
        for rounding in ("never", "many rows", "always"):
            known: set[object] = {
                tiles.replace(tile, splits=1) for tile in tiles.tiles_of(weight_of(), dtype, rounding)
            }
            known.add(tiles.Dequantized())
            for rows in (*ROWS, 3, 300, 10**4):
                found = tiles.candidates(rows, weight_of(), dtype, rounding)
                assert found[0] == tiles.by_rule(rows, weight_of(), dtype, rounding)
                whole = {
                    tiles.replace(tile, splits=1) if isinstance(tile, tiles.LinearTile) else tile for tile in found
                }
                assert whole <= known
                assert len({str(tile) for tile in found}) == len(found)
