"""Makes the inputs of prompts that are more than token ids: with images, or with embeddings of a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import NotRaggedError
from ...models import vocabulary_size
from ..prompt_inputs import PromptInputs, contents_of
from .decoder_call import DecoderCalls
from .model_runner import TEXT_INPUTS, prepare_step

PROBE = 1  # any token, for the second pass


@torch.no_grad()
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
    calls = DecoderCalls(model, prepare_step)
    first = _Call.of(calls, calls.first(ids, inputs))
    rows, columns = first.shape
    tokens = torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask.bool().cpu()
    first.check_mask(mask)
    probes = torch.full_like(ids[:, :1] if ids.shape[1] else ids.new_zeros(rows, 1), PROBE)
    second = _Call.of(calls, calls.second(torch.cat([ids, probes], dim=1), inputs, columns))
    embedded = _embedded(model, probes)
    if second.embeddings is not None and not torch.equal(second.embeddings, embedded):
        raise NotRaggedError(f"{type(model).__name__} embeds a token after the prompt in a way of its own")
    _check_pass(calls, first)
    return [
        _row(model, ids[row], tokens[row], row, first=first, second=second)
        for row in range(rows)
    ]


@dataclass(frozen=True)
class _Call:
    """What a decoder was given: embeddings [B, T, D] or ids [B, T], positions [P, B, T] on the host, and a mask."""

    embeddings: Tensor | None
    ids: Tensor | None
    positions: Tensor | None
    mask: Any
    planes: int | None  # P of positions [P, B, T]; None if they were [B, T], or missing

    @classmethod
    def of(cls, calls: DecoderCalls, given: dict[str, Any]) -> _Call:
        for name, value in given.items():
            known = name in TEXT_INPUTS or name == "inputs_embeds" or value is False
            if not known and calls.is_read(name):
                raise NotRaggedError(f"its decoder is given {name}")
        positions = given.get("position_ids")
        planes = len(positions) if positions is not None and positions.ndim == 3 else None
        if positions is not None:
            positions = (positions[None] if planes is None else positions).cpu()
        embeddings, ids = given.get("inputs_embeds"), given.get("input_ids")
        return cls(embeddings, ids, positions, given.get("attention_mask"), planes)

    @property
    def shape(self) -> tuple[int, int]:
        source: Any = self.ids if self.embeddings is None else self.embeddings
        return source.shape[0], source.shape[1]

    def check_mask(self, mask: Tensor | None) -> None:
        """Raise NotRaggedError unless the decoder makes its own mask, from the columns that are no padding."""
        own = self.mask
        if own is None and (mask is None or bool(mask.all())):
            return
        if not isinstance(own, Tensor) or own.ndim != 2 or mask is None or not torch.equal(own.bool(), mask.bool()):
            raise NotRaggedError("its decoder is given a mask of another form")

    def positions_of(self, row: int, columns: Tensor) -> Tensor:
        """Return the positions [P, n] of the columns of a row that hold its tokens."""
        if self.positions is None:
            return columns.nonzero().T
        return self.positions[:, min(row, self.positions.shape[1] - 1), columns]


def _check_pass(calls: DecoderCalls, first: _Call) -> None:
    """Raise NotRaggedError unless the model hands on the embeddings and positions of a ragged pass unchanged."""
    assert first.embeddings is not None
    embeddings = first.embeddings[:1]
    count = embeddings.shape[1]
    positions = torch.arange(count, device=embeddings.device).flip(0)[None] + 3
    if first.planes is not None:
        positions = positions.expand(first.planes, 1, count)
    given = calls(inputs_embeds=embeddings, position_ids=positions, use_cache=True)
    call = _Call.of(calls, given)
    same = call.embeddings is not None and torch.equal(call.embeddings, embeddings)
    if not same or call.positions is None or not torch.equal(given["position_ids"], positions):
        raise NotRaggedError("it changes embeddings or positions that it is given")


def _row(
    model: PreTrainedModel, ids: Tensor, tokens: Tensor, row: int, *, first: _Call, second: _Call
) -> PromptInputs | None:
    assert first.embeddings is not None
    columns = tokens.nonzero().flatten()
    embeddings = first.embeddings[row, columns.to(first.embeddings.device)]
    positions = first.positions_of(row, tokens)
    count = len(columns)
    if second.positions is None:  # the decoder counts the columns of its cache
        shifts = torch.tensor([first.shape[1] - count])
    else:
        shifts = second.positions_of(row, torch.ones(1, dtype=torch.bool))[:, 0] - count
    indices = torch.arange(count)
    if len(ids):
        own_ids = ids[columns.to(ids.device)]
        plain = (_embedded(model, own_ids) == embeddings).all(dim=-1) & (own_ids < vocabulary_size(model))
    else:
        own_ids, plain = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    moved = bool((positions != indices).any()) or bool(shifts.any())
    if bool(plain.all()) and not moved:
        return None
    is_plain = (plain.cpu() & (positions == indices).all(dim=0)).tolist()
    contents = contents_of(own_ids.tolist(), is_plain, embeddings, positions if moved else None)
    return PromptInputs(embeddings, positions if moved else None, tuple(shifts.tolist()), contents)


def _embedded(model: Any, ids: Tensor) -> Tensor:
    """Return the embeddings of token ids, of any that the model knows where one is none of its own."""
    embedded: Tensor = model.get_input_embeddings()(ids.clamp(max=vocabulary_size(model) - 1))
    return embedded
