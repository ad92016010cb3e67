"""Models whose queries are multiplied by a number of their position (Llama 4, Ministral 3, Mistral 4) run as others
do: each layer is one native call, and the numbers stand behind its tables.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel
from hf_accel import Engine, SpeculativeConfig
from hf_accel.fused.hf.layer_calls import LayerCalls, TracedForward
from hf_accel.kernels.cpu import refusal
from hf_accel.recognition.of_positions import OfPositions
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.symbols import BATCH, TOKENS
from hf_accel.undo.state import FUSED

from .families import VOCABULARY
from .test_chunks import SIZES as LLAMA_4
from .test_compressed import EXPERTS
from .test_compressed import SIZES as COMPRESSED
from .together import NEW_TOKENS, PROMPTS, WAIT, alone, check_forks, check_preemption, check_sampling, check_together

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))

ONE_FACTOR = 8  # positions that have one factor
TEMPERATURE = {
    "rope_theta": 10_000.0,
    "llama_4_scaling_beta": 0.7,
    "original_max_position_embeddings": ONE_FACTOR,
}
LONG_ROTATION = {
    "rope_type": "yarn",
    "factor": 4.0,
    "max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MINISTRAL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "initializer_range": 0.25, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "sliding_window": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Ministral3": MINISTRAL | {"rope_parameters": LONG_ROTATION | TEMPERATURE},
    "Mistral4": COMPRESSED | EXPERTS | {"rope_parameters": LONG_ROTATION | TEMPERATURE},
    "Llama4": LLAMA_4 | {"floor_scale": ONE_FACTOR, "attention_chunk_size": 16},
}


def model_of(kind: str, **other: Any) -> Any:
    made = getattr(transformers, f"{kind}ForCausalLM", None)
    if made is None:
        pytest.skip(f"this transformers has no {kind}")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = made.config_class
        config = config if kind != "Llama4" else transformers.Llama4TextConfig
        return made(config(**KINDS[kind] | other)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    model = model_of(kind)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    hf_accel.patch(model, weights=None)
    with Engine(model, speculative=SpeculativeConfig(drafter="ngram", num_draft=3)) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        assert [job.result(WAIT).tokens for job in jobs] == expected
    assert [alone(model, prompt) for prompt in PROMPTS] == expected


@pytest.mark.parametrize("kind", ["Ministral3", "Mistral4"])  # Llama 4's positions move with padding
def test_padded_batches_samples_and_preemption(kind: str) -> None:
    check_together(model_of(kind))
    check_sampling(model_of(kind))
    check_preemption(model_of(kind))
    check_forks(hf_accel.patch(model_of(kind), weights=None))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, "int8")],
)
@torch.no_grad()
def test_one_call_has_the_bits_of_its_modules(
    kind: str, dtype: torch.dtype, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_accel.patch(model_of(kind).to(dtype), weights=weights)
    settings = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ids = torch.tensor([prompt[:7] for prompt in PROMPTS if len(prompt) >= 7])
    found = model.generate(ids, **settings)
    layers = [module for module in model.modules() if isinstance(module, TracedForward)]
    assert len(layers) == model.config.num_hidden_layers
    scaled = [vars(layer)[FUSED].programme.by_position is not None for layer in layers]
    assert sum(scaled) == (2 if kind == "Llama4" else len(layers))
    monkeypatch.setattr(LayerCalls, "run", lambda *given: None)
    other = model.generate(ids, **settings)
    assert torch.equal(found.sequences, other.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(other.logits))


@pytest.mark.parametrize("kind", ["Ministral3", "Mistral4"])
@torch.no_grad()
def test_a_change_of_the_settings_is_seen(kind: str) -> None:
    """Also within the dictionary of a config."""
    model, twin = model_of(kind), model_of(kind)
    hf_accel.patch(model, weights=None)
    before = alone(model, PROMPTS[-1])
    for each in (model, twin):
        each.config.rope_parameters["llama_4_scaling_beta"] = 9.0
    assert alone(model, PROMPTS[-1]) == alone(twin, PROMPTS[-1]) != before


GIVEN_IDS = OfPositions("position_ids", counted=False)


def factors(positions: OfPositions) -> Any:
    return (1 + 0.5 * torch.log(1 + torch.floor(positions / 8)))[:, None, :, None]


def test_numbers_are_those_of_the_code() -> None:
    given = torch.tensor([[0, 7, 8, 4000], [3, 3, 99, 10**6]])
    expected = factors(given)  # type: ignore[arg-type]
    assert torch.equal(factors(GIVEN_IDS).of(given), expected)
    assert factors(GIVEN_IDS).tried(heads_first=True) is torch.float32
    assert factors(GIVEN_IDS).to(torch.bfloat16).tried(heads_first=True) is torch.bfloat16
    assert factors(GIVEN_IDS) == factors(OfPositions("position_ids", counted=False)) != factors(GIVEN_IDS) + 1
    counted = (
        (OfPositions("positions", counted=True).float() + 1.0).view((1, TOKENS, 1, 1)).expand(BATCH, TOKENS, 1, 1)
    )
    assert torch.equal(counted.of(given[:1]), given[:1, :, None, None] + 1.0)
    assert counted.tried(heads_first=False) is torch.float32


@pytest.mark.parametrize(
    "made",
    [
        lambda p: factors(p).tried(heads_first=False),  # of heads, not of tokens
        lambda p: p[:, None, :, None].tried(heads_first=True),  # integers
        lambda p: p.float().view(TOKENS, BATCH)[:, None, :, None].tried(heads_first=True),
        lambda p: torch.cumsum(p, 1),
        lambda p: torch.floor(p, out=None),
        lambda p: p[:, 1:],
        lambda p: p + Tensor([1.0]),
        lambda p: bool(p),
    ],
)
def test_what_is_no_number_of_each_token_is_not_known(made: Any) -> None:
    with pytest.raises((UntraceableError, TypeError)):
        made(GIVEN_IDS)
