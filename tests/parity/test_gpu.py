"""Patched models on an NVIDIA GPU, with CUDA graphs: stock's tokens. float32, so that no near-tie decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accel

from .families import FAMILIES, build
from .speculating import answers, by_engine, near, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

PROMPTS = requests(9, longest=20, seed=3, shared=4)
NEW_TOKENS = 16


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def patched(family: str = "llama", **settings: Any) -> Any:
    return hf_accel.patch(build(family).to("cuda"), weights=None, **settings)


def by_generate_batch(
    model: Any, new_tokens: int = NEW_TOKENS, prompts: Any = PROMPTS, **settings: Any
) -> list[list[int]]:
    outputs = model.generate_batch(prompts, max_new_tokens=new_tokens, do_sample=False, **settings)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_batch(family: str) -> None:
    model = patched(family, cache=hf_accel.CacheConfig(max_tokens=4096))
    assert by_generate_batch(model) == answers(family, PROMPTS, NEW_TOKENS)
    graphs = hf_accel.stats(model)["graphs"]
    assert graphs["replays"] >= NEW_TOKENS - 3, graphs


def test_generate() -> None:
    """Again and again: graphs are kept from call to call. The first prompt, which makes the pages, has none."""
    model = patched()
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    for number in range(3):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == answers("llama", PROMPTS[:1], NEW_TOKENS)[0]
        graphs = hf_accel.stats(model)["graphs"]
        assert graphs["replays"] >= NEW_TOKENS - 3 and (number == 0 or graphs["captures"] <= (number == 1)), graphs


def test_prompts_of_a_shape() -> None:
    """They are graphs from the second one on."""
    model, prompt = patched(), (PROMPTS[0] * 40)[:40]
    for number, length in enumerate((40, 40, 37, 33, 39)):
        ids = torch.tensor([prompt[:length]], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert out[0, length:].tolist() == answers("llama", [prompt[:length]], NEW_TOKENS)[0]
        assert len(hf_accel.stats(model)["graphs"]["eager"]) == (number < 2), "pages are made, and a shape is met"
    assert hf_accel.stats(model)["graphs"]["captures"] == 0


def test_generate_after_the_weights_have_moved() -> None:
    """All graphs are dropped, and captured again. What only reads a weight drops none."""
    model = hf_accel.patch(build("llama").to("cuda"), weights="int8")
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    captures = []
    for change in (None, None, lambda: model.lm_head.weight.sum(), lambda: model.to(torch.bfloat16).to(torch.float32)):
        if change is not None:
            change()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        graphs = hf_accel.stats(model)["graphs"]
        captures.append(graphs["captures"])
        assert graphs["replays"] >= NEW_TOKENS - 3, graphs
    assert captures[2] == 0 and captures[3] > 0, captures


def test_engine() -> None:
    model = patched(cache=hf_accel.CacheConfig(max_tokens=4096))
    tokens, stats = by_engine(model, PROMPTS, NEW_TOKENS)
    assert tokens == answers("llama", PROMPTS, NEW_TOKENS) and stats["blocks_used"] == 0


@pytest.mark.parametrize("drafter", ["ngram", "near model"])
def test_speculation(drafter: str) -> None:
    draft = near("llama").to("cuda") if drafter == "near model" else drafter
    model = patched(cache=hf_accel.CacheConfig(max_tokens=4096))
    config = hf_accel.SpeculativeConfig(drafter=draft, num_draft=3)
    assert by_generate_batch(model, speculative=config) == answers("llama", PROMPTS, NEW_TOKENS)


def test_preemption() -> None:
    model = patched(cache=hf_accel.CacheConfig(max_tokens=96))
    assert by_generate_batch(model, 40) == answers("llama", PROMPTS, 40)
    assert hf_accel.stats(model)["preemptions"] > 0


def test_pages_take_what_is_free() -> None:
    """Those of an Engine do: it does not know what will come."""
    model = patched()
    tokens, stats = by_engine(model, PROMPTS, NEW_TOKENS)
    assert tokens == answers("llama", PROMPTS, NEW_TOKENS)
    total = torch.cuda.mem_get_info()[1]
    per_block = stats["blocks_allocated"]
    assert per_block * 16 * 2 * 2 * 2 * 8 * 4 > total // 4  # layers, K and V, heads, numbers, bytes


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}])
def test_quantized_weights(weights: Any) -> None:
    """Graphs or none, tokens are the same."""
    model = hf_accel.patch(build("llama").to("cuda"), weights=weights, cache=hf_accel.CacheConfig(max_tokens=4096))
    first = by_generate_batch(model)
    assert len(first) == len(PROMPTS) and first == by_generate_batch(model)


def test_adapters_of_requests(tmp_path: Path) -> None:
    """One request of three has one: each gets the tokens that it gets alone, and the one those of PEFT."""
    peft = pytest.importorskip("peft")
    outer = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in outer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    outer.save_pretrained(tmp_path)
    prompts, adapters = PROMPTS[:3], [None, str(tmp_path), None]
    found = by_generate_batch(patched(), prompts=prompts, adapter=adapters)
    ids = torch.tensor([prompts[1]])
    wanted = outer.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS)
    assert found[1] == wanted[0, ids.shape[1] :].tolist() != answers("llama", prompts[1:2], NEW_TOKENS)[0]
    assert [found[0], found[2]] == answers("llama", [prompts[0], prompts[2]], NEW_TOKENS)
