"""The benchmarks run end to end on a tiny model, and their arithmetic is right. Nothing here depends on a clock."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    ViTConfig,
    ViTModel,
)

import hf_accel
from benchmarks import plots, run
from benchmarks.harness import checks, kind_shapes, quiet, results_folder
from benchmarks.harness.bench import Bench
from benchmarks.harness.checks import check
from benchmarks.harness.machine import NoKernelsError, loaded_kernels, machine
from benchmarks.harness.models import BLOCK, cut, load_model, random_model, read_bytes, tensor_bytes, weight_bytes
from benchmarks.harness.peak import peak_bytes, peaks, resident
from benchmarks.harness.processes import call
from benchmarks.harness.requests import median_ratio
from benchmarks.harness.results_folder import beside, provenance, replace, write
from benchmarks.harness.settings import Drafters, Drafts, Latency, Methods, NeverSlower, Settings, Waste
from benchmarks.harness.tables import Table, cell
from benchmarks.setups import SETUPS
from benchmarks.setups.stock import Stock
from benchmarks.topics import (
    decode,
    distill_memory,
    drafts,
    encoder_accuracy,
    encoders,
    experts,
    float_rows,
    http_load,
    isa,
    kinds,
    kv,
    ladder,
    memory,
    never_slower,
    patch_memory,
    scale_out,
    structured,
    students,
    tiles,
    weight_formats,
)
from benchmarks.topics.waste import lengths
from hf_accel.checkpoints.load import load_tokenizer
from hf_accel.cli.measurement import Generation, WrongResultError, take_turns, time_generate
from hf_accel.hardware.file_pages import PAGEMAP
from hf_accel.kernels import cpu as kernels
from hf_accel.patching.twin import twin

from .serving.running import serving

SMALL = ["--model", "tiny", "--context", "20", "--rounds", "1", "--quick", "--even-busy"]
OURS = "hf_accel exact,hf_accel int8,hf_accel int4"
SIZES = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_DELTA = SIZES | {
    "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
TINY_TEXT = {"delta": kind_shapes.TextShape(Qwen3_5ForCausalLM, lambda: Qwen3_5TextConfig(**TINY_DELTA))}
TINY_TRANSLATOR = {
    "vocab_size": 512, "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip
TINY_MORE = {
    "words": kind_shapes.InputShape(
        M2M100ForConditionalGeneration, lambda: M2M100Config(**TINY_TRANSLATOR), kind_shapes.sentences,
        beams=2, new_tokens=3,
    )
}  # fmt: skip
FEW = {
    "cases": (("tiny", "bfloat16"), ("tiny", "float32")), "batches": (2,), "prompts": (8,), "context": 20, "turn": 0.0,
    "towers": ("tiny tower",), "images": (1,),
}  # fmt: skip


FEWER: dict[Any, dict[str, Any]] = {  # of the settings with --quick
    Methods: {"windows": 1, "length": 128},
    Latency: {"requests": 3},
    Drafts: {"rows": 1, "length": 32, "measured": 64, "prompts": 1},
    Drafters: {"prompt": 64, "new_tokens": 8},
}
TOWER = {
    "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256, "image_size": 32,
}  # fmt: skip
FEW_NUMBERS = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("tiny")


def bench_of(**settings: Any) -> Bench:
    return Bench(Settings(**{"model": "tiny", "context": 20, "setups": tuple(OURS.split(",")), **settings}))


# -- end to end ----------------------------------------------------------------------------------------


TABLES = {  # topic -> rows of each of its tables
    "decode": [4, 4],
    "long_decode": [5, 5],
    "generate": [4],
    "prefill": [4],
    "rows": [4, 4, 4, 4, 4, 4],
    "profile": [13, 9, 9, 9],  # stock's layers module by module
    "estimates": [12],
    "memory": [4, 3, 4, 4],
    "patch": [3],
    "patch_memory": [15],
    "ladder": [7, 4],
    "structured": [1, 1, 3],
    "waste": [3],
    "isa": [5],
    "tiles": [4] * 8,
    "float_rows": [2] * 6,
    "weight_formats": [2, 4, 6],
    "encoders": [2, 1, 2, 3],  # a model of words, one of images, their cosines, and a classifier
    "experts": [2, 2],
    "kinds": [12, 4],  # two batches and a prompt; requests with beams
    "never_slower": [12, 2, 2, 1],
    "quality": [10],
    "methods": [5 + (importlib.util.find_spec("bitsandbytes") is not None)],
    "kv": [6],
    "small_model": [5],
    "batching": [6, 4],
    "latency": [5],
    "http_load": [5, 10],
    "scale_out": [4 if importlib.util.find_spec("ray") else 2] * 2,
    "shared_prompts": [3, 4],
    "adapters": [9],
    "speculation": [5, 5, 2],
    "drafters": [12],
    "students": [2, 2],
    "student_speed": [3],
    "ablation": [10],
    "drafts": [3, 7, 5, 4],
    "distill_memory": [4],
}


# What takes longest, and whose numbers no other test looks at.
LONG = (
    "methods", "small_model", "weight_formats", "kinds", "tiles", "http_load", "students", "student_speed", "ablation",
    "drafts", "structured",
)  # fmt: skip
SHORT = tuple(topic for topic in run.TOPICS if topic not in LONG)
PARTS = [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Returns the results of SHORT or LONG, which the first process of the tests that asks makes for the others."""
    if kernels.refusal() is not None:
        pytest.skip(str(kernels.refusal()))
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(topics: tuple[str, ...]) -> Path:
        out = base / ("short topics" if topics == SHORT else "long topics") / "results"
        whole = out.parent / "whole"
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out.parent / "lock"):
            if not whole.exists():
                measure_topics(out, topics)
                whole.touch()
        return out

    return folder_of


