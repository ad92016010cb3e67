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
from ...tensors import model_device
from ...undo.state import find_state, state_of
from ..marked_inputs import MarkedInputs, read_marked
from ..prompt_inputs import (
    TEXT_INPUTS,
    PromptInputs,
    RequestInputs,
    contents_of,
    contents_of_wholes,
    moved,
)
from .decoder_call import UpToDecoder
from .encoder_source import encoder_output
from .generation_state import LoopCall
from .marked_trial import refuse_mixed_tokens
from .model_runner import counts_positions, prepare_step
from .prompt_masks import tokens_seen

# Methods that only prepare calls of the decoder, so that a trial shows what they do.
PREPARING = (
    "prepare_inputs_for_generation", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation",
)  # fmt: skip
# Phi-3 has its own prepare_inputs_for_generation only for rotary scaling that depends on the length, which is refused
# before. A method that uses this name is therefore allowed.
LONG_ROPE = "original_max_position_embeddings"
PROBE = 1  # any token, for the second pass
TEXT_LENGTHS = ((5,), (9, 6), (33,))  # of the texts of trials
MOST_IDS = 32  # the tokens of trials are the first ones: those that stand for images have large ids


def inputs_of_rows(call: LoopCall) -> Sequence[PromptInputs | None]:
    """Return the inputs of each row of a call; None for a row of token ids alone that stand at their indices."""
    rows: list[PromptInputs | None] = [None] * len(call.input_ids)
    if call.has_more_than_ids:
        return prompt_inputs(call.model, call.input_ids, call.mask, call.inputs)
    if call.mask is None or not call.state.form.counts_padding:
        return rows
    for row, ids in enumerate(call.input_ids.tolist()):
        if padding := int((call.mask[row] == 0).sum()):
            rows[row] = moved(ids[padding:], padding)
    return rows


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
    read = _Read(UpToDecoder(model, prepare_step), ids, mask, inputs)
    return [read.row(row) for row in range(len(ids))]


def read_inputs(model: PreTrainedModel, tokens: list[int], inputs: RequestInputs) -> None:
    """Run the model's own code on what a request brings besides its tokens: its encoder, or its towers.

    tokens: those of the prompt. inputs: gets a source, or a prompt. Raises UnsupportedError if that cannot be handed
    on in ragged passes, and what the model's code raises.
    """
    assert inputs.unread is not None
    if model.config.is_encoder_decoder:
        inputs.source = encoder_output(model, inputs.unread)
    else:
        try:
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
        and LONG_ROPE not in method.__code__.co_names
        and not only_passes_on(type(model), name)
        and not hands_on_all(model, name)
    ]


@dataclass(frozen=True)
class TextForm:
    """The form in which the decoder is given a text.

    planes: P where it is given P coordinates for the position of each token; None for one. is_ids: whether it is given
    no more than what follows from the token ids; if not, the model's own code reads each text before it runs.
    """

    planes: int | None
    is_ids: bool


def text_form(model: PreTrainedModel) -> TextForm:
    """Return what the decoder is given for a text.

    This is found by calling the model's own code with random texts, one of them with padding. Raises NotRaggedError if
    the decoder is given what ragged passes do not hand on, in passes of a text or behind it.
    """
    planes, is_ids = None, True
    for lengths in TEXT_LENGTHS:
        ids, mask = _texts(model, lengths)
        calls = UpToDecoder(model, prepare_step)
        inputs: dict[str, Any] = {"attention_mask": mask}
        read = _Read(calls, ids, mask, inputs | _placed(calls, ids, inputs))
        planes = read.first.planes
        for row, count in enumerate(lengths):
            padding = max(lengths) - count
            found = read.row(row)
            is_ids &= found is None or bool(padding and read.is_moved_text(row, padding))
    return TextForm(planes, is_ids)


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
    if not state_of(model).generation.form.prepares:
        return None
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


