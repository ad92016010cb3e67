"""verify(model, prompts) -> Certificate: does the patched model write what the reference writes, token for token?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from .errors import UnsupportedError
from .patch import STATE, PatchState, is_patched, unpatch

# A first difference is put down to rounding if the two candidates' logits are closer than this many units in
# the last place of the model's dtype, at the size of the largest logit: each logit is the end of a long sum.
ROUNDING_UNITS = 4.0


@dataclass(frozen=True)
class Verdict:
    """One prompt. position counts generated tokens; logits are those of the two tokens, reference's first."""

    identical: bool
    tokens: int
    position: int | None = None
    reference_token: int | None = None
    model_token: int | None = None
    reference_logits: tuple[float, float] | None = None
    model_logits: tuple[float, float] | None = None
    margin: float | None = None
    rounding: float | None = None

    @property
    def explained(self) -> bool:
        """Whether a difference lies inside the rounding of the logits it hangs on (a near-tie)."""
        return self.identical or (
            self.margin is not None and self.rounding is not None and self.margin <= self.rounding
        )

    def __str__(self) -> str:
        if self.identical:
            return f"identical, {self.tokens} tokens"
        kind = "inside" if self.explained else "beyond"
        return (
            f"first difference at token {self.position}: {self.model_token} instead of {self.reference_token}, whose "
            f"logits are {self.margin:.3g} apart, {kind} the rounding of {self.rounding:.3g}"
        )


@dataclass(frozen=True)
class Certificate:
    """The verdict for every prompt, against which reference.

    exact: all identical. explained: every difference is a near-tie of the reference's own logits.
    """

    reference: str
    verdicts: tuple[Verdict, ...]

    @property
    def exact(self) -> bool:
        return all(v.identical for v in self.verdicts)

    @property
    def explained(self) -> bool:
        return all(v.explained for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        verdicts = [asdict(v) | {"explained": v.explained} for v in self.verdicts]
        return {"reference": self.reference, "exact": self.exact, "explained": self.explained, "verdicts": verdicts}

    def __str__(self) -> str:
        same = sum(v.identical for v in self.verdicts)
        lines = [f"certificate: {same} of {len(self.verdicts)} prompts identical to {self.reference}, greedy"]
        return "\n".join(lines + [f"  prompt {i}: {v}" for i, v in enumerate(self.verdicts)])


def verify(
    model: PreTrainedModel,
    prompts: Sequence[Any],
    *,
    reference: PreTrainedModel | str | Path | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 32,
) -> Certificate:
    """Compare greedy generation of a patched model with a reference, prompt by prompt.

    prompts: lists or 1-D tensors of token ids, or texts if a tokenizer is given.
    reference: a model, a path to load one from, or None for an unpatched copy of this model, with its float
        weights. What a quantized model writes may then differ by more than rounding: the margins say by how much.
    """
    ids = [_token_ids(prompt, tokenizer) for prompt in prompts]
    if not ids:
        raise UnsupportedError("verify() needs at least one prompt")
    other, name = _reference(model, reference)
    verdicts = [_compare(model, other, prompt.to(model.device), max_new_tokens) for prompt in ids]
    return Certificate(name, tuple(verdicts))


def _token_ids(prompt: Any, tokenizer: Any) -> Tensor:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UnsupportedError("verify() got a text; pass tokenizer=, or token ids")
        prompt = tokenizer(prompt)["input_ids"]
    ids = torch.as_tensor(prompt, dtype=torch.int64).flatten()
    if not len(ids):
        raise UnsupportedError("verify() got an empty prompt; each needs at least one token")
    return ids[None]


def _reference(model: PreTrainedModel, reference: PreTrainedModel | str | Path | None) -> tuple[PreTrainedModel, str]:
    if isinstance(reference, str | Path):
        return AutoModelForCausalLM.from_pretrained(reference, dtype=model.dtype).eval(), str(reference)
    if reference is not None:
        return reference, f"the given {type(reference).__name__}"
    if not is_patched(model):
        raise UnsupportedError("the model is not patched; patch it, or pass reference= to compare two models")
    state: PatchState = vars(model)[STATE]
    if state.originals.lost or state.originals.never_there:
        raise UnsupportedError("the model has no original weights to compare with; pass reference=")
    return unpatch(copy.deepcopy(model)), "the unpatched model"


@torch.no_grad()
def _compare(model: PreTrainedModel, reference: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> Verdict:
    expected = _greedy(reference, prompt, max_new_tokens)
    actual = _greedy(model, prompt, max_new_tokens)
    shared = min(len(expected), len(actual))
    differs = (expected[:shared] != actual[:shared]).nonzero()
    if not len(differs):
        return Verdict(identical=len(expected) == len(actual), tokens=shared)
    position = int(differs[0])
    pair = torch.stack([expected[position], actual[position]])
    history = torch.cat([prompt[0], expected[:position]])[None]
    theirs, ours = (m(input_ids=history).logits[0, -1].float() for m in (reference, model))
    return Verdict(
        identical=False,
        tokens=position,
        position=position,
        reference_token=int(pair[0]),
        model_token=int(pair[1]),
        reference_logits=tuple(theirs[pair].tolist()),
        model_logits=tuple(ours[pair].tolist()),
        margin=float((theirs[pair[0]] - theirs[pair[1]]).abs()),
        rounding=ROUNDING_UNITS * torch.finfo(reference.dtype).eps * float(theirs.abs().max()),
    )


def _greedy(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> Tensor:
    generate: Any = model.generate  # torch's stubs give a Module's attributes the type Tensor | Module
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
    output: Tensor = generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    return output[0, prompt.shape[1] :]