@pytest.fixture
def folder(folder_of: Callable[[tuple[str, ...]], Path]) -> Path:
    return folder_of(SHORT)


def even_quicker(quicker: Callable[[Any], Any], fewer: dict[str, Any]) -> Callable[[Any], Any]:
    """What --quick makes of a group of settings, with even fewer of some."""
    return lambda group: replace_fields(quicker(group), **fewer)


def measure_topics(out: Path, topics: tuple[str, ...]) -> None:
    """Run topics; processes of their own are calls here, to save their seconds of imports."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "generate.. decodes without drafts")  # of models that are too small for them
        for module in (memory, patch_memory, isa, distill_memory):
            patch.setattr(module, "call", call_here)
        for module in (students, drafts):
            patch.setattr(module, "call_all", lambda name, fields: [call_here(name, json.dumps(f)) for f in fields])
        patch.setattr(drafts, "DRAFTS", out.parent / "drafts")
        patch.setattr(isa, "levels", lambda: ["avx2"])
        patch.setattr(http_load, "started", served_here)
        patch.setattr(http_load, "llama_server", lambda: None)
        for name in ("run_ray", "run_accelerate"):
            patch.setattr(scale_out, name, answered_here)
        patch.setattr(tiles, "LEVELS", ("amx", "avx2_tiles"))
        patch.setattr(NeverSlower, "quicker", lambda self: replace_fields(self, **FEW))
        patch.setitem(never_slower.TOWERS, "tiny tower", lambda: ViTModel(ViTConfig(**TOWER)))
        for kind, fewer in FEWER.items():
            patch.setattr(kind, "quicker", even_quicker(kind.quicker, fewer))
        few_shapes = {"SHAPES": ((64, 96), (96, 64)), "BY_INPUTS": ((96, 32), (32, 64))}
        for name, value in {**few_shapes, "COLD_BYTES": 0, "SECONDS": 0}.items():
            patch.setattr(float_rows, name, value)
        for name, value in {"SHAPES": ((64, 96), (96, 64)), "COLD_BYTES": 0, "ROUNDS": 1, "NEW_TOKENS": 2}.items():
            patch.setattr(weight_formats, name, value)
        patch.setattr(weight_formats, "GPT_OSS", weight_formats.GPT_OSS | weight_formats.SMALL)
        patch.setattr(weight_formats, "DENSE", weight_formats.DENSE | FEW_NUMBERS)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        for name, value in {
            "MODELS": {
                "words": encoders.Encoder(
                    lambda: BertModel(BertConfig(**sizes)), {"1 x 16": [16], "of 3 and 5": [3, 5]}
                ),
                "images": encoders.Encoder(lambda: ViTModel(ViTConfig(**sizes)), {"1 image": [1]}, images=True),
            },
            "QUICK": ("words", "images"),
            "SECONDS": 0,
        }.items():
            patch.setattr(encoders, name, value)
        for name, value in {"SIZES": sizes, "STEPS": 16, "TESTED": 256}.items():
            patch.setattr(encoder_accuracy, name, value)
        patch.setattr(kv, "lengths", lambda wanted, most: [256])
        patch.setattr(structured, "MOST_TOKENS", 16)
        patch.setattr(structured, "coverage", partial(structured.coverage, count=12))
        few = (experts.Shape(4, 2, 64, 32, 1), experts.Shape(8, 3, 32, 64, 2))
        for name, value in {"SHAPES": few, "TOKENS": (1, 5), "GROUP": 32}.items():
            patch.setattr(experts, name, value)
        for name, value in {
            "TEXT": TINY_TEXT,
            "MORE": TINY_MORE,
            "BATCHES": (1, 2),
            "SHORT": 4,
            "REQUESTS": 2,
        }.items():
            patch.setattr(kinds, name, value)
        patch.setattr(quiet, "busy_cores", lambda seconds: 0.0)
        run.main([*topics, *SMALL, "--tokens", "100", "--setups", OURS, "--out", str(out)])


def call_here(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """processes.call without the process and the environment."""
    gc.freeze()  # a process of its own has less that a collection of garbage looks at
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        importlib.import_module(f"benchmarks.topics.{module}").main(*map(type_of(module), arguments))
    return json.loads(printed.getvalue().splitlines()[-1])


@contextlib.contextmanager
def served_here(system: http_load.System, path: Path) -> Iterator[str]:
    """http_load.started without its process: ours stands for all servers."""
    with serving(path, chat_template=None) as running:
        yield running.root


def answered_here(work: scale_out.Work, workers: int, threads: int) -> scale_out.Done:
    """scale_out's examples without their processes."""
    model = hf_accel.load(work.folder / "model")
    prompts = json.loads((work.folder / "prompts.json").read_text())
    tokenizer = load_tokenizer(str(work.folder / "model"))
    outputs = model.generate_batch(
        [tokenizer(prompt)["input_ids"] for prompt in prompts], max_new_tokens=work.asked.new_tokens, do_sample=False
    )
    tokens = [output.generated_tokens for output in outputs.values()]
    return scale_out.Done(1.0 / workers, 2.0, sum(map(len, tokens)), tokenizer.batch_decode(tokens))


def type_of(module: str) -> type:
    return int if module == "attention_peak" else str


@pytest.fixture
def read(folder_of: Callable[[tuple[str, ...]], Path]) -> Callable[[str], dict[str, Any]]:
    return lambda topic: json.loads((folder_of(LONG if topic in LONG else SHORT) / f"{topic}.json").read_text())


