"""For each kind of state that a model keeps: random programmes of requests, whose answers are those of each alone.

A programme has arrivals, samples, cancels, preemption, drafts, shared beginnings and passes that fail, in a random
order, over random settings of a session.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import hf_accel
from hf_accel.generation.hf.refusals import ragged_refusal
from hf_accel.kernels.cpu import refusal as kernels_refusal

from ..families.configs import tiny_config
from ..families.models import build as build_drawn
from ..families.models import family
from ..selection import some_long
from . import (
    test_chunks,
    test_compressed,
    test_convolutions,
    test_delta_attention,
    test_encoder_decoders,
    test_indexers,
    test_media,
    test_operators,
    test_reused_keys,
    test_whole_prompts,
)
from .families import VOCABULARY, build
from .programme import Asked, Programme, adapter_of
from .recurrent_models import LAYERS, delta_rule_of, gated_unit_of, matrix_memory_of, state_space_of, time_mixes_of

try:
    from . import test_own_code
except pytest.skip.Exception:  # an older transformers lacks one of its models: all other kinds are played
    test_own_code = None  # type: ignore[assignment]

NEW_TOKENS, NEW_BEHIND_ENCODERS, NEW_BEHIND_IMAGES = 16, 26, 10
MOST_FOR_ENCODERS = 10  # tokens, so that it is not the encoder's output that fills a cache
SEEDS_OF_A_TEST, LONG_TESTS = 20, 8
HAPPENS = ("arrived", "finished", "cancelled", "failed", "samples", "preempted", "shared", "accepted")
NEEDS_KERNELS = pytest.mark.skipif(
    kernels_refusal() is not None, reason=f"states in pages need the kernels: {kernels_refusal()}"
)
IMAGES = {"images": test_media.LLAVA, "images and windows": test_media.GEMMA, "images in grids": test_media.QWEN}
ENCODERS = {"encoder": "Bart", "encoder with distances": "T5"}

MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: build("llama"),
    "windows": lambda: build("gemma2"),
    "chunks": lambda: test_chunks.model_of(attention_chunk_size=16),
    "compressed keys": lambda: test_compressed.model_of("DeepseekV3"),
    "delta rule": lambda: delta_rule_of("next", LAYERS, tokens=4, repeats=2),
    "mamba 1": lambda: state_space_of("jamba", LAYERS, tokens=4, repeats=2),
    "mamba 2": lambda: state_space_of("bamba", LAYERS, tokens=4, repeats=2),
    "convolutions": test_convolutions.model_of,
    "delta attention": test_delta_attention.model_of,
    "reused keys": test_reused_keys.model_of,
    "indices": test_indexers.model_of,
    "gated units": lambda: gated_unit_of(("recurrent", "attention"), tokens=4),
    "time mixes": time_mixes_of,
    "matrix memories": matrix_memory_of,
    "operators": lambda: test_operators.model_of("bloom"),
    "operators and windows": lambda: test_operators.model_of("gpt_neo"),
    "whole prompts": lambda: test_whole_prompts.model_of("roformer"),
} | {kind: (lambda name=name: test_encoder_decoders.model_of(name)) for kind, name in ENCODERS.items()}
if test_own_code is not None:
    MODELS["own code"] = lambda: test_own_code.model_of("zaya")
STATES = ("delta rule", "mamba 1", "mamba 2", "delta attention", "gated units", "time mixes", "matrix memories")
DRAWN = [pytest.param("NemotronHForCausalLM 1", marks=NEEDS_KERNELS), "DeepseekV3ForCausalLM 3"]
KINDS = [pytest.param(kind, marks=NEEDS_KERNELS if kind in STATES else ()) for kind in (*MODELS, *IMAGES)]
# The states of these are those of DRAWN, or of other kinds: two of images, of windows with operators, and of encoders.
PLAYED_AS_OTHERS = ("mamba 2", "compressed keys", "images", "operators and windows", "encoder")


def texts() -> list[list[int]]:
    """Prompts of which many begin alike, and of which some are the beginning of others."""
    numbers = random.Random(3)

    def words(count: int) -> list[int]:
        return [numbers.randrange(3, VOCABULARY) for _ in range(count)]

    instructions = [words(count) for count in (0, 9, 24)]
    first = [instruction + words(numbers.randint(1, 18)) for instruction in instructions for _ in range(4)]
    return first + [prompt + words(numbers.randint(1, 12)) for prompt in first]


def with_images(name: str) -> list[dict[str, Tensor]]:
    """Prompts about two images, and prompts without one."""
    numbers = random.Random(3)
    words = [tuple(numbers.choices(range(3, 30), k=count)) for count in (0, 4, 11)]
    plain: list[dict[str, Tensor]] = [{"input_ids": torch.tensor([[5, *more, 7]])} for more in words]
    return plain + [test_media.prompt(name, row, more) for row in (0, 1, 2) for more in words]


@cache
def asked(kind: str) -> Asked:
    """Stock's answers are computed as they are asked for, from a model that is not patched."""
    if kind in IMAGES:
        name = IMAGES[kind]
        images = with_images(name)
        longest = max(each["input_ids"].shape[1] for each in images)
        return Asked(
            test_media.patched(name), images, lambda number, count: test_media.expected(name, images[number], count),
            most=NEW_BEHIND_IMAGES, needs=longest + NEW_BEHIND_IMAGES,
        )  # fmt: skip
    make = MODELS.get(kind) or partial(drawn, kind)
    stock, patched = make(), hf_accel.patch(make(), weights=None)
    refusal = ragged_refusal(patched)
    if refusal is not None:  # as of a rotation that the length of a batch changes
        raise hf_accel.UnsupportedError(refusal)
    prompts, most, needs = texts(), NEW_TOKENS, NEW_BEHIND_ENCODERS + 1
    if kind in ENCODERS:
        prompts, most = [prompt[-MOST_FOR_ENCODERS:] for prompt in prompts], NEW_BEHIND_ENCODERS
    else:
        needs = max(map(len, prompts)) + NEW_TOKENS
    return Asked(patched, prompts, lambda number, count: answer(stock, prompts[number], count), most, needs)


