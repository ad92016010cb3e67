"""Passes that give a decoder more than ids for some tokens: what its call is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...cache.step import PassInputs
from ..marked_inputs import marked_arguments
from ..prompt_inputs import Rows
from ..token_arguments import placed_arguments
from .decoder_call import giving_decoder


def giving_more(
    model: PreTrainedModel, own_hook: object, inputs: PassInputs, *, more: Mapping[str, Any], own_masks: bool
) -> Any:
    """Return what a pass calls: the model, or a copy that gives its decoder more for some of the tokens.

    The decoder is given for all others what the model's own code makes of their ids. own_hook: see UpToDecoder.
    more: other arguments of the decoder, by name. own_masks: whether it makes its masks by itself, see
    DecoderForm.makes_masks.
    """
    rows: Rows = () if inputs.carried is None else inputs.carried.rows
    count = len(inputs.ids)
    embedded = [(each.first, each.embeddings) for each in rows if each.embeddings is not None]
    marked = [(each.first, each.marked) for each in rows if each.marked is not None]
    others = [(each.first, each.arguments) for each in rows if each.arguments is not None]
    if not (embedded or marked or others or more or own_masks):
        return model
    more = {**more, **(marked_arguments(marked, count) if marked else {})}
    if own_masks:
        more["attention_mask"] = None

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        given = {**call, **more, **placed_arguments(call, others, count)}
        if embedded:
            given["inputs_embeds"] = _embeddings(model, call, embedded)
            given.pop("input_ids", None)
        return given

    return giving_decoder(model, own_hook, changed)


def _embeddings(model: PreTrainedModel, call: Mapping[str, Any], embedded: list[tuple[int, Tensor]]) -> Tensor:
    """Return the embeddings [1, N, D] of a pass.

    call: of the decoder, for token ids alone. embedded: those of tokens that stand end to end, with the index of the
    first of them.
    """
    own = call.get("inputs_embeds")
    table: Any = model.get_input_embeddings()
    embeddings: Tensor = table(call["input_ids"]) if own is None else own.clone()
    for first, each in embedded:
        embeddings[0, first : first + len(each)] = each
    return embeddings


def given_in(inputs: PassInputs) -> tuple[Tensor, Tensor]:
    """Return the ids [N] and positions [N], or [P, N] for several coordinates, with those that tokens have been given.

    Tokens that have been given embeddings may have no ids of their own.
    """
    ids, positions, rows = inputs.ids.clone(), inputs.positions, inputs.carried.rows
    planes = max((len(each.positions) for each in rows if each.positions is not None), default=0)
    positions = (positions.expand(planes, -1) if planes > 1 else positions).clone()
    for each in rows:
        place = slice(each.first, each.first + each.count)
        if each.embeddings is not None:
            ids[place] = 0
        if each.positions is not None:
            positions[..., place] = each.positions.to(positions.device)
    return ids, positions
