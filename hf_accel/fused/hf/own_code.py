"""Layers over pages whose own code computes each sequence of a pass: attention and convolutions that change keys,
masks or states in a way that no kernel knows (Doge, ZAYA, Inkling and others).

The code gets the tokens of one sequence, or of several that are as long, with a cache that stands for transformers'
and a mask for them alone. All other layers of the model compute the tokens of all sequences in one row.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.hf.mask import CausalMask, Meaning
from ...cache.hf import CacheOverPages
from ...cache.hf.pass_sequences import EqualLengths, PassSequences, columns_of_tokens
from ...cache.hf.sequence_cache import SequenceCache
from ...errors import NotRaggedError, UnsupportedError
from ...models import modules_by_name
from ...recognition.cache_code import CACHE_NAMES
from ...recognition.call_form import parameter_names
from ...recognition.code import code_of
from ...recognition.source import source_of
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..site import SiteKind

OWN_CODE = SiteKind(
    "own code", "layers with code of their own", "each sequence over pages",
    varies="what a layer's own code computes of a sequence rounds by how many are as long",
)  # fmt: skip
GIVEN_POSITIONS, GIVEN_TABLES = "position_ids", "position_embeddings"
ASKED_COUNTS = "get_query_offset", "get_seq_length"  # by which code learns the number of tokens before


@dataclass(frozen=True)
class OwnCode:
    """The facts about a module whose own code computes each sequence.

    cache: the name of the parameter that takes its cache. attends: whether what it computes depends on the number of
    tokens before. selects: whether it chooses some of them. moves_from: the number of columns in a batch of
    transformers' from which on padding in front of a token may change what its code computes; None for any number.
    whole: whether it is given the tables of the positions of all tokens so far, and not of those of a pass alone.
    computes_padding: whether padding changes its states in transformers.
    """

    cache: str
    attends: bool
    selects: bool
    moves_from: int | None
    whole: bool = False
    computes_padding: bool = False


class PagedSequences(Mixin):
    """A mixin for a module whose own code computes each sequence of a pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for all tokens. Raises NotRaggedError if it is given what is not known."""
        given = dict(zip(parameter_names(original_class(self).forward), args, strict=False)) | kwargs
        known: OwnCode = self.__dict__[FUSED]
        if not isinstance(given.get(known.cache), CacheOverPages):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return _Calls(self, known, given).results(super().forward)  # type: ignore[misc]


def padding_refusal(module: object, layer_idx: int) -> str:
    """Return the message about padded rows over pages, for a layer whose states change with padding."""
    return (
        f"{type(module).__name__} {layer_idx} computes padding as it computes tokens; give rows of one length, or "
        "take generate_batch()"
    )


class OfSequences(dict[Hashable, Any]):
    """The results of calls that are no rows of tokens of one width, by their sequences and the tokens of these.

    Other layers with code of their own take them.
    """


class _Calls:
    """The calls that compute a module in one pass."""

    def __init__(self, module: Any, known: OwnCode, given: dict[str, Any]) -> None:
        self.module, self.known, self.given = module, known, given
        self.cache: Any = given[known.cache]
        self.sequences = PassSequences.of(self.cache, module)
        if known.computes_padding and self.sequences.step.token_columns is not None:
            raise UnsupportedError(padding_refusal(module, module.layer_idx))
        hidden = next(value for value in given.values() if isinstance(value, Tensor) and value.ndim == 3)
        self.shape = hidden.shape[:2]
        layer = self.cache.layers[module.layer_idx]
        self.window = getattr(getattr(layer, "group", None), "window", None)
        has_states = self.cache.keeps_states(module.layer_idx)
        self.equal = self.sequences.equal(attends=known.attends, has_states=has_states, selects=known.selects)

    def results(self, forward: Any) -> Any:
        """Return what `forward` gives for the tokens of all sequences."""
        found, touched = [], dict[Any, None]()
        for equal in self.equal:
            cache, parts = SequenceCache(self.sequences, equal), []
            for cache.first, cache.stop in pairwise((0, *equal.ends)):
                parts.append(forward(**self._arguments(cache)))
                cache.end_call()
            found.append(parts)
            touched |= cache.touched
        for layer in touched:
            layer.pass_done(self.sequences.step)
        own: Any = self.cache.layers[self.module.layer_idx]
        if self.known.attends and own not in touched:
            own.is_followed = False  # it attends to the keys of another layer, and writes none
        if not isinstance(found[0][0], tuple):
            return self._joined(found)
        return tuple(self._joined([[part[i] for part in parts] for parts in found]) for i in range(len(found[0][0])))

    # -- what a call is given ------------------------------------------------------------------------------

    def _arguments(self, cache: SequenceCache) -> dict[str, Any]:
        def part(name: str, value: Any) -> Any:
            if value is self.cache:
                return cache
            if "mask" in name:
                return self._mask(name, value, cache)
            if self.known.whole and name == GIVEN_TABLES:
                rows = [self._tokens(each)[cache.equal.rows] for each in value]
                return cache.longer_tables(self.module.layer_idx, name, (rows[0], rows[1]))
            if isinstance(value, OfSequences):
                return value[cache.equal.numbers, cache.first, cache.stop]
            if isinstance(value, UserDict):
                key = id(value), cache.equal.numbers, cache.first, cache.stop
                return self.sequences.private.setdefault(key, type(value)())
            if isinstance(value, (tuple, list)):
                return type(value)(part(name, each) for each in value)
            if isinstance(value, dict):
                return {key: part(name, each) for key, each in value.items()}
            return self._rows(name, value, cache) if isinstance(value, Tensor) else value

        return {name: part(name, value) for name, value in self.given.items()}

    def _rows(self, name: str, value: Tensor, cache: SequenceCache) -> Tensor:
        """Return the tokens of a call of an input [B, Q, ...], or of positions [P, B, Q]."""
        rows = cache.equal.rows[:, cache.first : cache.stop]
        if name == GIVEN_POSITIONS and value.ndim == 3:
            return torch.stack([self._tokens(plane)[rows] for plane in value])
        if value.ndim < 2 or value.shape[1] != self.shape[1] or value.shape[0] not in (1, self.shape[0]):
            raise NotRaggedError(f"{type(self.module).__name__} is given {name}= of shape {tuple(value.shape)}")
        return self._tokens(value)[rows]

    def _tokens(self, value: Tensor) -> Tensor:
        columns = self.sequences.step.token_columns
        flat = value.expand(self.shape[0], *value.shape[1:]).flatten(0, 1)
        return flat if columns is None else flat[columns]

    def _mask(self, name: str, value: Any, cache: SequenceCache) -> Any:
        """Return the mask of a call in place of one with this name: that of causal attention, if it is one of scores.

        Others say what is padding, of which there is none.
        """
        if isinstance(value, dict):
            return {key: self._mask(key, each, cache) for key, each in value.items()}
        if isinstance(value, Tensor) and value.ndim == 2:
            return value.new_ones(len(cache.equal.numbers), cache.stop - cache.first)
        if not self.known.attends or any(word in name for word in ("conv", "linear", "padding")):
            return None
        count, rows = cache.stop - cache.first, len(cache.equal.numbers)
        length, _ = cache.get_mask_sizes(count, self.module.layer_idx)
        shown = torch.ones(1, 1, dtype=torch.bool, device=cache.equal.rows.device).expand(rows, length)
        return CausalMask(shown, (count, length), Meaning(self.window, padded=False, left_out=False))

    # -- what calls return ---------------------------------------------------------------------------------

    def _joined(self, found: list[list[Any]]) -> Any:
        """Return one result of all calls, as a module returns it for all tokens.

        found: for the sequences of each call, the results of its parts, one behind the other.
        """
        if any(part is None for parts in found for part in parts):
            return None
        if all(isinstance(part, Tensor) and part.ndim == 4 for parts in found for part in parts):
            return self._weights(found)
        pairs = list(zip(self.equal, found, strict=True))
        rows = all(_is_rows(equal, parts) for equal, parts in pairs)
        if rows and len({part.shape[2:] for parts in found for part in parts}) == 1:
            whole = [(equal, torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]) for equal, parts in pairs]
            return self.sequences.step.columns(self.sequences.placed(whole), self.shape[0])
        return OfSequences(
            ((equal.numbers, *ends), part)
            for equal, parts in pairs
            for ends, part in zip(pairwise((0, *equal.ends)), parts, strict=True)
        )

    def _weights(self, found: list[list[Tensor]]) -> Tensor | None:
        """Return the weights of attention [B, H, Q, T] where rows have columns; None in a ragged pass."""
        columns = columns_of_tokens(self.cache, self.shape[1])
        if columns is None:
            return None
        total = self.cache.padded.num_columns
        weights = found[0][0].new_zeros(self.shape[0], found[0][0].shape[1], self.shape[1], total)
        for equal, parts in zip(self.equal, found, strict=True):
            for (first, stop), part in zip(pairwise((0, *equal.ends)), parts, strict=True):
                for number, own in zip(equal.numbers, part, strict=True):
                    queries, keys = columns[number]
                    end = len(keys) - len(queries) + stop
                    weights[number][:, queries[first:stop, None], keys[end - own.shape[-1] : end]] = own
        return weights


def _is_rows(equal: EqualLengths, parts: list[Any]) -> bool:
    """Return whether results are rows of tokens [G, n, ...], and not the weights of attention [G, H, n, T]."""
    sizes = [stop - first for first, stop in pairwise((0, *equal.ends))]
    return all(
        isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == (len(equal.numbers), size)
        for part, size in zip(parts, sizes, strict=True)
    )


def own_code_modules(model: Any) -> Iterator[tuple[str, nn.Module, OwnCode]]:
    """Find the outermost modules in the layers of a decoder that take its cache, with their names."""
    decoder = model.get_decoder()
    prefix = next((name for name, module in modules_by_name(model) if module is decoder), "")
    for name, layers in decoder.named_children():
        if isinstance(layers, nn.ModuleList):
            for number, layer in enumerate(layers):
                yield from _outermost(layer, ".".join(filter(None, (prefix, name, str(number)))))


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, OwnCode]]:
    for key, child in module.named_children():
        taken = CACHE_NAMES & {*parameter_names(original_class(child).forward)}
        if not taken:
            yield from _outermost(child, f"{name}.{key}")
        elif isinstance(getattr(child, "layer_idx", None), int):
            sources = [source_of(original_class(each)) or "" for each in child.modules()]
            selects, attends = any("topk(" in code for code in sources), any(map(_attends, child.modules()))
            known = OwnCode(next(iter(taken)), attends, selects, _moves_from(child, "".join(sources)))
            yield f"{name}.{key}", child, known


def _moves_from(module: Any, code: str) -> int | None:
    """Return OwnCode.moves_from of a module with this code: where it asks for the number of tokens before, scores may
    grow with that, behind a number of tokens in its config. A trial shows whether it uses more than differences else.
    """
    if not any(f".{name}(" in code for name in ASKED_COUNTS):
        return None
    names = dict.fromkeys(re.findall(r"self\.config\.(\w*floor\w*)", code))
    return min((floor for name in names if (floor := getattr(module.config, name, 0)) is not None), default=None)


def _attends(module: nn.Module) -> bool:
    code = code_of(module)
    return code.attends or code.caches
