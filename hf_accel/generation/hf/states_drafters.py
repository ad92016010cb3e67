"""Drafters of transformers that read hidden states: layers for multi-token prediction, and models for DFlash."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...attention.hf.stock import stock_implementation
from ...cache.hf.cache_argument import CACHE_NAME
from ...errors import UnsupportedError
from ...models import layers_config
from ...recognition.trial import unwatched_twin
from ...tensors import model_device
from ...undo.journal import original_class
from ...undo.state import state_of
from .. import graphs
from ..speculation.drafters.hidden_states import HiddenStatesDrafter
from .decoder_call import with_part
from .pass_states import LAST

MTP, BLOCKS = "mtp", "dflash"
MOST_OF_A_BLOCK = 16  # the tokens that "auto" drafts at most with a model that drafts blocks


def heads_drafter(model: PreTrainedModel) -> HiddenStatesDrafter:
    """Make the drafter of the layers that a model's checkpoint has for multi-token prediction.

    Raises UnsupportedError if it has none, or if they cannot be used.
    """
    refusal = heads_refusal(model)
    if refusal is not None:
        raise UnsupportedError(f"drafter='mtp' cannot be used: {refusal}; use 'suffix', 'ngram' or a draft model")
    heads = _heads(model)
    return HiddenStatesDrafter(MTP, LAST, lambda: HeadsReader(heads))


def heads_refusal(model: Any) -> str | None:
    """Return why no layers for multi-token prediction can draft over pages, as one clause; None if they can."""
    if getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None) is None:
        return "the config names no layers for multi-token prediction (num_mtp_layers)"
    if (refusal := watching_refusal(model)) is not None:
        return refusal
    try:
        from transformers.modeling_layers import MtpModel

        if "attention_mask is not None" not in inspect.getsource(MtpModel.forward):
            return "the layers for multi-token prediction of this transformers take no tokens without a mask"
        _heads(model)
    except Exception as error:
        return f"its layers for multi-token prediction cannot be loaded ({type(error).__name__}: {error})"
    return None


def watching_refusal(model: Any) -> str | None:
    """Return why passes of a model cannot hand on hidden states, as one clause; None if they can."""
    if model.config.is_encoder_decoder:
        return "no hidden states are handed on for an encoder-decoder"
    if model_device(model).type in graphs.DEVICES:
        return "no hidden states are handed on where passes may be graphs"
    if state_of(model).generation.agreement.size > 1:
        return "no hidden states are handed on between ranks"
    return None


def _heads(model: PreTrainedModel) -> Any:
    """Return the layers for multi-token prediction, which are loaded once, as transformers loads them."""
    from transformers.modeling_layers import MtpModel  # older releases have none

    drafts = state_of(model).generation.drafts
    kept = drafts.get(MTP)
    if kept is None or kept[0] is not model:
        device = model_device(model)
        made = MtpModel.from_pretrained(with_stock_classes(model), device_map={"": device}).eval()
        kept = drafts[MTP] = (model, made)
    return kept[1]


def with_stock_classes(model: PreTrainedModel) -> Any:
    """Return a copy of a patched model without weights of its own, in which its last layer, from whose classes
    transformers makes others, has the classes and the attention that it has without us.
    """
    decoder: Any = model.get_decoder()
    layers = unwatched_twin(decoder.layers)
    layers._modules = {"0": _with_stock_classes(decoder.layers[-1])}
    name = next(name for name, module in model.named_modules() if module is decoder)
    made = with_part(model, name, unwatched_twin(decoder, _modules={"layers": layers}))
    made.__class__ = original_class(model)
    made.config = copy.deepcopy(model.config)
    for config in (made.config, layers_config(made.config)):
        config._attn_implementation_internal = stock_implementation(model, model)
    return made


def _with_stock_classes(module: nn.Module) -> Any:
    parts = {name: _with_stock_classes(part) for name, part in module._modules.items() if part is not None}
    twin = unwatched_twin(module, _modules=parts)
    twin.__class__ = original_class(module)
    return twin


class HeadsReader:
    """Continues one sequence with layers for multi-token prediction; see Continue.

    The layer k has read, besides hidden states, k tokens that it drafted itself. These are read again with the tokens
    that were accepted, as transformers does.
    """

    def __init__(self, heads: Any) -> None:
        self.heads, self.first = heads, -1
        self.cache: Any = None
        self.kept: Tensor | None = None  # the states of the last tokens, as many as there are layers

    def __call__(self, tokens: list[int], states: Tensor, start: int, length: int) -> list[int]:
        depth = len(self.heads.layers)
        if self.kept is None:
            self.first = start
        elif depth > 1:
            states, start = torch.cat([self.kept, states]), start - len(self.kept)
        if start == self.first:
            self._begin()
        elif depth > 1:
            self.cache.crop(-depth)
        self.kept = states[-depth:]
        positions = torch.arange(start + 1, start + 1 + len(states), device=states.device)[None]
        ids = torch.tensor([tokens[start + 1 : start + 1 + len(states)]], device=states.device)
        drafted: Tensor = self.heads(ids, states[None], None, positions, self.cache)[0]
        return drafted[0].tolist()

    def _begin(self) -> None:
        from transformers.cache_utils import MtpCache

        self.cache = MtpCache(config=self.heads.config)
        self.cache.activate_past_recording()


# -- DFlash ----------------------------------------------------------------------------------------------------


def is_block_drafter(model: object) -> bool:
    """Return whether a model drafts blocks of tokens from hidden states of another one (DFlash)."""
    config = getattr(model, "config", None)
    return all(hasattr(config, name) for name in ("target_layer_ids", "mask_token_id", "block_size"))


def block_drafter(target: PreTrainedModel, draft: Any) -> HiddenStatesDrafter:
    """Make the drafter of a model that drafts blocks. Raises UnsupportedError if the target hands on no states."""
    if (refusal := watching_refusal(target)) is not None:
        raise UnsupportedError(f"the draft model {type(draft).__name__} cannot be used: {refusal}; use 'suffix'")
    layers = [layer + 1 for layer in draft.config.target_layer_ids]  # transformers' first ones are the embeddings
    return HiddenStatesDrafter(BLOCKS, layers, lambda: BlockReader(draft, target))


class BlockReader:
    """Continues one sequence with a model for DFlash; see Continue.

    Its cache is filled from hidden states of the target. A pass computes a block behind it: the last token, and
    others that are masked. That block is taken out of the cache again.
    """

    def __init__(self, draft: Any, target: Any) -> None:
        from transformers.cache_utils import DFlashCache

        self.draft, self.target, self.size = draft, target, draft.config.block_size
        self.cache: Any = DFlashCache(config=draft.config)
        self.cache.activate_past_recording()
        self.has_block = False

    def __call__(self, tokens: list[int], states: Tensor, start: int, length: int) -> list[int]:
        count, device = len(states), states.device
        self.cache.set_previous_accepted_tokens(count)
        if self.has_block:
            self.cache.crop(-self.size)
        self.has_block = True
        ids = [tokens[start + count], *[self.draft.config.mask_token_id] * (self.size - 1)]
        output = self.draft(
            noise_embeds=self._embedded(torch.tensor([ids], device=device)),
            context_hidden_states=states[None],
            position_ids=torch.arange(start, start + count + self.size, device=device)[None],
            attention_mask=None,
            **{CACHE_NAME: self.cache},
        )
        logits: Tensor = self.target.get_output_embeddings()(output.last_hidden_state[0, 1:])
        return logits.argmax(-1).tolist()

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return what the target's table has for tokens, without a norm that may be in it."""
        table: Any = self.target.get_input_embeddings()
        if hasattr(table, "embed_norm"):
            table = unwatched_twin(table, _modules={"embed_norm": nn.Identity()})
        embedded: Tensor = table(ids)
        return embedded
