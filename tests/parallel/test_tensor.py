"""Tensor parallel: two gloo ranks on this CPU against one process.

One pair of ranks serves most tests, and each kind of weights is asked for everything at once: starting ranks and
loading models is what takes time.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel

from . import lost_jobs
from . import tensor_jobs as jobs
from .ranks import Ranks

SHARE = 0.55
KINDS = list(jobs.WEIGHTS)


@pytest.fixture(scope="module")
def asked(path: str, ranks: Ranks) -> dict[str, list[dict[str, Any]]]:
    return {kind: ranks.run(jobs.job_answers, path, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def whole(path: str) -> dict[str, Any]:
    """One process that has the model whole, patched, by kind."""
    models = {}
    for kind in KINDS:
        models[kind] = jobs.load(path, split=False)
        hf_accel.patch(models[kind], weights=jobs.WEIGHTS[kind])
    return models


def test_float_tokens_are_those_of_stock_in_one_process(
    path: str, asked: dict[str, list[dict[str, Any]]], whole: dict[str, Any]
) -> None:
    stock = jobs.load(path, split=False)
    expected = jobs.generated(stock, jobs.prompts())
    for found in asked["float"]:
        for way, tokens in found["greedy"].items():
            if way != "beams":
                assert tokens == expected[: len(tokens)], way
        assert found["greedy"]["beams"] == jobs.generated(stock, jobs.prompts()[:2], num_beams=2)
        assert found["ended"] == jobs.ended_answers(whole["float"])
        assert found["stock again"] == expected[:2]
        assert found["sampled"]["seeded"] == jobs.sampled_answers(whole["float"])["seeded"]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_never_differ(kind: str, asked: dict[str, list[dict[str, Any]]]) -> None:
    first, second = asked[kind]
    assert first["greedy"] == second["greedy"]
    assert first["sampled"] == second["sampled"] and first["ended"] == second["ended"]
    assert first["logits"] == second["logits"]
    ways = first["greedy"]
    for way, tokens in ways.items():
        if way != "beams":
            assert tokens == ways["generate"][: len(tokens)], way


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_tokens_differ_from_one_process_within_rounding(
    kind: str, asked: dict[str, list[dict[str, Any]]], whole: dict[str, Any]
) -> None:
    """Where the first token differs, its logit is as near to the best as the two models' logits are to each other.

    INT4 gives one process's logits but for the order of sums; INT8 is as far from float as one process is.
    """
    found, model = asked[kind][0], whole[kind]
    ours, theirs, exact = (
        torch.cat([torch.tensor(row) for row in logits])
        for logits in (found["logits"], *(jobs.last_logits(m, jobs.prompts()[:2]) for m in (model, whole["float"])))
    )
    if kind == "int4":
        assert (ours - theirs).abs().max() < 0.05 * theirs.std()  # activations that are rounded otherwise
    else:
        assert (ours - exact).std() < 1.2 * (theirs - exact).std() < 0.2 * exact.std()
    expected = jobs.generated(model, jobs.prompts())
    for prompt, got, wanted in zip(jobs.prompts(), found["greedy"]["generate"], expected, strict=True):
        place = next((i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            logits = torch.tensor(jobs.last_logits(model, [prompt + wanted[:place]])[0][-1])
            assert logits[wanted[place]] - logits[got[place]] <= 2 * (ours - theirs).abs().max()


def test_parts_are_those_of_the_whole_weight(asked: dict[str, list[dict[str, Any]]], whole: dict[str, Any]) -> None:
    """Split outputs keep all bits; so do split inputs in INT4, whose groups end where a rank's part ends.

    In INT8 a split row has a scale for each rank's part, no larger than the row's.
    """
    for kind in ("int8", "int4"):
        complete = jobs.stored_weights(whole[kind])
        for rank, found in enumerate(asked[kind]):
            for name, part in found["weights"].items():
                last = name.rpartition(".")[2]
                by_inputs = last in ("o_proj", "down_proj")
                for key, tensor in part.items():
                    expected = complete[name][key]
                    if key == "weight_shape":
                        assert tensor.tolist() == halved(expected.tolist(), int(by_inputs))
                    elif kind == "int4" or not by_inputs:
                        assert torch.equal(tensor, half(expected, rank, int(by_inputs))), (name, key)
                    elif key == "weight_scale":
                        assert (tensor <= expected).all()


def half(tensor: Tensor, rank: int, dim: int) -> Tensor:
    return tensor.chunk(2, dim)[rank]


def halved(shape: list[int], dim: int) -> list[int]:
    shape[dim] //= 2
    return shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_half(kind: str, asked: dict[str, list[dict[str, Any]]], whole: dict[str, Any]) -> None:
    complete = jobs.held_bytes(whole[kind])
    for found in asked[kind]:
        assert found["held"].keys() == complete.keys()
        split = [name for name in complete if name in found["split"]]  # older transformers keep the embedding whole
        assert len(split) >= 15
        assert sum(found["held"][name] for name in split) <= SHARE * sum(complete[name] for name in split)
        embedding = 0 if "model.embed_tokens" in split else complete["model.embed_tokens"]
        assert found["pages"] == [1, 16, 64]  # one of two heads
        assert found["token"] == 2 * 2 * 64 * 4  # the same, in 2 layers, for K and V
        loaded, patched = found["alive"]  # all that Python holds, norms and biases and tables included
        assert loaded <= SHARE * sum(parameter.nbytes for parameter in whole["float"].parameters()) + embedding
        assert kind == "float" or patched <= SHARE * sum(complete.values()) + embedding


def test_plan_says_what_is_split(asked: dict[str, list[dict[str, Any]]]) -> None:
    assert "rank 1 of 2" in asked["int8"][1]["plan"]
    assert "4 rowwise" in asked["int8"][0]["plan"]
    assert "several processes" in asked["int8"][0]["graphs"]


def test_ranks_that_would_decide_otherwise(path: str, ranks: Ranks, whole: dict[str, Any]) -> None:
    (first, passes, decided), other = ranks.run(jobs.job_other_decisions, path)
    assert (first, passes, decided) == other
    expected = whole["float"].generate_batch(jobs.prompts(), max_new_tokens=2 * jobs.NEW, do_sample=False)
    assert first == [output.generated_tokens for output in expected.values()]
    assert max(decided) == 3


def test_engines_out_of_step(path: str, ranks: Ranks, whole: dict[str, Any]) -> None:
    first, second = ranks.run(jobs.job_engine_out_of_step, path)
    assert first == second
    assert first["tokens"] == jobs.generated(whole["float"], jobs.prompts())
    assert first["ended"] == "cancelled" and first["used"] == 0


def test_refusals(path: str, ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(jobs.job_refusals, path, str(tmp_path))
    assert first == second
    for name, words in {
        "nf4": "weights='nf4'", "fp8": "weights='fp8'", "gptq": "method='rtn'", "auto": "weights='auto'",
        "self-int4": "self-int4", "group": "group_size=128 does not divide the 192 inputs",
        "loading": "hf_accel.patch(model)",
        "save": "holds a part of it", "compressed": "split over ranks", "verify": "second model",
        "max_time": "max_time=1.0", "max_time batch": "max_time=1.0", "drafts": "self-int4",
        "gradient": "compute no gradient",
    }.items():  # fmt: skip
        assert words in first[name], (name, first[name])


@pytest.mark.long
def test_other_callers(path: str, ranks: Ranks, asked: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    draft = jobs.save_llama(tmp_path, num_hidden_layers=1)
    first, second = ranks.run(jobs.job_other_callers, path, draft)
    assert first == second
    assert first["draft"] == first["manager"] == asked["float"][0]["greedy"]["generate"]


def save_family(folder: Path, name: str) -> str:
    """A tiny model of a family that is split in a way of its own."""
    torch.manual_seed(2)
    config: Any = getattr(transformers, f"{name}Config")(
        vocab_size=jobs.VOCABULARY, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    if name == "Mixtral":
        config.num_local_experts, config.num_experts_per_tok = 4, 2
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.long
def test_four_ranks(tmp_path: Path) -> None:
    """Sums over more than two ranks round by their place in a pass, and so a batch may change a token."""
    path = jobs.save_llama(tmp_path, num_key_value_heads=4, attention_bias=True)
    with Ranks(4) as four:
        found = four.run(jobs.job_family, path)
    assert found[0] == found[1] == found[2] == found[3]
    expected = jobs.generated(jobs.load(path, split=False), jobs.prompts())
    assert found[0]["float"] == found[0]["float batch"] == expected
    assert found[0]["int8 loop"] == "ragged"


GATHERED = dict.fromkeys((f"model.layers.*.self_attn.{one}_proj" for one in "qkv"), "colwise_gather_output")
FAMILIES = {  # family, plan -> the classes of the parts
    "Llama": ("auto", {"GatheredLinear", "QuantLinear", "ReducedLinear"}),
    "Llama, whole heads": (
        {**GATHERED, "model.layers.*.self_attn.o_proj": "rowwise_split_input"},
        {"GatheredLinear", "QuantLinear", "ReducedLinear", "SplitLinear"},
    ),
    "Qwen3": ("auto", {"GatheredLinear", "QuantLinear", "ReducedLinear"}),
    "Phi3": ("auto", {"GatheredLinear", "SplitLinear"}),
    "Phi3, packed": (
        {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"},
        {"GatheredLinear", "QuantLinear", "ReducedLinear", "SplitLinear"},
    ),
    "Mixtral": ("auto", {"GatheredLinear", "QuantLinear", "ReducedLinear"}),
    "Gemma2": ("auto", {"GatheredLinear", "QuantLinear", "ReducedLinear"}),
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, ranks: Ranks, tmp_path: Path) -> None:
    plan, parts = FAMILIES[family]
    path = save_family(tmp_path, family.partition(",")[0])
    first, second = ranks.run(jobs.job_family, path, plan)
    assert first == second
    expected = jobs.generated(jobs.load(path, split=False), jobs.prompts())
    assert first["stock"] == first["stock again"] == first["float"] == first["float batch"] == expected
    assert set(first["int8 parts"]) == set(first["int4 parts"]) == parts
    logits = torch.tensor(first["float logits"])
    for kind, most in (("int8", 0.4), ("int4", 1.0)):  # another expert may be chosen
        assert first[kind] == first[f"{kind} batch"] and first[f"{kind} loop"] == "ragged"
        assert (torch.tensor(first[f"{kind} logits"]) - logits).std() < most * logits.std()
    assert "were dropped by keep_original=False" in first["dropped"]
    if family == "Mixtral":
        assert "has a forward of its own" in str(first["int8 plan"])


def job_example() -> str:
    """What examples/tensor_parallel.py prints in this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tensor_parallel.py"), run_name="__main__")
    return printed.getvalue()


