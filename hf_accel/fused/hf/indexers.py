"""Indexers over pages: the layers that select the tokens to which attention is paid (DeepSeek-V3.2 and others).

An indexer keeps a key of each token, and gives each pair of a token and one before it a score. Its own code computes
them, of one sequence after the other. Where all tokens of a sequence are selected, it makes the keys alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.hf.selected import RaggedSelection
from ...cache.group import PageGroup
from ...cache.hf import RaggedCache
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.hf.pass_sequences import MOST_DRAFTED
from ...cache.pages import Pages
from ...cache.step import TokenRange
from ...recognition.source import lines_of
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import trial_linear
from ...undo.journal import Mixin, mixed_class, original_class
from ..site import FusedSite, SiteKind

INDEXER = SiteKind(
    "indexer", "indexers", "keys in pages",
    varies="an indexer's choice between nearly equal tokens depends on how a prompt is cut",
)  # fmt: skip
PARTS = {"wq_b", "wk", "k_norm", "weights_proj"}
INDEXER_SIZES = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk", "layer_idx")
# What is read of its code: it stores its keys, and returns those with the highest scores.
STORES = f"k = {CACHE_NAME}.update_indexer(k, self.layer_idx)"
SELECTS = "topk = min(self.index_topk, index_scores.shape[-1])"
RETURNS = "return index_scores.topk(topk, dim=-1).indices.to(torch.int32)"


class PagedIndexer(Mixin):
    """A mixin for an indexer: in a ragged pass it returns a RaggedSelection."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = self
        given = inspect.signature(original_class(own).forward).bind(own, *args, **kwargs).arguments
        cache = given.get(CACHE_NAME)
        if not isinstance(cache, RaggedCache):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        del given["self"]
        layer = cache.state_layer(own.layer_idx)
        with suppress(_StoredError):
            super().forward(**given | {CACHE_NAME: _Storing(layer)})  # type: ignore[misc]
        ragged = cache.step.groups[layer.group_index].ragged
        lengths = ragged.kv_len.tolist()
        if max(lengths, default=0) <= own.index_topk:
            return RaggedSelection([None] * len(lengths))
        keys = layer.index_keys()
        found: list[Tensor | None] = []
        ends = [0, *accumulate(lengths)]
        for queries, (first, stop) in zip(pairwise(ragged.cu_q.tolist()), pairwise(ends), strict=True):
            if stop - first <= own.index_topk:
                found.append(None)
                continue
            found.append(self._seen(given, range(*queries), keys[None, first:stop]))
        return RaggedSelection(found)

    def _seen(self, given: dict[str, Any], rows: range, keys: Tensor) -> Tensor:
        """Return which keys [1, T, D] the last n tokens of a sequence select, rows of a pass: bool [n, T]."""
        before, n = keys.shape[1] - len(rows), len(rows)
        seen = torch.zeros(n, keys.shape[1], dtype=torch.bool, device=keys.device)
        # Rounding can decide which of two nearly equal keys is selected: so tokens that are generated, or drafted, are
        # computed one by one, whatever is computed with them.
        for start in range(0, n, n if n > MOST_DRAFTED else 1):
            stop = n if n > MOST_DRAFTED else start + 1
            part = {
                name: _tokens(value, slice(rows.start + start, rows.start + stop)) for name, value in given.items()
            }
            own = seen[start:stop, : before + stop]
            causal = torch.ones_like(own).tril_(before + start)
            part |= {"attention_mask": causal[None], CACHE_NAME: _Held(keys[:, : before + stop])}
            chosen: Tensor = super().forward(**part)  # type: ignore[misc]
            own.scatter_(-1, chosen[0].long(), True).logical_and_(causal)
        return seen


class _StoredError(Exception):
    """The keys of an indexer are stored, and nothing else is wanted of it."""


class _Storing:
    """It stands for a cache before an indexer: it stores the keys and ends the indexer."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        self._layer.keep_index_keys(keys)
        raise _StoredError


class _Held:
    """It stands for a cache before an indexer: it has the keys of the tokens already."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        return self._keys


