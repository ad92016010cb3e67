"""A decoder that is given rows to attend to, seen as an encoder-decoder whose encoder hands on what it is given.

BLIP's text decoder is a model of its own, which says nothing of an encoder, and attends to rows that its caller has
made. Around it, the same code serves it as serves all encoder-decoders: the trial, the pages, the passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...cache.hf import PagedCache
from ...cache.hf.cache_argument import CACHE_NAME
from ...errors import UnsupportedError
from ...undo.state import state_of
from .generation_state import GenerationState, LoopCall

ROWS, SHOWN = "encoder_hidden_states", "encoder_attention_mask"  # by which a decoder is given rows, and their mask
OF_DECODERS = {f"decoder_{name}": name for name in ("attention_mask", "position_ids")}
WIDTHS = ("encoder_hidden_size", "hidden_size")  # what configs call the numbers of such a row


class GivenRowsConfig(PreTrainedConfig):
    """The config of a GivenDecoder, which has that of its decoder."""

    model_type = "given_decoder"


class GivenRows(nn.Module):
    """The encoder of a GivenDecoder: it returns the rows that it is given."""

    main_input_name = "inputs_embeds"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, inputs_embeds: Tensor, return_dict: bool = True) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


class GivenDecoder(PreTrainedModel, GenerationMixin):
    """A decoder as an encoder-decoder. It shares the decoder, its config and its settings of generation."""

    main_input_name = "input_ids"
    _supports_sdpa = False

    def __init__(self, decoder: Any) -> None:
        config = GivenRowsConfig()
        config.is_encoder_decoder = True
        config.decoder = decoder.config
        nn.Module.__init__(self)
        self.config = config
        rows = PreTrainedConfig()
        rows.hidden_size = next(getattr(decoder.config, name) for name in WIDTHS if hasattr(decoder.config, name))
        self.encoder, self.decoder = GivenRows(rows), decoder
        self.name_or_path = ""

    def forward(
        self,
        decoder_input_ids: Tensor,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Call the decoder. given: what it takes besides, also by the names that encoder-decoders have for that."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(inputs_embeds)
        named = {OF_DECODERS.get(name, name): value for name, value in given.items()}
        return self.decoder(input_ids=decoder_input_ids, **named, **{ROWS: encoder_outputs[0], SHOWN: attention_mask})

    def _prepare_decoder_input_ids_for_generation(
        self, batch_size: int, model_input_name: str, model_kwargs: dict[str, Any], *args: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the tokens that the decoder is given, in front of which nothing is put."""
        return model_kwargs.pop("decoder_input_ids"), model_kwargs

    @property
    def generation_config(self) -> Any:  # type: ignore[override]
        return self.decoder.generation_config

    @property
    def _generation_state(self) -> GenerationState:
        return state_of(self).generation

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        return self.encoder

    def get_decoder(self) -> Any:
        return self.decoder.get_decoder()

    def get_input_embeddings(self) -> Any:
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.decoder.get_output_embeddings()


def given_decoder(model: Any, part: Any) -> GivenDecoder | None:
    """Return a part of a model, whose generate() that of the model calls, as an encoder-decoder; None if the model's
    code gives it no rows to attend to.
    """
    code: Any = inspect.unwrap(type(model).generate).__code__
    names = {name for each in code.co_consts if isinstance(each, tuple) for name in each}
    taken = inspect.signature(type(part).forward).parameters.keys()
    is_given = ROWS in names and {ROWS, SHOWN, "position_ids"} <= taken and not part.config.is_encoder_decoder
    return GivenDecoder(part) if is_given and any(hasattr(part.config, name) for name in WIDTHS) else None


def as_given(call: LoopCall) -> LoopCall:
    """Return a call of a decoder that is given rows as one of its GivenDecoder; any other call as it is."""
    given = call.state.given
    if given is None or call.inputs.get(ROWS) is None:
        return call
    inputs = {name: value for name, value in call.inputs.items() if name not in (ROWS, SHOWN, "attention_mask")}
    inputs |= {
        "encoder_outputs": BaseModelOutput(last_hidden_state=call.inputs[ROWS]),
        "attention_mask": call.inputs.get(SHOWN),
        "decoder_attention_mask": call.inputs.get("attention_mask"),
    }
    return replace(call, model=given, inputs=inputs)


def served_by(model: Any, state: GenerationState, cache: object) -> Any:
    """Return what computes the tokens of a call that is given this cache: the model, or the GivenDecoder around it.

    Raises UnsupportedError for pages that cannot hold what a GivenDecoder attends to.
    """
    if state.given is None:
        return model
    if isinstance(cache, PagedCache):
        raise UnsupportedError(
            f"a PagedCache that is passed along cannot hold what {type(model).__name__} attends to besides tokens; "
            f"leave {CACHE_NAME}= out, and generate() makes pages for it"
        )
    return state.given


def is_given_rows(served: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether a call brings what its tokens attend to; True for what attends to tokens alone."""
    return not isinstance(served, GivenDecoder) or inputs.get(ROWS) is not None