def test_every_topic_is_tested() -> None:
    assert set(TABLES) == set(run.TOPICS)


@pytest.mark.parametrize(
    "topic", [pytest.param(topic, marks=pytest.mark.long if topic in LONG else ()) for topic in run.TOPICS]
)
def test_every_topic_writes_rows_for_every_setup(read: Callable[[str], dict[str, Any]], topic: str) -> None:
    result = read(topic)
    assert [len(table["rows"]) for table in result["tables"]] == TABLES[topic]
    for row in (row for table in result["tables"] for row in table["rows"]):
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, (int, float)))
        assert all(value > 0 for name, value in row.items() if isinstance(value, float) and name.endswith("seconds"))


def test_encoders_are_near_to_stock(read: Callable[[str], dict[str, Any]]) -> None:
    *speeds, cosines, accuracy = read("encoders")["tables"]
    for row in cosines["rows"]:
        assert row["exact_cosine"] > 1 - 1e-9
        assert 0.999 < row["int8_cosine"] < 1 - 1e-9
    for row in (row for table in speeds for row in table["rows"]):
        assert row["exact_ratio"] > 0 and row["int8_ratio"] > 0
    assert [row["kept_share"] for row in accuracy["rows"][:2]] == [1, 1]


@torch.inference_mode()
def test_a_runtime_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    small = encoders.Encoder(lambda: BertModel(BertConfig(**sizes)), {"of 3 and 5": [3, 5]})
    monkeypatch.setattr(encoders, "MODELS", {"small": small})
    monkeypatch.setattr(encoders, "why_missing", lambda name: None)

    def runtimes(model: torch.nn.Module, *_: Any) -> dict[str, Any]:
        def without_mask() -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
            return lambda given: model(input_ids=given["input_ids"]).last_hidden_state.flip(-1)

        right = lambda: encoders.hidden_of(model)  # noqa: E731
        return {"onnxruntime": without_mask, "openvino": right, "openvino_int8": without_mask}

    monkeypatch.setattr(encoders, "runtimes", runtimes)
    (row,), close = encoders.measured("small", 0, 0.0, tmp_path)
    assert row["onnxruntime_ratio"] is None
    assert row["openvino_ratio"] > 0
    assert row["openvino_int8_ratio"] > 0  # its rounding is only shown
    assert close["onnxruntime_cosine"] < encoders.LEAST_COSINE
    assert close["left_out"].startswith("onnxruntime: its outputs have a cosine of ")


def test_stock_is_its_own_baseline(read: Callable[[str], dict[str, Any]]) -> None:
    for table in [
        table for topic in ("decode", "long_decode", "generate", "prefill") for table in read(topic)["tables"]
    ]:
        assert table["rows"][0]["setup"] == "stock"
        assert table["rows"][0]["ratio"] == 1


def test_a_result_says_where_and_how_it_came_about(read: Callable[[str], dict[str, Any]]) -> None:
    result = read("decode")
    assert result["command"].startswith(f"python -m benchmarks.run {' '.join(SHORT)} --model tiny")
    assert result["settings"]["context"] == 20
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert result["machine"]["read_bytes_per_second"] > 1e8
    assert result["machine"]["kernels"] == loaded_kernels()
    assert result["machine"]["busy_cores"] is None or result["machine"]["busy_cores"] >= 0
    assert f"kernels {loaded_kernels()}, others took " in provenance(result)
    assert result["versions"]["hf_accel"] == hf_accel.__version__
    assert torch.__version__.startswith(result["versions"]["torch"])  # the package may leave out "+cu132"
    assert [row["setup"] for row in result["verified"]] == ["stock", *OURS.split(",")]
    assert all(row["logits_error"] <= row["tolerance"] for row in result["verified"])
    assert "choices" not in result["verified"][0]
    assert any(line.startswith("generate, greedy, sampling: ragged") for line in result["verified"][1]["choices"])


def test_the_products_of_the_ladder_are_those_of_its_factors(read: Callable[[str], dict[str, Any]]) -> None:
    product = 1.0
    for row in read("ladder")["tables"][0]["rows"]:
        product *= row["factor_ratio"]
        assert row["product"] == pytest.approx(product)
    assert product == pytest.approx(ladder_end_to_end(read("ladder")))


def ladder_end_to_end(result: dict[str, Any]) -> float:
    rows = result["tables"][0]["rows"]
    return rows[0]["token_seconds"] / rows[-1]["token_seconds"]


# -- the engine ----------------------------------------------------------------------------------------


def test_ratios_of_the_batching_topic(read: Callable[[str], dict[str, Any]]) -> None:
    main, laws = read("batching")["tables"]
    padded, continuous, *ours = main["rows"]
    assert padded["ratio"] == continuous["generate_batch_ratio"] == 1
    assert padded["waste_share"] > 0 == continuous["waste_share"]
    assert all(row["waste_share"] == 0 for row in ours)  # every request ran once, and nothing was padded
    for row in main["rows"]:
        assert row["ratio"] == pytest.approx(padded["serve_seconds"] / row["serve_seconds"])
    rows = {row["output_lengths"]: row for row in laws["rows"]}
    assert list(rows)[:2] == ["fixed, mean 8", "uniform, mean 8"]
    assert rows["fixed, mean 8"]["variation"] == 0 < rows["uniform, mean 8"]["variation"]
    means = [row["mean"] for name, row in rows.items() if name.startswith("exponential")]
    assert means == pytest.approx([4, 8], rel=0.2)


