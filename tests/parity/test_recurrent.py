"""Models with recurrent states run as others do: their states stay in pages."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, SpeculativeConfig, UnsupportedError
from hf_accel.cache.kinds.state_sizes import state_sizes
from hf_accel.cache.kinds.states import MOST_STATES
from hf_accel.fused.hf.layer_calls import LayerCalls
from hf_accel.fused.hf.part_activations import PartActivation
from hf_accel.kernels.cpu import refusal
from hf_accel.recognition.trial import Tolerance, agree
from hf_accel.recurrent.hf import state_pass
from hf_accel.recurrent.hf.lightning import PagedLightning
from hf_accel.recurrent.hf.recurrences import known_recurrence
from hf_accel.recurrent.hf.state_pass import PagedRecurrence

from ..selection import seeds
from .families import VOCABULARY
from .recurrent_models import DELTA_RULES, FULL, LAYERS, LINEAR, STATE_SPACES, delta_rule_of, state_space_of
from .snapshot import snapshot
from .speculating import OracleDrafter
from .together import (
    NEW_TOKENS,
    PROMPTS,
    WAIT,
    alone,
    check_forks,
    check_programme,
    check_sampling,
    check_together,
    in_passes,
    padded,
    together,
)

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")

KINDS = (*DELTA_RULES, *STATE_SPACES)
WIDE = {"hidden_size": 64, "intermediate_size": 64, "linear_value_head_dim": 16}  # multiples of INT4's groups
# Kinds with other layers for other numbers of heads are tried with each, the others once. Those of one layer share
# its sizes out among them.
SIZES = ((2, 1), (4, 2), (3, 3))
VARIED = (*DELTA_RULES, "falcon_h1", "zamba2", "zamba")
SHARED_OUT = [(kind, *SIZES[place % 3]) for place, kind in enumerate((*DELTA_RULES, "zamba"))]
CASES: list[Any] = [(kind, *sizes) for kind in ("falcon_h1", "zamba2") for sizes in SIZES] + SHARED_OUT
CASES += [(kind, 4, 2) for kind in KINDS if kind not in VARIED]
CASES += [
    pytest.param(kind, *sizes, marks=pytest.mark.long)
    for kind in VARIED
    for sizes in SIZES
    if (kind, *sizes) not in CASES
]


def model_of(
    kind: str = "next", layers: Sequence[str] = LAYERS, *, tokens: int = 4, repeats: int = 2, **other: Any
) -> Any:
    if kind in DELTA_RULES:
        return delta_rule_of(kind, layers, tokens=tokens, repeats=repeats, **other)
    width = {"hidden_size": other["hidden_size"]} if "hidden_size" in other else {}
    return state_space_of(kind, layers, tokens=tokens, repeats=repeats, **width)


def mixers(model: Any) -> list[nn.Module]:
    """The modules of a model that keep states."""
    return [module for module in model.modules() if "A_log" in module._parameters or "slope_rate" in module._buffers]


@pytest.mark.parametrize(("kind", "tokens", "repeats"), CASES)
def test_requests_together_give_the_tokens_of_each_alone(kind: str, tokens: int, repeats: int) -> None:
    model = model_of(kind, tokens=tokens, repeats=repeats)
    check_together(model)


def test_a_model_of_recurrent_layers_alone() -> None:
    """transformers cannot generate with it, but its passes without a cache say what is right."""
    model = model_of(layers=[LINEAR, LINEAR])
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    hf_accel.patch(model, weights=None)
    assert together(model) == expected


def test_a_decoder_of_its_own_cache_whose_layers_keep_no_state() -> None:
    """MiniMax's decoder asks for its own cache, also where each layer attends to pages alone."""
    check_together(model_of("minimax", layers=[FULL, FULL], tokens=64))


