"""The kinds of state that a decoder layer can keep of its tokens: what the others of the package ask of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import torch

from ...models import head_dim, num_kv_heads
from ..group import PageGroup
from ..quantized import PageDtypes, head_bytes


class GroupSettings(TypedDict):
    """The keywords that each group of pages is made with, see PageGroup."""

    num_blocks: int
    block_size: int
    growable: bool
    prefix_sharing: bool
    quantized: PageDtypes | None


class TokenNumbers(NamedTuple):
    """The numbers that pages hold of a token, and those that a query reads of it.

    queries: the heads of a query. heads: those of keys and of values, of which one has `keys` and `values` numbers.
    read: the numbers of a value that a query reads, where they are a part of the keys; None for `values`. dtype: in
    which pages hold them, whatever is asked of the pages; None for what is asked. quantizes: whether that may be a
    quantized one.
    """

    queries: int
    heads: int
    keys: int
    values: int
    read: int | None = None
    dtype: torch.dtype | None = None
    quantizes: bool = True

    def token_bytes(self, dtype: torch.dtype, quantized: PageDtypes | None, *, heads: int | None = None) -> int:
        """Return the bytes of a token. quantized: the dtypes of pages with scales. heads: if they are fewer here."""
        keys, values = quantized if quantized is not None and self.quantizes else (None, None)
        dtype = self.dtype or dtype
        return (heads or self.heads) * (head_bytes(self.keys, dtype, keys) + head_bytes(self.values, dtype, values))

    @property
    def pair_operations(self) -> int:
        """Return the operations of a query and a token that it reads; a multiplication and an addition are two."""
        return 2 * self.queries * (self.keys + (self.values if self.read is None else self.read))


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of state that a decoder layer keeps of its tokens in pages. Equal ones share a group of pages.

    window: the number of last tokens that it keeps; None for all.
    """

    window: int | None

    holds_tokens: ClassVar[bool] = True  # see PageGroup
    sees_later: ClassVar[bool] = True  # whether a token of a prompt can see later ones, as those of an image do
    device_clause: ClassVar[str | None] = None  # why pages are read on a CPU alone; None if anywhere
    ranks_clause: ClassVar[str | None] = None  # why ranks cannot share out the pages; None if they can

    @property
    def mask_window(self) -> int | None:
        """The window of the mask of such a layer; None without one."""
        return self.window

    @property
    def chunk(self) -> int | None:
        """The tokens of a chunk, to whose own tokens alone a token attends; None without chunks."""
        return None

    @abstractmethod
    def group(self, **settings: Unpack[GroupSettings]) -> PageGroup:
        """Make the pages of all layers of this kind."""

    @abstractmethod
    def numbers(self, layer: Any) -> TokenNumbers:
        """Return what the pages hold of a token. layer: the config of a layer (PreTrainedConfig.per_layer_config)."""

    def device_refusal(self, device: torch.device) -> str | None:
        """Return why the pages cannot be read on a device, as one clause about the model; None if they can."""
        return None if device.type in ("cpu", "meta") else self.device_clause

    def block_refusal(self, block_size: int) -> str | None:
        """Return why blocks of so many tokens cannot hold it, as one clause with the way out; None if they can."""
        return None

    def dtype_refusal(self, quantized: PageDtypes) -> str | None:
        """Return why pages of quantized dtypes cannot hold it, as one clause with the way out; None if they can."""
        return None


@dataclass(frozen=True)
class KeysAndValues(Kind):
    """The keys and values of a layer that attends causally."""

    def group(self, **settings: Unpack[GroupSettings]) -> PageGroup:
        return PageGroup(window=self.window, **settings)

    def numbers(self, layer: Any) -> TokenNumbers:
        dim = head_dim(layer)
        key_dim = max(dim, getattr(layer, "qk_head_dim", None) or 0)
        value_dim = max(dim, getattr(layer, "v_head_dim", None) or 0)
        return TokenNumbers(layer.num_attention_heads, num_kv_heads(layer), key_dim, value_dim)