def test_latencies_are_in_order(read: Callable[[str], dict[str, Any]]) -> None:
    for row in read("latency")["tables"][0]["rows"]:
        assert 0 < row["first_p50_seconds"] <= row["first_p99_seconds"]
        assert 0 <= row["between_p50_seconds"] <= row["between_p99_seconds"]


def test_what_prompts_share_is_computed_and_stored_once(read: Callable[[str], dict[str, Any]]) -> None:
    (stock, *ours), requests = (table["rows"] for table in read("shared_prompts")["tables"])
    assert stock["computed_tokens"] == 4 * (20 + 8 - 5)  # of 4 new tokens the last is never fed
    assert [row["computed_tokens"] for row in ours] == [20 + 4 * 3] * 2
    assert [row["stored_tokens"] for row in ours] == [16 * (1 + 4)] * 2
    assert requests[0]["computed_tokens"] == 4 * (20 + 32 + 3)
    assert [row["computed_tokens"] for row in requests[2:]] == [4 * (20 + 32 + 3) - 3 * 16] * 2


def test_oracles_accept_what_they_should(read: Callable[[str], dict[str, Any]]) -> None:
    *batches, nothing = (table["rows"] for table in read("speculation")["tables"])
    for row in (row for rows in batches for row in rows):
        if row["acceptance"] == 0:
            assert row["tokens_per_pass"] == 1
            assert not row["first_accepted_share"]
        elif row["num_draft"] == 3:
            assert 2 < row["tokens_per_pass"] < 4
            assert 0.6 < row["first_accepted_share"] <= 1
    assert [row["batch"] for row in nothing] == [1, 4]


def test_what_is_slower_than_stock_is_counted(read: Callable[[str], dict[str, Any]]) -> None:
    summary, half, single, tower = read("never_slower")["tables"]
    assert [row["work"] for row in tower["rows"]] == ["images: 1"]
    assert [row["work"] for row in half["rows"]] == ["decode, batch 2", "prefill of 8"]
    assert {row["faster"] for row in half["rows"]} <= {"stock", "stock float32"}
    assert {row["faster"] for row in single["rows"]} == {"stock"}
    for row, label in zip(summary["rows"], never_slower.OURS, strict=False):
        ratios = [work[f"{label}_ratio"] for work in half["rows"]]
        assert row["model"] == f"tiny, bfloat16, {label}"
        assert row["lowest_ratio"] == min(ratios)
        assert row["slower"] == sum(ratio < 0.97 for ratio in ratios) >= row["surely_slower"]


def test_the_faster_stock_counts_and_a_hopeless_one_is_left_out() -> None:
    """Stock takes four times as long as in float32 with one row, so that it is not asked about eight."""
    seconds = {
        ("stock", 1): 4.0, ("stock float32", 1): 1.0, ("exact", 1): 2.0, ("stock float32", 8): 4.0, ("exact", 8): 2.0,
    }  # fmt: skip
    runs: Any = {f"{rows} rows": partial(lambda rows, name: seconds[name, rows], rows) for rows in (1, 8)}
    bench: Any = SimpleNamespace(description="m", settings=Settings(rounds=1, never_slower=NeverSlower(turn=0.0)))
    stocks: Any = {name: name for name in ("stock", "stock float32")}
    ours: Any = {"exact": "exact"}
    one, eight = never_slower.rows_of(bench, runs, stocks, ours, warm_up=False)
    assert (one["faster"], one["stock_seconds"], one["exact_ratio"]) == ("stock float32", 1.0, 0.5)
    assert (eight["exact_ratio"], eight["exact_least_ratio"], eight["spread_share"]) == (2.0, 2.0, 0.0)


def test_forms_of_the_distillation_loss_agree(read: Callable[[str], dict[str, Any]]) -> None:
    result = read("distill_memory")
    assert result["model"] == "random heads of width 256"
    (table,) = result["tables"]
    assert table["title"].startswith("distillation loss, 32000 classes, 80 tokens")
    assert table["rows"][0]["ratio"] == 1
    values = {"torch": [1.0, 2.0], "logits": [1.0, 2.0], "fused": [1.0, 2.001]}
    with pytest.raises(WrongResultError, match="fused: loss and norms"):
        distill_memory.check({form: {"values": found} for form, found in values.items()})


def test_drafters_that_are_not_there_are_named(read: Callable[[str], dict[str, Any]]) -> None:
    result = read("drafters")
    assert result["model"] == "stdlib-tiny"
    assert "name a checkpoint with --draft" in result["refused"]["draft model"]
    names = [row["drafter"] for row in result["tables"][0]["rows"]]
    assert names[:4] == ["editing: none", "editing: ngram", "editing: suffix", "editing: self-int4"]
    assert all(row["tokens_per_pass"] >= 1 for row in result["tables"][0]["rows"])


@pytest.mark.parametrize("topics", PARTS)
def test_paths_stay_on_the_machine(folder_of: Callable[[tuple[str, ...]], Path], topics: tuple[str, ...]) -> None:
    folder = folder_of(topics)
    for path in folder.glob("*.json"):
        assert str(folder.parent) not in path.read_text()


@pytest.mark.parametrize("topics", PARTS)
def test_plots_lie_beside_their_numbers(folder_of: Callable[[tuple[str, ...]], Path], topics: tuple[str, ...]) -> None:
    folder = folder_of(topics)
    plotted = {path.stem for path in folder.glob("*.png")}
    assert plotted == (set(plots.PLOTS) & set(topics) if importlib.util.find_spec("matplotlib") else set())
    text = (folder / "README.md").read_text()
    assert all(f"![{topic}]({topic}.png)" in text for topic in plotted)


