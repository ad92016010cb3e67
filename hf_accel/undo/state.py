"""The state that patch() leaves on a model, and the names of the attributes that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import PatchConfig
from ..errors import UnsupportedError
from .journal import Journal

if TYPE_CHECKING:
    from ..generation.hf.generation_state import GenerationState
    from ..patching.originals import Originals

# On a patched model, and on each model within it.
STATE = "_hf_accel"  # its PatchState
PART_OF = "_hf_accel_part_of"  # the name of the class of the model around it

# On attention modules.
BACKEND_ATTRIBUTE = "_hf_accel_attention"  # its PlannedAttention
STOCK_ATTRIBUTE = "_hf_accel_stock_attention"  # the implementation that the module had before patch()

# On modules with a native forward: the values that it reads.
FUSED = "_hf_accel_fused"  # of a norm, an MLP or a float Linear

# On a module that was patched as a part of some model.
MARKS = (BACKEND_ATTRIBUTE, STOCK_ATTRIBUTE, FUSED)

# On layers of bitsandbytes: how often each of the 16 levels stands in the weight that patch() made.
LEVELS = "_hf_accel_levels"


@dataclass
class PatchState:
    """The changes to a model, the way back, and what its generate() needs. description: the plan, as to_dict()."""

    config: PatchConfig
    description: dict[str, Any]
    journal: Journal
    originals: Originals
    generation: GenerationState


def find_state(model: object) -> PatchState | None:
    """Return the state of this very model; None if it is not patched."""
    state: PatchState | None = getattr(model, "__dict__", {}).get(STATE)
    return state


def state_of(model: object) -> PatchState:
    """Return the state of this very model; raises UnsupportedError if it is not patched."""
    state = find_state(model)
    if state is None:
        raise UnsupportedError("the model is not patched; call hf_accel.patch(model) first")
    return state
