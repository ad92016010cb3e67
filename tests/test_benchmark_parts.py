"""Pieces of the benchmarks: who takes part, quality, profiles, processes. No clock, no network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_accel
from benchmarks import versions
from benchmarks.harness import corpus, integer_peak
from benchmarks.harness.bench import Bench
from benchmarks.harness.machine import core
from benchmarks.harness.models import load_model
from benchmarks.harness.processes import ProcessError, call
from benchmarks.harness.settings import Settings
from benchmarks.setups import SETUPS, accel
from benchmarks.topics import attention_peak, isa, kv, memory, prefill, profile_step, quality, rows
from benchmarks.topics.profile_step import SelfTimes
from benchmarks.topics.quality import Variant, joined, make_variants, predictions, score
from hf_accel.fused import layer_programme
from hf_accel.hardware import device
from hf_accel.kernels import cpu as kernels


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("tiny")


def bench_of(**settings: Any) -> Bench:
    return Bench(Settings(**{"model": "tiny", "context": 20, "setups": ("hf_accel int8",), **settings}))


# -- who takes part -------------------------------------------------------------------------------------


def test_competitors_that_do_not_take_part_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    bench = bench_of(setups=())
    assert [setup.name for setup in bench.setups if setup.is_peer] == []
    assert set(bench.refused) == {setup.name for setup in SETUPS if setup.is_peer or setup.only_named}
    assert bench.refused["llama.cpp Q4_0"] == "llama_cpp is not installed"
    assert bench.refused["OpenVINO int8"] == "openvino is not installed"
    assert "name it in --setups" in bench.refused["torchao int8 compiled"]


# -- text to train on -----------------------------------------------------------------------------------


def test_what_is_measured_on_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a module of the held-out text, nor one that is mostly copied from it."""
    own = [[f"value_{name}_{i} = some_function_of({name!r}, {i}, 'line')" for i in range(20)] for name in "abc"]
    held_out, near, new = own[0], own[0][10:13] + own[1][:17], own[0][10:11] + own[2]
    modules = ["\n".join(lines) for lines in (held_out, near, new)]
    monkeypatch.setattr(corpus, "standard_library", lambda: modules)
    seen = list[str]()
    monkeypatch.setattr(
        corpus, "tokens_of", lambda tokenizer, texts, order, least: seen.extend(texts) or torch.arange(9)
    )
    corpus.training_windows(None, "first = 1\n" + modules[0] + "\n", count=1, length=2, seed=0)
    assert seen == [modules[2]]


# -- prefill, rows, memory -----------------------------------------------------------------------------


def test_operations_of_a_prefill() -> None:
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    assert prefill.operations(bench_of()) == 2 * (20 * 2 * layer + 512 * 256)


def test_an_int8_peak_is_two_operations_per_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "least_seconds", lambda run, device: (run(), 0.25)[1])
    assert integer_peak._integer_peak.__wrapped__("cpu", 1) == 2 * 512**3 / 0.25


def test_without_an_int8_matmul_there_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(size: int, *, device: str) -> Any:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(integer_peak, "onednn_matmul", missing)
    monkeypatch.setattr(integer_peak, "int_matmul", missing)
    assert integer_peak._integer_peak.__wrapped__("cpu", 1) is None


@pytest.mark.parametrize("build", [integer_peak.onednn_matmul, integer_peak.int_matmul])
def test_the_int8_matmuls_multiply_integers(build: Any) -> None:
    try:
        product = build(64, device="cpu")()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"not in this build of torch: {error}")
    # oneDNN's operand is unsigned with zero point 128: a one stands for -127
    assert product.float().unique().tolist() == [64.0 if build is integer_peak.int_matmul else -127.0 * 64]


def test_linears_of_all_layers_and_small_ones_in_pairs() -> None:
    entrant = bench_of().entrants["hf_accel int8"]
    assert len(rows.linears_of(entrant, "mlp.down_proj")) == len(rows.linears_of(entrant, "lm_head")) + 1 == 2
    assert len(rows.linears_of(entrant, "self_attn.k_proj")) == 4


