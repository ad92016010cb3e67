"""Decoders that take a cache of their own class alone, as MiniMax's does, though their layers could read pages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from ...cache.hf import CacheOverPages
from ...cache.hf.cache_argument import CACHE_NAME
from ...fused.site import FusedSite, SiteKind
from ...models import modules_by_name
from ...recognition.source import tree_of
from ...undo.journal import Mixin, original_class

OWN_CACHE = SiteKind("own cache", "decoders", "pages in place of their own cache", "its code asks for the class alone")
USES = "use_cache"


class TakesPages(Mixin):
    """A mixin for a decoder that refuses caches of other classes where `use_cache` is true, and only there.

    Its layers read and write the cache that they are given, whatever `use_cache` says.
    """

    def forward(self, *args: Any, use_cache: bool | None = None, **kwargs: Any) -> Any:
        use_cache = False if isinstance(kwargs.get(CACHE_NAME), CacheOverPages) else use_cache
        return super().forward(*args, use_cache=use_cache, **kwargs)  # type: ignore[misc]


def own_cache_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the decoders of a model that take caches of one class alone."""
    for name, module in modules_by_name(model):
        if hasattr(module, "layers") and takes_one_class(original_class(module).forward):
            yield FusedSite(name, module, OWN_CACHE, TakesPages, None)


@lru_cache(maxsize=4096)
def takes_one_class(forward: Any) -> bool:
    """Return whether a forward raises for a cache of another class than its own, if it is to use it."""
    tree = tree_of(forward)
    if tree is None:
        return False
    return any(
        isinstance(node, ast.If)
        and ast.unparse(node.test).startswith(f"{USES} and (not isinstance({CACHE_NAME}, ")
        and [type(each) for each in node.body] == [ast.Raise]
        for node in ast.walk(tree)
    )
