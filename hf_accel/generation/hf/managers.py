"""transformers' own continuous batching of a patched model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...attention.hf import attention_is_ours
from ...state import state_of
from .step import weights_salt

MANAGER = "transformers' continuous batching manager"


def model_for_manager(model: Any) -> PreTrainedModel:
    """What a manager may call, in a thread of its own, while this model goes on attending by our function.

    The same one for as long as the weights and adapters are the same: a manager that is kept is kept on it.
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