def test_rows_are_compared_with_one() -> None:
    medians = {("stock", 1): 3.0, ("int8", 1): 1.0, ("int8", 4): 1.5}
    row = rows.row("int8", medians, 3.0, (1, 4))
    assert row == {"setup": "int8", "ratio": 3.0, "one_row_seconds": 1.0, "4_rows_ratio": 1.5}


def test_growth_of_peaks() -> None:
    assert memory.growth((1024, 4096), (10, 40)) == pytest.approx(1)
    assert memory.growth((1024, 4096, 8192), (10, 160, None)) == pytest.approx(2)
    assert memory.growth((1024, 4096), (10, None)) is None


def test_a_length_that_would_not_fit_is_left_out() -> None:
    assert attention_peak.fits([], 8192, None)
    assert attention_peak.fits([10**8], 8192, 2048)
    assert not attention_peak.fits([10**8, 16 * 10**8], 32768, 8192)
    assert not attention_peak.fits([None], 32768, 8192)


# -- quality -------------------------------------------------------------------------------------------


def test_predictions_in_chunks_are_those_of_one_pass(model: PreTrainedModel) -> None:
    ids = bench_of().tokens(batch=1, length=130)
    chunks = list(predictions(Variant(model, None), ids))
    assert [len(chunk) for chunk in chunks] == [64, 64, 1]
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    torch.testing.assert_close(torch.cat(chunks), expected, atol=0.02, rtol=0.02)


def test_scores_against_their_definitions(model: PreTrainedModel) -> None:
    ids = bench_of().tokens(batch=1, length=70)
    actual, expected = torch.randn(2, 5, 7).log_softmax(-1)
    scores = quality.compare(actual, expected, torch.tensor([[1, 2, 3, 4, 5]]))
    assert scores.losses.tolist() == pytest.approx([-float(actual[i, i + 1]) for i in range(5)])
    by_torch = torch.nn.functional.kl_div(actual, expected, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(scores.divergences, by_torch)
    assert joined([scores, scores]).same_top.shape == (10,)
    variants = {"stock": Variant(model, None)}
    loss = float(score(variants, ids)["stock"].losses.mean())
    with torch.no_grad():
        assert loss == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-2)


def test_variants_share_no_patch(model: PreTrainedModel) -> None:
    variants = make_variants(model)
    assert not hf_accel.is_patched(model)
    assert isinstance(variants["int8 with int8 KV"].new_cache(), hf_accel.PagedCache)
    assert variants["int8 with int8 KV"].new_cache().settings.dtype == "int8"
    assert variants["int8"].model is variants["int8 with int8 KV"].model


def test_contexts_are_those_that_the_model_has_positions_for() -> None:
    assert list(kv.lengths((2048, 4096, 8192), 4096)) == [2048, 4096]
    assert list(kv.lengths((2048, 4096), 512)) == [512]


def test_a_model_of_random_weights_has_no_perplexity() -> None:
    assert quality.checkpoint(Settings()).endswith("stdlib-tiny")
    assert quality.checkpoint(Settings(model="some/model")) == "some/model"


# -- profiles ------------------------------------------------------------------------------------------


def test_own_time_leaves_out_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(profile_step.time, "perf_counter", lambda: now[0])
    times = SelfTimes()

    def work(seconds: float, *inner: Any) -> None:
        now[0] += seconds
        for run in inner:
            run()

    leaf = times.wrap("leaf", lambda: work(2.0))
    layer = times.wrap("layer", lambda: work(1.0, leaf, leaf))
    times.wrap("model", lambda: work(0.5, layer, leaf))()
    assert times.seconds == {"leaf": 6.0, "layer": 1.0, "model": 0.5}


def test_profiling_leaves_no_trace() -> None:
    bench = bench_of(batch_tokens=3)
    entrant = bench.entrants["hf_accel int8"]
    before = {name: dict(vars(module)) for name, module in entrant.model.named_modules()}
    times, run_layer = SelfTimes(), layer_programme.run_layer
    profile_step.run(bench, entrant, times)
    assert {profile_step.WHOLE, profile_step.AROUND, "linear: head", "norms"} <= set(times.seconds)
    assert all(seconds > 0 for seconds in times.seconds.values())
    assert layer_programme.run_layer is run_layer
    after = {name: dict(vars(module)) for name, module in entrant.model.named_modules()}
    assert [n for n in after if after[n].get("forward") is not before[n].get("forward")] == []