def test_no_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "batching.png").write_bytes(b"old")
    assert "matplotlib is not installed" in plots.draw(tmp_path, {"topic": "batching", "model": "m", "tables": []})
    assert not list(tmp_path.iterdir())


def test_the_readme_is_made_from_all_files(folder: Path, read: Callable[[str], dict[str, Any]]) -> None:
    text = (folder / "README.md").read_text()
    for topic in SHORT:
        assert f"\n## {topic}\n" in text
    for row in read("decode")["tables"][0]["rows"]:
        assert f"| {row['setup']} | {row['ratio']:,.2f}x |" in text
    assert not list(folder.glob("*.new"))


def test_sizes_of_the_memory_topic(read: Callable[[str], dict[str, Any]]) -> None:
    weights, kv, _, _ = read("memory")["tables"]
    size = {row["setup"]: row["weight_bytes"] for row in weights["rows"]}
    assert size["hf_accel int4"] < size["hf_accel int8"] < size["stock"] == size["hf_accel exact"]
    assert [row["cache"] for row in kv["rows"]] == ["stock", "paged", "paged int8"]
    assert kv["rows"][1]["kv_bytes"] / kv["rows"][2]["kv_bytes"] == pytest.approx(2 * 64 / (64 + 2))  # head_dim 64


def test_every_way_to_a_quantized_model_ends_at_the_same_bytes(read: Callable[[str], dict[str, Any]]) -> None:
    stock, *ways, fitted = read("patch_memory")["tables"][0]["rows"]
    assert fitted["result_bytes"] < 0.6 * stock["result_bytes"] and fitted["weights"] in ("int8", "int4")
    sizes = {row["weights"]: {w["result_bytes"] for w in ways if w["weights"] == row["weights"]} for row in ways}
    assert [len(values) for values in sizes.values()] == [1, 1, 1]
    assert max(sizes["int4"]) < max(sizes["int8"]) < stock["result_bytes"]
    assert sizes["as they are"] == {stock["result_bytes"]}


def test_smaller_keys_and_values_lose_more(read: Callable[[str], dict[str, Any]]) -> None:
    rows = {row["keys_and_values"]: row for row in read("kv")["tables"][0]["rows"]}
    assert rows["stock"]["kl_nats"] == 0 <= rows["auto"]["kl_nats"] < rows["int8"]["kl_nats"] < rows["int4"]["kl_nats"]
    assert rows["int4"]["token_bytes"] < rows["int8"]["token_bytes"] == rows["fp8"]["token_bytes"]
    assert rows["int8"]["token_bytes"] < rows["auto"]["token_bytes"] == rows["stock"]["token_bytes"]


def test_perplexity_of_the_shipped_model(read: Callable[[str], dict[str, Any]]) -> None:
    result = read("quality")
    assert result["model"] == "stdlib-tiny"
    rows = {row["weights"]: row for row in result["tables"][0]["rows"]}
    assert rows["stock"]["kl_nats"] == rows["stock"]["change_percent"] == 0
    assert 0 < rows["int8"]["kl_nats"] < rows["int4, groups of 32"]["kl_nats"] < rows["int4, groups of 128"]["kl_nats"]
    assert rows["int8"]["kl_nats"] != rows["int8 with int8 KV"]["kl_nats"]  # the cache is read, and rounded
    for row in rows.values():
        assert math.log(row["perplexity"] / rows["stock"]["perplexity"]) == pytest.approx(
            math.log1p(row["change_percent"] / 100)
        )


class Begun(Exception):
    """A topic has begun."""


def begin(bench: Bench) -> list[Table]:
    raise Begun


def test_nothing_is_measured_without_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch's fallback would stand in the file as hf_accel."""
    lacking = SimpleNamespace(refusal=lambda: "cpu kernels: not built (no compiler)")
    monkeypatch.setattr(importlib.import_module("benchmarks.harness.machine"), "kernels", lacking)
    monkeypatch.setitem(run.TOPICS, "decode", begin)
    monkeypatch.setattr(quiet, "busy_cores", lambda seconds: 0.0)
    argv = ["decode", *SMALL, "--out", str(tmp_path)]
    with pytest.raises(NoKernelsError, match=r"not built \(no compiler\): .*or pass --even-without-kernels"):
        run.main(argv)
    assert loaded_kernels() == "cpu kernels: not built (no compiler)"
    with pytest.raises(Begun):
        run.main([*argv, "--even-without-kernels"])


def test_a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = iter([1.5, 0.4, 0.1])
    monkeypatch.setattr(quiet, "busy_cores", lambda seconds: next(seen))
    monkeypatch.setattr(quiet, "SAMPLE", 0.0)
    assert quiet.wait_until_quiet(even_busy=False) == 0.1
    monkeypatch.setattr(quiet, "busy_cores", lambda seconds: 1.5)
    monkeypatch.setattr(quiet, "PATIENCE", -1.0)
    monkeypatch.setitem(run.TOPICS, "decode", begin)
    argv = ["decode", *[option for option in SMALL if option != "--even-busy"], "--out", str(tmp_path)]
    argv += [] if kernels.refusal() is None else ["--even-without-kernels"]
    with pytest.raises(quiet.BusyMachineError, match=r"other processes take 1\.5 cores, .*or pass --even-busy"):
        run.main(argv)
    assert quiet.wait_until_quiet(even_busy=True) == 1.5


def test_a_file_of_before_says_what_it_knows() -> None:
    assert beside({"load_average": 2.75}) == "load 2.8"
    assert beside({"load_average": None}) == "load unknown"