def test_example(ranks: Ranks) -> None:
    printed, nothing = ranks.run(job_example)
    assert nothing == ""
    assert "rank 0 of 2" in printed and "def parse(" in printed and "class Reader:" in printed
    whole, mine = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+)", printed)[:3:2])
    assert mine < SHARE * whole


def test_a_killed_rank(path: str, ranks: Ranks) -> None:
    """The other one has an error at once, and its pages back."""
    found = ranks.outcomes(ranks.send(lost_jobs.job_lost_in_generate, path, lost_jobs.KILL), timeout=60)
    ranks.kill()
    assert found[1] == (False, "the process ended, exit code -9")
    fine, seen = found[0]
    assert fine, seen
    assert seen["message"].startswith("LostRankError: rank 0 of 2 lost another rank while ")
    assert seen["blocks"] == 0 and seen["seconds"] < 40


def test_a_rank_that_hangs(path: str, ranks: Ranks) -> None:
    """The other one has an error after the timeout of the process group, here in an Engine."""
    ranks.send(lost_jobs.job_lost_in_engine, path, lost_jobs.STOP, 1, 3.0)
    fine, seen = ranks.outcomes([0], timeout=60)[0]
    ranks.kill()
    assert fine, seen
    assert all("LostRankError" in message for message in seen["messages"]), seen
    assert "the engine broke" in seen["after"]
    assert seen["blocks"] == 0 and 2 < seen["seconds"] < 40


