"""RWKV and xLSTM: all layers are recurrent, and transformers keeps their states in caches of their own classes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_accel
from hf_accel import PagedCache
from hf_accel.kernels.cpu import refusal
from hf_accel.recurrent.hf.matrix_memories import known_matrix_memory
from hf_accel.recurrent.hf.time_mixes import known_time_mixes
from hf_accel.undo.state import FUSED

from ..selection import seeds
from .families import VOCABULARY
from .recurrent_models import matrix_memory_of, state_space_of, time_mixes_of
from .together import PROMPTS, alone, check_programme, padded, together

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")

MODELS: dict[str, Callable[[], Any]] = {"rwkv": time_mixes_of, "xlstm": matrix_memory_of}
EMBEDDED = MODELS | {"mamba2": lambda: state_space_of("mamba2", ["mamba"], tokens=4, repeats=2)}


@pytest.mark.parametrize("kind", MODELS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    model = MODELS[kind]()
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert together(model) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("kind", MODELS)
def test_random_programmes_of_requests(kind: str, seed: int) -> None:
    """Arrivals, chunks of prompts, samples, preemption and drafts change no request's tokens."""
    check_programme(MODELS[kind](), random.Random(seed), block_sizes=[1, 4, 16], seed=seed)


def test_padding_is_tokens() -> None:
    """Neither reads a mask: of a batch, stock computes the padding in front of a prompt as a part of it."""
    model = matrix_memory_of()
    ids, mask = padded("left")
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **settings)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize("kind", ["mamba2", "rwkv", "xlstm"])
def test_embeddings_as_prompts(kind: str) -> None:
    """A decoder whose code takes no layers but its own cannot be tried with stand-ins, and runs in stock's loop."""
    model = EMBEDDED[kind]()
    embedded = model.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones(embedded.shape[:2]).long()}
    expected = model.generate(inputs_embeds=embedded, **settings)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(inputs_embeds=embedded, **settings), expected)


def test_rows_that_change_each_other_stay_on_transformers_loop() -> None:
    """Behind a prompt, transformers' RWKV mixes each token with those of other rows."""
    model = time_mixes_of()
    ids = torch.randint(1, VOCABULARY, (2, 7))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **settings)
    one = [model.generate(row[None], **settings)[0] for row in ids]
    hf_accel.patch(model, weights=None)
    known = vars(model.rwkv.blocks[0])[FUSED]
    if known.mixes_rows:
        with pytest.warns(hf_accel.HfAccelWarning, match="a row of its batch from the states of other rows"):
            assert torch.equal(model.generate(ids, **settings), expected)
    for row, wanted in zip(ids, one, strict=True):
        assert torch.equal(model.generate(row[None], **settings)[0], wanted)
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize("kind", MODELS)
def test_passes_over_a_paged_cache(kind: str) -> None:
    model = MODELS[kind]()
    ids = torch.randint(1, VOCABULARY, (3, 40))
    whole = model(ids, use_cache=False).logits
    hf_accel.patch(model, weights=None)
    cache, name = PagedCache(model.config), {"rwkv": "state", "xlstm": "cache_params"}[kind]
    with torch.no_grad():
        parts = [model(part, use_cache=True, **{name: cache}).logits for part in ids[:, :15].split([13, 1, 1], 1)]
        fork = copy.deepcopy(cache)
        model(torch.randint(1, VOCABULARY, (3, 5)), use_cache=True, **{name: cache})
        parts.append(model(ids[:, 15:], use_cache=True, **{name: fork}).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", ["none", "decay", "mix", "norm"])
def test_a_layer_is_known_by_what_it_computes(change: str) -> None:
    layer = time_mixes_of().rwkv.blocks[1]

    class Other(type(layer.attention)):  # type: ignore[misc]
        def extract_key_value(self, hidden: Any, state: Any = None) -> Any:
            receptance, key, value, state = super().extract_key_value(hidden, state=state)
            return receptance, key * (1.5 if change == "decay" else 1.0), value + float(change == "mix"), state

    if change in ("decay", "mix"):
        layer.attention.__class__ = Other
    if change == "norm":
        layer.ln2 = None
    assert (known_time_mixes(layer) is not None) is (change == "none")


@pytest.mark.parametrize(("cap", "known"), [(15.0, True), (2.0, True), (80.0, False)])
def test_gates_that_may_overflow_are_not_known(cap: float, known: bool) -> None:
    layer = matrix_memory_of(cap=cap).backbone.blocks[1].mlstm_layer
    assert (known_matrix_memory(layer, "backbone.blocks.1.mlstm_layer") is not None) is known