@pytest.mark.long
def test_topics_in_processes_of_their_own(tmp_path: Path) -> None:
    run.main(["memory", "patch_memory", "isa", *SMALL[:3], "64", *SMALL[4:], "--setups", OURS, "--out", str(tmp_path)])
    # The peaks are the system's word: there is no bound on them.
    attention = json.loads((tmp_path / "memory.json").read_text())["tables"][2]["rows"]
    assert {row["attention"] for row in attention} >= {"stock", "hf_accel"}
    ways = json.loads((tmp_path / "patch_memory.json").read_text())["tables"][0]["rows"]
    in_memory = next(row for row in ways if row["weights"] == "int8" and row["way"].startswith("patch, in memory"))
    assert in_memory["result_bytes"] < weight_bytes(load_model("tiny"))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [(["decoding"], "topic 'decoding' is not known"), (["decode", "--setups", "vllm"], "setup 'vllm' is not known")],
)
def test_unknown_names_are_one_line_and_exit_code_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(argv)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


# -- models and their bytes ----------------------------------------------------------------------------


def test_bench_1b_has_the_parameters_that_its_name_says() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.harness.models import MODELS

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**MODELS["bench-1b"], tie_word_embeddings=False))
    attention, mlp = 2048 * (2048 + 256 + 256 + 2048), 3 * 2048 * 5632
    assert model.num_parameters() == 2 * 32000 * 2048 + 22 * (attention + mlp + 2 * 2048) + 2048


def test_random_weights_are_seeded_and_no_row_repeats(model: PreTrainedModel) -> None:
    again, other = load_model("tiny"), load_model("tiny", seed=1)
    head = model.lm_head.weight
    assert head.dtype == torch.bfloat16
    assert torch.equal(head, again.lm_head.weight) and not torch.equal(head, other.lm_head.weight)
    assert len(head.unique(dim=0)) == len(head)
    assert not torch.equal(head, model.model.embed_tokens.weight)
    assert 0.015 < head.float().std() < 0.025


