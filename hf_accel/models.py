"""Questions to any model: the model inside its wrappers, its layers, its mode, and what its config says of them.

Answers hold while a model is only read: layers of equal code and settings are asked once.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

from .errors import UnsupportedError
from .tensors import is_sharded

LEARNT_KEYS = ("PREFIX_TUNING", "CARTRIDGE")  # adapters of PEFT that put keys in front of a prompt
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# The answers, by the question and what it is about, while nobody changes the model; None: somebody may change it.
_answered: ContextVar[dict[tuple[Hashable, ...], tuple[Any, Any]] | None] = ContextVar("answered", default=None)
Asking = TypeVar("Asking", bound=Callable[..., Any])
Answer = TypeVar("Answer")


def reading_once(function: Asking) -> Asking:
    """Decorate a function that only reads a model, and within which nobody else changes it: code is asked once."""

    @wraps(function)
    def reading(*args: Any, **keywords: Any) -> Any:
        token = _answered.set({})
        try:
            return function(*args, **keywords)
        finally:
            _answered.reset(token)

    return cast(Asking, reading)


def answer_once(question: Callable[..., Answer], subject: Any, *others: Any, equal: Hashable = None) -> Answer:
    """Return question(subject, *others), which is asked once within a function that is `reading_once`.

    equal: the same for all subjects of which the answer is the same; None: an answer is of one object alone. The
    others are kept apart as objects.
    """
    answered = _answered.get()
    if answered is None:
        return question(subject, *others)
    key = (question, id(subject) if equal is None else equal, *map(id, others))
    if key not in answered:
        # What an id stands for is kept, or another object could get the same one.
        answered[key] = (question(subject, *others), (subject, others))
    answer: Answer = answered[key][0]
    return answer


def learnt_prompt(model: Any) -> int:
    """Return how many embeddings PEFT puts in front of each prompt in this call of generate(); 0 for none.

    PEFT sets a method of its own on the model for the time of a call. Keys and values, which some of its methods put
    there instead, are not meant.
    """
    own = vars(model).get("prepare_inputs_for_generation")
    code, outer = getattr(own, "__func__", None), cast(Any, getattr(own, "__self__", None))
    if code is None or code.__module__ != "peft.peft_model" or model.config.is_encoder_decoder:
        return 0
    config, inner = outer.active_peft_config, outer.base_model_prepare_inputs_for_generation
    known = getattr(inner, "__func__", None) is type(model).prepare_inputs_for_generation and inner.__self__ is model
    if not known or not config.is_prompt_learning or config.peft_type in LEARNT_KEYS:
        return 0
    return int(config.num_virtual_tokens)


def learnt_kind(model: Any) -> str | None:
    """Return what PEFT calls the active adapter of its model, if generate() alone applies it; None for any other."""
    config: Any = None if getattr(model, "_adapters_disabled", False) else getattr(model, "active_peft_config", None)
    return str(config.peft_type.value) if getattr(config, "is_prompt_learning", False) else None


def without_adapters(model: Any) -> Any:
    """Return the model inside PEFT's wrapper; any other object unchanged."""
    is_adapted = hasattr(model, "get_base_model") and not isinstance(model, type)
    return model.get_base_model() if is_adapted else model


def unwrapped(model: Any, *, keep_adapters: bool = False) -> Any:
    """Return the model inside the wrappers of torch.compile, torch's data parallelism and PEFT.

    keep_adapters: whether a PEFT model is returned unchanged, since generating needs its adapters.
    """
    while "_orig_mod" in getattr(model, "_modules", ()) or isinstance(model, PARALLEL):
        model = model.module if isinstance(model, PARALLEL) else model._orig_mod
    return model if keep_adapters else without_adapters(model)


def is_transformers_model(given: object) -> bool:
    """Return whether the object is a PreTrainedModel, without importing transformers."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(given).__mro__
    )


def models_within(given: object) -> dict[str, Any]:
    """Return the transformers models that a module or another object holds, by the names of their attributes.

    Parts of a model that is found are left out, and a model that is found twice is named once. Other objects than
    modules, as pipelines, are looked into one level deep.
    """
    if isinstance(given, nn.Module):
        found: dict[str, Any] = {}
        for name, module in given.named_modules():
            if is_transformers_model(module) and not any(is_within(name, outer) for outer in found):
                found[name] = module
        return found
    held = {name: without_adapters(value) for name, value in getattr(given, "__dict__", {}).items()}
    models = {name: value for name, value in held.items() if is_transformers_model(value)}
    return {
        name: model
        for index, (name, model) in enumerate(models.items())
        if not any(model is other for other in list(models.values())[:index])
    }


def model_of(given: Any, *, keep_adapters: bool = False) -> Any:
    """Return the transformers model that an object holds: a SentenceTransformer, a CrossEncoder, a pipeline, a module
    of the user's own, a PEFT model. An object that holds none is returned unchanged.

    keep_adapters: whether a PEFT model is returned unchanged, since generating needs its adapters.
    Raises UnsupportedError where several are held, since none of them is the model that is meant.
    """
    inner = without_adapters(given)
    if is_transformers_model(inner) or isinstance(inner, type):
        return given if keep_adapters else inner
    found = models_within(inner)
    if len(found) > 1:
        names = ", ".join(f"{_path(name)} (a {type(model).__name__})" for name, model in found.items())
        raise UnsupportedError(
            f"this {type(inner).__name__} holds {len(found)} transformers models, {names}; pass one of them, or each "
            "in turn"
        )
    return next(iter(found.values()), inner)


def _path(name: str) -> str:
    """Write the name of a module as Python does: .0.model is [0].model."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))


