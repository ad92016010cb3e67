"""Drafts from hidden states of the model: layers for multi-token prediction, and models for DFlash."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hf_accel
from hf_accel import SpeculativeConfig, UnsupportedError
from hf_accel.generation.speculation.drafters.hidden_states import HiddenStatesDrafter

from ..selection import some_long

transformers_drafts = pytest.importorskip("transformers.generation.candidate_generator")
layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(layers, "MtpModel") or not hasattr(transformers_drafts, "DFlashTokenCandidateGenerator"):
    pytest.skip("this release of transformers has neither", allow_module_level=True)
if "attention_mask is not None" not in inspect.getsource(layers.MtpModel.forward):
    pytest.skip("layers of this transformers take no tokens without a mask", allow_module_level=True)
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel  # noqa: E402

WORDS = 13  # so few that random layers are right now and then
BASE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip


def with_heads(depth: int) -> PreTrainedModel:
    config = Glm4MoeConfig(
        **BASE, num_hidden_layers=2, max_position_embeddings=256, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
        num_nextn_predict_layers=depth,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Glm4MoeForCausalLM(config).eval()


@torch.no_grad()
def random_heads(kind: Any, model: Any, **settings: Any) -> Any:
    """Make the layers that transformers reads from a checkpoint, with random weights."""
    made, generator = kind(model, model.config.num_mtp_layers), torch.Generator().manual_seed(5)
    for parameter in made.layers.parameters():
        random = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.copy_(random if parameter.ndim > 1 else random + 1)
    return made


@pytest.fixture(autouse=True)
def _heads_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.MtpModel, "from_pretrained", classmethod(random_heads))


def plain_target() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**BASE, num_hidden_layers=3)).eval()


@functools.cache
def block_model(window: int = 64) -> Any:
    config = MuseGlimmerAssistantConfig(
        **BASE, num_hidden_layers=2, block_size=4, mask_token_id=1, target_layer_ids=[0, 2], sliding_window=window
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MuseGlimmerAssistantModel(config).eval()


def asked(rows: int, columns: int, *, hidden: int = 0, **settings: Any) -> dict[str, Any]:
    ids = torch.randint(1, WORDS, (rows, columns), generator=torch.Generator().manual_seed(columns))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * hidden] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 30, "do_sample": False, **settings}


# What drafts, how stock is asked for it, and the tokens of its drafts.
KINDS: dict[str, tuple[Any, Any, int]] = {
    "1 layer": (lambda: with_heads(1), {"use_mtp": True}, 1),
    "3 layers": (lambda: with_heads(3), {"use_mtp": True}, 3),
    "blocks": (plain_target, {"assistant_model": block_model, "speculation_type": "dflash"}, 3),
    "blocks in a window": (
        plain_target, {"assistant_model": lambda: block_model(8), "speculation_type": "dflash"}, 3
    ),
}  # fmt: skip


def made(kind: str) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Any], SpeculativeConfig]:
    make, given, count = KINDS[kind]
    settings = {name: value() if callable(value) else value for name, value in given.items()}
    drafter = settings.get("assistant_model", "mtp")
    return make(), hf_accel.patch(make(), weights=None), settings, SpeculativeConfig(drafter=drafter, num_draft=count)


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [4, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_tokens_are_those_of_stock(kind: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts after the same tokens are the same; both accept others of them, since stock's end with their block."""
    stock, model, settings, config = made(kind)
    theirs: dict[int, list[int]] = {}
    ours: dict[int, list[int]] = {}
    for name in ("MTPCandidateGenerator", "DFlashTokenCandidateGenerator"):
        generator = getattr(transformers_drafts, name)

        def recorded(self: Any, ids: Tensor, *, _made: Any = generator.get_candidates, **given: Any) -> Any:
            candidates = _made(self, ids, **given)
            theirs[ids.shape[1]] = candidates[0][0, ids.shape[1] :].tolist()
            return candidates

        monkeypatch.setattr(generator, "get_candidates", recorded)
    propose = HiddenStatesDrafter.propose

    def proposed(self: Any, sequences: Any, lengths: Any) -> Any:
        drafts = propose(self, sequences, lengths)
        ours.update((len(s.tokens), draft.tokens) for s, draft in zip(sequences, drafts, strict=True))
        return drafts

    monkeypatch.setattr(HiddenStatesDrafter, "propose", proposed)
    expected = stock.generate(**asked(1, columns), **settings)
    found = model.generate(**asked(1, columns), speculative=config)
    assert torch.equal(found, expected) and hf_accel.stats(model)["loop"] == "ragged"
    shared = [at for at in ours.keys() & theirs.keys() if theirs[at]]
    assert len(shared) >= 15 and all(theirs[at][: len(ours[at])] == ours[at][: len(theirs[at])] for at in shared)
    assert torch.equal(model.generate(**asked(1, columns), **settings), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize("kind", some_long(["3 layers", "blocks"], "3 layers"))
def test_rows_with_padding_and_samples(kind: str) -> None:
    """Transformers drafts for one row alone."""
    stock, model, _, config = made(kind)
    given = asked(3, 9, hidden=3)
    assert torch.equal(model.generate(**given, speculative=config), stock.generate(**given))
    statistics = hf_accel.stats(model)
    assert statistics["loop"] == "ragged" and 0 < statistics["accepted"] < statistics["drafted"]
    seeded = SpeculativeConfig(drafter=config.drafter, num_draft=config.num_draft, verify="seeded")
    samples = {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5, "speculative": seeded}
    found = []
    for drafter in (seeded, SpeculativeConfig(drafter="ngram", verify="seeded")):  # tokens depend on the seed alone
        torch.manual_seed(1)
        found.append(model.generate(**given | samples | {"speculative": drafter}))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", some_long(["3 layers", "blocks"], "3 layers"))
def test_requests_that_share_prefixes_and_wait_for_room(kind: str) -> None:
    """States of a shared prefix are not computed again, and those of a preempted request are."""
    stock, model, _, config = made(kind)
    text = asked(1, 24)["input_ids"][0].tolist()
    prompts = [text[: 16 + number] + text[:number] for number in range(6)]
    outputs = [stock.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0] for prompt in prompts]
    expected = [output[len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]
    with hf_accel.Engine(model, max_tokens=96, token_budget=16, speculative=config) as engine:
        handles = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
        assert [handle.result(60).tokens for handle in handles] == expected
        speculation = engine.stats["speculation"]
    assert speculation["drafted"] > 0


@pytest.mark.parametrize("kind", some_long(["3 layers", "blocks"], "blocks"))
def test_prompts_of_few_tokens(kind: str) -> None:
    """There are fewer tokens than layers; transformers raises an error then."""
    stock, model, _, config = made(kind)
    for columns in (1, 2, 3):
        given = asked(2, columns)
        assert torch.equal(model.generate(**given, speculative=config), stock.generate(**given))


def test_quantized_weights_and_unpatch() -> None:
    model = hf_accel.patch(with_heads(2), weights="int8")
    given = asked(2, 9)
    config = SpeculativeConfig(drafter="mtp", num_draft=2)
    assert torch.equal(model.generate(**given, speculative=config), model.generate(**given))
    assert hf_accel.stats(model)["loop"] == "ragged"
    hf_accel.unpatch(model)
    one = asked(1, 9)
    assert torch.equal(model.generate(**one, use_mtp=True), with_heads(2).generate(**one))


def test_stock_loop_makes_layers_of_its_own_classes() -> None:
    """A cache of the user's kind keeps the call on transformers' loop, which makes layers of the classes it finds."""
    model, given = hf_accel.patch(with_heads(2), weights=None), asked(1, 9)
    found = model.generate(**given, use_mtp=True, cache_implementation="dynamic")
    assert hf_accel.stats(model)["loop"] == "stock: it has no paged cache"
    assert torch.equal(found, with_heads(2).generate(**given))


def test_models_that_have_no_such_layers() -> None:
    model = hf_accel.patch(plain_target(), weights=None)
    with pytest.raises(UnsupportedError, match=r"drafter='mtp'.*num_mtp_layers"):
        model.generate(**asked(1, 5), speculative="mtp")
    with pytest.raises(ValueError, match="num_mtp_layers"), pytest.warns(hf_accel.HfAccelWarning):
        model.generate(**asked(1, 5), use_mtp=True)
