"""Prompts of models whose own generate() calls that of a part of it: BLIP-2, InstructBLIP, Kosmos-2 and others.

The tokens of such a request are computed by the part. Nothing here knows what a class makes of an image: a copy of
the model, whose part only says how it was called, runs the class's own generate().
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...errors import UnsupportedError
from ...keywords import Default
from ...recognition.trial import unwatched_twin
from ...tensors import model_device
from ...undo.journal import original_class
from ...undo.state import find_state, state_of
from .decoder_call import with_part
from .encoder_source import DECODER_IDS
from .generation_state import GenerationState
from .given_decoder import ROWS, SHOWN
from .refusals import refuse_speculation
from .vocabulary import check_mask, token_ids

OF_PART = "its generate() calls that of a part of it"
IDS, MASK, EMBEDDINGS = "input_ids", "attention_mask", "inputs_embeds"
NOT_READ = ("pad_token_id", MASK)  # what an answer without padding does not depend on


class _Called(Exception):
    """The generate() of the part was called. given: its arguments by name."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__("generate() was called")
        self.given = given


class PartPrompts:
    """Reads the prompts of a patched model whose generate() calls that of `part`.

    Raises UnsupportedError if either generate() was replaced on the model itself.
    """

    def __init__(self, model: Any) -> None:
        inner = state_of(model).generation.inner
        assert inner is not None
        self.inner: GenerationState = inner
        self.model: Any = model
        self.name, self._part = next(
            (name, part)
            for name, part in model.named_children()
            if (state := find_state(part)) is not None and state.generation is inner
        )
        # Computes the tokens; one that is given rows to attend to does so as an encoder-decoder.
        self.part: Any = inner.given or self._part
        if any("generate" in vars(each) for each in (self.model, self._part)):
            raise UnsupportedError(
                f"the generate() of {type(model).__name__}, or of its {self.name!r}, was replaced on the model "
                "itself, and only model.generate() calls it"
            )

    @torch.no_grad()
    def read(self, prompt: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a prompt as the part takes it, and the settings of a GenerationConfig that go with it, by name.

        prompt: token ids, or what a processor makes for one prompt. The model's towers run here. Raises
        UnsupportedError for a prompt that the model's generate() does not take.
        """
        given, kind = self._given(prompt), type(self.model).__name__

        def called(*args: Any, **kwargs: Any) -> None:
            raise _Called({**dict(zip((IDS,), args, strict=False)), **kwargs})

        end: Any = unwatched_twin(self._part)
        end.generate = called
        try:
            original_class(self.model).generate(with_part(self.model, self.name, end), **given)
        except _Called as found:
            return self._parts(found.given)
        except (TypeError, ValueError) as error:  # as for a prompt without an image
            raise UnsupportedError(f"{kind} refuses this prompt: {error}") from error
        raise UnsupportedError(f"{kind} does not call the generate() of its {self.name!r}; use model.generate()")

    def _given(self, prompt: Any) -> dict[str, Any]:
        """Return the arguments of the model's generate(): tensors of one row."""
        device = model_device(self.model)
        values = dict(prompt) if isinstance(prompt, Mapping) else {IDS: prompt}
        given = {name: value for name, value in values.items() if value is not None}
        unknown = sorted(given.keys() - inspect.signature(original_class(self.model).generate).parameters.keys())
        if unknown:
            raise UnsupportedError(f"prompt holds {unknown[0]!r}, which {type(self.model).__name__} does not take")
        if IDS in given:
            ids = torch.tensor([token_ids(given[IDS], "prompt['input_ids']")], device=device)
            check_mask(given.get(MASK), "prompt")
            given |= {IDS: ids, MASK: torch.ones_like(ids)}
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}

    def _parts(self, called: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the arguments of the part's generate(). Raises UnsupportedError for a batch, and for padding."""
        given = {name: value for name, value in called.items() if value is not None}
        check_mask(given.get(MASK), "prompt")
        fields = GenerationConfig().to_dict()
        settings = {name: given.pop(name) for name in sorted(given.keys() & fields.keys())}
        for name, value in given.items():
            if isinstance(value, Tensor) and len(value) != 1:
                raise UnsupportedError(
                    f"prompt has {len(value)} rows of {name}; give each prompt by itself, as a batch of one row"
                )
        if IDS not in given and not self.part.config.is_encoder_decoder:
            raise UnsupportedError(f"prompt holds no {IDS!r}, which logits processors read; give them too")
        left = {name: value for name, value in given.items() if name not in NOT_READ}
        if self.part is not self._part:
            left = self._with_rows(left)
        return left, {name: value for name, value in settings.items() if name not in NOT_READ}

    def _with_rows(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the prompt of a GivenDecoder: tokens to begin with, and the rows that they attend to."""
        rows, shown = given.pop(ROWS, None), given.pop(SHOWN, None)
        if rows is None or given.keys() != {IDS}:
            raise UnsupportedError(f"{type(self._part).__name__} is given {sorted(given)}; use model.generate()")
        if shown is not None and state_of(self.part).generation.form.hides_rows:
            rows = rows[:, shown[0] != 0]
        return {EMBEDDINGS: rows, DECODER_IDS: given[IDS]}


def batch_of_part(model: Any, prompts: Iterable[Any], *given: Any, speculative: Any, **keywords: Any) -> Any:
    """Return what generate_batch() of the part whose generate() that of a patched model calls gives for these prompts.

    given, keywords: its other arguments. Raises what PartPrompts raises, and UnsupportedError for prompts that bring
    settings of their own.
    """
    if speculative is not None and not isinstance(speculative, Default):
        refuse_speculation(OF_PART)
    reads = PartPrompts(model)
    found = [reads.read(prompt) for prompt in prompts]
    asked = next((name for _, settings in found for name in settings), None)
    if asked is not None:
        raise UnsupportedError(f"the generate() of {type(model).__name__} sets {asked}= by itself; use an Engine")
    outputs = reads.part.generate_batch([prompt for prompt, _ in found], *given, **keywords)
    own: GenerationState = state_of(model).generation
    own.statistics = reads.inner.statistics
    return outputs


def prompts_of_part(model: Any) -> PartPrompts | None:
    """Return what reads the prompts of a patched model whose generate() calls that of a part; None for any other."""
    state = find_state(model)
    return None if state is None or state.generation.inner is None else PartPrompts(model)
