"""Finds the layers of a model that keep a recurrent state, and says what computes them over pages."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn

from ...fused.site import FusedSite, SiteKind
from ...models import answer_once, modules_by_name
from ...recognition.small_model import settings_of_layer
from .delta_attention import known_delta_attention
from .delta_rules import known_delta_rule
from .gated_units import known_gated_unit
from .headed_scans import known_headed_scan
from .lightning import known_lightning_attention
from .matrix_memories import known_matrix_memory, own_state_sites
from .selective_scans import known_selective_scan
from .state_pass import Recurrence
from .state_spaces import known_state_space
from .time_mixes import known_time_mixes

RECURRENCE = SiteKind("recurrence", "recurrent layers", "states in pages", computes_all=True, multiplies=True)


def recurrence_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the recurrent layers of a model, which get a forward over pages."""
    for name, module in modules_by_name(model):
        known = known_recurrence(module) or known_gated_unit(module, name) or known_matrix_memory(module, name)
        if known is not None:
            yield FusedSite(name, module, RECURRENCE, known.mixin, known)
    yield from own_state_sites(model)


def unknown_recurrences_refusal(model: nn.Module, count: int) -> str | None:
    """Return a clause unless as many layers of a model are known as keep a state by its config, `count`.

    Some keep it in themselves, so that nothing else in their code says that they have one.
    """
    found = sum(site.kind == RECURRENCE for site in recurrence_sites(model))
    return None if found >= count else f"{count - found} of its recurrent layers compute in a way that is not known"


def known_recurrence(module: nn.Module) -> Recurrence | None:
    """Return what computes a module with a recurrent state over pages; None if the module is not known."""
    return answer_once(_known, module)


def _known(module: nn.Module) -> Recurrence | None:
    """Return an object of the module's own, as it notes what the module holds; equal layers are tried once."""
    return copy.copy(answer_once(_tried, module, equal=settings_of_layer(module)))


def _tried(module: nn.Module) -> Recurrence | None:
    known: Recurrence | None = known_delta_rule(module) or known_delta_attention(module)
    known = known or known_state_space(module) or known_selective_scan(module)
    return known or known_headed_scan(module) or known_lightning_attention(module) or known_time_mixes(module)