def is_within(name: str, outer: str) -> bool:
    """Return whether the module `name` is the module `outer`, of which "" is the whole model, or one inside of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def spans_processes(model: Any) -> bool:
    """Return whether a model is split over processes, or its config says that it was loaded so."""
    settings = getattr(model.config, "distributed_config", None)
    return settings is not None or any(map(is_sharded, model.parameters()))


def modules_by_name(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of `named_modules`, which are listed once while the model is only read."""
    return answer_once(_named_modules, model)


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what `model.modules()` gives, outer ones first, without its generators: each call of generate() asks."""
    found: dict[nn.Module | None, None] = {model: None}
    level = [model]
    while level:
        inside = dict.fromkeys(chain.from_iterable([module._modules.values() for module in level]))
        level = [module for module in inside if module is not None and module not in found]
        found.update(dict.fromkeys(level))
    return list(found)  # type: ignore[arg-type]


def layer_lists(model: nn.Module, count: int) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of `count` modules, by name: the layers, and lists with a module per layer."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in modules_by_name(model):
        is_inside = any(is_within(name, outer) for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_inside:
            found[name] = module
    return found


def layers_config(config: Any) -> Any:
    """Return the config of the layers that decode: that of the text part of a model of several parts, or `config`."""
    return answer_once(_decoder_config, config)


class _Copied(NamedTuple):
    """Holds the config that transformers makes for the decoder of a flat one, with the settings of that one."""

    config: weakref.ref[Any]
    settings: dict[str, Any]
    decoder: Any

    def is_of(self, config: Any) -> bool:
        try:
            return self.config() is config and self.settings == vars(config)
        except (RuntimeError, ValueError):  # tensors and arrays say neither
            return False


_copied: dict[int, _Copied] = {}  # by the id of the config


def forget(known: dict[Any, Any], key: Any, reference: Any) -> None:
    """Forget what was kept of an object that is gone. It needs no name of a module: at the end there are none."""
    known.pop(key, None)


def _decoder_config(config: Any) -> Any:
    key = id(config)
    if (known := _copied.get(key)) is not None and known.is_of(config):
        return known.decoder
    decoder = config.get_text_config(decoder=True)
    if decoder is not config and all(decoder is not part for part in vars(config).values()):
        # It is copied for each call of transformers, which takes longer than all else that is asked about it.
        of_config = weakref.ref(config, partial(forget, _copied, key))
        _copied[key] = _Copied(of_config, copy.deepcopy(vars(config)), decoder)
    return decoder


def encoder_width(model: Any) -> int:
    """Return the width of the output of an encoder-decoder's encoder, which may have a config of its own."""
    encoder = getattr(model.get_encoder(), "config", None)
    width = getattr(encoder, "hidden_size", None)
    return width if isinstance(width, int) else int(layers_config(model.config).hidden_size)


def padding_token(model: Any) -> int:
    """Return the id of the token that pads prompts of a model; 0 if its config names none."""
    found = getattr(layers_config(model.config), "pad_token_id", None)
    return 0 if found is None else int(found)


def positions_depend_on_length(config: Any) -> bool:
    """Return whether the rotary scaling depends on the prompt's length.

    If it does, equal prefixes of prompts of different lengths have different keys.
    """
    rope = getattr(layers_config(config), "rope_parameters", None) or {}
    types = [rope.get("rope_type"), *(v.get("rope_type") for v in rope.values() if isinstance(v, dict))]
    return any(rope_type in ("dynamic", "longrope") for rope_type in types)


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens that a transformers model knows."""
    return int(layers_config(model.config).vocab_size)


def num_embedded(model: Any) -> int:
    """Return the number of token ids that a prompt may hold: the table of embeddings may have rows for tokens that a
    model never says, as for an image.
    """
    rows = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    return max(vocabulary_size(model), rows if isinstance(rows, int) else 0)


def experts_per_token(config: Any) -> int | None:
    """Return how many experts a router of the model sends each token to; None where its config does not say."""
    layers = layers_config(config)
    named = (getattr(layers, name, None) for name in ("num_experts_per_tok", "top_k_experts"))
    return next((number for number in named if isinstance(number, int) and number > 0), None)


def head_dim(config: Any) -> int:
    """The numbers of a head of a model with this config, or of a layer with a config of its own."""
    named = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return int(named or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: Any) -> int:
    """The heads of K and V that a layer with this config caches."""
    if getattr(config, "new_decoder_architecture", False):  # Falcon repeats its K and V before it caches them
        return int(config.num_attention_heads)
    if getattr(config, "multi_query", False):
        return 1
    named = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    return int(named or config.num_attention_heads)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode inside the block, and each back into its own mode afterwards."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
