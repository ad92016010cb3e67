"""A draft head computes here: a decoder of one layer that reads its target's own hidden states (EAGLE, 2401.15077)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...models import layers_config
from ...undo.journal import original_class
from .pass_states import LAST, UNNORMED, read_outputs, tapped


@dataclass(frozen=True)
class HeadForm:
    """Says how a head computes. As it is here, it is that of a head which is made of its target's last layer.

    fuses: whether one linear layer makes what the decoder reads of two norms, of an embedding and of a state. If not,
    the decoder's layer is given both side by side, as they are (EAGLE-3, as its authors publish heads).
    reads_normed: whether the own state that it reads for a drafted token is the one behind its last norm, and not the
    one ahead of it.
    norms: of the target's states, ahead of `narrow`: none, one for each layer, or one for all of them.
    has_embeddings: whether the embeddings are its own, and not the target's.
    target, target_size: the class that it drafts for, and the size of a state of that; None for the decoder's own.
    """

    fuses: bool = True
    reads_normed: bool = True
    norms: Literal["none", "each", "all"] = "none"
    has_embeddings: bool = False
    target: type | None = None
    target_size: int | None = None


MADE_OF_TARGET = HeadForm()


class HeadModule(nn.Module):
    """Drafts the tokens of a target from the target's hidden states, which it fuses with the embeddings of tokens.

    At position t it reads the target's states at t and the token at t + 1, and gives the logits of the token at t + 2.
    Where the target has no state yet, since the token was drafted, it reads its own last hidden state (EAGLE-3,
    2503.01840, which is trained so too).

    decoder: a model of one layer. If `form` fuses, it is of the target's class, and its embeddings and head are the
    target's memory; else its head is its own.
    target_layers: which of the target's hidden states are read, as `output_hidden_states` numbers them: 0 is the
    embeddings', the number of layers is the last one, behind the last norm.
    known: [N] int64, the ids of the only tokens that it drafts, rising; `words`, or the decoder's own head, then gives
    their logits. None for all tokens.
    weights: what its linear layers are rounded to while it drafts, where our kernels are; None for their own dtype. A
    draft may be rounded in any way: what is verified are its tokens.
    """

    weights: Literal["int8"] | None = "int8"

    def __init__(
        self,
        decoder: PreTrainedModel,
        target_layers: Sequence[int],
        known: Sequence[int] | None = None,
        *,
        form: HeadForm = MADE_OF_TARGET,
    ) -> None:
        super().__init__()
        config = layers_config(decoder.config)
        size, dtype = config.hidden_size, decoder.dtype
        self.form = form
        self.target_layers = tuple(target_layers)
        self.decoder: Any = decoder
        state_size, count = form.target_size or size, len(self.target_layers)
        self.narrow = nn.Linear(count * state_size, size, bias=False, dtype=dtype)
        sizes = {"none": (), "each": (state_size,) * count, "all": (count * state_size,)}[form.norms]
        eps = getattr(config, "rms_norm_eps", 1e-6)
        self.norms = nn.ModuleList(nn.RMSNorm(each, eps=eps, dtype=dtype) for each in sizes)
        self.token_norm, self.state_norm = (
            nn.RMSNorm(size, eps=1e-6, dtype=dtype) if form.fuses else nn.Identity() for _ in range(2)
        )
        self.fuse: Any = nn.Linear(2 * size, size, bias=False, dtype=dtype) if form.fuses else nn.Identity()
        self.words: nn.Linear | None = None
        self.known: Tensor | None
        self.register_buffer("known", None if known is None else torch.tensor(known))
        if known is not None and form.fuses:
            self.words = nn.Linear(size, len(known), bias=False, dtype=dtype)

    @property
    def config(self) -> Any:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.narrow.weight.device

    @property
    def own_layers(self) -> tuple[int, ...]:
        """The states of its decoder that it reads for a drafted token, as `pass_states` numbers them."""
        return LAST if self.form.reads_normed else UNNORMED

    def narrowed(self, states: Tensor) -> Tensor:
        """Return the states [..., H] that it reads for those of the target, [..., C]."""
        return self.narrow(self.normed(states))

    def normed(self, states: Tensor) -> Tensor:
        """Return the target's states [..., C] behind the norms that the head has for them."""
        if not len(self.norms):
            return states
        parts = states.chunk(len(self.norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)

    def fused(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return what the decoder reads, [..., H], or [..., 2 H] where nothing fuses both: states [..., H], of
        `narrow` or its own, and token ids [...].
        """
        embeddings = self.token_norm(self.decoder.get_input_embeddings()(ids))
        fused: Tensor = self.fuse(torch.cat([embeddings, self.state_norm(states)], dim=-1))
        return fused

    def forward(self, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B, T, V], or those [B, T, N] of the tokens that are known, and the states [B, T, H] that
        it reads next, for states [B, T, H] and ids [B, T].
        """
        keep = 0 if self.words is None else 1  # of the target's head
        given = {"inputs_embeds": self.fused(states, ids), "use_cache": False}
        if keep and self.decoder._supports_logits_to_keep():
            given["logits_to_keep"] = keep
        with read_outputs(tapped(self.decoder, self.own_layers)) as found:
            read = self.decoder(**given)
        (last,) = found
        return read.logits if self.words is None else self.words(last), last

    def over_vocabulary(self, logits: Tensor, size: int) -> Tensor:
        """Return logits [..., N] of the tokens that are known as those of all, [..., size]: -inf for the others."""
        if self.known is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], size), float("-inf"))
        return wide.index_copy_(-1, self.known, logits)

    def own_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that are not the target's, by name."""
        shared = {id(p) for p in self._shared()}
        return {name: p for name, p in self.named_parameters() if id(p) not in shared}

    def _shared(self) -> list[Tensor]:
        """Return the parameters that are the target's own."""
        decoder, form = self.decoder, self.form
        modules = [] if form.has_embeddings else [decoder.get_input_embeddings()]
        modules += [decoder.get_output_embeddings()] if form.fuses else []
        return [p for module in modules if module is not None for p in module.parameters()]


def check_draft_head(head: HeadModule, target: Any) -> None:
    """Raise UnsupportedError for a head that cannot read the states of this target, or drafts other tokens."""
    config = layers_config(target.config)
    size, read = len(head.target_layers) * config.hidden_size, head.narrow.in_features
    kind, known = head.form.target or original_class(head.decoder), layers_config(head.config).vocab_size
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
