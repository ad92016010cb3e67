"""What ranks run in the tests of context parallel: a tiny model on one rank, then over all, and what differs."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import GptOssConfig, GptOssForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_accel
from hf_accel.cache.storage import KVStorage
from hf_accel.errors import LostRankError
from hf_accel.undo.state import state_of

from ..parity.families import DECODER, PADDING, WINDOW, build, prompts
from ..parity.snapshot import snapshot

LENGTH = 75  # of prompts, in tokens: more than four blocks for each rank
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # family, CacheConfig, call
    "grouped heads": ("llama", {}, {}),
    "chunks": ("llama", {}, {"prefill_chunk_size": 16}),
    "a batch": ("llama", {}, {"rows": 3}),
    "beams": ("llama", {}, {"rows": 2, "num_beams": 3}),
    "samples": ("llama", {}, {"do_sample": True, "num_return_sequences": 3}),
    "a window": ("mistral", {}, {"rows": 2}),
    "window and softcap": ("gemma2", {}, {"rows": 2, "prefill_chunk_size": 16}),
    "sinks and a window": ("gpt_oss", {}, {"rows": 2}),
    "drafts": ("llama", {}, {"rows": 2, "speculative": "suffix"}),
    "a draft of its own weights": ("llama", {}, {"speculative": "self-int4"}),
    "int8": ("llama", {"dtype": "int8"}, {"rows": 2, "prefill_chunk_size": 16}),
    "int4": ("gemma2", {"dtype": "int4"}, {"rows": 2}),
}


def model_of(family: str) -> PreTrainedModel:
    if family != "gpt_oss":
        return build(family)
    torch.manual_seed(0)
    config = GptOssConfig(**DECODER, head_dim=8, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1)
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model.eval()


def given(rows: int) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the left."""
    ids = prompts(rows, LENGTH)
    for row in range(rows):
        ids[row, : 20 * row] = PADDING
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}


def generated(model: PreTrainedModel, call: dict[str, Any]) -> Any:
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True} | call
    torch.manual_seed(1)
    return model.generate(**given(call.pop("rows", 1)), **call)


