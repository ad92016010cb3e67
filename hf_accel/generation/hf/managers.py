"""Chooses the manager for continuous batching: ours, or transformers' own for a model that cannot run ragged."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ...attention.hf import attention_is_ours
from ...state import state_of
from .continuous import ContinuousManager
from .generation_state import GenerationState
from .model_runner import weights_salt
from .refusals import ragged_refusal


def manager_for(model: PreTrainedModel, generation_config: Any, batching_config: Any, hints: Any) -> Any:
    """Return the manager that was kept for this session, or make a new one."""
    state: GenerationState = state_of(model).generation
    refusal = ragged_refusal(model)
    if refusal is not None:
        state.statistics = {"loop": f"stock: transformers' continuous batching manager, because {refusal}"}
        attending: Any = _model_for_stock(model)
        return GenerationMixin.init_continuous_batching(attending, generation_config, batching_config, hints)
    if state.manager is None:
        return ContinuousManager(model, generation_config, batching_config)
    return state.manager


def destroy_managers(model: PreTrainedModel) -> None:
    """Stop and drop the managers that were kept."""
    state: GenerationState = state_of(model).generation
    if state.manager is not None:
        state.manager.destroy()
    if state.attending is not None:
        attending: Any = state.attending[1]
        state.attending = None
        GenerationMixin.destroy_cached_continuous_batching_manager(attending)


def _model_for_stock(model: Any) -> PreTrainedModel:
    """Return a model for transformers' manager, which calls it in another thread, with the original attention.

    This model keeps our attention meanwhile. The same model is returned as long as weights and adapters are the same,
    because transformers stores a kept manager on it.
    """
    state = state_of(model).generation
    if not attention_is_ours(model.config):
        return model
    salt = weights_salt(model)
    if state.attending is None or state.attending[0] != salt:
        assert state.make_attending is not None
        model.destroy_cached_continuous_batching_manager()
        state.attending = salt, state.make_attending(model)
    return state.attending[1]