@pytest.mark.parametrize("seed", seeds(0, 12))  # test_programmes plays one
def test_random_programmes_of_requests(seed: int) -> None:
    """Arrivals, cancels, chunks of prompts, samples, preemption and drafts change no request's tokens."""
    numbers = random.Random(seed)
    layers = [*numbers.choices([LINEAR, FULL], [3, 2], k=3), FULL, LINEAR]
    model = model_of(numbers.choice(KINDS), layers, tokens=numbers.choice([2, 3, 4]))
    check_programme(model, numbers, block_sizes=[1, 4, 16], seed=seed)


def test_drafts_that_fail_leave_nothing_behind() -> None:
    model = model_of()
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(max_tokens=400))
    for right in (0, 1, 3, 100):
        drafter = OracleDrafter(PROMPTS, expected, right=right)
        with Engine(model, speculative=SpeculativeConfig(drafter=drafter, num_draft=5)) as engine:
            jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
            assert [job.result(WAIT).tokens for job in jobs] == expected
            assert engine.stats["speculation"]["drafted"] > 0


@pytest.mark.parametrize(
    ("kind", "drafter"), [("3.5", "self-int4"), ("3.5", "ngram"), ("3.5", "model"), ("mamba2", "self-int4")]
)
def test_named_drafters(kind: str, drafter: str) -> None:
    model, draft = model_of(kind, **WIDE), model_of(kind, **WIDE, layers=[LINEAR, FULL])
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    speculative = SpeculativeConfig(drafter=draft if drafter == "model" else drafter, num_draft=3)
    with Engine(model, speculative=speculative) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected
        # Alone, a sequence is given longer drafts.
        assert [engine.submit(p, max_new_tokens=NEW_TOKENS).result(WAIT).tokens for p in PROMPTS] == expected
        counts = engine.stats["speculation"]
    assert drafter == "ngram" or counts["drafted"] > counts["accepted"]


@pytest.mark.parametrize("kind", ["3.5", "nemotron_h"])
def test_preemption_computes_states_again(kind: str) -> None:
    """Also those of tokens that were generated, whose steps may be smaller than those of a prompt."""
    model = model_of(kind)
    expected = [alone(model, prompt, 40) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=4, max_tokens=140))
    with Engine(model) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=40) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected
        assert engine.stats["preemptions"] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["next", "mamba2", "mamba", "nemotron_h", "zamba", "minimax"])
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_and_their_copies(kind: str, settings: dict[str, Any]) -> None:
    model = model_of(kind)
    ids, mask = padded("left")
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    hf_accel.patch(model, weights=None)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    assert torch.equal(out, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["next", "3.5", "falcon_h1", "nemotron_h", "zamba", "minimax"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("cuts", [[40], [12, 28], [13, 1, 1, 25], [2] * 20])
def test_passes_over_a_paged_cache(kind: str, cuts: list[int], gradients: bool) -> None:
    """There a pass of one column takes padding for a token, so that no such column is padding here.

    With gradients, torch's operators take the place of the kernels.
    """
    model = model_of(kind)
    ids = torch.randint(1, VOCABULARY, (3, 40))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    with torch.set_grad_enabled(gradients):
        # In transformers these forget their state before a second pass of many tokens, or raise.
        theirs = [40] if kind in ("zamba", "minimax") else cuts
        expected = in_passes(model, ids, mask, theirs, cache=None)
        hf_accel.patch(model, weights=None)
        found = in_passes(model, ids, mask, cuts, cache=PagedCache(model.config))
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


def test_padding_behind_tokens_stays_on_transformers_cache() -> None:
    """There it changes the states, and so the tokens."""
    model = model_of()
    ids, mask = padded("right")
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(out, expected)
    cache = PagedCache(model.config)
    before = model(ids, attention_mask=mask, past_key_values=cache).logits[mask.bool()]
    torch.testing.assert_close(before, model(ids, attention_mask=mask).logits[mask.bool()], rtol=1e-4, atol=1e-4)
    longer = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    with pytest.raises(UnsupportedError, match=r"attention_mask hides columns between tokens.*; pad on the left"):
        model(ids[:, :1], attention_mask=longer, past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1]


def test_a_cache_goes_back_and_forks() -> None:
    check_forks(hf_accel.patch(model_of(), weights=None), crops=(3, 2))


def test_a_state_that_was_not_kept() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    cache = PagedCache(model.config)
    model(torch.randint(1, VOCABULARY, (1, MOST_STATES + 2)), past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"cannot go back to 33 tokens: the recurrent state.*; crop less"):
        cache.crop(-1)
    cache.crop(-MOST_STATES - 2)
    assert cache.statistics()["blocks_used"] == 0


def test_a_pass_that_fails_leaves_the_state_before_it() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    ids = torch.randint(1, VOCABULARY, (2, 30))
    whole = model(ids).logits
    cache = PagedCache(model.config)
    model(ids[:, :20], past_key_values=cache)
    hook = model.model.layers[2].register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 20:], past_key_values=cache)
    hook.remove()
    logits = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(logits, whole[:, 20:], rtol=1e-4, atol=1e-4)


