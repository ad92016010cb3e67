"""Models with short convolutions (LFM2) run as others do: their inputs stay in pages, beside keys and values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM

import hf_accel
from hf_accel import PagedCache, UnsupportedError
from hf_accel.cache.hf import model_kinds
from hf_accel.fused.hf.layer_calls import LayerCalls, TracedForward
from hf_accel.recurrent.hf.convolutions import PagedConvolution, is_known_convolution
from hf_accel.undo.state import FUSED

from ..selection import seeds
from .families import VOCABULARY
from .snapshot import snapshot
from .together import (
    PROMPTS,
    alone,
    check_forks,
    check_programme,
    check_sampling,
    check_together,
    in_passes,
    padded,
    together,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention"]


def model_of(kind: str = "lfm2", layers: Sequence[str] = LAYERS, tokens: int = 3, **other: Any) -> Any:
    torch.manual_seed(3)
    sizes = SIZES | {"num_hidden_layers": len(layers), "layer_types": list(layers), "conv_L_cache": tokens} | other
    if kind == "lfm2":
        return Lfm2ForCausalLM(Lfm2Config(**sizes)).eval()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1}
    return Lfm2MoeForCausalLM(Lfm2MoeConfig(**sizes, **experts)).eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_requests_together_give_the_tokens_of_each_alone(kind: str, tokens: int) -> None:
    model = model_of(kind, tokens=tokens)
    check_together(model)


@pytest.mark.parametrize("seed", seeds(0, 6))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption and drafts change no request's tokens."""
    numbers = random.Random(seed)
    layers = [*numbers.choices(["conv", "full_attention"], [3, 2], k=3), "full_attention", "conv"]
    model = model_of(layers=layers, tokens=numbers.choice([2, 3, 4]))
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_and_their_copies(settings: dict[str, Any]) -> None:
    model = model_of()
    ids, mask = padded("left")
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    hf_accel.patch(model, weights=None)
    assert torch.equal(
        model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings), expected
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["left", "right", "gaps"])
@pytest.mark.parametrize("cuts", [[40], [1, 39], [7, 1, 1, 31], [2] * 20])
def test_passes_over_a_paged_cache(side: str, cuts: list[int]) -> None:
    """Padding on the right, or between tokens, is a token of zeros to a convolution, as in transformers.

    There a pass of one column takes padding for a token, so that no such column is padding here.
    """
    model, numbers = model_of(), random.Random(len(cuts))
    ids = torch.randint(1, VOCABULARY, (3, 40))
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 5, 11)):
        places = {"left": range(count), "right": range(40 - count, 40), "gaps": numbers.sample(range(9, 40), count)}
        mask[row, list(places[side])] = 0
    expected = in_passes(model, ids, mask, cuts, cache=None)
    hf_accel.patch(model, weights=None)
    found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def test_a_cache_goes_back_and_forks() -> None:
    check_forks(hf_accel.patch(model_of(tokens=4), weights=None))


def test_inputs_of_convolutions_are_never_quantized() -> None:
    model = hf_accel.patch(model_of(), weights=None, cache={"dtype": "int8"})
    cache = PagedCache(model.config, dtype="int8")
    model(torch.tensor([PROMPTS[0]]), past_key_values=cache)
    dtypes = [layer.group.storages[layer.layer_idx].pages.k.dtype for layer in cache.paged_layers]
    assert dtypes == [torch.float32 if name == "conv" else torch.int8 for name in LAYERS]
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


def test_quantized_weights_batch_exactly() -> None:
    model = hf_accel.patch(model_of())
    expected = [alone(model, prompt) for prompt in PROMPTS]
    assert together(model) == expected


