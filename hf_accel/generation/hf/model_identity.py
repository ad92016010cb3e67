"""A digest of all that keys and values depend on besides tokens, which is the same in another process.

A ModelWatch sees whether a model has changed; a digest says which model it is. It covers each bit of the weights, as
they are computed with, the config, the modules with their plain values, the code that runs, and what has rounded. What
it cannot know (a hook, or a class that is not in a known package) is refused. Names and folders do not count.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Iterable, Mapping, Set
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, ModuleType, NoneType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...errors import UnsupportedError
from ...kernels import cpu
from ...recognition.unchanged import GLOBAL_HOOKS, HOOKS
from ...tensors import PLAIN, model_device, plain_tensors
from ...undo.running_code import KNOWN_PACKAGES, is_known_code
from ...undo.state import FUSED, STATE
from .model_objects import FUNCTIONS, SCALARS, stored_fields

# What is no part of what a model computes: names, settings of generate(), and what patch() makes of the rest.
LEFT_OUT = {
    "name_or_path", "_name_or_path", "transformers_version", "generation_config", "warnings_issued", "hf_quantizer",
    "_loss_function", STATE, FUSED,
}  # fmt: skip
ROUNDS = ("attention", "fuse", "deterministic")  # the fields of a PatchConfig that change what is rounded
PIECE = 2**26  # bytes that are hashed at a time, so that other threads wait for none


class ModelIdentity:
    """Says which model it is. It is made in little time; `digest` reads all weights.

    Raises UnsupportedError, with the reason as one clause, for a model of which no digest can tell everything.
    """

    def __init__(self, model: nn.Module, patched: Any) -> None:
        """patched: the PatchConfig of the model."""
        self._known: dict[int, int] = {}
        self._text: list[str] = [*_software(), *_machine(model)]
        self._tensors: list[Tensor] = []
        self._text += [repr(getattr(patched, name, None)) for name in ROUNDS]
        self._refuse_hooks("the process", GLOBAL_HOOKS)
        for name, module in model.named_modules():
            self._module(name, module)

    def digest(self) -> str:
        """Return the digest of the model as it is now."""
        found = hashlib.sha256("\n".join(self._text).encode())
        for tensor in self._tensors:
            for piece in tensor.detach().reshape(-1).split(PIECE // tensor.element_size()):
                found.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    # -- reading ---------------------------------------------------------------------------------------

    def _module(self, name: str, module: nn.Module) -> None:
        own = vars(module)
        self._refuse_hooks(name or "the model", (own[each] for each in HOOKS))
        kinds: Any = type(module).__mro__
        for kind in kinds:
            forward = vars(kind).get("forward")
            if forward is not None and not is_known_code(inspect.unwrap(forward)):
                raise UnsupportedError(f"the code of {kind.__name__} is of no package that is known")
            if issubclass(kind, nn.Module):
                self._text.append(f"{kind.__module__} {kind.__qualname__} {_source(kind)}")
        for key, value in sorted(own.items()):
            if key not in LEFT_OUT and key != "_modules" and "_hooks" not in key:
                self._text.append(f"{name}.{key}")
                self._value(value, f"{name}.{key}")

    def _refuse_hooks(self, where: str, hooks: Iterable[Mapping[int, Any]]) -> None:
        for each in hooks:
            for hook in each.values():
                self._function(hook, f"a hook of {where}")

    def _value(self, value: Any, where: str) -> None:
        kind: Any = type(value)
        self._text.append(f"{kind.__module__}.{kind.__qualname__}")
        if isinstance(value, SCALARS):
            self._text.append(repr(value))
        elif isinstance(value, Tensor):
            self._tensor(value, where)
        elif isinstance(value, (*FUNCTIONS, BuiltinFunctionType)):
            self._function(value, where)
        elif isinstance(value, (dict, list, tuple, Set)):
            self._all(value, where)
        elif isinstance(value, PreTrainedConfig):
            settings = {key: each for key, each in value.to_dict().items() if key not in LEFT_OUT}
            self._text.append(json.dumps(settings, sort_keys=True, default=str))
        elif kind.__module__.partition(".")[0] not in KNOWN_PACKAGES:
            raise UnsupportedError(f"{where} is a {kind.__name__}, of no package that is known")
        elif stored_fields(kind) and self._is_new(value):
            self._all({name: getattr(value, name) for name in stored_fields(kind)}, where)

    def _all(self, values: Any, where: str) -> None:
        self._text.append(str(len(values)))
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        if isinstance(values, Set):
            pairs = enumerate(sorted(values, key=repr))
        for key, value in pairs:
            self._text.append(repr(key))
            self._value(value, where)

    def _function(self, function: Any, where: str) -> None:
        """Read a function of a known package, with what is bound to it."""
        if isinstance(function, partial):
            self._function(function.func, where)
            self._all([*function.args, function.keywords], where)
        elif isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, ModuleType | NoneType):
            self._text.append(repr(function))  # torch.tanh, say
        elif is_known_code(inspect.unwrap(getattr(function, "__func__", function))):
            self._text.append(f"{function.__module__}.{function.__qualname__}")
        else:
            raise UnsupportedError(f"{where} is code of no package that is known")

    def _tensor(self, tensor: Tensor, where: str) -> None:
        for plain in (tensor,) if type(tensor) in PLAIN else plain_tensors(tensor):
            if plain.is_meta:
                raise UnsupportedError(f"{where} is not in memory")
            self._text.append(f"{plain.dtype} {tuple(plain.shape)}")
            if self._is_new(plain):
                self._tensors.append(plain)

    def _is_new(self, value: Any) -> bool:
        """Return whether an object was not met before; it says which one it is."""
        is_new = id(value) not in self._known
        self._text.append(str(self._known.setdefault(id(value), len(self._known))))
        return is_new


def _machine(model: nn.Module) -> list[str]:
    """Return what rounds: another machine gives other last bits, and prompts must not depend on which one they met."""
    device = model_device(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    level = cpu.refusal() or cpu.isa()
    return [device.type, name, level, torch.get_float32_matmul_precision(), str(torch.backends.mkldnn.enabled)]


@lru_cache(maxsize=1)
def _software() -> tuple[str, ...]:
    found = hashlib.sha256()
    folder = Path(__file__).parents[2]
    for file in sorted(each for suffix in ("*.py", "*.so", "*.dll", "*.dylib") for each in folder.rglob(suffix)):
        found.update(str(file.relative_to(folder)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return torch.__version__, transformers.__version__, platform.python_version(), found.hexdigest()


@lru_cache(maxsize=4096)
def _source(kind: type) -> str:
    """Return a digest of the file that a class was read from; empty for a class that was made by code."""
    try:
        file = inspect.getsourcefile(kind)
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""
