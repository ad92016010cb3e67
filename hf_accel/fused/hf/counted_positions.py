"""Attention that counts the tokens of its cache to know where each token stands, as Llama 4's does (its temperature).

Transformers' code adds this count to the numbers 0, 1, .. of a pass. In a ragged pass the tokens are of many
sequences, and the cache answers with what makes these numbers the position of each token in its own sequence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...cache.hf import RaggedCache, TokensBefore
from ...models import modules_by_name
from ...recognition.code import code_of
from ...recognition.source import tree_of
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..site import FusedSite, SiteKind
from .own_code import PagedSequences

COUNTED = SiteKind("counted positions", "attention modules", "positions of each sequence")
STEPS = "floor_scale"  # the attribute that says how many positions have one temperature
IN_STEPS = f"torch.floor((positions.float() + 1.0) / self.{STEPS})"  # the one use of positions in code with STEPS


class CountedCache:
    """A RaggedCache that answers how many tokens are before each token of a pass."""

    def __init__(self, cache: RaggedCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get_seq_length(self, layer_idx: int = 0) -> TokensBefore:
        """Return what makes the numbers 0, 1, .. of a pass, added to it, the position of each token."""
        return TokensBefore(self._cache.positions)


class CountedAttention(Mixin):
    """A mixin for attention that counts the tokens of its cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_counted, args))
        return super().forward(*args, **{name: _counted(value) for name, value in kwargs.items()})  # type: ignore[misc]


def _counted(given: Any) -> Any:
    return CountedCache(given) if isinstance(given, RaggedCache) else given


def counted_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the attention in a model that counts the tokens of its cache. The state is the attribute of its steps."""
    for name, module in modules_by_name(model):
        if code_of(module).counts:
            yield FusedSite(name, module, COUNTED, CountedAttention, _steps_of(module))


def _steps_of(module: nn.Module) -> str | None:
    """Return the name of the attribute that says below which position nothing depends on it; None without one."""
    tree: Any = tree_of(original_class(module).forward)
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "positions"]
    loads = [node for node in uses if isinstance(node.ctx, ast.Load)]
    return STEPS if len(loads) == 1 and len(uses) == 2 and IN_STEPS in ast.unparse(tree) else None


def moves_with_padding(model: nn.Module, columns: int) -> bool:
    """Return whether transformers' code gives tokens behind padding other results, in a batch of so many columns."""
    found = [module for module in model.modules() if isinstance(module, CountedAttention)]
    steps = ((module, vars(module)[FUSED]) for module in found)
    own = (vars(module)[FUSED].moves_from for module in model.modules() if isinstance(module, PagedSequences))
    return any(name is None or columns >= getattr(module, name) for module, name in steps) or any(
        least is not None and columns >= least for least in own
    )
