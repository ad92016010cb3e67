"""A draft head computes here: a decoder of one layer that reads its target's own hidden states (EAGLE, 2401.15077)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...models import layers_config
from ...undo.journal import original_class


class HeadModule(nn.Module):
    """Drafts the tokens of a target from the target's hidden states, which it fuses with the embeddings of tokens.

    At position t it reads the target's states at t and the token at t + 1, and gives the logits of the token at t + 2.
    Where the target has no state yet, since the token was drafted, it reads its own last hidden state (EAGLE-3,
    2503.01840, which is trained so too).

    decoder: a model of the target's class with one layer; its embeddings and head are the target's memory.
    target_layers: which of the target's hidden states are read, as `output_hidden_states` numbers them: 0 is the
    embeddings', the number of layers is the last one, behind the last norm.
    known: [N] int64, the ids of the only tokens that it drafts, rising; `words` then gives their logits. None for all
    tokens, whose logits the target's head gives.
    weights: what its linear layers are rounded to while it drafts, where our kernels are; None for their own dtype. A
    draft may be rounded in any way: what is verified are its tokens.
    """

    weights: Literal["int8"] | None = "int8"

    def __init__(
        self, decoder: PreTrainedModel, target_layers: Sequence[int], known: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        config = layers_config(decoder.config)
        size, dtype = config.hidden_size, decoder.dtype
        self.target_layers = tuple(target_layers)
        self.decoder: Any = decoder
        self.narrow = nn.Linear(len(self.target_layers) * size, size, bias=False, dtype=dtype)
        self.token_norm, self.state_norm = (nn.RMSNorm(size, eps=1e-6, dtype=dtype) for _ in range(2))
        self.fuse = nn.Linear(2 * size, size, bias=False, dtype=dtype)
        self.words: nn.Linear | None = None
        self.known: Tensor | None
        self.register_buffer("known", None if known is None else torch.tensor(known))
        if known is not None:
            self.words = nn.Linear(size, len(known), bias=False, dtype=dtype)

    @property
    def config(self) -> Any:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.fuse.weight.device

    def fused(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return what the decoder reads, [..., H]: states [..., H], of `narrow` or its own, and token ids [...]."""
        embeddings = self.token_norm(self.decoder.get_input_embeddings()(ids))
        return self.fuse(torch.cat([embeddings, self.state_norm(states)], dim=-1))

    def forward(self, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B, T, V], or those [B, T, N] of the tokens that are known, and the last hidden states
        [B, T, H] for states [B, T, H] and ids [B, T].
        """
        keep = 0 if self.words is None else 1  # of the target's head
        given = {"inputs_embeds": self.fused(states, ids), "use_cache": False, "output_hidden_states": True}
        if keep and self.decoder._supports_logits_to_keep():
            given["logits_to_keep"] = keep
        read = self.decoder(**given)
        last: Tensor = read.hidden_states[-1]
        return read.logits if self.words is None else self.words(last), last

    def over_vocabulary(self, logits: Tensor, size: int) -> Tensor:
        """Return logits [..., N] of the tokens that are known as those of all, [..., size]: -inf for the others."""
        if self.known is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], size), float("-inf"))
        return wide.index_copy_(-1, self.known, logits)

    def own_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that are not the target's, by name."""
        shared = {id(p) for p in _shared(self.decoder)}
        return {name: p for name, p in self.named_parameters() if id(p) not in shared}


class SavedHead:
    """A head in a folder, which is loaded for each target that it is to draft for.

    load: returns it for a target.
    """

    def __init__(self, load: Callable[[Any], HeadModule]) -> None:
        self._load = load
        self._loaded: WeakKeyDictionary[Any, HeadModule] = WeakKeyDictionary()

    def loaded(self, target: Any) -> HeadModule:
        head = self._loaded.get(target)
        if head is None:
            head = self._loaded[target] = self._load(target)
        return head


def _shared(decoder: Any) -> list[Tensor]:
    """Return the parameters of a decoder's embeddings and head."""
    modules = (decoder.get_input_embeddings(), decoder.get_output_embeddings())
    return [p for module in modules if module is not None for p in module.parameters()]


def check_draft_head(head: HeadModule, target: Any) -> None:
    """Raise UnsupportedError for a head that cannot read the states of this target, or drafts other tokens."""
    config = layers_config(target.config)
    size, read = len(head.target_layers) * config.hidden_size, head.narrow.in_features
    kind, known = original_class(head.decoder), layers_config(head.config).vocab_size
    layers, way_out = len(head.target_layers), "a head drafts for the model that it was trained with"
    if kind is not original_class(target) or known != config.vocab_size:
        raise UnsupportedError(
            f"the drafter is a head of {kind.__name__} with {known} tokens, and this is "
            f"{original_class(target).__name__} with {config.vocab_size}; {way_out}"
        )
    if read != size:
        raise UnsupportedError(
            f"the head reads states of {read} numbers, and {layers} layers of the target give {size}; {way_out}"
        )