def test_turns_over_one_cache() -> None:
    model = model_of("3.5")
    first = PROMPTS[0]
    answer = alone(model, first)
    second = first + answer + PROMPTS[1]
    expected = alone(model, second)
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config)
    assert alone(model, first, past_key_values=cache) == answer
    assert alone(model, second, past_key_values=cache) == expected
    assert alone(model, second, past_key_values=cache) == expected, "it holds all of the prompt, and more"


def test_pages_are_made_for_the_states_in_use() -> None:
    """A pool of a fixed size has room for many states, which together would fill the memory."""
    model = hf_accel.patch(model_of(), weights=None, cache={"max_tokens": 10**9})
    cache = PagedCache(model.config, max_tokens=10**4)
    for _ in range(3):
        model(torch.randint(1, VOCABULARY, (5, 40)), past_key_values=cache)  # a state for each
        model(torch.randint(1, VOCABULARY, (5, 1)), past_key_values=cache)  # and another
        assert {len(cache.pages.groups[-1].storages[layer].pages.k) for layer in (0, 2, 3)} == {16}
        cache.reset()
    model(torch.randint(1, VOCABULARY, (9, 4)), past_key_values=cache)  # few tokens, whose states are all kept
    assert 36 <= len(cache.pages.groups[-1].storages[0].pages.k) <= 64


def test_states_are_never_quantized() -> None:
    model = hf_accel.patch(model_of(), weights=None, cache={"dtype": "int8"})
    cache = PagedCache(model.config, dtype="int8")
    model(torch.tensor([PROMPTS[0]]), past_key_values=cache)
    dtypes = [layer.group.storages[layer.layer_idx].pages.k.dtype for layer in cache.paged_layers]
    assert dtypes == [torch.float32 if name == LINEAR else torch.int8 for name in LAYERS]
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["next", "mamba2", "zamba2", "jamba", "zamba", "minimax"])
@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}])
def test_quantized_weights_batch_exactly(kind: str, weights: Any) -> None:
    # Layers that share their weights stay in float, so that many rows of theirs go to torch unless this is asked for.
    model = hf_accel.patch(model_of(kind, **WIDE), weights=weights, deterministic=kind in ("zamba", "zamba2"))
    assert together(model) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("fuse", [True, False])