def layer_calls(model: nn.Module) -> list[LayerCalls[Any]]:
    return [vars(module)[FUSED] for module in model.modules() if isinstance(module, TracedForward)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize(
    ("dtype", "weights", "tokens"),
    [(torch.float32, None, 2), (torch.bfloat16, None, 3), (torch.float16, None, 5), (torch.bfloat16, "int8", 4)],
)
@torch.no_grad()
def test_a_layer_with_a_convolution_is_one_call_with_the_bits_of_its_modules(
    kind: str, dtype: torch.dtype, weights: str | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages of one token and of many, in passes of one token and of many, for several sequences."""
    model = hf_accel.patch(model_of(kind, tokens=tokens, hidden_size=40).to(dtype), weights=weights)
    ids = torch.randint(1, VOCABULARY, (3, 24))
    original, native = LayerCalls.run, []

    def logits(block_size: int) -> Tensor:
        cache, columns = PagedCache(model.config, block_size=block_size), torch.arange(24)[None]
        parts = zip(ids.split([9, 1, 1, 13], 1), columns.split([9, 1, 1, 13], 1), strict=True)
        return torch.cat([model(part, position_ids=at, past_key_values=cache).logits for part, at in parts], 1)

    def counted(*given: Any) -> Any:
        result = original(*given)
        native.append(result is not None)
        return result

    monkeypatch.setattr(LayerCalls, "run", counted)
    found = [logits(block_size) for block_size in (1, 16)]
    assert len(native) == 2 * 4 * len(LAYERS)
    assert all(native)
    monkeypatch.setattr(LayerCalls, "run", lambda *given: None)
    expected = logits(4)
    assert all(torch.equal(each, expected) for each in found)


@torch.no_grad()
def test_a_call_of_a_layer_sees_a_changed_convolution() -> None:
    """A weight that is replaced or changed, a stride that is not known, and a hook, which then runs."""
    model = hf_accel.patch(model_of(), weights=None)

    def logits() -> Tensor:
        found: Tensor = model(torch.tensor([[3, 4, 5, 6]]), past_key_values=PagedCache(model.config)).logits
        return found

    before = logits()
    module: Any = model.model.layers[0].conv
    seen: list[Any] = []
    handle = module.in_proj.register_forward_hook(lambda *given: seen.append(given))
    assert torch.equal(logits(), before)
    assert seen
    handle.remove()
    module.conv.weight = nn.Parameter(module.conv.weight * 2)
    after = logits()
    assert not torch.equal(after, before)
    module.conv.weight.mul_(0.5)
    assert torch.equal(logits(), before)
    module.conv.stride = (2,)
    with pytest.raises(UnsupportedError, match="its convolution is not a causal one"):
        logits()


@pytest.mark.parametrize("fuse", [True, False])
def test_patch_is_undone_exactly(fuse: bool) -> None:
    model = model_of()
    before = snapshot(model)
    hf_accel.patch(model, weights=None, fuse=fuse)
    assert sum(isinstance(module, PagedConvolution) for module in model.modules()) == LAYERS.count("conv")
    alone(model, PROMPTS[0])
    assert snapshot(hf_accel.unpatch(model)) == before


def test_sampling_draws_stocks_numbers() -> None:
    model = model_of()
    check_sampling(model)


def test_a_bias_in_front_of_the_convolution_stays_on_stocks_loop() -> None:
    """Padding, zeros in transformers, would not be zeros behind the bias."""
    model = model_of(conv_bias=True)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert not any(isinstance(module, PagedConvolution) for module in model.modules())
    assert [alone(model, prompt) for prompt in PROMPTS] == expected


class OtherConvolution(nn.Module):
    """A module with the parts of a short convolution that computes something else with them."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.in_proj, self.conv, self.out_proj = module.in_proj, module.conv, module.out_proj
        self.layer_idx = module.layer_idx

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None) -> Tensor:
        after, before, x = self.in_proj(hidden_states).chunk(3, dim=-1)  # the gates change places
        inputs = (before * x).transpose(1, 2)
        mixed = self.conv(inputs)[..., : inputs.shape[-1]].transpose(1, 2)
        return self.out_proj(mixed * after)


def test_other_code_with_the_same_parts_is_not_known() -> None:
    module = model_of().model.layers[0].conv
    assert is_known_convolution(module)
    other = OtherConvolution(module)
    assert not is_known_convolution(other)
    module.conv.stride = (2,)
    assert not is_known_convolution(module)


def test_a_model_that_is_not_patched_says_how_to_read_pages() -> None:
    model = model_of()
    with pytest.raises(UnsupportedError, match=r"call hf_accel\.patch\(model\) first"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=PagedCache(model.config))


def test_an_argument_that_is_not_known() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    module, cache = model.model.layers[0].conv, PagedCache(model.config)
    with pytest.raises(UnsupportedError, match="it is given seq_idx="):
        module(torch.randn(1, 3, 32), past_key_values=cache, seq_idx=torch.zeros(1, 3))


def test_ranks_do_not_share_out_inputs() -> None:
    with pytest.raises(UnsupportedError, match="layers that are no attention need all that they keep"):
        hf_accel.plan(model_of(), context_parallel=object())  # type: ignore[arg-type]


def test_estimate_counts_what_the_cache_keeps() -> None:
    model = model_of()
    windows = model_kinds(model.config).windows
    assert windows == [3, None, 3, 3, None]
    estimate = hf_accel.estimate(model, context=1000, weights=None)
    keys_and_values = 2 * 2 * 2 * 8 * 1000 * 4  # layers, K and V, heads, numbers of each, tokens, bytes
    assert estimate.kv_bytes == keys_and_values + 3 * 3 * 32 * 4