def _tokens(value: Any, rows: slice) -> Any:
    """Return some tokens of an input [1, N, ..] of a pass, or of each in a tuple; others as they are."""
    if isinstance(value, tuple):
        return tuple(_tokens(each, rows) for each in value)
    return value[:, rows] if isinstance(value, Tensor) and value.ndim > 1 else value


def indexer_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the indexers of a model, whose keys are in pages."""
    for name, module in model.named_modules():
        if is_known_indexer(module):
            yield FusedSite(name, module, INDEXER, PagedIndexer, None)


def is_known_indexer(module: nn.Module) -> bool:
    """Return whether a module is an indexer, by its code and by what it returns for random input."""
    if module._modules.keys() != PARTS or module._parameters:
        return False
    if not all(isinstance(getattr(module, name, None), int) for name in INDEXER_SIZES):
        return False
    lines = lines_of(original_class(module).forward)
    return all(lines.count(line) == 1 for line in (STORES, SELECTS, RETURNS)) and _agrees(module)


@torch.no_grad()
def _agrees(module: Any) -> bool:
    """Return whether passes over pages select what one pass over whole sequences does."""
    numbers, width, rank, heads, dim, rotated, most = RandomNumbers(), 6, 5, 16, 8, 4, 4
    parts: dict[str, Any] = {
        "wq_b": trial_linear(rank, heads * dim), "wk": trial_linear(width, dim),
        "weights_proj": trial_linear(width, heads),
    }  # fmt: skip
    for part in parts.values():
        part.weight.copy_(numbers(*part.weight.shape))
    own = {name: nn.Parameter(numbers(dim)) for name in module.k_norm._parameters}
    parts["k_norm"] = unwatched_twin(module.k_norm, _parameters=own)
    vars(parts["k_norm"]).update(normalized_shape=(dim,))
    theirs, ours = (unwatched_twin(module, _modules=parts) for _ in range(2))
    for twin in (theirs, ours):
        vars(twin).update(zip(INDEXER_SIZES, (heads, dim, rotated, most, 0), strict=True), hidden_size=width)
        vars(twin).update(q_lora_rank=rank, softmax_scale=dim**-0.5)
    ours.__class__ = mixed_class(PagedIndexer, original_class(module))
    tokens = 9
    x, q = numbers(2, tokens, width), numbers(2, tokens, rank)
    angles = numbers(1, tokens, rotated // 2).repeat(1, 1, 2)
    tables = angles.cos(), angles.sin()
    seen = torch.ones(2, tokens, tokens, dtype=torch.bool).tril()
    try:
        expected = _sets(original_class(module).forward(theirs, x, q, tables, seen, None), seen)
        return all(torch.equal(expected, _sets_in_passes(ours, (x, q), tables, cuts)) for cuts in ((9,), (6, 1, 2)))
    except Exception:  # the code of the module does something that is not known
        return False


def _sets(indices: Tensor, seen: Tensor) -> Tensor:
    """Return which tokens are selected, bool [B, Q, T]."""
    return torch.zeros_like(seen).scatter_(-1, indices.long(), True) & seen


def _sets_in_passes(
    ours: Any, inputs: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], cuts: tuple[int, ...]
) -> Tensor:
    x, _ = inputs
    group = PageGroup(
        window=None, num_blocks=4, block_size=4, growable=True, prefix_sharing=False, quantized=None
    )  # fmt: skip
    pages = Pages([group])
    cache, sequences = RaggedCache(pages.groups, [(0,)]), [pages.begin() for _ in x]
    total, start = x.shape[1], 0
    found = torch.zeros(len(x), total, total, dtype=torch.bool)
    for count in cuts:
        for sequence in sequences:
            pages.append(sequence, count)
        cache.step = pages.step([TokenRange(each, start, count) for each in sequences])
        part, stop = slice(start, start + count), start + count
        rows = (given[:, part].reshape(1, -1, given.shape[-1]) for given in inputs)
        placed = tuple(table[:, part].repeat(1, len(x), 1) for table in tables)
        chosen: RaggedSelection = ours(*rows, placed, None, None, **{CACHE_NAME: cache})
        for number, own in enumerate(chosen.seen):
            every = torch.ones(count, stop, dtype=torch.bool).tril(start)
            found[number, part, :stop] = every if own is None else own
        start = stop
    return found
