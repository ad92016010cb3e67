"""Tries whether a decoder computes the same for a token, whatever other tokens are in its pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ...attention.hf.mask import numbers_of
from ...cache.hf.cache_argument import CACHE_NAME
from ...errors import LostRankError, NotRaggedError
from ...models import layer_lists, layers_config
from ...recognition.call_form import parameter_names
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...tensors import is_out_of_memory
from ...undo.journal import original_class
from ..marked_inputs import MarkedInputs, marked_arguments
from ..token_arguments import TokenArguments

# Which tokens of two sequences are marked. A third one has no features at all.
MARKS = ((False, True, True, False, True, False), (True, False))
UNMARKED = 3
CUT = 2  # the first tokens of the first sequence are computed by an earlier pass
FACTOR = 1.5
CLOSE = Tolerance(of_largest=1e-4)
# What code raises that meets something it does not expect. What else stops it, such as a signal, says nothing of it.
OF_CODE = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    NameError,
    RuntimeError,
)
# Arguments of layers that are known to be right in a ragged pass.
KNOWN = frozenset({"attention_mask", "position_ids", "position_embeddings", CACHE_NAME, "use_cache"})


def refuse_mixed_tokens(decoder: nn.Module, given: MarkedInputs, planes: int | None, like: Tensor) -> None:
    """Raise NotRaggedError unless a decoder gives its layers, for a marked token, what it gives without other tokens.

    The decoder's own code runs on random numbers, over layers that only say what they are given. given: features of
    the forms that are to be tried. planes: P if it takes positions [P, B, T]. like: an embedding.
    """
    trial = _DecoderTrial(decoder, planes)
    numbers = RandomNumbers()
    marked, embedded = [], []
    for marks in MARKS:
        count = sum(marks)
        features = tuple(numbers(count, *f.shape[1:], dtype=f.dtype, device=f.device) for f in given.features)
        marked.append(MarkedInputs(given.form, torch.tensor(marks), features))
    for count in (len(MARKS[0]), UNMARKED, len(MARKS[1])):
        embedded.append(numbers(count, like.shape[-1], dtype=like.dtype, device=like.device))
    first, second = (marked_arguments([(0, each)], len(each.marks)) for each in marked)
    alone = [trial(embedded[0], first), trial(embedded[1], {}), trial(embedded[2], second)]
    later = marked[0].part(CUT, len(MARKS[0]))
    assert later is not None
    parts = [(0, later), (len(MARKS[0]) - CUT + UNMARKED, marked[1])]
    row = torch.cat([embedded[0][CUT:], *embedded[1:]])
    together = trial(row, marked_arguments(parts, len(row)))
    expected = [torch.cat([a[CUT:], b, c]) for a, b, c in zip(*alone, strict=True)]
    if len(expected) != len(together) or not all(map(torch.equal, expected, together)):
        raise NotRaggedError(f"{type(decoder).__name__} mixes tokens that are given {given.form.marks}")


def refuse_planes(decoder: nn.Module, planes: int, like: Tensor) -> None:
    """Raise NotRaggedError unless a decoder places a token by P equal coordinates as it does by one.

    planes: P. like: an embedding.
    """
    embedded = RandomNumbers()(UNMARKED, like.shape[-1], dtype=like.dtype, device=like.device)
    one, several = _DecoderTrial(decoder, None), _DecoderTrial(decoder, planes)
    expected, found = [*one(embedded, {}), *one.places], [*several(embedded, {}), *several.places]
    if not one.places or len(found) != len(expected) or not all(map(torch.equal, expected, found)):
        raise NotRaggedError(f"{type(decoder).__name__} places tokens in another way where it is given one position")


class CountedPositions(NamedTuple):
    """The positions of tokens as a decoder that is given none counts them, [B, T].

    uncounted: the id of the token that it does not count in a prompt, and that stands at the position of this number
    wherever it is; None if it counts all tokens.
    """

    positions: Tensor
    uncounted: int | None = None


def counted_positions(decoder: nn.Module, given: Mapping[str, Any], shape: tuple[int, int]) -> CountedPositions | None:
    """Return the positions at which a decoder that is given none places tokens; None if it counts in an unknown way.

    They are their columns behind those of its cache; or such columns without those of padding, which begin behind the
    number of the token that pads, as fairseq counted. given: the arguments of its call. shape: (B, T).
    """
    cache = given.get(CACHE_NAME)
    cache = getattr(cache, "self_attention_cache", cache)
    # A cache of states alone does not say how many tokens it has read.
    before = 0 if cache is None or all(cache.is_linear) else int(cache.get_seq_length())
    trial = _DecoderTrial(decoder, None)
    columns = torch.arange(before, before + shape[1]).repeat(shape[0], 1)
    if trial.places_as(given, columns):
        return CountedPositions(columns)
    padding = getattr(trial.config, "pad_token_id", None)
    if padding is None:
        return None
    positions, ids = columns + padding + 1, given.get("input_ids")
    if ids is not None:
        counts = (ids != padding).cpu()
        positions = (counts.long().cumsum(1) + before) * counts + padding
    return CountedPositions(positions, padding) if trial.places_as(given, positions) else None


class Merged(NamedTuple):
    """The embeddings [B, T, D] into which a decoder puts features by itself, and what else it takes for each token."""

    embeddings: Tensor
    arguments: dict[str, Tensor]


def merged_embeddings(
    decoder: nn.Module, given: Mapping[str, Any], others: Mapping[str, Any], positions: Tensor | None = None
) -> Merged | None:
    """Return the embeddings into which a decoder puts features by itself; None if it does more with them.

    It gives its layers all that it gives them for these embeddings without features: which are what it gives its first
    layer, or what it puts features in before it scales and places them. given: the arguments of its call. others:
    those that bring the features. positions: at which it places tokens by itself; None if it is given them.
    """
    trial = _DecoderTrial(decoder, None)
    expected = trial.entered(given)
    plain = {name: value for name, value in given.items() if name not in others and name != "input_ids"}
    if positions is not None:
        plain["position_ids"] = positions.to(expected[0].device)
    tried = [Merged(expected[0], {}), *_put_in(decoder, given, others)]
    for each in tried:
        found = trial.entered({**plain, **each.arguments, "inputs_embeds": each.embeddings.clone()})
        if _all_same(expected, found):
            return each
    return None


def _put_in(decoder: Any, given: Mapping[str, Any], others: Mapping[str, Any]) -> list[Merged]:
    """Return the embeddings of a call with features instead of the tokens that another argument marks.

    They may be all that the decoder needs, or it may read the marks besides.
    """
    tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
    features = [value for value in tensors.values() if value.is_floating_point()]
    marks = {name: value for name, value in tensors.items() if not value.is_floating_point()}
    if len(others) != 2 or len(features) != 1 or len(marks) != 1 or "input_ids" not in given:
        return []
    (name, mark), table = next(iter(marks.items())), decoder.get_input_embeddings()
    embeddings = table(given["input_ids"]).clone()
    rows = features[0].reshape(-1, features[0].shape[-1])
    chosen = mark != 0
    if chosen.shape != embeddings.shape[:2] or rows.shape != (int(chosen.sum()), embeddings.shape[-1]):
        return []
    embeddings[chosen] = rows.to(embeddings.dtype)
    return [Merged(embeddings, {}), Merged(embeddings, {name: mark})]


def _all_same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_same_places, expected, found))


def _same_places(expected: Tensor, found: Tensor) -> bool:
    return expected.dtype is found.dtype and torch.equal(*torch.broadcast_tensors(expected, found))


def refuse_mixed_arguments(
    decoder: nn.Module, given: TokenArguments, planes: int | None, like: Tensor, *, absent: Collection[str] = ()
) -> None:
    """Raise NotRaggedError unless a decoder computes a token with its arguments as it does without other tokens.

    The decoder computes three tokens that see no other, in one row and alone, with random arguments. given: arguments
    of the form that is to be tried. planes, like: see refuse_mixed_tokens. absent: the names of arguments that texts
    are not given, for which zeros are tried.
    """
    numbers, device = RandomNumbers(), like.device
    embedded = numbers(1, UNMARKED, like.shape[-1], dtype=like.dtype, device=device)
    more = {name: _random_like(value, numbers)[None] for name, value in given.items()}
    apart = torch.eye(UNMARKED, dtype=torch.bool, device=device)[None, None]

    def called(first: int, stop: int, arguments: Mapping[str, Tensor]) -> Tensor:
        positions = torch.arange(first, stop, device=device)[None]
        output = decoder(
            inputs_embeds=embedded[:, first:stop],
            position_ids=positions if planes is None else positions.expand(planes, 1, -1),
            attention_mask=apart[..., first:stop, first:stop], use_cache=False, return_dict=True,
            **{name: value[:, first:stop] for name, value in arguments.items()},
        )  # fmt: skip
        states: Tensor = output.last_hidden_state
        return states

    alone = torch.cat([called(index, index + 1, more) for index in range(UNMARKED)], dim=1)
    if not agree(lambda: alone, lambda: called(0, UNMARKED, more), CLOSE):
        raise NotRaggedError(f"{type(decoder).__name__} mixes tokens that are given {', '.join(given)}")
    zeros = more | {name: torch.zeros_like(more[name]) for name in absent}
    fewer = {name: value for name, value in more.items() if name not in absent}
    if absent and not agree(lambda: called(0, UNMARKED, fewer), lambda: called(0, UNMARKED, zeros), CLOSE):
        raise NotRaggedError(f"{type(decoder).__name__} takes no {', '.join(absent)} for something else than zeros")


def _random_like(value: Tensor, numbers: RandomNumbers) -> Tensor:
    """Return random arguments of three tokens, [3, ...]; of what is no number, zero for one of them."""
    if value.is_floating_point():
        return numbers(UNMARKED, *value.shape[1:], dtype=value.dtype, device=value.device)
    most = value.amax(dim=0)
    return torch.stack([most, torch.zeros_like(most), most])


class _DecoderTrial:
    """A decoder whose layers do nothing but multiply."""

    def __init__(self, decoder: nn.Module, planes: int | None) -> None:
        self.config = layers_config(decoder.config)
        self.planes = planes
        self.seen: list[Tensor] = []
        self.places: list[Tensor] = []
        self.numbers: list[Tensor] = []
        self.masks: list[Tensor] = []
        lists = layer_lists(decoder, self.config.num_hidden_layers)
        parts = {name: nn.ModuleList(map(self._stand_in, found)) for name, found in lists.items() if "." not in name}
        self.decoder = unwatched_twin(decoder, _modules=parts)

    def _stand_in(self, layer: nn.Module) -> Any:
        twin = unwatched_twin(layer)
        twin.forward = partial(self._called, parameter_names(original_class(layer).forward)[1:])
        return twin

    def _called(self, names: Sequence[str], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs |= dict(zip(names, args, strict=False))
        others = [*args[len(names) :], *(value for name, value in kwargs.items() if name not in KNOWN)]
        if any(isinstance(each, Tensor | Sequence) and not isinstance(each, str) for each in others):
            raise NotRaggedError(f"{type(self.decoder).__name__} gives its layers more than hidden states")
        self.seen.append(hidden)
        mask = numbers_of(kwargs.get("attention_mask"))
        self.masks += [mask] if isinstance(mask, Tensor) else []
        place = kwargs.get("position_embeddings")
        self.places += [place] if isinstance(place, Tensor) else place or ()
        numbers = kwargs.get("position_ids")
        self.numbers += [numbers] if isinstance(numbers, Tensor) else []
        return hidden * FACTOR

    def places_as(self, given: Mapping[str, Any], positions: Tensor) -> bool:
        """Return whether a call of the decoder gives its layers what it gives them with these positions, and something
        else with others.
        """
        expected = self._placed(given)
        here, others = (
            self._placed({**given, "position_ids": each.to(expected[0].device)})
            for each in (positions, torch.where(positions > 0, positions - 1, 1))
        )
        return _all_same(expected, here) and not _all_same(expected, others)

    def _placed(self, given: Mapping[str, Any]) -> list[Tensor]:
        """Return what each layer is given of states and places in a call of the decoder."""
        self.seen, self.places, self.numbers = [], [], []
        self._run(**given)
        return [*self.seen, *self.places, *self.numbers]

    def _run(self, **given: Any) -> Any:
        """Call the decoder, whose own code need not take layers that are no layers: RWKV's return more than states."""
        try:
            return self.decoder(**given)
        except (NotRaggedError, LostRankError):
            raise
        except OF_CODE as error:
            if is_out_of_memory(error):
                raise
            raise NotRaggedError(
                f"{type(self.decoder).__name__} cannot be tried without its layers: {error}"
            ) from error

    def entered(self, given: Mapping[str, Any]) -> list[Tensor]:
        """Return what each layer is given in a call of the decoder, of states, places and masks, and the result."""
        self.seen, self.places, self.masks = [], [], []
        result = self._run(**{**given, CACHE_NAME: None, "use_cache": False, "return_dict": True})
        return [*self.seen, *self.places, *self.masks, result.last_hidden_state]

    def __call__(self, embedded: Tensor, more: dict[str, Any]) -> list[Tensor]:
        """Return what each layer is given, and the result, [T, D] each."""
        self.seen, self.places = [], []
        positions = torch.arange(len(embedded), device=embedded.device)[None]
        if self.planes is not None:
            positions = positions.expand(self.planes, 1, -1)
        result = self._run(
            inputs_embeds=embedded[None], position_ids=positions, use_cache=True, return_dict=True,
            **{CACHE_NAME: DynamicCache(config=self.config)}, **more,
        )  # fmt: skip
        return [*(states[0] for states in self.seen), result.last_hidden_state[0]]
