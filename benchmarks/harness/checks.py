"""Verify, then time: a model that computes something else is not faster, it is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel
from hf_accel.cli.measurement import WrongResultError
from hf_accel.undo.state import state_of
from tests.parity.dequantize import dequantized

ROUNDED = 0.2  # of the norm of a weight, more than 4 bits change it
SAME_WEIGHTS = 0.15  # of the norm of logits, that rounded activations and other sums make of the same weights
PROMPT_TOKENS = 16
NEW_TOKENS = 8


def check(
    name: str, model: PreTrainedModel, stock: PreTrainedModel, *, tolerance: float, exact: bool
) -> dict[str, Any]:
    """What was compared and how it came out; raises WrongResultError if it is out of bounds.

    tolerance: of the logits' difference, relative to their norm; logits that have nothing in common differ by 1.41.
    On top of it comes what stock differs from itself with another attention of its own, by rounding alone. Many layers
    of random weights leave little in common after a rounding of each weight; such a model is held against stock's
    modules with its own rounded weights. A router chooses otherwise where two experts are nearly as good: then that
    token and those behind it have other logits, and most tokens of short prompts must agree.
    """
    prompt, reference = random_tokens(stock, batch=1, length=PROMPT_TOKENS), stock
    error, correlation = compare_logits(model, stock, prompt)
    result = {"setup": name, "logits_error": error, "correlation": correlation}
    if not error <= tolerance:
        tolerance += own_error(stock, prompt)
    if not error <= tolerance and hf_accel.is_patched(model) and not exact:
        reference = dequantized(stock, model)
        result["weights_error"] = rounded = weights_error(reference, stock)
        error, _ = compare_logits(model, reference, prompt)
        tolerance = SAME_WEIGHTS + own_error(reference, prompt)
        result["error_to_same_weights"] = error
        if not rounded <= ROUNDED:
            raise WrongResultError(f"{name}: a weight differs from stock's by {rounded:.3f} of its norm")
    if not error <= tolerance and getattr(stock.config.get_text_config(), "num_experts_per_tok", 0):
        result["error_of_most_tokens"] = error = error_of_most_tokens(model, reference)
    if not error <= tolerance:
        raise WrongResultError(
            f"{name}: logits differ from stock's by {error:.3f} of their norm, above {tolerance:.3f}"
        )
    result["tolerance"] = tolerance
    result |= {"choices": choices(model)} if hf_accel.is_patched(model) else {}
    if not exact:
        return result
    certificate = hf_accel.verify(model, [prompt[0]], reference=stock, max_new_tokens=NEW_TOKENS)
    if not certificate.explained:
        raise WrongResultError(f"{name}: tokens differ from stock's by more than rounding: {certificate}")
    return {**result, "tokens": [str(verdict) for verdict in certificate.verdicts]}


def choices(model: PreTrainedModel) -> list[str]:
    """What the patch really chose, so that a part that fell back is not taken for ours."""
    lines = state_of(model).description["choices"]
    return [f"{line['topic']}, {line['what']}: {line['choice']}" for line in lines]


@torch.no_grad()
def compare_logits(model: PreTrainedModel, stock: PreTrainedModel, prompt: Tensor) -> tuple[float, float]:
    """Norm of the difference, relative to the norm of stock's logits; and their correlation (Pearson)."""
    expected, actual = (m(input_ids=prompt).logits.float() for m in (stock, model))
    correlation = torch.corrcoef(torch.stack([expected.flatten(), actual.flatten()]))[0, 1]
    return float((actual - expected).norm() / expected.norm()), float(correlation)


@torch.no_grad()
def error_of_most_tokens(model: PreTrainedModel, stock: PreTrainedModel) -> float:
    """Norm of the difference of a token's logits, relative to their norm: the median of tokens of short prompts."""
    prompts = random_tokens(stock, batch=8, length=4)
    expected, actual = (m(input_ids=prompts).logits.float() for m in (stock, model))
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@torch.no_grad()
def own_error(stock: PreTrainedModel, prompt: Tensor) -> float:
    """Norm of the difference of stock's logits to those with its plain attention, relative to their norm."""
    before = stock.config._attn_implementation
    try:
        stock.set_attn_implementation("eager")
        plain = stock(input_ids=prompt).logits.float()
    finally:
        stock.set_attn_implementation(before)
    expected = stock(input_ids=prompt).logits.float()
    return float((plain - expected).norm() / expected.norm())


@torch.no_grad()
def weights_error(model: PreTrainedModel, stock: PreTrainedModel) -> float:
    """The largest norm of a weight's difference, relative to its own."""
    ours, theirs = (dict(one.named_parameters(remove_duplicate=False)) for one in (model, stock))
    pairs = ((ours[name], weight) for name, weight in theirs.items())
    return max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


def random_tokens(model: PreTrainedModel, *, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)
