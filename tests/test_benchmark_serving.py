"""Pieces of the engine's benchmarks: workloads, oracles, prompts, ways of serving. No clock, no network."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

import hf_accel
from benchmarks.harness import texts
from benchmarks.harness.bench import Bench
from benchmarks.harness.models import load_model
from benchmarks.harness.oracle import OracleDrafter, spoilt
from benchmarks.harness.requests import in_turn, poisson, shared_prefix
from benchmarks.harness.settings import Drafters, Settings, Waste
from benchmarks.run import parse, without_path
from benchmarks.topics import batching, drafters, engine_ladder, http_load, latency, serving
from benchmarks.topics.serving import continuous, stock_settings
from benchmarks.topics.waste import lengths, waste
from benchmarks.topics.waste import requests as requests_of
from hf_accel.cli.measurement import Requests, Served, WrongResultError, accelerated, draw, one_padded_batch
from hf_accel.patching.twin import twin


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """In float32, where padding and batches leave the greedy tokens of random weights as they are."""
    return load_model("tiny").float()


def requests(law: str = "exponential", count: int = 6, **keywords: Any) -> Requests:
    return draw(
        law, **{"requests": count, "mean": 5, "prompt_lengths": (3, 20), "vocabulary": 512, "seed": 0, **keywords}
    )


# -- workloads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("law", "variation"), [("fixed", 0.0), ("uniform", 3**-0.5), ("exponential", 1.0)])
def test_laws_have_the_same_mean_and_their_variation(law: str, variation: float) -> None:
    drawn = requests(law, 4000, mean=32, prompt_lengths=(1, 2))
    assert statistics.fmean(drawn.lengths) == pytest.approx(32, rel=0.01)
    assert drawn.variation == pytest.approx(variation, abs=0.05)


def test_a_workload_is_seeded_and_bounded() -> None:
    one = requests(count=200)
    assert one == requests(count=200) != requests(count=200, seed=1)
    assert min(one.lengths) >= 1
    assert {len(prompt) for prompt in one.prompts} == set(range(3, 21))
    assert one.first(3, most_new=2).lengths == [min(2, length) for length in one.lengths[:3]]


def test_tokens_of_a_workload() -> None:
    work = Requests("w", [[1, 2], [3], [4, 5, 6]], [4, 1, 2])
    assert work.useful == 7
    assert work.needed == (2 + 3) + (1 + 0) + (3 + 1)
    assert work.padded == 3 * (3 + 3)


def test_arrivals_are_poisson() -> None:
    arrivals = poisson(requests(count=4000), per_second=8.0, seed=0).arrivals
    assert arrivals is not None and arrivals[0] == 0
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.05)


def test_prompts_share_their_beginning_and_no_more() -> None:
    work = shared_prefix(requests=4, shared=10, own=5, new=3, vocabulary=10**6, seed=0)
    assert len({tuple(prompt[:10]) for prompt in work.prompts}) == 1
    assert len({prompt[10] for prompt in work.prompts}) == 4
    assert {len(prompt) for prompt in work.prompts} == {15} and work.lengths == [3] * 4


# -- ways of serving -----------------------------------------------------------------------------------


def test_all_ways_give_the_same_tokens(model: PreTrainedModel) -> None:
    work = requests()
    expected = in_turn(model, work).checked(work).tokens
    assert one_padded_batch(model, work).checked(work).tokens == expected
    assert continuous(model, work, stock_settings(work, batch_tokens=64)).checked(work).tokens == expected
    patched = hf_accel.patch(twin(model), weights=None, keep_original=True)
    served = accelerated(patched, work, record_timestamps=True)
    assert served.checked(work).tokens == expected
    assert served.statistics["computed_tokens"] == work.needed
    assert [len(times) for times in served.times] == work.lengths
    assert served.decode_seconds > 0


def test_wrong_results_are_not_timed(model: PreTrainedModel) -> None:
    work = requests(count=2)
    with pytest.raises(WrongResultError, match="asked for"):
        Served(1.0, [[1]] * 2).checked(Requests("w", work.prompts, [1, 2]))
    patched = hf_accel.patch(twin(model), weights=None, keep_original=True)
    serving.agree("same", patched, work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "in_turn", lambda *_: Served(1.0, [[0] * length for length in work.lengths]))
        with pytest.raises(WrongResultError, match="x: generate_batch gives"):
            serving.agree("x", patched, work)


def test_the_best_settings_are_those_of_the_least_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    work = requests()
    seconds = {64: 3.0, 128: 1.0, 256: 2.0}
    answer = lambda model, work, config: Served(seconds[config.max_batch_tokens], [[0] * n for n in work.lengths])  # noqa: E731
    monkeypatch.setattr(serving, "continuous", answer)
    assert serving.best_settings(None, work, [(64, None), (128, 3), (256, None)]) == (128, 3)  # type: ignore[arg-type]


def test_stock_gets_pages_for_all() -> None:
    config = stock_settings(Requests("w", [[0] * 15, [0] * 17], [1, 1]), batch_tokens=9, running=1)
    page_size = config.page_size if hasattr(config, "page_size") else config.block_size  # the older name
    assert (config.num_blocks, page_size) == (1 + 1 + 2 + 1, 16)
    assert (config.max_batch_tokens, config.max_requests_per_batch) == (9, 1)


def test_ratios_and_waste_of_a_batch() -> None:
    work = Requests("w", [[1, 2], [3]], [4, 1])
    results = {
        batching.PADDED: [Served(8.0, [])],
        batching.CONTINUOUS: [Served(6.0, [])],
        "ours": [Served(2.0, [], {"computed_tokens": 12})],
    }
    row = batching.row("ours", work, results)
    assert (row["ratio"], row["generate_batch_ratio"], row["useful_tokens_per_second"]) == (4, 3, 2.5)
    assert row["waste_share"] == 1 - work.needed / 12
    assert batching.row(batching.PADDED, work, results)["waste_share"] == 1 - work.needed / work.padded


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.75, 4.0), (0.9, 4.6), (1.0, 5.0)])
def test_quantiles(share: float, value: float) -> None:
    assert latency.quantile([5.0, 1.0, 3.0, 2.0, 4.0], share) == pytest.approx(value)


def test_streams_are_timed_token_by_token(model: PreTrainedModel) -> None:
    work = poisson(requests(count=3), per_second=1000.0, seed=0)
    patched = hf_accel.patch(twin(model), weights="int8", keep_original=True)
    for times in (
        latency.our_times(patched, 16, work),
        latency.stock_times(model, stock_settings(work, batch_tokens=64), work),
    ):
        assert [len(one) for one in times] == work.lengths
        assert all(0 < before <= after for one in times for before, after in itertools.pairwise(one))


def test_the_last_steps_of_the_ladder_come_in_pairs() -> None:
    rows = engine_ladder.rows({"one": 4.0, "one, drafted": 2.0, "alone": 9.0, "together": 3.0})
    assert [row["factor_ratio"] for row in rows] == [1, 2, 1, 3]


# -- waste ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "low", "high"), [(16, 0.012, 0.02), (256, 0.17, 0.27), (2048, 0.6, 0.8)])
def test_waste_of_the_scheduler(block_size: int, low: float, high: float) -> None:
    settings = Settings(waste=Waste(requests=200))
    share, passes = waste(settings, lengths(settings), block_size=block_size, running=32)
    assert low < share < high
    assert passes > 200


def test_requests_of_the_simulation_run_to_their_end() -> None:
    (request,) = requests_of(iter([40]), seed=0)
    assert request.num_prompt + request.settings.max_new_tokens == 40
    share, passes = waste(Settings(), iter([40]), block_size=1, running=1)
    assert passes == request.settings.max_new_tokens  # the prompt's own pass brings the first
    assert share == 0


# -- oracle and drafters -------------------------------------------------------------------------------


def test_an_oracle_is_right_as_often_as_it_should() -> None:
    tokens = list(range(4000))
    drafter = OracleDrafter({(7, 8): tokens}, acceptance=0.8, vocabulary=5000)
    sequence: Any = SimpleNamespace(tokens=[7, 8], num_prompt=2, num_new=0)
    (draft,) = drafter.propose([sequence], [4000])
    right = sum(a == b for a, b in zip(draft.tokens, tokens, strict=True)) / 4000
    assert right == pytest.approx(0.8, abs=0.02)
    sequence.tokens, sequence.num_new = [7, 8, *tokens[:5]], 5
    assert drafter.propose([sequence], [3])[0].tokens == draft.tokens[5:8]  # whatever was asked for before
    assert spoilt([1, 2], 1.0, 3, random.Random(0)) == [1, 2]
    assert spoilt([1, 2], 0.0, 3, random.Random(0)) == [2, 0]


def test_prompts_repeat_what_they_should() -> None:
    passage = list(range(64))
    assert texts.editing(passage) == [*range(56), *range(8)]
    assert texts.quoting(passage) == [*range(40), *range(8), *range(24, 32)]
    assert texts.prompts(list(range(200)), "open text", count=2, length=50) == [[*range(50)], [*range(75, 125)]]
    assert len(texts.prompts([1, 2, 3], "editing", count=1, length=50)[0]) <= 3


def test_drafters_are_compared_with_their_like() -> None:
    names = drafters.Models(None, None, object()).drafters()  # type: ignore[arg-type]
    assert {name: drafters.nearest(name) for name in names} == {
        "ngram": "stock: prompt lookup",
        "suffix": "stock: prompt lookup",
        "self-int4": None,
        "draft model": "stock: draft model",
        "suffix, draft model": "stock: draft model",
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_runs(model: PreTrainedModel, temperature: float) -> None:
    stock = drafters.endless(twin(model).bfloat16())
    patched = hf_accel.patch(twin(stock), weights=None, keep_original=True)
    models = drafters.Models(stock, patched, drafters.endless(load_model("tiny", layers=1)))
    settings = Settings(drafters=Drafters(new_tokens=6))
    for name, run in drafters.candidates(settings, models, [[1, 2, 3, 1, 2, 3, 1, 2]], temperature).items():
        counts = run().statistics
        assert not counts if name.startswith("stock") or name == "none" else counts["tokens"] >= 5


# -- paths ---------------------------------------------------------------------------------------------


def test_only_names_of_files_are_recorded(tmp_path: Any) -> None:
    argv = ["drafters", "--target", str(tmp_path / "big"), "--draft", str(tmp_path / "small"), "--out", str(tmp_path)]
    arguments = parse(argv)
    assert arguments.command == f"python -m benchmarks.run drafters --target big --draft small --out {tmp_path.name}"
    assert arguments.settings.drafters.target == str(tmp_path / "big")
    assert without_path(str(tmp_path / "big")) == "big"
    assert without_path("bench-1b") == "bench-1b" and without_path(3) == 3


# -- load over HTTP ------------------------------------------------------------------------------------


def test_words_are_one_token_each_for_every_server() -> None:
    tokenizer = http_load.words_tokenizer(800)
    tokens = [0, 25, 26, 701, 702, 798]
    assert [http_load.word(token) for token in tokens] == ["a", "z", "aa", "zz", "aaa", "ads"]
    assert tokenizer(http_load.text(tokens))["input_ids"] == tokens
    assert tokenizer.decode(tokens) == http_load.text(tokens)
    assert len(tokenizer) == 800


def test_llama_server_has_a_slot_for_each_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def gguf_file(model: Any, kind: str, *, tokenizer: Any) -> Path:
        made.append(f"{kind} {len(tokenizer)}")
        return tmp_path / kind

    monkeypatch.setattr(http_load, "gguf_file", gguf_file)
    monkeypatch.setattr(http_load, "llama_refusal", lambda program, config: None)
    monkeypatch.setenv("LLAMA_SERVER", "/there/llama-server")
    bench = Bench(Settings(model="tiny"))
    workload = Requests("any", [[1] * 300, [2]], [213, 5], None)
    systems = http_load.llama_servers(bench, workload)
    assert [system.name for system in systems] == [f"llama-server {kind}" for kind in http_load.GGUF_KINDS]
    assert made == [f"{kind} 512" for kind in http_load.GGUF_KINDS]
    command = systems[1].command
    assert command[:3] == ("/there/llama-server", "--model", str(tmp_path / "Q8_0"))
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--parallel"], options["--ctx-size"]) == ("2", str(2 * 768))
    assert systems[1].more == {"ignore_eos": True}


def test_without_llama_server_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    bench = Bench(Settings(model="tiny"))
    assert http_load.llama_servers(bench, Requests("any", [[1]], [1], None)) == []
    assert bench.refused == dict.fromkeys(
        [f"llama-server {kind}" for kind in http_load.GGUF_KINDS],
        "llama-server is not on the PATH, and LLAMA_SERVER does not name it",
    )


@pytest.mark.parametrize("options", [[], ["--at-once"]], ids=["loads", "all at once"])
def test_loads_that_arrive_can_be_left_out(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(load: str, system: http_load.System, path: Path, workloads: list[Requests], *, titles: Any = None) -> Any:
        asked.append(len(workloads))
        return [{"load": title, "system": system.name, "requests_per_second": 1.0} for title in titles or [load]]

    monkeypatch.setattr(http_load, "run", run)
    monkeypatch.setattr(http_load, "save", lambda model, path: None)
    monkeypatch.setattr(http_load, "llama_server", lambda: None)
    tables = http_load.measure(Bench(parse(["http_load", "--model", "tiny", *options]).settings))
    assert [len(table.rows) for table in tables] == ([5] if options else [5, 5 * 4])
    assert asked == ([1] * 5 if options else [1] * 5 + [4] * 5)
