"""The config of the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from ..keywords import checked_keywords, one_of, positive_int

KVDtype = Literal["auto", "int8", "fp8", "int4"]


@checked_keywords(kv_dtype="dtype=", bits="dtype='int8'", page_size="block_size=", max_length="max_tokens=")
@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. CacheConfig("int8") is CacheConfig(dtype="int8").

    dtype: "auto" stores K and V as the model computes them, "int8" or "fp8" (e4m3) with a scale per
        token and head, "int4" rotated, with a scale and a shift, for heads of an even size: it loses little where
        heads are as large as usual (64 numbers, 128), and a lot where they are small.
    block_size: tokens in a block.
    max_tokens: a fixed capacity in tokens over all sequences; None grows as needed. On a GPU, None gives an Engine
        and generate_batch() as many as fit into its free memory.
    prefix_sharing: keep one copy of blocks whose tokens and history are equal.
    """

    dtype: KVDtype = "auto"
    _: KW_ONLY
    block_size: int = 16
    max_tokens: int | None = None
    prefix_sharing: bool = True

    def __post_init__(self) -> None:
        positive_int("block_size", self.block_size)
        as_block = f"block_size={self.dtype}" if str(self.dtype).isdigit() else None
        one_of("cache dtype", self.dtype, get_args(KVDtype), instead=as_block)
        if self.max_tokens is not None:
            positive_int("max_tokens", self.max_tokens)
        one_of("prefix_sharing", self.prefix_sharing, (True, False))


MEANT_BY_CACHE = dict.fromkeys(  # transformers' words
    ("dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "quantized", "none", "stock"),
    "cache=None, and transformers' own cache is made as without hf_accel",
)


def parse_cache(cache: object) -> CacheConfig | None:
    if cache is None or isinstance(cache, CacheConfig):
        return cache
    if isinstance(cache, Mapping):
        return CacheConfig(**cache)
    instead = (
        f"cache=hf_accel.CacheConfig({cache!r})" if cache in get_args(KVDtype) else MEANT_BY_CACHE.get(str(cache))
    )
    one_of("cache", cache, (None, "paged"), instead=instead)
    return CacheConfig()
