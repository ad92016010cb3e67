"""Patched models inside of PEFT: generate as the stock model inside of PEFT does, whatever adapter is active."""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel
from hf_accel.cache.hf.cache_argument import CACHE_NAME

from .families import build, inputs, prompts

peft = pytest.importorskip("peft")


def adapted(model: PreTrainedModel, **keywords: Any) -> Any:
    """Two LoRA adapters, "default" and "other", that do something."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], **keywords)
    outer = peft.get_peft_model(model, config)
    outer.add_adapter("other", config)
    randomize({name: p for name, p in outer.named_parameters() if "lora_" in name})
    return outer.eval()


@torch.no_grad()
def randomize(parameters: dict[str, torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(parameters.items()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def greedy(model: Any, **keywords: Any) -> Tensor:
    return model.generate(**inputs("left"), max_new_tokens=6, do_sample=False, **keywords)


def by_adapter(outer: Any) -> list[Tensor]:
    """Tokens with either adapter, with none, and with the first again."""
    results = [greedy(outer)]
    outer.set_adapter("other")
    results.append(greedy(outer))
    with outer.disable_adapter():
        results.append(greedy(outer))
    outer.set_adapter("default")
    return [*results, greedy(outer)]


@pytest.mark.parametrize("order", ["patch first", "adapters first", "patched through PEFT"])
def test_adapters_are_switched_between_calls(order: str) -> None:
    model = build("llama")
    expected = by_adapter(adapted(copy.deepcopy(model)))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(expected))
    if order == "patch first":
        outer = adapted(hf_accel.patch(model, weights=None))
    else:
        outer = adapted(model)
        hf_accel.patch(outer if order == "patched through PEFT" else model, weights=None)
    for got, wanted in zip(by_adapter(outer), expected, strict=True):
        assert torch.equal(got, wanted)
    assert hf_accel.stats(outer)["loop"] == "ragged"
    hf_accel.unpatch(outer)
    for got, wanted in zip(by_adapter(outer), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_prefixes_are_not_shared_between_adapters(weights: str | None) -> None:
    outer = adapted(hf_accel.patch(build("llama"), weights=weights))
    ids = prompts(1, 40)

    def turn(cache: Any) -> Tensor:
        return outer.generate(input_ids=ids, past_key_values=cache, max_new_tokens=4, do_sample=False)

    def turns(fresh: bool) -> list[Tensor]:
        shared, results = hf_accel.PagedCache(outer.config), []
        for adapter in ("default", "other", None, "default"):
            cache = hf_accel.PagedCache(outer.config) if fresh else shared
            cache.reset()
            if adapter is None:
                with outer.disable_adapter():
                    results.append(turn(cache))
            else:
                outer.set_adapter(adapter)
                results.append(turn(cache))
        return results

    for got, wanted in zip(turns(fresh=False), turns(fresh=True), strict=True):
        assert torch.equal(got, wanted)


def test_weights_that_change_in_place_between_calls() -> None:
    """As a step of training changes them: the pages of known prompts are of the old ones."""
    outer, ids = adapted(hf_accel.patch(build("llama"), weights=None)), prompts(1, 40)
    cache = hf_accel.PagedCache(outer.config)
    for _ in range(2):
        cache.reset()
        options = {"max_new_tokens": 4, "do_sample": False}
        got = outer.generate(input_ids=ids, past_key_values=cache, **options)
        assert torch.equal(got, outer.generate(input_ids=ids, **options))
        with torch.no_grad():
            for name, parameter in outer.named_parameters():
                if "lora_A" in name:
                    parameter.mul_(-3)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_adapter_learns_as_over_stock(weights: str | None) -> None:
    model, given = build("llama"), inputs("left")

    def gradients(outer: Any) -> dict[str, Tensor]:
        outer.train()
        outer(**given, labels=given["input_ids"]).loss.backward()
        return {name: p.grad.clone() for name, p in outer.named_parameters() if p.grad is not None}

    expected = gradients(adapted(copy.deepcopy(model)))
    got = gradients(adapted(hf_accel.patch(model, weights=weights)))
    assert got.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= (1e-4 if weights is None else 0.2) * gradient.norm() + 1e-6


@pytest.mark.filterwarnings(
    "ignore:Position ids are not supported for parameter efficient tuning",
    "ignore:Both `past_key_values` and `cache` are set:FutureWarning",  # peft may know the older name alone
)
@pytest.mark.parametrize("kind", ["prefix", "prompt", "ia3", "dora"])
def test_other_kinds_of_adapters(kind: str) -> None:
    """Prompt learning hands generate() a cache or embeddings of its own."""
    task = {"task_type": "CAUSAL_LM"}
    configs = {
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **task),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **task),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **task
        ),
        "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "up_proj"], **task),
    }

    def tokens(patched: bool) -> Tensor:
        model = build("llama")
        if patched:
            hf_accel.patch(model, weights=None)
        outer = peft.get_peft_model(model, configs[kind]()).eval()
        randomize({name: p for name, p in outer.named_parameters() if p.requires_grad})
        return greedy(outer)

    assert torch.equal(tokens(patched=True), tokens(patched=False))


# -- prompts behind what an adapter has learnt ---------------------------------------------------------------

LEARNT: dict[str, Any] = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "encoder": lambda: peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
PASSED_ON = "ignore:Position ids are not supported for parameter efficient tuning"
BOTH = "ignore:Both `past_key_values` and `cache` are set:FutureWarning"  # a peft that knows the older name alone
# Such a peft finds no cache behind a prompt, and embeds again what its adapter has learnt, with and without hf_accel.
FINDS_CACHE = f'"{CACHE_NAME}"' in inspect.getsource(peft.PeftModelForCausalLM.prepare_inputs_for_generation)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.4},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "scores": {
        "output_scores": True,
        "return_dict_in_generate": True,
        "eos_token_id": list(range(40)),
        "pad_token_id": 0,
    },
}


def learnt(family: str, kind: str) -> Any:
    outer = peft.get_peft_model(build(family), LEARNT[kind]()).eval()
    randomize({name: p for name, p in outer.named_parameters() if p.requires_grad})
    return outer


@pytest.mark.filterwarnings(PASSED_ON, BOTH, "ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
@pytest.mark.parametrize(
    ("family", "kind", "layout", "reason"),
    [
        ("llama", "prompt", "left", "ragged"),
        ("llama", "encoder", "left", "ragged"),
        ("llama", "prompt", "single", "ragged"),
        ("mistral", "prompt", "single", "ragged"),
        ("mistral", "prompt", "left", "stock: padding stands between the embeddings of its adapter and its prompt"),
        ("gpt2", "prompt", "left", "ragged"),
        ("llama", "prefix", "left", "stock: its adapter puts keys and values in front of each prompt"),
    ],
)
def test_prompts_behind_what_an_adapter_has_learnt(family: str, kind: str, layout: str, reason: str) -> None:
    expected, model = learnt(family, kind), learnt(family, kind)
    hf_accel.patch(model, weights=None)
    if reason == "ragged" and not FINDS_CACHE:
        name = type(expected.get_base_model()).__name__
        reason = f"stock: {name} embeds the tokens behind a prompt in a way of its own"
    for way in WAYS.values():
        found = []
        for each in (expected, model):
            torch.manual_seed(0)
            output = each.generate(**inputs(layout), max_new_tokens=7, **{"do_sample": False} | way)
            found.append(getattr(output, "sequences", output))
        assert torch.equal(*found) and hf_accel.stats(model)["loop"] == reason
    if family == "llama" and reason == "ragged":
        drafted = greedy(model, prompt_lookup_num_tokens=3)
        assert torch.equal(drafted, greedy(expected)) and hf_accel.stats(model)["loop"] == "ragged"
    hf_accel.unpatch(model)
    assert torch.equal(greedy(model), greedy(expected))


@pytest.mark.filterwarnings(PASSED_ON)
def test_a_cache_is_kept_with_what_the_adapter_has_learnt() -> None:
    """Its columns are those of the embeddings, of the padding behind them, of the prompt and of what was generated."""
    model = learnt("llama", "prompt")
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**inputs("left"), **settings).past_key_values
    hf_accel.patch(model, weights=None)
    kept = model.generate(**inputs("left"), **settings).past_key_values
    assert kept.get_seq_length() == expected.get_seq_length()
    assert kept.get_seq_length() == 3 + 13 + 5 or not FINDS_CACHE


SERVES: dict[str, Any] = {
    "Engine": lambda model, ids: hf_accel.Engine(model).close(),
    "generate_batch": lambda model, ids: model.generate_batch([ids], max_new_tokens=4),
    "init_continuous_batching": lambda model, ids: model.init_continuous_batching(),
    "continuous_batching_context_manager": lambda model, ids: model.continuous_batching_context_manager(),
    "paged": lambda model, ids: model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=4, cache_implementation="paged"
    ),
}


@pytest.mark.filterwarnings(PASSED_ON)
@pytest.mark.parametrize("way", SERVES)
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_nothing_leaves_out_what_an_adapter_has_learnt(kind: str, way: str) -> None:
    model, ids = learnt("llama", kind), prompts(1, 9)[0].tolist()
    hf_accel.patch(model, weights=None)
    with pytest.raises(hf_accel.UnsupportedError, match=r"_TUNING.*in front of each prompt.*generate\(\) of the PEFT"):
        SERVES[way](model, ids)


@pytest.mark.filterwarnings(PASSED_ON)
def test_a_batch_without_what_an_adapter_has_learnt() -> None:
    """The model inside has learnt nothing, nor has an adapter that is off."""
    model, ids = learnt("llama", "prompt"), prompts(1, 9)
    hf_accel.patch(model, weights=None)
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = build("llama").generate(ids, **settings)[0, 9:].tolist()
    assert _batched(model.base_model, ids, settings) == expected
    with model.disable_adapter():
        assert _batched(model, ids, settings) == expected
    plain = adapted(hf_accel.patch(build("llama"), weights=None))
    assert _batched(plain, ids, settings) == plain.generate(input_ids=ids, **settings)[0, 9:].tolist()


def _batched(model: Any, ids: Tensor, settings: dict[str, Any]) -> list[int]:
    output = next(iter(model.generate_batch(ids.tolist(), **settings).values()))
    assert output.error is None
    return output.generated_tokens


# -- an adapter for each row ---------------------------------------------------------------------------------

NAMES = ["default", "other", "__base__"]


def of_rows(ids: Tensor, model: Any, **more: Any) -> Tensor:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, **more}
    return model.generate(input_ids=ids, adapter_names=NAMES, **given)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
@pytest.mark.parametrize("speculative", [None, "ngram"])
@pytest.mark.parametrize("alike", [True, False], ids=["equal prompts", "other prompts"])
def test_an_adapter_for_each_row(alike: bool, speculative: str | None) -> None:
    """Rows of equal ids do not share their keys and values, because their adapters differ."""
    outer = adapted(build("llama"))
    ids = prompts(1, 9).expand(3, -1) if alike else prompts(3, 9)
    ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"use_cache": False}]
    expected = [of_rows(ids, outer, **way) for way in ways]
    assert len({tuple(row) for row in expected[0].tolist()}) == 3
    hf_accel.patch(outer, weights=None, speculative=speculative)
    assert all(torch.equal(of_rows(ids, outer, **way), each) for way, each in zip(ways, expected, strict=True))
    assert hf_accel.stats(outer)["loop"].startswith("stock: adapter_names= gives each row")
    assert torch.equal(of_rows(ids, outer, prompt_lookup_num_tokens=2), expected[0])
    assert torch.equal(greedy(outer), greedy(adapted(build("llama")))) and hf_accel.stats(outer)["loop"] == "ragged"


@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
def test_rows_on_quantized_weights() -> None:
    outer = adapted(hf_accel.patch(build("llama")))
    ids = prompts(1, 9)
    found = of_rows(ids.expand(3, -1), outer)
    for row, name in enumerate(NAMES[:2]):
        outer.set_adapter(name)
        assert torch.equal(found[row : row + 1], outer.generate(input_ids=ids, max_new_tokens=6, do_sample=False))


@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
def test_adapters_that_begin_inside_a_row() -> None:
    """Activated LoRA, whose offsets PEFT reads from the tokens of each row."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]
    )
    outer = peft.get_peft_model(build("llama"), config).eval()
    randomize({name: p for name, p in outer.named_parameters() if "lora_" in name})
    ids = prompts(2, 12)
    ids[0, 4], ids[0, 5], ids[1, 8], ids[1, 9] = 5, 6, 5, 6
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    expected = outer.generate(**asked)
    hf_accel.patch(outer, weights=None)
    assert torch.equal(outer.generate(**asked), expected)


@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
def test_a_task_for_each_row() -> None:
    """Poly, whose hooks hold the tasks in a closure."""
    config = peft.PolyConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", n_tasks=3)
    outer = peft.get_peft_model(build("llama"), config).eval()
    randomize({name: p for name, p in outer.named_parameters() if "poly_" in name})
    for name, parameter in outer.named_parameters():
        parameter.data *= 5 if "poly_" in name else 1
    ids = prompts(1, 9).expand(3, -1)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    tasks = torch.tensor([2, 0, 1])
    expected = outer.generate(**asked, task_ids=tasks)
    assert len({tuple(row) for row in expected.tolist()}) == 3
    hf_accel.patch(outer, weights=None)
    assert torch.equal(outer.generate(**asked, task_ids=tasks), expected)
    assert hf_accel.stats(outer)["loop"].startswith("stock: task_ids= gives each row")
