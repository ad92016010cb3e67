"""HeadRunner: calls a draft head on the tokens of many sequences, and on the hidden states that each is read with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...cache.step import PassInputs, Step
from ...tensors import integers
from ..prompt_inputs import Rows
from .head_module import HeadModule
from .model_runner import ModelRunner
from .pass_states import LAST


class HeadRunner(ModelRunner):
    """A ModelRunner for the decoder of a draft head, which is given fused embeddings instead of ids.

    Its own last hidden states are kept, which the head reads for the tokens that it has drafted.
    """

    def __init__(self, head: HeadModule, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.head = head
        self.kept.layers = LAST
        self._embeddings: Tensor | None = None

    def read(self, states: Tensor, ids: list[int], positions: list[int], *, step: Step, keep: list[int]) -> Tensor:
        """Compute N tokens with the states [N, H] that the head reads them with; returns logits [len(keep), V]."""
        self._embeddings = self.head.fused(states, integers(ids))
        return self(ids, positions, step, keep)

    def narrow(self, states: Tensor) -> Tensor:
        """Return the states [N, H] that the head reads for those of the target, [N, C]."""
        narrowed: Tensor = self.head.narrow(states)
        return narrowed

    def own_states(self) -> Tensor:
        """Return the head's own last hidden states of the last call, [N, H]."""
        return self.kept.states

    def _tokens(self, inputs: PassInputs, rows: Rows) -> dict[str, Tensor]:
        given = super()._tokens(inputs, rows)
        assert self._embeddings is not None
        del given["input_ids"]
        return given | {"inputs_embeds": self._embeddings[None]}
