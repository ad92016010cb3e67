"""The call of a model's decoder: what the model's own code makes of its inputs before the first layer.

A model that sees images calls its decoder with embeddings, some of which are those of images. Nothing here knows how a
class makes them: a copy of the model, whose decoder only says with what it was called, runs the class's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from ...attention.hf.stock import EAGER, name_before_patch
from ...cache.hf.cache_argument import CACHE_NAME
from ...errors import NotRaggedError
from ...models import is_within, layers_config, learnt_prompt
from ...recognition.trial import unwatched_twin
from ...recognition.unchanged import has_own_forward

HIDING = ("encoder_attention_mask", "encoder_padding_mask")  # the names of a mask of the rows of an encoder's output


class _Reached(Exception):
    """The decoder was called. call: its arguments by name."""

    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__("the decoder was called")
        self.call = call


class UpToDecoder:
    """Runs a model's own code up to the call of its decoder, and returns the arguments of that call.

    Everything but the decoder is the model's own, without copies of weights: an image goes through the model's tower.
    The model itself stays as it is, also where its code keeps something of a call.

    own_hook: the hook on the model that changes nothing. Raises NotRaggedError if it is not known where the decoder
    begins, or if others watch or change what comes before it.
    """

    def __init__(self, model: PreTrainedModel, own_hook: object = None) -> None:
        self.name = decoder_name(model)
        self.decoder = model.get_submodule(self.name)
        self._signature = _signature(type(self.decoder))  # type: ignore[arg-type]
        self.num_learnt = learnt_prompt(model)  # the embeddings that an adapter puts in front of prompts
        self.model: Any = _around(model, self.name, self._reached, own_hook)
        self.config = layers_config(model.config)

    def _reached(self, *args: Any, **kwargs: Any) -> None:
        named = _named(self._signature, args, kwargs)
        raise _Reached({name: value for name, value in named.items() if value is not None})

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """Return the arguments, those that are None left out, with which the model calls its decoder.

        Raises what the model's own code raises, and NotRaggedError if it does not call its decoder.
        """
        try:
            self.model(**inputs, return_dict=True)
        except _Reached as reached:
            return reached.call
        raise NotRaggedError(f"{type(self.model).__name__} does not call its decoder, {self.name!r}")

    def first(self, ids: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's call in the first pass of transformers' loop.

        ids: [B, T]. inputs: what generate() has prepared besides them.
        """
        given = {**inputs, CACHE_NAME: DynamicCache(config=self.config), "use_cache": True}
        prepared = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=None, is_first_iteration=True, **given
        )
        return self(**prepared)

    def second(self, ids: Tensor, inputs: Mapping[str, Any], num_cached: int) -> dict[str, Any]:
        """Return the decoder's call in the second pass, where `ids` [B, T + 1] have a new token for each row.

        num_cached: the columns that the first pass has put into the cache.
        """
        cache = DynamicCache(config=self.config)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer):
                column = torch.zeros(len(ids), 1, num_cached, 1, device=ids.device)
                cache.update(column, column, index)
        given = {**inputs, CACHE_NAME: cache, "use_cache": True}
        given = self.model._update_model_kwargs_for_generation(
            ModelOutput(**{CACHE_NAME: cache}), given, is_encoder_decoder=False
        )
        return self(**self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given))

    @property
    def is_causal(self) -> bool:
        """True if the decoder's attention is causal where no mask says what it sees.

        Raises NotRaggedError if only some of it is.
        """
        modules = [module for module in self.decoder.modules() if name_before_patch(module) != EAGER]
        found = {bool(module.is_causal) for module in modules if hasattr(module, "is_causal")}
        if len(found) > 1:
            raise NotRaggedError(f"some attention of {type(self.decoder).__name__} is causal, and some is not")
        return found != {False}

    @property
    def hiding(self) -> str:
        """Return the name of the argument that says which rows of an encoder's output there are."""
        return next((name for name in HIDING if name in self._signature.parameters), HIDING[0])

    def is_read(self, name: str) -> bool:
        """Return whether the code of the decoder, or of a module inside of it, names an argument."""
        return any(name in _names_in(type(module)) for module in self.decoder.modules())  # type: ignore[arg-type]


def giving_decoder(
    model: PreTrainedModel, own_hook: object, changed: Callable[[dict[str, Any]], dict[str, Any]]
) -> Any:
    """Return a copy of a model which calls the model's decoder with other arguments.

    own_hook: see UpToDecoder, which also says what is raised. changed: makes the arguments, by name, of those of the
    model's own call. The decoder is the model's own, with all that is on it.
    """
    name = decoder_name(model)
    decoder = model.get_submodule(name)
    signature = _signature(type(decoder))  # type: ignore[arg-type]

    def called(*args: Any, **kwargs: Any) -> Any:
        return decoder(**changed(_named(signature, args, kwargs)))

    return _around(model, name, called, own_hook)


def _around(model: PreTrainedModel, name: str, called: Callable[..., Any], own_hook: object) -> Any:
    """Return a copy of a model, without weights of its own, which calls `called` where the model calls its decoder."""
    path = [model, *(model.get_submodule(part) for part in _parents(name))]
    for module in path:
        own = vars(module)
        hooks = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
        if has_own_forward(module) or any(hook is not own_hook for hook in hooks):
            raise NotRaggedError(f"a hook or another forward is on {type(module).__name__}, around its decoder")
    end: Any = unwatched_twin(model.get_submodule(name))
    end.forward = called
    return with_part(model, name, end)


def with_part(model: PreTrainedModel, name: str, part: Any) -> Any:
    """Return a copy of a model, without weights of its own, which has another module by the name of one of its own."""
    path = [model, *(model.get_submodule(parent) for parent in _parents(name))]
    for module, own_name in zip(reversed(path), reversed(name.split(".")), strict=True):
        part = unwatched_twin(module, _modules={own_name: part})
    return part


@lru_cache(maxsize=256)
def _signature(kind: type) -> inspect.Signature:
    """Return the signature of a class's forward(), which each pass of a copy reads again."""
    return inspect.signature(kind.forward)  # type: ignore[attr-defined]


def _named(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a method, by name."""
    named = dict(signature.bind(None, *args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    named.pop("self", None)
    return named


def decoder_name(model: PreTrainedModel) -> str:
    """Return the name of the innermost model that holds the layers which decode. Raises NotRaggedError for none."""
    if model.config.is_encoder_decoder:
        decoder: Any = model.get_decoder()
        while isinstance(decoder, PreTrainedModel) and (inner := decoder.get_decoder()) is not decoder:
            decoder = inner  # Florence-2 answers with a whole BART
        return next(name for name, module in model.named_modules() if module is decoder)
    config, found = layers_config(model.config), ""
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or type(module.config) is not type(config):
            continue
        takes = "inputs_embeds" in _signature(type(module)).parameters  # type: ignore[arg-type]
        if name and takes and is_within(name, found):
            found = name
    if not found:
        raise NotRaggedError(f"{type(model).__name__} has no decoder that takes embeddings")
    return found


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@lru_cache(maxsize=4096)
def _names_in(kind: type) -> frozenset[str]:
    """Return all names and strings in the code of the methods of a class and its bases, except torch's own."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object) or base.__module__.startswith("torch."):
            continue
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if inspect.isfunction(value) else None
            found |= _names_of(code)
    return frozenset(found)


def _names_of(code: Any) -> set[str]:
    if code is None:
        return set()
    found = {*code.co_varnames, *code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    return found.union(*(_names_of(c) for c in code.co_consts if inspect.iscode(c)))
