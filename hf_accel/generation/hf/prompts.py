"""Makes the inputs of prompts that are more than token ids: with images, or with embeddings of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from ...errors import NotRaggedError, UnsupportedError
from ...models import vocabulary_size
from ...recognition.generation_code import hands_on_all, only_passes_on
from ...recognition.source import without_renaming
from ...tensors import model_device
from ...undo.state import state_of
from ..prompt_inputs import (
    PromptInputs,
    RequestInputs,
    asked_behind,
    is_padded_behind,
    moved,
    other_input,
    whole,
)
from .decoder_call import UpToDecoder
from .encoder_source import encoder_output
from .generation_state import GenerationState, LoopCall
from .model_runner import counts_positions, prepare_step
from .prompt_reader import PromptReader

# Methods that only prepare calls of the decoder, so that a trial shows what they do.
PREPARING = (
    "prepare_inputs_for_generation", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation",
)  # fmt: skip
# Phi-3 has its own prepare_inputs_for_generation only for rotary scaling that depends on the length, which is refused
# before. A method that uses this name is therefore allowed.
LONG_ROPE = "original_max_position_embeddings"
TEXT_LENGTHS = ((5,), (9, 6), (33,))  # of the texts of trials
MOST_IDS = 32  # the tokens of trials are the first ones: those that stand for images have large ids


def inputs_of_rows(call: LoopCall) -> Sequence[PromptInputs | None]:
    """Return the inputs of each row of a call; None for a row of token ids alone that stand at their indices."""
    rows: list[PromptInputs | None] = [None] * len(call.input_ids)
    form, is_text = call.state.form, other_input(call.inputs) is None and not (call.moves_tokens or call.num_learnt)
    if _knows_wholes(call.state) and is_text and call.num_columns:
        return [_whole(call, row) for row in range(len(call.input_ids))]
    if call.has_more_than_ids:
        return prompt_inputs(call.model, call.input_ids, call.mask, call.inputs)
    if call.mask is not None and not call.has_encoder and is_padded_behind(call.mask):
        return [_asked(call, row) for row in range(len(call.input_ids))]
    if call.mask is None or not form.counts_padding:
        return rows
    for row, ids in enumerate(call.input_ids.tolist()):
        if padding := int((call.mask[row] == 0).sum()):
            rows[row] = moved(ids[padding:], padding)
    return rows


def _knows_wholes(state: GenerationState) -> bool:
    """Return whether the tokens of a text see each other, and the model's own code has no more to say of it."""
    return state.form.whole_prompts and not state.form.prepares and state.context is None


def _whole(call: LoopCall, row: int) -> PromptInputs:
    """Return the inputs of a row of token ids that all see each other."""
    padding = 0 if call.mask is None else int((call.mask[row] == 0).sum())
    return whole(call.input_ids[row, padding:].tolist(), padding if call.state.form.counts_padding else 0)


def _asked(call: LoopCall, row: int) -> PromptInputs | None:
    """Return the inputs of a row with padding on the right, whose last column chooses the first token in stock."""
    assert call.mask is not None
    count = int(call.mask[row].sum())
    if count == call.prompt_columns:
        return None
    return asked_behind(call.input_ids[row, :count].tolist(), int(call.inputs["position_ids"][row, -1]))


def prompt_inputs(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, inputs: Mapping[str, Any]
) -> list[PromptInputs | None]:
    """Return the inputs of each row of a batch; None for a row that is text alone.

    They are what the model's own code hands to its decoder, so its tower runs here, once for all rows. What the second
    pass of transformers' loop hands on is looked at too: it must be an embedded token at the next position.

    ids: [B, T], or [B, 0] with inputs_embeds. mask: [B, T] with padding on the left, or None. inputs: the model's
    other inputs, as generate() has prepared them. Raises NotRaggedError if the decoder is given what ragged passes do
    not hand on, and what the model's code raises.
    """
    read = PromptReader(UpToDecoder(model, prepare_step), ids, mask, inputs)
    return [read.row(row) for row in range(len(ids))]


def read_inputs(model: PreTrainedModel, tokens: list[int], inputs: RequestInputs) -> None:
    """Run the model's own code on what a request brings besides its tokens: its encoder, or its towers.

    tokens: those of the prompt. inputs: gets a source, or a prompt. Raises UnsupportedError if that cannot be handed
    on in ragged passes, and what the model's code raises.
    """
    assert inputs.unread is not None
    try:
        if model.config.is_encoder_decoder:
            inputs.source = encoder_output(model, tokens, inputs.unread)
        else:
            inputs.prompt = request_inputs(model, tokens, inputs.unread)
    except NotRaggedError as error:
        raise UnsupportedError(f"this prompt cannot run ragged: {error}; use model.generate()") from error
    except UnsupportedError:
        raise
    except ValueError as error:  # as for another number of images than the tokens stand for
        raise UnsupportedError(f"{type(model).__name__} refuses this prompt: {error}") from error
    inputs.unread = None


