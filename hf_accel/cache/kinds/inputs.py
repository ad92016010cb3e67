"""The inputs of a short convolution, and the keys by which an indexer selects tokens: one head without scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from ..group import PageGroup
from .kind import GroupSettings, Kind, TokenNumbers

INDEX_SIZES = ("index_head_dim", "indexer_head_dim")  # what configs call the numbers of an indexer's key


class _InHalves(Kind):
    """Numbers of a token of which pages hold one half as a key and one as a value, so that kernels write them."""

    def group(self, **settings: Unpack[GroupSettings]) -> PageGroup:
        return PageGroup(window=self.window, **(settings | {"quantized": None}))


@dataclass(frozen=True)
class ConvolutionInputs(_InHalves):
    """The inputs of a short convolution, of which a token's result needs those of `window` tokens."""

    sees_later: ClassVar[bool] = False
    device_clause: ClassVar[str | None] = "has convolutions, whose pages are read on a CPU alone"
    ranks_clause: ClassVar[str | None] = "layers that are no attention need all that they keep on each rank"

    def numbers(self, layer: Any) -> TokenNumbers:
        half = layer.hidden_size // 2
        return TokenNumbers(1, 1, half, half, quantizes=False)


@dataclass(frozen=True)
class IndexKeys(_InHalves):
    """The keys of an indexer, which selects the tokens that a token attends to (DeepSeek V3.2)."""

    device_clause: ClassVar[str | None] = "selects tokens by keys whose pages are read on a CPU alone"
    ranks_clause: ClassVar[str | None] = "no rank knows how to select tokens among a part of them"

    def numbers(self, layer: Any) -> TokenNumbers:
        size = next(size for name in INDEX_SIZES if (size := getattr(layer, name, None)) is not None)
        return TokenNumbers(1, 1, size - size // 2, size // 2, quantizes=False)
