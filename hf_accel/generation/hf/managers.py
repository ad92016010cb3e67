"""Chooses the manager for continuous batching: ours, or transformers' own for a model that cannot run ragged."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ...attention.hf import attention_is_ours
from ...errors import UnsupportedError
from ...undo.state import state_of
from .continuous import ContinuousManager
from .generation_state import GenerationState
from .model_runner import weights_salt
from .refusals import ragged_refusal

STOCKS_LAYERS = ("full_attention", "sliding_attention")  # what transformers' manager has pages for


def manager_for(model: PreTrainedModel, generation_config: Any, batching_config: Any, hints: Any) -> Any:
    """Return the manager that was kept for this session, or make a new one."""
    state: GenerationState = state_of(model).generation
    refusal = ragged_refusal(model)
    if refusal is not None:
        refuse_batching(model)
        state.statistics = {"loop": f"stock: transformers' continuous batching manager, because {refusal}"}
        attending: Any = _model_for_stock(model)
        return GenerationMixin.init_continuous_batching(attending, generation_config, batching_config, hints)
    if state.manager is None:
        return ContinuousManager(model, generation_config, batching_config)
    return state.manager


def refuse_batching(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for a model that transformers' manager cannot serve, of those that cannot run ragged."""
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()).difference(STOCKS_LAYERS)
    if config.is_encoder_decoder:
        refusal = "is an encoder-decoder, and its prompts are no tokens of its decoder"
    elif kinds or getattr(model, "_is_stateful", False):
        refusal = f"keeps a state that has no pages ({', '.join(sorted(kinds)) or 'recurrent layers'})"
    else:
        return
    raise UnsupportedError(
        "continuous batching (generate_batch(), init_continuous_batching()) cannot serve this model, with hf_accel "
        f"or without: {type(model).__name__} {refusal}; call generate() with a padded batch and its attention_mask"
    )


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