@pytest.mark.parametrize("name", ["bench-14m", "bench-qwen2", "bench-gpt2"])
def test_other_shapes_are_random_too(name: str) -> None:
    model = load_model(name, layers=1, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 1
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for parameter_name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and parameter_name.endswith("weight")
        assert bool((parameter == 1).all()) is is_norm
        assert is_norm or 0.015 < parameter.std() < 0.025


def test_weights_are_cut_from_a_repeated_block() -> None:
    cuts = cut(torch.arange(7), torch.Size((3, 4)), start=5)
    assert cuts.tolist() == [[5, 6, 0, 1], [2, 3, 4, 5], [6, 0, 1, 2]]
    for columns in (2048, 5632):  # rows begin at another place of the block each, in every matrix of bench-1b
        assert BLOCK // math.gcd(BLOCK, columns) > 32000


def test_a_model_can_be_cut(model: PreTrainedModel) -> None:
    assert len(load_model("tiny", layers=1).model.layers) == 1


def test_a_checkpoint_is_taken_too(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert torch.equal(load_model(str(tmp_path)).lm_head.weight, model.lm_head.weight)


def test_bytes_of_weights(model: PreTrainedModel) -> None:
    embedding, head = 512 * 256, 512 * 256
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    norms = 5 * 256
    assert weight_bytes(model) == 2 * (embedding + head + 2 * layer + norms)
    assert read_bytes(model) == weight_bytes(model) - 2 * embedding
    patched = hf_accel.patch(twin(model), weights="int8")
    outputs = 2 * (256 + 128 + 128 + 256 + 512 + 512 + 256) + 512
    assert read_bytes(patched) == head + 2 * layer + 2 * outputs + 2 * norms


def test_a_tied_embedding_is_read_as_the_head() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.harness.models import MODELS

    tied = LlamaForCausalLM(LlamaConfig(**MODELS["tiny"], tie_word_embeddings=True))
    assert read_bytes(tied) == weight_bytes(tied) == 4 * sum(p.numel() for p in tied.parameters())


def test_bytes_of_a_tensor_that_holds_others() -> None:
    class Wide:
        inner = torch.zeros(10, dtype=torch.int8)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

    assert tensor_bytes(Wide()) == 10  # type: ignore[arg-type]


# -- checks --------------------------------------------------------------------------------------------


def test_a_wrong_model_is_not_timed(model: PreTrainedModel) -> None:
    wrong = load_model("tiny", seed=1)
    with pytest.raises(WrongResultError, match=r"x: logits differ from stock's by 1\.\d+ of their norm, above 0\.5"):
        check("x", wrong, model, tolerance=0.5, exact=False)
    with pytest.raises(WrongResultError, match="x: tokens differ from stock's by more than rounding"):
        check("x", wrong, model, tolerance=9, exact=True)


def test_not_a_number_is_wrong(model: PreTrainedModel) -> None:
    broken = load_model("tiny")
    broken.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(WrongResultError):
        check("x", broken, model, tolerance=9, exact=False)


def test_a_router_that_chose_otherwise_is_no_wrong_model() -> None:
    stock = load_model("bench-qwen3-moe", layers=1)
    model = load_model("bench-qwen3-moe", layers=1)
    first = 15  # of the tokens that have other logits

    def disturb(_module: Any, _inputs: Any, output: Any) -> None:
        output.logits[:, first:] *= -1

    model.register_forward_hook(disturb)
    assert check("x", model, stock, tolerance=0.1, exact=False)["error_of_most_tokens"] < 0.1
    first = 0
    with pytest.raises(WrongResultError, match="x: logits differ from stock's by 2"):
        check("x", model, stock, tolerance=0.1, exact=False)


def test_a_model_that_rounding_has_changed_is_held_against_its_own_weights(model: PreTrainedModel) -> None:
    """In a deep random model little is left of stock's logits."""
    rounded = hf_accel.patch(load_model("tiny"), weights="int4")
    found = check("x", rounded, model, tolerance=0.0, exact=False)
    assert found["error_to_same_weights"] < 0.1 < found["logits_error"] and 0 < found["weights_error"] < 0.2
    rounded.lm_head.write(-rounded.lm_head.weight)
    with pytest.raises(WrongResultError, match="x: a weight differs from stock's by 2"):
        check("x", rounded, model, tolerance=0.0, exact=False)


def test_an_entrant_is_checked_before_it_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of()
    setup = next(s for s in SETUPS if s.name == "hf_accel int8")
    monkeypatch.setattr(setup, "tolerance", 0.0)
    monkeypatch.setattr(checks, "ROUNDED", 0.0)
    with pytest.raises(WrongResultError, match="hf_accel int8: a weight differs"):
        bench.entrant(setup)


def test_the_stock_model_stays_stock() -> None:
    bench = bench_of()
    before = {name: p.clone() for name, p in bench.model.named_parameters()}
    assert list(bench.entrants) == ["stock", *OURS.split(",")]
    assert not hf_accel.is_patched(bench.model)
    assert hf_accel.is_patched(bench.entrants["hf_accel int4"].model)
    assert all(torch.equal(p, before[name]) for name, p in bench.model.named_parameters())


def test_a_setup_that_refuses_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = next(s for s in SETUPS if s.name == "hf_accel int8")
    monkeypatch.setattr(setup, "refuses", lambda config: "it rains")
    bench = bench_of()
    assert "hf_accel int8" not in [s.name for s in bench.setups]
    assert bench.refused == {"hf_accel int8": "it rains"}


@pytest.mark.parametrize("name", ["stock", *OURS.split(",")])
def test_generate_goes_on_from_a_filled_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(batch_tokens=4)
    entrant = bench.entrants[name]
    caches, forwards = [], []
    filled_cache = bench.filled_cache
    monkeypatch.setattr(bench, "filled_cache", lambda *a, **k: caches.append(filled_cache(*a, **k)) or caches[-1])
    entrant.model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: forwards.append(inputs[0].shape))
    assert decode.run_one(bench, entrant, batch=3, context=20).per_step > 0
    assert forwards == [(3, 1)] * 4
    assert caches[0].get_seq_length() == 24


# -- timing and tables ---------------------------------------------------------------------------------


def test_generation_times_are_in_order(model: PreTrainedModel) -> None:
    timed = time_generate(model, torch.tensor([[1, 2, 3]]), num_new=5)
    assert 0 < timed.first_token < timed.first_token + 4 * timed.per_step <= timed.total
    assert time_generate(model, torch.tensor([[1]]), num_new=1).per_step == 0


class Clock:
    """A model that takes 5 seconds to the first token, 2 for each further one, and 1 to finish."""

    now = 100.0
    device = torch.device("cpu")
    config = SimpleNamespace(is_encoder_decoder=False)

    def generate(self, prompt: torch.Tensor, *, streamer: Any, max_new_tokens: int, **_: Any) -> torch.Tensor:
        streamer.put(prompt)
        for number in range(max_new_tokens):
            self.now += 2 if number else 5
            streamer.put(prompt[:, -1])
        self.now += 1
        return torch.cat([prompt, prompt.new_zeros(1, max_new_tokens)], dim=1)


def test_generation_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("hf_accel.cli.measurement.time.perf_counter", lambda: clock.now)
    assert time_generate(clock, torch.ones(1, 3), num_new=4) == Generation(12.0, 5.0, 2.0)  # type: ignore[arg-type]


def test_candidates_take_turns_and_the_warm_up_is_dropped() -> None:
    calls: list[str] = []
    record = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert take_turns(record, rounds=2) == {"a": [4, 5], "b": [3, 6]}  # another one begins each round
    assert calls == list("abbaab")
    assert take_turns(record, rounds=1, warm_up=False) == {"a": [8], "b": [7]}


def test_ratios_are_taken_within_a_round() -> None:
    assert median_ratio([1.0, 10.0, 4.0], [0.5, 5.0, 1.0]) == 2.0  # the median seconds, 4 and 1, would say 4


def test_ladder_rows() -> None:
    rows = ladder.rows({"naive": 8.0, "cache": 2.0, "int8": 1.0})
    assert [row["factor_ratio"] for row in rows] == [1, 4, 2]
    assert [row["product"] for row in rows] == [1, 4, 8]


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("change_percent", -0.01, "-0.010 %"),
        ("perplexity", 10.4, "10.40000"),
        ("kl_nats", 0.0007, "0.00070"),
        ("setup", "stock", "stock"),
        ("ratio", 2.5, "2.50x"),
        ("product", 1234.0, "1,234.00x"),
        ("step_seconds", 0.0123, "12.30 ms"),
        ("patch_seconds", 12.0, "12.00 s"),
        ("weight_bytes", 2.2e9, "2,200.00 MB"),
        ("weight_bytes", 512, "512 B"),
        ("waste_share", 0.015, "1.5%"),
        ("tokens_per_second", 12.34, "12.3"),
        ("unpatch_seconds", None, "-"),
        ("batch", 4, "4"),
    ],
)
def test_cells(column: str, value: Any, text: str) -> None:
    assert cell(column, value) == text