# -- processes and instruction sets --------------------------------------------------------------------


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ProcessError, match="no_such_measurement"):
        call("no_such_measurement", 1)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_levels_are_those_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        instruction_sets = ("avx2", "fma3")

    monkeypatch.setattr(isa, "detect", Old)
    assert isa.levels() == ["avx2"]
    monkeypatch.setattr(Old, "instruction_sets", ("avx2", "fma3", "avx_vnni"))
    assert isa.levels() == ["avx_vnni", "avx2"]


def test_int8_keys_and_values_count_half() -> None:
    from benchmarks.harness.bench import Entrant
    from benchmarks.topics.decode import kv_bytes

    bench = bench_of()
    wide, narrow = (
        kv_bytes(bench, Entrant(s, bench.model, 0.0, {}), batch=2, context=20) for s in (accel.INT8, accel.INT8_KV)
    )
    assert math.isclose(wide / narrow, 2 * 64 / (64 + 2), rel_tol=0.02)


# -- this tree against another -----------------------------------------------------------------------------


class Clock:
    """Stands for the process of a work tree: each answer is the next of its seconds."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def run(self, workload: str) -> dict[str, float]:
        return {"step": self.seconds.pop(0)}


def test_two_trees_are_compared_pair_by_pair() -> None:
    """The first round warms up; a machine that becomes slower for both changes nothing."""
    before, now = Clock(9, 2, 4, 8), Clock(1, 1, 2, 4)
    (row,) = versions.compare(before, now, "w", rounds=3)  # type: ignore[arg-type]
    assert row == {
        "workload": "w, step", "before_seconds": 4, "now_seconds": 2,
        "ratio": pytest.approx(2), "low_ratio": pytest.approx(2), "high_ratio": pytest.approx(2),
    }  # fmt: skip


def test_the_interval_holds_the_mean_and_shrinks_with_rounds() -> None:
    few, many = [0.1, -0.1, 0.2], [0.1, -0.1, 0.2] * 9
    assert versions.interval(few)[0] <= sum(few) / 3 <= versions.interval(few)[1]
    widths = [high - low for low, high in map(versions.interval, (few, many))]
    assert widths[1] < widths[0] / 2


@pytest.mark.long
def test_a_tree_against_itself(tmp_path: Path) -> None:
    settings = ["--rounds", "1", "--only", "decode small exact 1", "--even-busy", "--out", str(tmp_path)]
    versions.main([str(versions.HERE), *settings])
    (table,) = json.loads((tmp_path / "versions.json").read_text())["tables"]
    assert table["rows"][0]["ratio"] > 0


# -- the machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vendor, family, model, name",
    [
        ("AuthenticAMD", 23, 0x71, "Zen 2"),
        ("AuthenticAMD", 25, 0x01, "Zen 3"),
        ("AuthenticAMD", 25, 0x11, "Zen 4"),
        ("AuthenticAMD", 25, 0x50, "Zen 3"),
        ("AuthenticAMD", 25, 0xA0, "Zen 4"),
        ("AuthenticAMD", 26, 0x02, "Zen 5"),
        ("AuthenticAMD", 27, 0x00, None),
        ("GenuineIntel", 6, 0x8F, None),
    ],
)
def test_cores_of_amd_are_told_apart(vendor: str, family: int, model: int, name: str | None, tmp_path: Path) -> None:
    """Virtual machines give all of them one name, and their results would stand in one folder."""
    (tmp_path / "proc").mkdir()
    one = f"processor : 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n"
    (tmp_path / "proc" / "cpuinfo").write_text(one + "\n" + one)
    assert core(tmp_path) == name


def test_a_machine_that_does_not_say_its_core(tmp_path: Path) -> None:
    assert core(tmp_path) is None