def held(cache: Any) -> int:
    """The bytes of all tensors of its pages."""
    storages = [storage for group in cache.pages.groups for storage in group.storages.values()]
    return sum(x.untyped_storage().nbytes() for storage in storages for x in storage.pages if x is not None)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of a second pass over keys of a first one."""
    state = state_of(model).generation
    cache = hf_accel.PagedCache(model.config, state.cache, context=state.context)
    model(input_ids=ids[:, :-9], past_key_values=cache)
    return model(input_ids=ids[:, -9:], past_key_values=cache).logits.float()


def compare(names: list[str]) -> dict[str, dict[str, Any]]:
    """Each case on this rank alone, then with the blocks shared out."""
    found = {}
    for name in names:
        family, cache, call = CASES[name]
        model = model_of(family)
        before = snapshot(model)
        results = []
        for group in (None, distributed.group.WORLD):
            settings = hf_accel.CacheConfig(block_size=4, **cache)
            hf_accel.patch(model, weights=None, cache=settings, context_parallel=group)
            output = generated(model, call)
            ids = output.sequences[:, : LENGTH + 12]
            results.append((ids.tolist(), held(output.past_key_values), logits(model, prompts(2, 40))))
            del output
            hf_accel.unpatch(model)
        (one, one_bytes, expected), (two, two_bytes, actual) = results
        found[name] = {
            "one": one, "two": two, "share": two_bytes / one_bytes, "restored": snapshot(model) == before,
            "error": float((actual - expected).abs().max() / expected.abs().max()),
        }  # fmt: skip
    return found


def served() -> list[Any]:
    """An Engine's answers, and those of generate_batch, on each rank; and one rank's."""
    found = []
    texts = [prompts(1, length)[0].tolist() for length in (40, 7, 23)]
    model = model_of("llama")
    for group in (None, distributed.group.WORLD):
        hf_accel.patch(model, weights=None, cache={"block_size": 4}, context_parallel=group)
        batch = model.generate_batch(texts, max_new_tokens=6, do_sample=False)
        with hf_accel.Engine(model, max_tokens=80) as engine:
            requests = [engine.submit(text, max_new_tokens=6, temperature=0.7, seed=3) for text in texts]
            answers = [request.result().tokens for request in requests]
        found.append(([output.generated_tokens for output in batch.values()], answers))
        hf_accel.unpatch(model)
    return found


def longer_than_one_rank_holds() -> dict[str, Any]:
    """Pages of equal bytes on each rank: alone, and together."""
    found: dict[str, Any] = {}
    model = model_of("llama")
    for name, max_tokens, group in (("one", 60, None), ("two", 120, distributed.group.WORLD)):
        hf_accel.patch(model, weights=None, cache={"block_size": 4, "max_tokens": max_tokens}, context_parallel=group)
        short = model.generate(prompts(1, 20), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        found[f"{name} bytes"] = held(short.past_key_values)
        del short
        try:
            found[name] = model.generate(prompts(1, 100), max_new_tokens=8, do_sample=False).tolist()
        except hf_accel.OutOfBlocksError as error:
            found[name] = str(error)
        hf_accel.unpatch(model)
    found["stock"] = model.generate(prompts(1, 100), max_new_tokens=8, do_sample=False).tolist()
    return found


def refusals() -> list[str]:
    """What is said to calls that cannot be served; all before the ranks would wait for each other."""
    model = model_of("llama")
    ids, world = prompts(1, 8), distributed.group.WORLD
    said = []
    keywords: dict[str, Any]
    for keywords in (
        {"context_parallel": "world"},
        {"context_parallel": world, "cache": None},
        {"context_parallel": world, "weights": "auto"},
        {"context_parallel": world, "deterministic": True},
    ):
        try:
            hf_accel.patch(model, **{"weights": None} | keywords)
        except hf_accel.UnsupportedError as error:
            said.append(str(error))
    hf_accel.patch(model, weights=None, context_parallel=world)
    said.append(str(hf_accel.plan(model_of("llama"), weights=None, context_parallel=world)))
    for call in (
        lambda: model.generate(ids, max_time=1.0),
        lambda: model.generate(ids, use_cache=False),
        lambda: model.generate(ids, past_key_values=hf_accel.PagedCache(model.config)),
        lambda: model.generate(ids, output_attentions=True, return_dict_in_generate=True),
    ):
        try:
            call()
        except hf_accel.UnsupportedError as error:
            said.append(str(error))
        else:
            said.append("served")
    return said


def other_prompts() -> str:
    """Each rank has a text of its own. generate() notices by itself; here the model is called directly."""
    model = hf_accel.patch(model_of("llama"), weights=None, context_parallel=distributed.group.WORLD)
    try:
        cache = hf_accel.PagedCache(model.config, context=state_of(model).generation.context)
        model(prompts(1, 8, seed=1 + distributed.get_rank()), past_key_values=cache)
    except LostRankError as error:
        return str(error)
    return "served"


def example(path: str) -> str:
    """What the example prints here."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def live_pages() -> int:
    gc.collect()
    return sum(type(each) is KVStorage for each in gc.get_objects())


def late(seconds: float) -> tuple[str, float, int]:
    """Rank 1 never calls; the others wait no longer than their group's timeout."""
    group = distributed.new_group(timeout=timedelta(seconds=seconds))
    if distributed.get_rank() == 1:
        return "", 0.0, 0
    start, message = time.monotonic(), "served"
    model = hf_accel.patch(model_of("llama"), weights=None, context_parallel=group)
    try:
        model.generate(prompts(1, 8), max_new_tokens=2)
    except LostRankError as error:
        message = str(error)
    return message, time.monotonic() - start, live_pages()


class Death(LogitsProcessor):
    """Ends the process of rank 1 when it has chosen a few tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores


def half_way() -> tuple[str, int, int]:
    """Rank 1 dies in the middle of a call: what the others say, and the pages that they hold before and after."""
    model = hf_accel.patch(model_of("llama"), weights=None, context_parallel=distributed.group.WORLD)
    death, message, before = LogitsProcessorList([Death()]), "served", 0
    try:
        model.generate(prompts(2, LENGTH), max_new_tokens=20, do_sample=False, logits_processor=death)
    except LostRankError as error:
        before, message = live_pages(), str(error)
    return message, before, live_pages()