def test_markdown() -> None:
    table = Table("a title", [{"setup": "stock", "step_seconds": 0.5}], "a note")
    lines = table.markdown().splitlines()
    assert lines == [
        "### a title",
        "",
        "| setup | step seconds |",
        "| --- | ---: |",
        "| stock | 500.00 ms |",
        "",
        "a note",
    ]


def test_results_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decode.json"
    replace(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace(path, "new")
    assert path.read_text() == "old"


def test_one_topic_leaves_the_others_results(tmp_path: Path) -> None:
    for topic in ("one", "two"):
        result = {"topic": topic, "date": "today", "command": "c", "model": "m", "refused": {"x": "it rains"}}
        write(tmp_path, {**result, "machine": machine(), "versions": {}, "tables": []})
    text = (tmp_path / "README.md").read_text()
    assert "## one" in text and "## two" in text and "x did not take part: it rains." in text


def test_each_kind_of_cpu_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path)
    here = machine()
    kinds = [{**here, "cpu": "A (R) 7", "kernels": "avx2"}, {**here, "cpu": "B", "kernels": "cpu kernels: not built"}]
    for number, kind in enumerate(kinds):
        for topic in ["one", "two"][number:]:
            result = {"topic": topic, "date": f"2030-01-0{number + 1}", "command": "c", "model": "m", "refused": {}}
            write(results_folder.machine_folder(kind), {**result, "machine": kind, "versions": {}, "tables": []})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "a-r-7-avx2", "b-without-kernels"]
    text = (tmp_path / "README.md").read_text()
    assert "[a-r-7-avx2](a-r-7-avx2/README.md): A (R) 7, topics: 2, the latest of 2030-01-01" in text
    assert "B, topics: 1, the latest of 2030-01-02" in text and "## one" not in text


# -- waste and peaks -----------------------------------------------------------------------------------


def test_lengths_are_exponential_and_bounded() -> None:
    drawn = list(lengths(Settings(waste=Waste(requests=5000))))
    assert len(drawn) == 5000
    assert min(drawn) >= 1 and max(drawn) == 2048
    assert 460 < sum(drawn) / 5000 < 520  # 500 less what is cut off above 2048


def test_peak_counts_what_is_held_for_a_moment_only() -> None:
    def allocate() -> None:
        torch.ones(50 * 2**20, dtype=torch.uint8)

    peak = peak_bytes(allocate)
    if peak is None:
        pytest.skip("this system does not tell the peak")
    assert 0.9 < peak / (50 * 2**20) < 1.2
    assert peak_bytes(lambda: None) < 2**21


def test_peaks_tell_anonymous_memory_from_mapped_pages(tmp_path: Path) -> None:
    size = 50 * 2**20
    (tmp_path / "pages").write_bytes(bytes(size))
    before = resident()
    if before is None:
        pytest.skip("this system does not tell the peak")

    held = []

    def read() -> None:
        held.append(torch.from_file(str(tmp_path / "pages"), size=size, dtype=torch.uint8))
        assert held[0].max() == 0

    found = peaks(read, before)
    assert found is not None
    assert found["peak_bytes"] == pytest.approx(size, rel=0.2)
    assert found["mapped_bytes"] == pytest.approx(size, rel=0.2)
    assert abs(found["anonymous_bytes"]) < 0.2 * size
    assert found["shared_bytes"] == 0


# Both copies would be 1.5. What patch() holds for a moment is in tests/unit/patching/test_memory_of_patch.py too.
@pytest.mark.parametrize(("way", "most"), [pytest.param("memory", 1.4, marks=pytest.mark.long), ("checkpoint", 1)])
def test_a_model_is_patched_in_little_more_than_its_own_bytes(way: str, most: float, tmp_path: Path) -> None:
    """In a process of its own, above what that held before it had the model, which is of 200 MB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 512}
    model = random_model(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8))
    model_bytes = weight_bytes(model)
    model.save_pretrained(tmp_path)
    if not Path(PAGEMAP).exists() or resident() is None:
        pytest.skip("this system does not tell what is mapped")
    found = call("patch_peak", way, "int8", tmp_path, 0)
    assert 0.5 * model_bytes < found["held_bytes"] <= found["peak_bytes"] < most * model_bytes


def test_quick_runs_leave_other_libraries_out() -> None:
    peers = {setup.name for setup in SETUPS if setup.is_peer}
    bench = bench_of(setups=(), quick=True)
    assert not peers & {setup.name for setup in bench.setups}
    assert bench.refused.items() >= dict.fromkeys(peers, "a quick run leaves other libraries out").items()
    assert bench.refused.keys() - peers == {"hf_accel fp8", "hf_accel int4 deterministic"}
    named = bench_of(setups=tuple(setup.name for setup in SETUPS), quick=True)
    assert all(named.refusal(setup) == setup.refuses(named.model.config) for setup in SETUPS)


def test_stock_takes_part_whatever_is_asked_for() -> None:
    assert [setup.name for setup in bench_of(setups=("hf_accel int8",)).setups] == ["stock", "hf_accel int8"]
    assert Stock().refuses(load_model("tiny").config) is None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # theirs, not ours
@pytest.mark.parametrize("name", [s.name for s in SETUPS if s.is_peer and not s.name.endswith("bf16")])
def test_peers_are_verified_too(name: str) -> None:
    bench = bench_of(setups=(name,))
    setup = next(s for s in SETUPS if s.name == name)
    if reason := bench.refusal(setup):
        pytest.skip(reason)
    entrant = bench.entrants[name]
    assert setup.read_bytes(entrant.model) < setup.weight_bytes(entrant.model) < weight_bytes(bench.model)