@torch.no_grad()
def test_an_activation_of_a_part_has_the_bits_of_one_row(fuse: bool) -> None:
    """Zamba2 cuts a tensor in two and takes the exact GELU of one half, which torch rounds by its layout."""
    model = hf_accel.patch(model_of("zamba2", **WIDE), weights=None, fuse=fuse)
    feed_forward = model.model.layers[1].shared_transformer.feed_forward
    assert isinstance(feed_forward.act_fn, PartActivation)
    x = torch.randn(3, 128) * 3
    whole, alone = (feed_forward.act_fn(part.chunk(2, -1)[0]) for part in (x, x[:1]))
    assert torch.equal(whole[:1], alone)
    assert not isinstance(
        hf_accel.unpatch(model).model.layers[1].shared_transformer.feed_forward.act_fn, PartActivation
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["next", "3.5", "falcon_h1", "bamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_token_has_the_same_bits_whatever_is_computed_with_it(kind: str, dtype: torch.dtype) -> None:
    """Also with head sizes that fill no vectors, and however a prompt is cut.

    Bamba's code counts positions from the beginning of each pass, unless it is given them.
    """
    sizes = {"head_dim": 16} if kind in DELTA_RULES else {}  # the sigmoid of their attention is torch's
    model = hf_accel.patch(model_of(kind, repeats=3, **sizes).to(dtype), deterministic=True)
    ids = torch.randint(1, VOCABULARY, (3, 30))

    def logits(rows: Tensor, cuts: list[int]) -> Tensor:
        cache, columns = PagedCache(model.config), torch.arange(rows.shape[1])[None]
        parts = zip(rows.split(cuts, 1), columns.split(cuts, 1), strict=True)
        return torch.cat([model(ids, position_ids=at, past_key_values=cache).logits for ids, at in parts], 1)

    whole = logits(ids, [30])
    assert torch.equal(logits(ids, [7, 1, 1, 21]), whole)
    assert torch.equal(logits(ids[1:2], [30]), whole[1:2])
    assert torch.equal(logits(ids[2:], [1] * 30), whole[2:])
    expected = [alone(model, prompt) for prompt in PROMPTS]
    with Engine(model, token_budget=9) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected


ONE_CALL = (
    "next",
    "3.5",
    "3.5_moe",
    "mamba2",
    "bamba",
    "granite",
    "nemotron_h",
    "zamba2",
    "falcon_h1",
    "mamba",
    "falcon_mamba",
    "jamba",
)
WHOLE_LAYERS = {
    "next", "3.5", "3.5_moe", "bamba", "granite", "falcon_h1", "mamba", "falcon_mamba", "mamba2", "nemotron_h",
    "jamba",
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ONE_CALL)
@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]
)
@torch.no_grad()
def test_one_call_has_the_bits_of_its_steps(
    kind: str, dtype: torch.dtype, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole layer, of its recurrent module alone, and of that step by step."""
    model = hf_accel.patch(model_of(kind).to(dtype), weights=weights)
    modules, layers = (counted_calls(monkeypatch, *place) for place in MODULES_AND_LAYERS)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ids = torch.tensor([prompt[:7] for prompt in PROMPTS if len(prompt) >= 7])
    found = [model.generate(ids, **settings)]
    assert (layers[True] > 0) is (kind in WHOLE_LAYERS)
    assert (modules[True] == 0) is (kind in WHOLE_LAYERS)
    for kind_of_calls, name in reversed(MODULES_AND_LAYERS):
        monkeypatch.setattr(kind_of_calls, name, lambda *given: None)
        found.append(model.generate(ids, **settings))
        assert modules[True] or kind_of_calls is state_pass.Recurrence
    assert not modules[False]
    for other in found[1:]:
        assert torch.equal(found[0].sequences, other.sequences)
        assert torch.equal(torch.stack(found[0].logits), torch.stack(other.logits))


MODULES_AND_LAYERS = ((state_pass.Recurrence, "in_one_call"), (LayerCalls, "run"))


def counted_calls(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> dict[bool, int]:
    """Return how many calls of layers with a state give a result, and how many give None."""
    counts, original = {True: 0, False: 0}, getattr(kind, name)

    def counted(*given: Any) -> Any:
        result = original(*given)
        keeps = not isinstance(given[0], LayerCalls) or getattr(given[0].programme, "state_sizes", None) is not None
        counts[result is not None] += keeps
        return result

    monkeypatch.setattr(kind, name, counted)
    return counts


@pytest.mark.parametrize("kind", ["mamba2", "mamba"])
@torch.no_grad()
def test_one_call_sees_what_changes(kind: str) -> None:
    """A weight that is replaced or changed, and a hook on a linear layer, which then runs."""
    model = hf_accel.patch(model_of(kind), weights=None)

    def logits() -> Tensor:
        found: Tensor = model(torch.tensor([[3, 4, 5, 6]]), cache_params=PagedCache(model.config)).logits
        return found

    before = logits()
    mixer: Any = mixers(model)[0]
    seen: list[Any] = []
    handle = mixer.in_proj.register_forward_hook(lambda *given: seen.append(given))
    assert torch.equal(logits(), before)
    assert seen
    handle.remove()
    for name in ("A_log", "D"):
        setattr(mixer, name, nn.Parameter(getattr(mixer, name) + 1))
        after = logits()
        assert not torch.equal(after, before)
        before = after
    for parameter in (part.weight for name, part in mixer.named_children() if name in ("conv1d", "dt_proj", "x_proj")):
        parameter.mul_(2)
        after = logits()
        assert not torch.equal(after, before)
        before = after


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["next", "mamba2", "falcon_h1", "mamba", "zamba", "minimax"])
@pytest.mark.parametrize("fuse", [True, False])
def test_patch_is_undone_exactly(kind: str, fuse: bool) -> None:
    model = model_of(kind)
    before = snapshot(model)
    hf_accel.patch(model, weights=None, fuse=fuse)
    assert mixers(model) and all(isinstance(module, PagedRecurrence | PagedLightning) for module in mixers(model))
    alone(model, PROMPTS[0])
    assert snapshot(hf_accel.unpatch(model)) == before


@pytest.mark.parametrize("kind", ["next", "mamba2", "zamba2"])
def test_sampling_draws_stocks_numbers(kind: str) -> None:
    model = model_of(kind)
    check_sampling(model)


@pytest.mark.parametrize("kind", ["next", "mamba2", "mamba", "zamba", "minimax"])
def test_other_code_with_the_same_parts_is_not_known(kind: str) -> None:
    layer: Any = mixers(model_of(kind))[0]
    assert known_recurrence(layer)

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = super().forward(hidden_states, *args, **kwargs)
            return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01

    other = copy.copy(layer)
    other.__class__ = Other
    assert not known_recurrence(other)
    if kind == "minimax":
        layer.key_decay = nn.Buffer(layer.key_decay * 0.9)
    layer.activation = "gelu"
    assert not known_recurrence(layer)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_trials_leave_room_for_rounding(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine rounds otherwise, and must know the same layers."""

    def agree_closely(theirs: Any, ours: Any, tolerance: Tolerance) -> bool:
        return agree(theirs, ours, Tolerance(*(allowed / 4 for allowed in tolerance)))

    monkeypatch.setattr(state_pass, "agree", agree_closely)
    assert known_recurrence(mixers(model_of(kind, tokens=tokens))[0]) is not None


def test_a_changed_layer_keeps_the_model_on_transformers_cache() -> None:
    model = model_of()
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.conv1d = nn.Conv1d(56, 56, 4, groups=56, padding=3, bias=True)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert not any(isinstance(module, PagedRecurrence) for module in model.modules())
    assert [alone(model, prompt) for prompt in PROMPTS] == expected


def test_a_model_that_is_not_patched_says_how_to_read_pages() -> None:
    model = model_of()
    with pytest.raises(UnsupportedError, match=r"call hf_accel\.patch\(model\) first"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=PagedCache(model.config))


def test_an_argument_that_is_not_known() -> None:
    model = hf_accel.patch(model_of(), weights=None)
    module, cache = model.model.layers[0].linear_attn, PagedCache(model.config)
    with pytest.raises(UnsupportedError, match="it is given cu_seq_lens_q="):
        module(torch.randn(1, 3, 32), cache_params=cache, cu_seq_lens_q=torch.zeros(2))


@pytest.mark.parametrize(
    ("kind", "state", "layers"),
    [
        ("next", 4 * 8 * 6 + 3 * (2 * 2 * 8 + 4 * 6), (2, 3)),  # heads of key_dim x value_dim; 3 inputs of channels
        ("falcon_h1", 4 * 16 * 16 + 3 * (64 + 2 * 2 * 16), (3, 3)),  # heads of head_dim x state_size
        ("nemotron_h", 4 * 16 * 16 + 3 * (64 + 2 * 2 * 16), (2, 3)),
        ("jamba", 64 * 16 + 3 * 64, (1, 3)),  # channels x state_size
        ("zamba", 64 * 16 + 3 * 64, (2, 5)),
        ("minimax", 4 * 8 * 8, (2, 3)),  # heads of head_dim x head_dim
    ],
)
def test_estimate_counts_what_the_cache_keeps(kind: str, state: int, layers: tuple[int, int]) -> None:
    """layers: those that keep keys and values, and those that keep states."""
    model = model_of(kind)
    assert sum(state_sizes(model.config) or ()) == state
    estimate = hf_accel.estimate(model, context=1000, weights=None)
    keys_and_values = layers[0] * 2 * 2 * 8 * 1000 * 4  # K and V, heads, numbers of each, tokens, bytes
    assert estimate.kv_bytes == keys_and_values + layers[1] * 2 * state * 4  # the state before and after a token
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config, block_size=8)
    model.generate(torch.randint(1, VOCABULARY, (1, 992)), max_new_tokens=9, past_key_values=cache)
    assert cache.statistics()["kv_bytes"] == estimate.kv_bytes


