"""Tries whether a decoder gives its layers the same for a token, whatever other tokens are in its pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ...errors import NotRaggedError
from ...models import layer_lists, layers_config
from ...recognition.trial import RandomNumbers, unwatched_twin
from ..marked_inputs import MarkedInputs, marked_arguments

# Which tokens of two sequences are marked. A third one has no features at all.
MARKS = ((False, True, True, False, True, False), (True, False))
UNMARKED = 3
CUT = 2  # the first tokens of the first sequence are computed by an earlier pass
FACTOR = 1.5
# Arguments of layers that are known to be right in a ragged pass.
KNOWN = frozenset({"attention_mask", "position_ids", "position_embeddings", "past_key_values", "use_cache"})


def refuse_mixed_tokens(decoder: nn.Module, given: MarkedInputs, planes: int | None, like: Tensor) -> None:
    """Raise NotRaggedError unless a decoder gives its layers, for a marked token, what it gives without other tokens.

    The decoder's own code runs on random numbers, over layers that only say what they are given. given: features of
    the forms that are to be tried. planes: P if it takes positions [P, B, T]. like: an embedding.
    """
    trial = _DecoderTrial(decoder, planes)
    numbers = RandomNumbers()
    marked, embedded = [], []
    for marks in MARKS:
        count = sum(marks)
        features = tuple(numbers(count, *f.shape[1:], dtype=f.dtype, device=f.device) for f in given.features)
        marked.append(MarkedInputs(given.form, torch.tensor(marks), features))
    for count in (len(MARKS[0]), UNMARKED, len(MARKS[1])):
        embedded.append(numbers(count, like.shape[-1], dtype=like.dtype, device=like.device))
    first, second = (marked_arguments([(0, each)], len(each.marks)) for each in marked)
    alone = [trial(embedded[0], first), trial(embedded[1], {}), trial(embedded[2], second)]
    later = marked[0].part(CUT, len(MARKS[0]))
    assert later is not None
    parts = [(0, later), (len(MARKS[0]) - CUT + UNMARKED, marked[1])]
    row = torch.cat([embedded[0][CUT:], *embedded[1:]])
    together = trial(row, marked_arguments(parts, len(row)))
    expected = [torch.cat([a[CUT:], b, c]) for a, b, c in zip(*alone, strict=True)]
    if len(expected) != len(together) or not all(map(torch.equal, expected, together)):
        raise NotRaggedError(f"{type(decoder).__name__} mixes tokens that are given {given.form.marks}")


class _DecoderTrial:
    """A decoder whose layers do nothing but multiply."""

    def __init__(self, decoder: nn.Module, planes: int | None) -> None:
        self.config = layers_config(decoder.config)
        self.planes = planes
        self.seen: list[Tensor] = []
        lists = layer_lists(decoder, self.config.num_hidden_layers)
        parts = {name: nn.ModuleList(map(self._stand_in, found)) for name, found in lists.items() if "." not in name}
        self.decoder = unwatched_twin(decoder, _modules=parts)

    def _stand_in(self, layer: nn.Module) -> Any:
        twin = unwatched_twin(layer)
        twin.forward = self._called
        return twin

    def _called(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        others = [*args, *(value for name, value in kwargs.items() if name not in KNOWN)]
        if any(isinstance(each, Tensor | Sequence) and not isinstance(each, str) for each in others):
            raise NotRaggedError(f"{type(self.decoder).__name__} gives its layers more than hidden states")
        self.seen.append(hidden[0])
        return hidden * FACTOR

    def __call__(self, embedded: Tensor, more: dict[str, Any]) -> list[Tensor]:
        """Return what each layer is given, and the result, [T, D] each."""
        self.seen = []
        positions = torch.arange(len(embedded), device=embedded.device)[None]
        if self.planes is not None:
            positions = positions.expand(self.planes, 1, -1)
        result = self.decoder(
            inputs_embeds=embedded[None], position_ids=positions, use_cache=True, return_dict=True,
            past_key_values=DynamicCache(config=self.config), **more,
        )  # fmt: skip
        return [*self.seen, result.last_hidden_state[0]]