@dataclass(frozen=True)
class _Call:
    """The arguments of a decoder: embeddings [B, T, D], positions [P, B, T] on the host, and a mask.

    positions: None if it counts them by itself. planes: P where it was given positions [P, B, T]; None if they were
    [B, T]. marked: the features that it was given for some of the B * T tokens; None for none.
    """

    embeddings: Tensor
    positions: Tensor | None
    planes: int | None
    mask: Any
    marked: MarkedInputs | None


class _Read:
    """The decoder's calls for a batch of prompts, checked, and read row by row. See prompt_inputs."""

    @torch.no_grad()
    def __init__(self, calls: UpToDecoder, ids: Tensor, mask: Tensor | None, inputs: Mapping[str, Any]) -> None:
        self.calls, self.ids = calls, ids
        state = find_state(calls.model)
        self.counts = counts_positions(calls.model)
        self.counts_padding = state is not None and state.generation.form.counts_padding
        self.first = self._call(calls.first(ids, inputs))
        rows, self.columns = self.first.embeddings.shape[:2]
        self.tokens = torch.ones(rows, self.columns, dtype=torch.bool) if mask is None else mask.bool().cpu()
        self.seen = tokens_seen(calls.config, self.first.mask, self.tokens, causal=calls.is_causal)
        if state is not None and state.generation.form.operators is not None:
            raise NotRaggedError("its attention is by torch's operators, which ragged passes know of token ids alone")
        if state is not None and state.generation.context is not None and (any(self.seen) or self.first.marked):
            raise NotRaggedError("tokens see later ones or bring features, and ranks share out its cache")
        if bool((ids >= vocabulary_size(calls.model)).any()):  # a drafter may propose such a token
            raise NotRaggedError("the prompt holds token ids that have no embedding")
        probes = ids.new_full((rows, 1), PROBE)
        self.second = self._call(calls.second(torch.cat([ids, probes], dim=1), inputs, self.columns))
        if self.first.embeddings.dtype is not self.second.embeddings.dtype:
            raise NotRaggedError(f"it is given embeddings of {self.first.embeddings.dtype}")
        if not torch.equal(self.second.embeddings, self._embedded(probes)) or self.second.marked is not None:
            raise NotRaggedError(f"{type(calls.model).__name__} embeds the tokens behind a prompt in a way of its own")
        self._check_pass()
        if self.first.marked is not None:
            self._check_marked(self.first.marked)

    def _check_pass(self) -> None:
        """Raise NotRaggedError unless the model hands on the embeddings and positions of a ragged pass unchanged."""
        embeddings, planes = self.first.embeddings[:1], self.first.planes
        placed = {}
        if not self.counts:
            positions = torch.arange(self.columns, device=embeddings.device).flip(0)[None] + 3
            placed["position_ids"] = positions if planes is None else positions.expand(planes, 1, self.columns)
        given = self.calls(inputs_embeds=embeddings, use_cache=True, **placed)
        same = all(torch.equal(given[name], value) for name, value in placed.items())
        if not torch.equal(self._call(given).embeddings, embeddings) or not same:
            raise NotRaggedError("its own code changes embeddings or positions that it is given")

    def _check_marked(self, marked: MarkedInputs) -> None:
        """Raise NotRaggedError unless the decoder takes features of tokens by token, in the form of earlier ones."""
        state = state_of(self.calls.model).generation
        if state.marked_form not in (None, marked.form):
            raise NotRaggedError(f"its decoder was given {marked.form.marks} in another form before")
        refuse_mixed_tokens(self.calls.decoder, marked, self.first.planes, self.first.embeddings)
        state.marked_form = marked.form

    def row(self, row: int) -> PromptInputs | None:
        """Return the inputs of one prompt; None if it is text alone."""
        columns = self.tokens[row].nonzero().flatten()
        count, indices = len(columns), torch.arange(len(columns))
        embeddings, positions, shifts = self._embeddings(row), self._positions(row), self._shifts(row)
        plain = torch.zeros(count, dtype=torch.bool)
        ids = plain.long()
        if self.ids.shape[1]:
            ids = self.ids[row].cpu()[columns]
            plain = (self._embedded(ids) == embeddings).all(dim=-1).cpu()
        is_moved = bool((positions != indices).any()) or bool(shifts.any())
        marked = self._marked(row)
        if bool(plain.all()) and not is_moved and self.seen[row] is None and marked is None:
            return None
        is_plain = (plain & (positions == indices).all(dim=0)).tolist()
        places = positions if is_moved else None
        contents = contents_of(ids.tolist(), is_plain, embeddings, places, marked=marked)
        seen = self.seen[row]
        if seen is not None:
            contents = contents_of_wholes(contents, seen)
        return PromptInputs(embeddings, places, tuple(shifts.tolist()), contents, seen, marked)

    def is_moved_text(self, row: int, columns: int) -> bool:
        """Return whether a row is a text whose tokens stand, with those behind it, so many columns later."""
        positions, ids = self._positions(row), self.ids[row].cpu()[self.tokens[row]]
        same = torch.equal(self._embedded(ids), self._embeddings(row))
        moved = positions == torch.arange(len(ids)) + columns
        return same and bool(moved.all()) and bool((self._shifts(row) == columns).all())

    def _call(self, given: dict[str, Any]) -> _Call:
        """Read a call. Raises NotRaggedError if the decoder reads an argument that ragged passes do not hand on."""
        others = {
            name: value
            for name, value in given.items()
            if name not in TEXT_INPUTS and name != "inputs_embeds" and value is not False and self.calls.is_read(name)
        }
        positions, embeddings = given.get("position_ids"), given.get("inputs_embeds")
        if (positions is None) is not self.counts:
            how = "no positions, and counts tokens in a way of its own" if positions is None else "positions at times"
            raise NotRaggedError(f"its decoder is given {how}")
        planes = len(positions) if positions is not None and positions.ndim == 3 else None
        if positions is not None:
            positions = (positions[None] if planes is None else positions).cpu()
        if embeddings is None:
            embeddings = self._embedded(given["input_ids"])
        rows, columns = embeddings.shape[:2]
        marked = read_marked(others, (rows, columns))
        if others and marked is None:
            raise NotRaggedError(f"its decoder is given {next(iter(others))}")
        return _Call(embeddings, positions, planes, given.get("attention_mask"), marked)

    def _embeddings(self, row: int) -> Tensor:
        embeddings = self.first.embeddings
        return embeddings[row, self.tokens[row].to(embeddings.device)]

    def _marked(self, row: int) -> MarkedInputs | None:
        """Return the features of the tokens of a row; None for none. Padding has none."""
        marked = self.first.marked
        if marked is None:
            return None
        own = marked.part(row * self.columns, (row + 1) * self.columns)
        return None if own is None else own.chosen(self.tokens[row])

    def _positions(self, row: int) -> Tensor:
        """Return the positions [P, n] of the tokens of a row."""
        positions, tokens = self.first.positions, self.tokens[row]
        if positions is None:
            columns = tokens.nonzero().flatten()
            return (columns if self.counts_padding else torch.arange(len(columns)))[None]
        return positions[:, min(row, positions.shape[1] - 1), tokens]

    def _shifts(self, row: int) -> Tensor:
        """Return what is added to the index of a token behind a row's prompt, [P]."""
        positions, count = self.second.positions, int(self.tokens[row].sum())
        if positions is None:
            return torch.tensor([self.columns - count if self.counts_padding else 0])
        return positions[:, min(row, positions.shape[1] - 1), 0] - count

    def _embedded(self, ids: Tensor) -> Tensor:
        table: Any = self.calls.model.get_input_embeddings()
        embedded: Tensor = table(ids.to(self.ids.device))
        return embedded
