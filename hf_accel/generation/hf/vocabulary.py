"""Checks of token ids and vocabularies."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ...models import vocabulary_size
from ...undo.journal import original_class
from ..prompt_inputs import RequestInputs

EMBEDDINGS = "inputs_embeds"  # what an encoder may read in place of token ids
OF_TOKENS = ("input_ids", "attention_mask")  # a processor makes them besides the inputs of images


def vocabulary_refusal(target: Any, draft: Any) -> str | None:
    """Return why the draft model's vocabulary does not fit the target's, as one clause; None if it may.

    Models with the same tokenizer may pad their vocabularies differently, so a small difference of sizes is accepted.
    """
    ours, theirs = vocabulary_size(target), vocabulary_size(draft)
    if abs(ours - theirs) <= max(1024, ours // 50):
        return None
    return f"the draft model has {theirs} tokens and the model {ours}: not the same tokenizer"


def check_ids(model: Any, ids: Sequence[int], name: str) -> None:
    """Raise UnsupportedError unless all ids are in the model's vocabulary. There must be at least one id."""
    size = vocabulary_size(model)
    if min(ids) < 0 or max(ids) >= size:
        raise UnsupportedError(f"{name} holds token ids from {min(ids)} to {max(ids)}; the model has 0 to {size - 1}")


def prompt_parts(model: Any, prompt: Any, name: str = "prompt") -> tuple[list[int], RequestInputs | None]:
    """Return the token ids of one prompt, and what else it brings; None if it brings nothing.

    prompt: token ids, or the dict that a tokenizer or a processor makes for one prompt: input_ids, pixel_values, ...
    name: the name of the prompt for error messages. Raises UnsupportedError for ids or inputs that the model does not
    take.
    """
    has_encoder = model.config.is_encoder_decoder
    reads_none = isinstance(prompt, Mapping) and "input_ids" not in prompt and EMBEDDINGS in prompt
    if has_encoder and (model.main_input_name != "input_ids" or reads_none):
        return [], _encoder_inputs(model, prompt, name)
    if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
        ids = token_ids(prompt, name)
        check_ids(model, ids, name)
        return ids, None
    ids = token_ids(prompt["input_ids"], f"{name}['input_ids']")
    check_mask(prompt.get("attention_mask"), name)
    given = _known_inputs(model, {key: value for key, value in prompt.items() if key not in OF_TOKENS}, name)
    if not given or has_encoder:  # an id that stands for an image may be none that has an embedding
        check_ids(model, ids, name)
    return ids, RequestInputs(given) if given else None


def check_mask(mask: Any, name: str) -> None:
    """Raise UnsupportedError if the attention_mask of a prompt of this name leaves tokens out."""
    if mask is not None and not all(token_ids(mask, f"{name}['attention_mask']")):
        raise UnsupportedError(f"{name}['attention_mask'] leaves tokens out; give a prompt without padding")


def _encoder_inputs(model: Any, prompt: Any, name: str) -> RequestInputs:
    """Return what a prompt of a model whose encoder reads no token ids brings: the dict that a processor makes."""
    encoder = model.get_encoder()
    taken = inspect.signature(original_class(encoder).forward).parameters
    # A model around encoders of several kinds names an input of its own.
    needed = model.main_input_name if model.main_input_name in taken else encoder.main_input_name
    needed = EMBEDDINGS if needed == "input_ids" else needed
    if not isinstance(prompt, Mapping) or prompt.get(needed) is None:
        raise UnsupportedError(
            f"{name} holds no {needed!r}, which the encoder of {type(model).__name__} reads; give what its processor "
            "makes for one sound or image"
        )
    return RequestInputs(_known_inputs(model, prompt, name))


def _known_inputs(model: Any, prompt: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the inputs of a prompt that are not None, if the model takes them."""
    given = {key: value for key, value in prompt.items() if value is not None}
    if "decoder_input_ids" in given:
        given["decoder_input_ids"] = token_ids(given["decoder_input_ids"], f"{name}['decoder_input_ids']")
        check_ids(model, given["decoder_input_ids"], f"{name}['decoder_input_ids']")
    known = inspect.signature(type(model).forward).parameters
    unknown = sorted(key for key in given if key not in known)
    if unknown:
        raise UnsupportedError(
            f"{name} holds {unknown[0]!r}, which {type(model).__name__} does not take; leave it out"
        )
    return given


def token_ids(prompt: Any, name: str = "prompt") -> list[int]:
    """Return the token ids of one prompt, which is an iterable of integers, or a tensor or array [T] or [1, T].

    name: the name of the prompt for error messages. Raises UnsupportedError, with what to give instead, for anything
    else.
    """
    if isinstance(prompt, Tensor) or hasattr(prompt, "__array__"):
        if len(prompt.shape) != 1 and tuple(prompt.shape[:-1]) != (1,):
            raise UnsupportedError(f"{name} has the shape {tuple(prompt.shape)}; give each row of token ids by itself")
        prompt = prompt.reshape(-1).tolist()
    try:
        given = [] if isinstance(prompt, str | Mapping) else list(prompt)
        if len(given) == 1 and isinstance(given[0], list | tuple):  # a batch of one prompt, as a tokenizer returns it
            given = list(given[0])
        ids = [operator.index(token) for token in given if not isinstance(token, bool)]
    except TypeError:
        ids = []
    if not ids or len(ids) != len(given):
        raise UnsupportedError(f"{name} {_refused(prompt)}")
    return ids


def _refused(prompt: Any) -> str:
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if isinstance(first, Mapping) and "role" in first:
        what = "a list of chat messages" if first is not prompt else "a chat message"
        return (
            f"is {what}; give the token ids of the whole chat: "
            "tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)"
        )
    if isinstance(prompt, Mapping):
        return "is a dict, as a tokenizer returns it; give its ids: prompt['input_ids']"
    if isinstance(prompt, str):
        return "is a text; give its token ids: tokenizer(text)['input_ids']"
    if isinstance(first, str):
        return "is a list of texts; give each by itself, as a list of token ids"
    return f"must be a list of at least one token id, not {prompt!r}"
