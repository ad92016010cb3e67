"""Finds the layers of a model that keep a recurrent state, and says what computes them over pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ...fused.hf.sites import FusedSite
from ...kernels import cpu
from .delta_attention import known_delta_attention
from .delta_rules import known_delta_rule
from .selective_scans import known_selective_scan
from .state_pass import PagedRecurrence, Recurrence
from .state_spaces import known_state_space

RECURRENCE = "recurrence"  # the kind in the plan


def recurrent_pages_refusal(device: torch.device) -> str | None:
    """Return why recurrent layers on a device cannot read pages, as one clause; None if they can."""
    if device.type not in ("cpu", "meta"):
        return "whose states are read in pages on a CPU alone"
    # Without our kernel, a prompt would take longer than transformers' own code needs for it.
    return None if cpu.refusal() is None else f"whose states only our kernels read in pages ({cpu.refusal()})"


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
