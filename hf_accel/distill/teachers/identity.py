"""The identity of a teacher: its model, its kind of model, and its vocabulary."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from ...errors import UnsupportedError
from ...models import unwrapped
from ...undo.state import find_state
from .texts import DIGEST_BYTES

SAMPLES = 4096
# These entries of a config are described elsewhere, or change none of a teacher's answers.
VOLATILE = {"transformers_version", "use_cache", "dtype", "torch_dtype", "quantization_config"}
AUTO_CLASSES = {  # how modeling_auto's mappings are called, and who loads their classes
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "TOKEN_CLASSIFICATION": "AutoModelForTokenClassification",
    "SEQUENCE_CLASSIFICATION": "AutoModelForSequenceClassification",
}
TASKS = {
    "CAUSAL_LM": "causal",
    "MASKED_LM": "token",
    "TOKEN_CLASSIFICATION": "token",
    "SEQUENCE_CLASSIFICATION": "sequence",
}


def auto_class_of(model: Any) -> str | None:
    """The key of AUTO_CLASSES that a model's class, or one that it inherits from, belongs to."""
    kinds = _kinds()
    return next((kinds[one.__name__] for one in type(unwrapped(model)).__mro__ if one.__name__ in kinds), None)


@functools.cache
def _kinds() -> dict[str, str]:
    """The key of AUTO_CLASSES for the name of each of transformers' classes."""
    found = {}
    for kind in AUTO_CLASSES:
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            found.update(dict.fromkeys([names] if isinstance(names, str) else names, kind))
    return found


def task_of(model: Any) -> str | None:
    """Return what a model's logits predict: "causal" is the next token, "token" each token itself, "sequence" a class
    of the whole text. None if it is not known.
    """
    return TASKS.get(auto_class_of(model) or "")


def describe(model: Any) -> dict[str, Any]:
    """Describes a teacher by what JSON can hold. weights: a hash of a sample of each tensor, those of adapters and
    quantized layers included."""
    base = unwrapped(model)
    state = find_state(base)
    config = {k: v for k, v in base.config.to_dict().items() if not k.startswith("_") and k not in VOLATILE}
    return {
        "name": base.config.name_or_path,
        "class": type(base).__name__,
        "config": hash_json(config),
        "weights": _hash_weights(model),
        "dtype": str(base.dtype).removeprefix("torch."),
        "patched": str(state.config) if state is not None else None,
    }


def hash_vocabulary(tokenizer: Any) -> str:
    """A hash of the pairs of token and id."""
    return hash_json(sorted(tokenizer.get_vocab().items()))


def hash_json(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _hash_weights(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for prefix, module in model.named_modules():
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, f"{prefix}.", False)  # a quantized layer unpacks here, one at a time
        for name, tensor in own.items():
            if isinstance(tensor, Tensor):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(_sample(name, tensor))
    return digest.hexdigest()


def _sample(name: str, tensor: Tensor) -> bytes:
    if tensor.is_meta:
        raise UnsupportedError(f"{name} of the teacher is on the meta device; load its weights first")
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLES)
    sample: bytes = flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return sample
