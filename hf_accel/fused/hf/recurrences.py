"""Finds the layers of a model that keep a recurrent state, and says what computes them over pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from ...cache.hf import model_kinds
from ...kernels import cpu
from .compressed import compressed_sites
from .convolutions import convolution_sites
from .delta_rules import known_delta_rule
from .selective_scans import known_selective_scan
from .sites import FusedSite
from .state_pass import PagedRecurrence, Recurrence
from .state_spaces import known_state_space

RECURRENCE = "recurrence"  # the kind in the plan


def recurrent_pages_refusal(device: torch.device) -> str | None:
    """Return why recurrent layers on a device cannot read pages, as one clause; None if they can."""
    if device.type not in ("cpu", "meta"):
        return "whose states are read in pages on a CPU alone"
    # Without our kernel, a prompt would take longer than transformers' own code needs for it.
    return None if cpu.refusal() is None else f"whose states only our kernels read in pages ({cpu.refusal()})"


def state_sites(model: PreTrainedModel) -> Iterator[FusedSite]:
    """Find the layers of a model whose pages are read by no other forward than ours, whatever fuse= says."""
    kinds = model_kinds(model.config)
    if kinds.convolves or kinds.recurs:
        yield from convolution_sites(model)
        yield from _recurrence_sites(model)
    if kinds.compresses:
        yield from compressed_sites(model)


def _recurrence_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the recurrent layers of a model, which get a forward over pages."""
    for name, module in model.named_modules():
        known = known_recurrence(module)
        if known is not None:
            yield FusedSite(name, module, RECURRENCE, PagedRecurrence, known)


def known_recurrence(module: nn.Module) -> Recurrence | None:
    """Return what computes a module with a recurrent state over pages; None if the module is not known."""
    return known_delta_rule(module) or known_state_space(module) or known_selective_scan(module)