def drawn(kind: str) -> Any:
    """The model of a class and a number, such as JambaForCausalLM 3, whose configuration tests/families draws."""
    name, number = kind.split()
    return build_drawn(replace(family(name), variant=int(number)))


def answer(stock: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens that a model of transformers writes behind a prompt, at most so many."""
    ids = torch.tensor([prompt], device=stock.device)
    settings = {"max_new_tokens": count, "do_sample": False}
    tokens: list[int] = stock.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    return tokens[1 if stock.config.is_encoder_decoder else len(prompt) :]


def happened(kind: str, seeds: range, *, arrivals: int = 12) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        programme = Programme(asked(kind), seed)
        try:
            programme.play(arrivals=arrivals)
        except Exception as error:
            error.add_note(f"in the programme of seed {seed}, after {dict(programme.happened)}")
            raise
        counts += programme.happened
    return counts


@pytest.mark.parametrize("kind", some_long(KINDS, *PLAYED_AS_OTHERS))
def test_a_programme(kind: str) -> None:
    """`python -m tests.parity.play --all` plays many."""
    assert happened(kind, range(1), arrivals=7)["finished"] > 0


@pytest.mark.parametrize("kind", DRAWN)
def test_a_programme_over_a_drawn_configuration(kind: str) -> None:
    """`python -m tests.parity.play NemotronHForCausalLM --programmes 20` plays one over each of 20."""
    assert happened(kind, range(1), arrivals=5)["finished"] > 0


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # as transformers initializes these layers
def test_an_adapter_leaves_out_layers_without_a_weight() -> None:
    """Those of a DeepSeek V3 that has no shared expert, to which nothing is added: it raised ZeroDivisionError."""
    model = hf_accel.patch(test_compressed.model_of("DeepseekV3", n_shared_experts=0), weights=None)
    assert 0 in {layer.in_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    parts = adapter_of(model, 1).parts
    assert parts
    assert all(layer.in_features and layer.out_features for layer in parts)


def test_what_no_session_serves_is_no_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    monkeypatch.setitem(MODELS, "changing", lambda: LlamaForCausalLM(tiny_config("llama", rope_parameters=rotation)))
    with pytest.raises(hf_accel.UnsupportedError, match="depends on the length"):
        happened("changing", range(1))


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_TESTS))
@pytest.mark.parametrize("kind", KINDS)
def test_many_programmes(kind: str, part: int) -> None:
    counts = happened(kind, range(SEEDS_OF_A_TEST * part, SEEDS_OF_A_TEST * (part + 1)))
    # What a decoder behind an encoder is given is one token, which is no block that others could share.
    assert all(counts[name] > 0 for name in HAPPENS if not (name == "shared" and kind in ENCODERS)), counts
