"""RecurrentGemma: gated linear recurrent units, whose states transformers keeps in the modules."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_accel
from hf_accel import Engine, PagedCache, UnsupportedError
from hf_accel.kernels.cpu import refusal
from hf_accel.recognition.trial import Tolerance, agree
from hf_accel.recurrent.hf import state_pass
from hf_accel.recurrent.hf.gated_units import PagedUnit, known_gated_unit

from ..selection import seeds
from .families import VOCABULARY
from .recurrent_models import gated_unit_of
from .snapshot import snapshot
from .together import (
    NEW_TOKENS,
    PROMPTS,
    WAIT,
    alone,
    check_forks,
    check_preemption,
    check_programme,
    padded,
    together,
)

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")

BLOCKS = ("recurrent", "recurrent", "attention")


def model_of(blocks: tuple[str, ...] = BLOCKS, *, tokens: int = 4, **other: Any) -> Any:
    return gated_unit_of(blocks, tokens=tokens, **other)


def unit_of(model: Any) -> Any:
    return model.model.layers[0].temporal_block


@pytest.mark.covering(1)
@pytest.mark.parametrize("blocks", [BLOCKS, ("recurrent", "attention"), ("attention", "recurrent")], ids=str)
@pytest.mark.parametrize(("tokens", "heads"), [(2, 1), (3, 2), (4, 8)])
def test_requests_together_give_the_tokens_of_each_alone(blocks: tuple[str, ...], tokens: int, heads: int) -> None:
    model = model_of(blocks, tokens=tokens, heads=heads)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert together(model) == expected


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
def test_padding_and_beams_stay_on_transformers_loop(settings: dict[str, Any]) -> None:
    """Its convolutions compute padding as they compute tokens, and its states stay when beams change places."""
    model = model_of()
    ids, mask = padded("left")
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False} | settings
    torch.manual_seed(0)
    expected = model.generate(ids, **settings)
    hf_accel.patch(model, weights=None)
    torch.manual_seed(0)
    with pytest.warns(hf_accel.HfAccelWarning, match="recurrent layers compute padding"):
        assert torch.equal(model.generate(ids, **settings), expected)
    assert hf_accel.stats(model)["loop"] == "stock: its recurrent layers compute padding as they compute tokens"
    ids = ids[:1]
    expected = hf_accel.unpatch(copy.deepcopy(model)).generate(ids, num_beams=3, max_new_tokens=12)
    with pytest.warns(hf_accel.HfAccelWarning, match="leaves its recurrent states behind when beams change places"):
        assert torch.equal(model.generate(ids, num_beams=3, max_new_tokens=12), expected)
    with pytest.raises(UnsupportedError, match=r"computes padding as it computes tokens.*generate_batch"):
        model(padded("left")[0], attention_mask=mask, past_key_values=PagedCache(model.config))


@pytest.mark.parametrize("seed", seeds(0, 6))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption and drafts change no request's tokens."""
    numbers = random.Random(seed)
    blocks = (*numbers.choices(["recurrent", "attention"], k=3), "attention", "recurrent")
    model = model_of(blocks, tokens=numbers.choice([2, 3, 4]), window=numbers.choice([8, 64]))
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


def test_preemption_and_shared_prefixes() -> None:
    check_preemption(model_of(window=200))


def test_a_cache_goes_back_and_forks() -> None:
    check_forks(hf_accel.patch(model_of(window=200), weights=None), crops=(3, 2))


@pytest.mark.parametrize("gradients", [True, False])
def test_passes_over_a_paged_cache(gradients: bool) -> None:
    """There a pass of many tokens goes on with the convolution, which transformers' begins anew in each."""
    model = model_of(window=200)
    ids = torch.randint(1, VOCABULARY, (3, 40))
    whole = model(ids, use_cache=False).logits
    hf_accel.patch(model, weights=None)
    cache, parts = PagedCache(model.config), []
    with torch.set_grad_enabled(gradients):
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([13, 1, 1, 25], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_position_of_zero_forgets_what_was_before() -> None:
    model = hf_accel.patch(model_of(window=200), weights=None)
    unit = unit_of(model)
    x = torch.randn(1, 12, 32)
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    expected, _ = unit(x, position_ids=at, use_cache=False)
    cache = PagedCache(model.config)
    cache.prepare(1, 12, device=x.device)
    found, _ = unit(x, position_ids=at, past_key_values=cache)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
def test_quantized_weights_batch_exactly(weights: Any) -> None:
    model = hf_accel.patch(model_of(hidden_size=64), weights=weights)
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_bits_whatever_is_computed_with_it(dtype: torch.dtype) -> None:
    model = hf_accel.patch(model_of(("recurrent",)).to(dtype), deterministic=True)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    with Engine(model, token_budget=9) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected


@pytest.mark.parametrize("fuse", [True, False])
def test_patch_is_undone_exactly(fuse: bool) -> None:
    model = model_of()
    before = snapshot(model)
    # It calls the model, whose code then keeps other states.
    before["vars"] = {n: [(key, id(value)) for key, value in vars(m).items()] for n, m in model.named_modules()}
    hf_accel.patch(model, weights=None, fuse=fuse)
    assert isinstance(unit_of(model), PagedUnit)
    alone(model, PROMPTS[0])
    assert snapshot(hf_accel.unpatch(model)) == before


@pytest.mark.parametrize("change", ["code", "bias", "hook", "width"])
def test_a_changed_layer_keeps_the_model_on_transformers_cache(change: str) -> None:
    model = model_of()
    block = unit_of(model)
    if change == "code":

        class Other(type(block)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
                return super().forward(*args, **kwargs)[0] * 1.01, None

        block.__class__ = Other
    elif change == "bias":
        block.conv_1d.bias = None
        block.conv_1d.register_parameter("bias", None)
    elif change == "hook":
        block.rg_lru.register_forward_hook(lambda *given: None)
    else:
        block.conv_1d = nn.Conv1d(32, 32, 4, groups=32, padding=0)
    assert known_gated_unit(block, "model.layers.0.temporal_block") is None
    assert hf_accel.plan(model, weights=None).stock_cache == (
        "1 of its recurrent layers compute in a way that is not known"
    )


def test_trials_leave_room_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def agree_closely(theirs: Any, ours: Any, tolerance: Tolerance) -> bool:
        return agree(theirs, ours, Tolerance(*(allowed / 4 for allowed in tolerance)))

    monkeypatch.setattr(state_pass, "agree", agree_closely)
    for tokens in (2, 3, 4):
        assert known_gated_unit(unit_of(model_of(tokens=tokens)), "model.layers.0.temporal_block") is not None


def test_estimate_counts_what_the_cache_keeps() -> None:
    model = model_of(window=10**4)
    estimate = hf_accel.estimate(model, context=1000, weights=None)
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=8)
    model.generate(torch.randint(1, VOCABULARY, (1, 992)), max_new_tokens=9, past_key_values=cache)
    assert cache.statistics()["kv_bytes"] == estimate.kv_bytes
