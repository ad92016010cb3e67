"""The output head of a model, and the table that shares its weight, as places that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...models import modules_by_name
from ...recognition.unchanged import has_own_forward
from ..site import FusedSite, SiteKind
from ..trained_head import HeadCall, Tie, TiedTable, TrainedHead, is_tied

TIED_TABLE = SiteKind("tied table")


def with_trained_head(model: nn.Module, floats: list[FusedSite]) -> tuple[list[FusedSite], list[FusedSite]]:
    """Give the head among float linears a mixin that also trains, and find the table that shares its weight."""
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not any(site.module is head for site in floats):
        return floats, []
    named = [(n, m) for n, m in modules_by_name(model) if is_tied(m, head) and not has_own_forward(m)]
    tie = Tie() if len(named) == 1 else None
    trained = [
        replace(each, mixin=TrainedHead, state=HeadCall(each.state.float_rows, tie)) if each.module is head else each
        for each in floats
    ]
    return trained, [] if tie is None else [FusedSite(*named[0], TIED_TABLE, TiedTable, tie)]