@pytest.mark.long
@pytest.mark.parametrize("number", [lost_jobs.KILL, lost_jobs.STOP], ids=["killed", "silent"])
@pytest.mark.parametrize("victim", [0, 1], ids=["first", "other"])
def test_a_rank_that_is_lost_while_an_engine_is_idle(victim: int, number: int, path: str, ranks: Ranks) -> None:
    """The next request of the rank that is left ends with an error: at once, or after the timeout."""
    ranks.send(lost_jobs.job_lost_while_idle, path, victim, number, 3.0)
    fine, seen = ranks.outcomes([1 - victim])[1 - victim]
    ranks.kill()
    assert fine, seen
    assert "LostRankError" in seen["message"] and seen["blocks"] == 0
    assert seen["seconds"] < 40 and (number == lost_jobs.KILL or seen["seconds"] > 2)


@pytest.mark.long
def test_other_prompts_on_each_rank(path: str, ranks: Ranks) -> None:
    """Both are told: one which prompt it was, the other that it is alone."""
    first, second = ranks.run(lost_jobs.job_other_prompts, path)
    ranks.kill()
    assert "lost another rank" in first and "another prompt (4 tokens" in second


@pytest.mark.long
def test_a_killed_rank_of_an_engine(path: str, ranks: Ranks) -> None:
    ranks.send(lost_jobs.job_lost_in_engine, path, lost_jobs.KILL, 5, 30.0)
    fine, seen = ranks.outcomes([0], timeout=60)[0]
    ranks.kill()
    assert fine, seen
    assert all("LostRankError" in message for message in seen["messages"]) and seen["blocks"] == 0