def test_a_cache_that_holds_all_but_one_token() -> None:
    """transformers computes that token as a generated one, whose step has no least one."""
    model = model_of("nemotron_h")
    ids = torch.tensor([PROMPTS[0]])
    past = model(ids[:, :-1], use_cache=True).past_key_values
    expected = alone(model, PROMPTS[0], past_key_values=past)
    hf_accel.patch(model, weights=None)
    cache = PagedCache(model.config)
    model(ids[:, :-1], past_key_values=cache)
    assert alone(model, PROMPTS[0], past_key_values=cache) == expected
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize(("kind", "shares"), [("nemotron_h", False), ("zamba2", False), ("mamba2", True)])
def test_states_of_other_steps_are_not_shared(kind: str, shares: bool) -> None:
    """A prompt that is a first prompt with its answer computes the answer's tokens as a prompt's."""
    model = model_of(kind)
    first = [*range(1, 40)]
    second = first + alone(model, first) + [5, 6]
    expected = alone(model, second)
    hf_accel.patch(model, weights=None)
    with Engine(model) as engine:
        for prompt in (first, second, second):
            found = engine.submit(prompt, max_new_tokens=NEW_TOKENS).result(WAIT).tokens
    assert found == expected
    assert (engine.stats["prefix_hits"] > 0) is shares


def test_a_bias_in_front_of_the_convolution_stays_on_transformers_cache() -> None:
    """Behind it, padding is no zero."""
    model = model_of("mamba2")
    for layer in mixers(model):
        layer.in_proj.bias = nn.Parameter(torch.randn(len(layer.in_proj.weight)))  # type: ignore[arg-type, union-attr]
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS] == expected
    assert "stock" in hf_accel.stats(model)["loop"]


def test_a_changed_setting_is_seen_in_the_next_pass() -> None:
    model = hf_accel.patch(model_of("bamba"), weights=None)
    alone(model, PROMPTS[0])
    mixers(model)[0].activation = "gelu"  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="has the activation 'gelu'"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=PagedCache(model.config))


def test_ranks_cannot_share_out_states() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match="was asked for, but layers that are no attention need all"):
            hf_accel.patch(model_of(), weights=None, context_parallel=distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
