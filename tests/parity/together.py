"""Requests of several lengths: each alone, and all together, for models that keep states of other kinds."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, SpeculativeConfig
from hf_accel.undo.state import find_state

from .families import VOCABULARY
from .speculating import OracleDrafter, requests

PROMPTS = requests(5, longest=40, seed=6, shared=9)
NEW_TOKENS = 5
WAIT = 60
_answers: dict[tuple[Any, ...], list[int]] = {}  # of stock's models


def alone(model: Any, prompt: list[int], count: int = NEW_TOKENS, **settings: Any) -> list[int]:
    """The tokens that generate() writes behind one prompt; those of a stock model of the same numbers are kept."""
    key = None if settings or find_state(model) is not None else (_contents(model), tuple(prompt), count)
    if key in _answers:
        return list(_answers[key])
    ids = torch.tensor([prompt])
    settings = {"do_sample": False} | settings
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    if key is not None:
        _answers[key] = list(tokens)
    return tokens


def _contents(model: Any) -> tuple[Any, ...]:
    """Return what a model's tokens follow from: its classes, its settings, its hooks and its numbers."""
    numbers = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        numbers.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    config = model.config
    settings = config.to_json_string(use_diff=False), config._attn_implementation, repr(model.generation_config)
    return tuple(map(_settings, model.modules())), settings, numbers.digest()


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the class of a module, its scalars, its hooks and what else was put on it, as a forward."""
    own = vars(module)
    scalars = ((name, value) for name, value in own.items() if isinstance(value, bool | int | float | str))
    hooks = (tuple(own[name].values()) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return type(module), *scalars, *hooks, *filter(callable, own.values())


def padded(side: str) -> tuple[Tensor, Tensor]:
    """PROMPTS as ids and a mask, padded on one side."""
    longest = max(map(len, PROMPTS))
    rows = [[0] * (longest - len(p)) + p if side == "left" else p + [0] * (longest - len(p)) for p in PROMPTS]
    ids = torch.tensor(rows)
    return ids, (ids != 0).long()


def together(model: Any) -> list[list[int]]:
    """The tokens that generate_batch() writes behind each of PROMPTS."""
    found = model.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [output.generated_tokens for output in found.values()]


def in_passes(model: Any, ids: Tensor, mask: Tensor, cuts: list[int], *, cache: Any) -> Tensor:
    """The logits of ids [B, T] in passes over so many columns each, over one cache."""
    start, logits = 0, []
    for count in cuts:
        part = slice(start, start + count)
        output = model(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, part.stop
        logits.append(output.logits)
    return torch.cat(logits, 1)


def check_together(model: Any) -> None:
    """Patch a model, and require the tokens that it gave before: prompts alone, all together, and padded."""
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    assert [alone(model, prompt) for prompt in PROMPTS[:2]] == expected[:2]
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert together(model) == expected
    ids, mask = padded("left")
    rows = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert rows[:, ids.shape[1] :].tolist() == expected
    assert hf_accel.stats(model)["loop"] == "ragged"


def check_served(model: Any, prompts: Sequence[list[int]], expected: Sequence[list[int]], **settings: Any) -> None:
    """Require these tokens of an Engine over a patched model, beside a request that is cancelled, and of samples.

    settings: keywords of Engine.
    """
    lengths = [len(tokens) for tokens in expected]
    with Engine(model, **settings) as engine:
        jobs = [engine.submit(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        engine.submit(prompts[0], max_new_tokens=30).cancel()
        assert [job.result(WAIT).tokens for job in jobs] == expected
        samples = engine.submit(prompts[1], max_new_tokens=lengths[1], n=3)
        assert [sample.tokens for sample in samples.results(WAIT)] == [expected[1]] * 3
    assert engine.stats["blocks_used"] == 0


def check_programme(model: Any, numbers: random.Random, *, block_sizes: Sequence[int], seed: int) -> None:
    """Patch a model, and require its tokens for requests of random lengths, with random drafts, pools and chunks.

    numbers: draws them. Requests with an odd seed have drafts.
    """
    prompts = requests(6, longest=50, seed=seed, shared=numbers.choice([0, 20]))
    lengths = [numbers.randint(1, 16) for _ in prompts]
    expected = [alone(model, prompt, count) for prompt, count in zip(prompts, lengths, strict=True)]
    cache = CacheConfig(block_size=numbers.choice(block_sizes), max_tokens=numbers.choice([160, 400]))
    hf_accel.patch(model, weights=None, cache=cache)
    known = OracleDrafter(prompts, expected, right=numbers.choice([0, 1, 2, 5]))
    drafter = numbers.choice([known, known, "ngram"])
    speculative = SpeculativeConfig(drafter=drafter, num_draft=numbers.choice([1, 3, 6])) if seed % 2 else None
    check_served(model, prompts, expected, speculative=speculative, token_budget=numbers.choice([None, 7, 64]))


def check_preemption(model: Any) -> None:
    """Patch a model with a small pool, and require its tokens of an Engine that preempts and shares prefixes."""
    expected = [alone(model, prompt, 24) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None, cache=CacheConfig(block_size=4, max_tokens=120))
    with Engine(model) as engine:
        for _ in range(2):
            jobs = [engine.submit(prompt, max_new_tokens=24) for prompt in PROMPTS]
            assert [job.result(WAIT).tokens for job in jobs] == expected
        assert engine.stats["preemptions"] > 0 and engine.stats["prefix_hits"] > 0


def check_forks(model: Any, *, near: float = 1e-4, crops: Sequence[int] = (5,)) -> None:
    """Require of a patched model that its cache goes back, and that a copy of it goes on by itself.

    crops: five columns, taken back in so many steps.
    """
    ids = torch.randint(1, VOCABULARY, (2, 30))
    whole = model(ids).logits
    cache = PagedCache(model.config)
    model(ids[:, :20], past_key_values=cache)
    fork = copy.deepcopy(cache)
    model(torch.randint(1, VOCABULARY, (2, 5)), past_key_values=cache)
    for count in crops:
        cache.crop(-count)
    for each in (cache, fork):
        logits = model(ids[:, 20:], past_key_values=each).logits
        torch.testing.assert_close(logits, whole[:, 20:], rtol=near, atol=near)


def check_weights_of_attention(model: Any, ids: Tensor) -> None:
    """Patch a model of eager attention, and require the attention weights that it gave before, over pages."""
    expected = model(ids, output_attentions=True).attentions
    hf_accel.patch(model, weights=None)
    found = model(ids, output_attentions=True, past_key_values=PagedCache(model.config)).attentions
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check_sampling(model: Any) -> None:
    """Patch a model, and require the tokens that it drew before with the same seed."""
    ids, mask = padded("left")
    torch.manual_seed(5)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True)
    hf_accel.patch(model, weights=None)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True), expected)
