"""Loads the models of a server. They have one memory, of which each gets its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...cache.hf.room import pass_bytes
from ...checkpoints.fitting import process_bytes
from ...checkpoints.text_encoder import Folder, encodes
from ...errors import UnsupportedError
from ...estimate import estimate
from ...estimate.result import room_in
from ...estimate.shapes import shapes_of
from ..models import Models
from ..service import ModelService
from .served_model import load_to_start
from .transcriptions import transcribes

OF_TEXTS = ("speculative", "chat_template", "engine", "cache")  # keywords for models that write text
OF_PAGES = ("max_tokens", "directory", "directory_bytes")  # fields of cache= for models that write text
ANY_SPEED = 1e9  # bytes a second, which changes no count of bytes


def load_models(
    paths: Mapping[str, str],
    *,
    fit: Any = None,
    within: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    **given: Any,
) -> Models:
    """Load models by their names and paths, and start what computes for each.

    fit: a memory for all of them, as load() takes it. Each gets the part of it that its weights, its cache and its
    passes have of all, as estimate() counts them. given: the other keywords of load_served. Of a cache= max_tokens are
    shared out evenly among the models that write text; on a GPU without either, all weights are loaded first, and each
    cache gets an equal part of the memory that is left. What is for models that write text alone is left out for
    the others, if there are such models. within: what is entered while the model of a path is loaded.
    """
    texts = [name for name, path in paths.items() if not encodes(path) and not transcribes(path)]
    given |= {"cache": _divided(given["cache"], len(texts))} if "cache" in given else {}
    fits = _fits(paths, fit, on_gpu=torch.device(given.get("device_map") or "cpu").type != "cpu")
    starts: dict[str, Callable[[float], ModelService]] = {}
    for name, path in paths.items():
        own = dict(given) if name in texts or not texts else _of_rows(given, has_cache=transcribes(path))
        own |= {} if fit is None else {"fit": fits(name)}
        with within(path):
            starts[name] = load_to_start(path, name=name, **own)
    services = {}
    for place, name in enumerate(sorted(paths, key=lambda name: name not in texts)):
        services[name] = starts[name](1 / (len(paths) - place))
    return Models([services[name] for name in paths])


def _divided(cache: Any, parts: int) -> Any:
    """Return cache= of one of so many models, each with as many tokens. Raises UnsupportedError for too few."""
    if not isinstance(cache, Mapping) or cache.get("max_tokens") is None or parts < 2:
        return cache
    if cache["max_tokens"] < parts:
        raise UnsupportedError(f"max_tokens={cache['max_tokens']} are too few for the caches of {parts} models")
    return {**cache, "max_tokens": cache["max_tokens"] // parts}


def _of_rows(given: Mapping[str, Any], *, has_cache: bool) -> dict[str, Any]:
    """Return the keywords for a model that writes no text, of those for models that do."""
    own, cache = {name: value for name, value in given.items() if name not in OF_TEXTS}, given.get("cache")
    fields = {name: value for name, value in cache.items() if name not in OF_PAGES} if isinstance(cache, dict) else {}
    return own | ({"cache": fields} if fields and has_cache else {})


def _fits(paths: Mapping[str, str], fit: Any, *, on_gpu: bool) -> Callable[[str], Any]:
    """Return what gives each model its fit=, when it is about to be loaded.

    load() takes off what the process holds by then, the models before it included.
    """
    if fit is None or len(paths) == 1:
        return lambda name: fit
    is_device = isinstance(fit, str) and not fit[:1].isdigit()
    held = 0 if on_gpu or is_device else process_bytes()
    room = room_in(fit) - held
    needs = {name: _bytes_of(path) for name, path in paths.items()}
    if room <= 0:
        raise UnsupportedError(f"fit={fit!r} is less than this process holds before it loads a model; give more")

    def fit_of(name: str) -> int:
        return int(room * needs[name] / sum(needs.values())) + (0 if on_gpu else process_bytes())

    return fit_of


def _bytes_of(path: str) -> int:
    """Return about the bytes of a model as it is, of its cache and of its largest pass."""
    if path.endswith(".gguf"):
        return Path(path).stat().st_size
    inner = Folder(path).inner if Path(path).is_dir() else ""  # of sentence-transformers
    place = str(Path(path, inner)) if inner else path
    found = estimate(place, bandwidth=ANY_SPEED)
    writes = found.bound.decode is not None
    return found.total_bytes + (pass_bytes(shapes_of(place, dtype=None), found.context) if writes else 0)