def request_inputs(model: PreTrainedModel, tokens: list[int], given: Mapping[str, Any]) -> PromptInputs | None:
    """Return the inputs of one prompt of T tokens; None if it is text alone. Raises what prompt_inputs raises.

    given: what the model takes besides the token ids, as a processor makes it for one prompt: pixel_values, ...
    """
    if _knows_wholes(state_of(model).generation) and other_input(given) is None and "position_ids" not in given:
        return whole(tokens, 0)
    device = model_device(model)
    ids = torch.tensor([tokens], device=device)
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    inputs["attention_mask"] = torch.ones_like(ids)
    if "position_ids" not in given:
        inputs |= _placed(UpToDecoder(model, prepare_step), ids, inputs)
    return prompt_inputs(model, ids, inputs["attention_mask"], inputs)[0]


def own_methods(model: PreTrainedModel) -> list[str]:
    """List the methods of the model's class that prepare calls of the decoder in a way of their own.

    Those of encoder-decoders are not listed: their ragged passes prepare nothing by them.
    """
    if model.config.is_encoder_decoder:
        return []
    own = [(name, getattr(type(model), name)) for name in PREPARING]
    return [
        name
        for name, method in own
        if method is not getattr(GenerationMixin, name)
        and LONG_ROPE not in without_renaming(method).__code__.co_names
        and not only_passes_on(type(model), name)
        and not hands_on_all(model, name)
    ]


@dataclass(frozen=True)
class TextForm:
    """The form in which the decoder is given a text.

    planes: P where it is given P coordinates for the position of each token; None for one. is_ids: whether it is given
    no more than what follows from the token ids; if not, the model's own code reads each text before it runs.
    makes_masks, uncounted: see DecoderForm.
    """

    planes: int | None
    is_ids: bool
    makes_masks: bool
    uncounted: int | None


def text_form(model: PreTrainedModel) -> TextForm:
    """Return what the decoder is given for a text.

    This is found by calling the model's own code with random texts, one of them with padding. Raises NotRaggedError if
    the decoder is given what ragged passes do not hand on, in passes of a text or behind it.
    """
    planes, is_ids, makes_masks, uncounted = None, True, False, None
    for lengths in TEXT_LENGTHS:
        ids, mask = _texts(model, lengths)
        calls = UpToDecoder(model, prepare_step)
        inputs: dict[str, Any] = {"attention_mask": mask}
        read = PromptReader(calls, ids, mask, inputs | _placed(calls, ids, inputs))
        planes, makes_masks = read.first.planes, makes_masks or read.makes_masks
        uncounted = read.first.uncounted
        for row, count in enumerate(lengths):
            padding = max(lengths) - count
            found = read.row(row)
            is_ids &= found is None or bool(padding and read.is_moved_text(row, padding))
    return TextForm(planes, is_ids, makes_masks, uncounted)


def _placed(calls: UpToDecoder, ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the position_ids that generate() prepares, by name; none for a model that counts them by itself."""
    if counts_positions(calls.model):
        return {}
    return {"position_ids": calls.model._prepare_position_ids_for_generation(ids, dict(inputs))}


def text_refusal(model: PreTrainedModel) -> str | None:
    """Return why a text is more to the model's own methods than its tokens, as one clause; None if it is not."""
    try:
        text_form(model)
    except NotRaggedError as error:
        return str(error)
    except Exception as error:
        return f"its own code fails on a text ({type(error).__name__}: {error})"
    return None


def assisted_refusal(model: PreTrainedModel) -> str | None:
    """Return why transformers' assisted decoding must run by itself, as one clause; None if it need not."""
    form = state_of(model).generation.form
    if not form.reads_prompts:
        return None
    if form.whole_prompts and getattr(model.config, "is_decoder", None) is False:
        return (
            None  # transformers' fails: it asks for the cache in what the model returns, and an encoder returns none
        )
    try:
        causal = UpToDecoder(model, prepare_step).is_causal
    except NotRaggedError as error:
        return str(error)
    return None if causal else "the tokens of its prompts see those of transformers' first draft"


def _texts(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random token ids and their mask, [B, T], padded on the left."""
    columns, device = max(lengths), model_device(model)
    generator = torch.Generator().manual_seed(columns)
    most = min(vocabulary_size(model), MOST_IDS)
    ids = torch.randint(1, most, (len(lengths), columns), generator=generator).to(device)
    mask = torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]
    return ids, mask.long().to(device)
