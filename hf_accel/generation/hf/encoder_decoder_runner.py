"""Calls the decoder of a patched encoder-decoder on the tokens of many sequences, each with an encoder's output."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...cache.group import PageGroup
from ...cache.hf import RaggedEncoderDecoderCache
from ...cache.step import PassInputs
from ...fused.hf.operator_models import OperatorModel
from ...models import encoder_width, layers_config
from .encoder_source import rows_as_output
from .model_runner import ModelRunner, begun_pass

POSITIONS = "decoder_position_ids"


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a call may give the positions of the decoder's tokens, if only among what it passes on."""
    return _take_positions(type(model).forward, type(model.get_decoder()).forward)


@lru_cache(maxsize=256)
def _take_positions(model_forward: Any, decoder_forward: Any) -> bool:
    parameters = inspect.signature(model_forward).parameters
    if POSITIONS in parameters:
        return True
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return passes_on and "position_ids" in inspect.signature(decoder_forward).parameters


class EncoderDecoderRunner(ModelRunner):
    """A ModelRunner of an encoder-decoder. The encoder has run before, and its output is in the sequences' tables."""

    def __init__(
        self, model: PreTrainedModel, groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]],
        operators: OperatorModel | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, groups, groups_of_layer, operators)
        self.cache: Any = RaggedEncoderDecoderCache(groups, groups_of_layer, one_column=self.cache.one_column)
        self.takes_positions = takes_positions(model)
        self.pad_token = getattr(layers_config(model.config), "pad_token_id", None)
        # Stands for the encoder's output where all layers have its keys: code asks whether there is one.
        self._stands_in = torch.zeros(1, 1, encoder_width(model), dtype=model.dtype)

    def _compute(self, inputs: PassInputs, *, everything: bool) -> Tensor:
        assert inputs.carried is None, "an encoder-decoder is served token ids alone"
        counts = int(inputs.ids[0]) != self.pad_token
        sources = self.cache.begin(inputs.step, inputs.positions, first_counts=counts)
        ids, tokens_part = inputs.ids[None], self.cache.self_attention_cache
        with begun_pass(self.model, tokens_part, None).running():
            output = self.model(
                decoder_input_ids=ids,
                decoder_attention_mask=torch.ones_like(ids if self.operators is None else ids[:, :1]),
                encoder_outputs=rows_as_output(self._stands_in if sources is None else sources),
                use_cache=True,
                return_dict=True,
                **{self._cache_name: self.cache},
                **({POSITIONS: inputs.positions[None]} if self.takes_positions else {}),
            )
        self.cache.check_read()
        logits: Tensor = output.logits[0]
        # As many as there are tokens are all of them, in order, and a copy of them takes as long as their computation.
        return logits if everything or len(inputs.keep) == len(logits) else logits[inputs.keep]
