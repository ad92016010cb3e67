"""Finds the layers of a model that keep a recurrent state, and says what computes them over pages."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...fused.site import FusedSite, SiteKind
from .delta_attention import known_delta_attention
from .delta_rules import known_delta_rule
from .selective_scans import known_selective_scan
from .state_pass import PagedRecurrence, Recurrence
from .state_spaces import known_state_space

RECURRENCE = SiteKind("recurrence", "recurrent layers", "states in pages", computes_all=True, convolves=True)


def recurrence_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the recurrent layers of a model, which get a forward over pages."""
    for name, module in model.named_modules():
        known = known_recurrence(module)
        if known is not None:
            yield FusedSite(name, module, RECURRENCE, PagedRecurrence, known)


def known_recurrence(module: nn.Module) -> Recurrence | None:
    """Return what computes a module with a recurrent state over pages; None if the module is not known."""
    known = known_delta_rule(module) or known_delta_attention(module)
    return known or known_state_space(module) or known_selective_scan(module)
