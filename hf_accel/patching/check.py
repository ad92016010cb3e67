"""Checks of what a user passes: the model, what accelerate offloads of it, and the names of its modules in skip=."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from functools import partial
from os import PathLike
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from ..config import PatchConfig, WeightConfig
from ..errors import HfAccelError, UnsupportedError
from ..keywords import named
from ..linear.experts import holds_experts
from ..models import PARALLEL, model_of
from ..recognition.window_products import is_product
from ..undo.state import MARKS, PART_OF, PatchState, find_state


def transformers_model(given: Any) -> PreTrainedModel:
    """Return the transformers model that the object is or holds (`model_of`).

    Raises UnsupportedError if there is none, if there are several, and for one that torch.compile or torch's data
    parallelism has wrapped already.
    """
    inner = model_of(given)
    if not isinstance(inner, PreTrainedModel) or _wrapper_within(given) is not None:
        what = f"the class {given.__name__}" if isinstance(given, type) else f"{type(given).__name__}"
        raise UnsupportedError(f"hf_accel works on a transformers PreTrainedModel, not on {what}; {_way_out(given)}")
    return inner


def _way_out(given: Any) -> str:
    if isinstance(given, str | PathLike):
        return f"load it first, as with AutoModelForCausalLM.from_pretrained({str(given)!r})"
    if isinstance(given, PreTrainedConfig):
        return "make a model of it first, as with AutoModelForCausalLM.from_config(config)"
    if isinstance(given, PreTrainedTokenizerBase):
        return "pass the model that it is the tokenizer of"
    if isinstance(given, type):
        return "pass a model of it, as its from_pretrained returns one"
    wrapper = _wrapper_within(given)
    if wrapper is not None:
        name, attribute = wrapper
        where = f"model.{name}.{attribute}" if name else f"model.{attribute}"
        if attribute == "_orig_mod":
            return f"it is compiled: pass {where}, or patch before torch.compile"
        return f"pass the transformers model in it, {where}"
    return "pass the model that from_pretrained returned, or an object that holds one"


def _wrapper_within(given: Any) -> tuple[str, str] | None:
    """Return the name of a wrapper of torch's around the model of a module, and the attribute that holds the model."""
    modules = given.named_modules() if isinstance(given, nn.Module) and not isinstance(given, PreTrainedModel) else ()
    for name, module in modules:
        if isinstance(module, PreTrainedModel):
            return None
        if "_orig_mod" in module._modules or isinstance(module, PARALLEL):
            return name, "_orig_mod" if "_orig_mod" in module._modules else "module"
    return None


def is_patched_with(model: PreTrainedModel, settings: PatchConfig) -> bool:
    """Return whether the model is patched already, with these settings.

    Raises UnsupportedError where it is patched with others, is part of a patched model, or has a part that is patched.
    """
    outer = vars(model).get(PART_OF)
    if outer is not None:
        raise UnsupportedError(
            f"this {type(model).__name__} is a part of a patched {outer} and is patched with it; use it as it is, or "
            f"call hf_accel.unpatch() on the {outer} first"
        )
    state = find_state(model)
    if state is not None:
        others = _differences(state, settings)
        if others:
            raise UnsupportedError(
                f"the model is patched already, with {'; '.join(others)}; call hf_accel.unpatch(model) first"
            )
        return True
    for name, module in model.named_modules():
        if find_state(module) is not None:
            raise UnsupportedError(
                f"{name!r} in this {type(model).__name__}, a {type(module).__name__}, is patched already; call "
                f"hf_accel.unpatch(model.{name}) first"
            )
        if any(mark in vars(module) for mark in MARKS):
            raise UnsupportedError(
                f"{name!r} in this {type(model).__name__}, a {type(module).__name__}, belongs to another model too, "
                "which is patched, or was copied out of one; this model runs as it is, on what was patched of it; "
                "to patch it whole, call hf_accel.unpatch() on the other one first"
            )
    return False


def _differences(state: PatchState, settings: PatchConfig) -> list[str]:
    """Describe the settings that a model was patched with where different ones are asked for now."""
    before = state.config
    found = []
    for name in (f.name for f in dataclasses.fields(PatchConfig) if f.compare):
        old, new = getattr(before, name), getattr(settings, name)
        if old != new:
            found += _changes(name, old, new)
        elif name in settings.explicit - before.explicit and new is not None:
            found.append(f"{name}= left out, so that it need not have been met")
    if settings.weights is not None and settings.weights.calibration is not None:
        found.append("calibration data that was not kept, so that it cannot be compared")
    if getattr(getattr(state.generation.context, "ranks", None), "group", None) is not settings.context_parallel:
        found.append("another context_parallel=")
    return found


def _changes(name: str, old: Any, new: Any) -> list[str]:
    """Return the settings that differ between two configs."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        fields = [
            f.name for f in dataclasses.fields(old) if f.compare and getattr(old, f.name) != getattr(new, f.name)
        ]
        return [f"{f}={_short(getattr(old, f))} in {name}=, not {_short(getattr(new, f))}" for f in fields]
    return [f"{name}={_short(old)}, not {_short(new)}"]


def _short(value: Any) -> str:
    """Describe a config by its settings that are not the default, and a draft model by its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        default = type(value)()
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
        settings = [f"{name}={_short(v)}" for name, v in given.items() if v != getattr(default, name)]
        return f"{type(value).__name__}({', '.join(settings)})"
    return repr(value) if isinstance(value, str | int | float | tuple | None) else f"a {type(value).__name__}"


def check_model(model: object) -> PreTrainedModel:
    """Return the `transformers_model`; refuse one whose parameters have no values here."""
    inner = transformers_model(model)
    names = (name for name, parameter in inner.named_parameters() if parameter.device.type == "meta")
    on_meta = next((name for name in names if _unknown(inner, name)), None)
    if on_meta is None:
        return inner
    if any(hasattr(module, "_hf_hook") for module in inner.modules()):
        raise UnsupportedError(
            f"parameter {on_meta!r} is on the meta device, since accelerate brings it in for each pass, not to the "
            "CPU or in a way that is not known; load the model without offloading, as with device_map='cpu'"
        )
    raise UnsupportedError(
        f"parameter {on_meta!r} is on the meta device and has no values; load the model's weights first"
    )


def _unknown(model: nn.Module, name: str) -> bool:
    """Return whether a parameter on the meta device is none that a hook of its module brings to the CPU."""
    return not brings_in(model.get_submodule(name.rpartition(".")[0]))


def check_calibration(config: WeightConfig | None) -> None:
    """Raise UnsupportedError if calibration data is needed and not there, as in the config of a checkpoint."""
    if config is not None and config.needs_data and config.calibration is None:
        method, bits = f"method={config.method!r}", f"average_bits={config.average_bits}"
        what, way_out = (method, "choose method='rtn'") if config.is_calibrated else (bits, "say bits= instead")
        raise UnsupportedError(
            f"{what} needs calibration=: token ids [n, length], or texts like those that the model will work on; give "
            f"some, or {way_out}"
        )


def check_in_memory(model: nn.Module, config: WeightConfig | None) -> None:
    """Raise UnsupportedError if calibration would have to read weights that accelerate offloads while it runs."""
    if config is None or not config.needs_data:
        return
    offloaded = next((name for name, module in model.named_modules() if is_offloaded(module)), None)
    if offloaded is not None:
        raise UnsupportedError(
            f"calibration reads all weights while the model runs, and accelerate offloads those of {offloaded!r}; "
            "choose method='rtn', or load the model without offloading, as with device_map='cpu'"
        )


def check_linear_names(model: nn.Module, config: WeightConfig) -> None:
    """Raise UnsupportedError for a name in skip= or eight_bits= that no Linear has, and that would change nothing."""
    modules = dict(model.named_modules())
    linears = [n for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) or holds_experts(m) or is_product(m)]
    for keyword, wanted in [*(("skip", n) for n in config.skip), *(("eight_bits", n) for n in config.eight_bits)]:
        if not any(named(name, wanted) for name in linears):
            hint = _meant(wanted, modules, linears)
            raise UnsupportedError(f"{keyword}={wanted!r} is the name, or the end of the name, of no Linear; {hint}")


def _meant(wanted: str, modules: Iterable[str], linears: list[str]) -> str:
    inside = {
        wanted + name[len(around) :]
        for around in modules
        for name in linears
        if named(around, wanted) and name.startswith(f"{around}.")
    }
    ends = sorted({name.rpartition(".")[2] for name in linears})
    close = sorted(inside) or difflib.get_close_matches(wanted, [*ends, *linears], n=3)
    return f"did you mean {first_names(close)}?" if close else f"there are {first_names(ends)}"


def first_names(names: list[str], most: int = 8) -> str:
    return ", ".join([*map(repr, names[:most]), *(["..."] if len(names) > most else [])])


# -- what accelerate offloads --------------------------------------------------------------------------

NOTE = "read from where accelerate offloads it, and in memory from then on"
MOVED = "is moved between devices by accelerate"


def is_offloaded(module: nn.Module) -> bool:
    """Return whether the weight is brought in by a hook of the module, and not in memory between calls."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.device.type == "meta" and "_hf_hook" in vars(module)


def read_offloaded(module: nn.Module, name: str) -> Tensor:
    """Return an offloaded parameter as the hook of its module would bring it in.

    name: of the parameter in the model. Raises HfAccelError if it is not where the hook looks for it.
    """
    key = name.rpartition(".")[2]
    parameter, hook = module._parameters[key], vars(module)["_hf_hook"]
    assert parameter is not None
    try:
        tensor: Tensor = hook.weights_map[key]
    except Exception as error:  # a file that is gone or damaged, a name that is not in the index
        raise HfAccelError(f"{name!r} cannot be read from where accelerate offloads it: {error!r}") from error
    if tensor.shape != parameter.shape:
        found, expected = list(tensor.shape), list(parameter.shape)
        raise HfAccelError(f"{name!r} has the shape {found} where accelerate offloads it, and not {expected}")
    return tensor.detach().to("cpu", parameter.dtype)


def brings_in(module: nn.Module) -> bool:
    """Return whether hooks of accelerate bring the module's own parameters to the CPU for each call."""
    return any(
        type(hook) is AlignDevicesHook and hook.offload and _is_cpu(hook.execution_device)
        for hook in _hooks(vars(module).get("_hf_hook"))
    )


def hook_refusal(module: nn.Module, model: nn.Module) -> str | None:
    """Return why a Linear of a model must stay because of a hook of accelerate, as one clause; None if it need not.

    Known is one hook that takes inputs to the CPU, where they are if no part of the model is elsewhere, and brings the
    weights there; and under it the forward of the module's class.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None:
        return None
    if type(hook) is not AlignDevicesHook or hook.io_same_device or not _is_cpu(hook.execution_device):
        return MOVED
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if not places <= {"cpu", "disk"}:
        return MOVED  # its inputs may come from another device
    if not _calls_the_class(module):
        return "has a forward of its own under a hook of accelerate"
    on_meta = {parameter.device.type == "meta" for parameter in module._parameters.values() if parameter is not None}
    if on_meta != {bool(hook.offload)} or (hook.offload and hook.weights_map is None):
        return MOVED
    return None


def _hooks(hook: Any) -> Iterator[Any]:
    if isinstance(hook, SequentialHook):
        for each in hook.hooks:
            yield from _hooks(each)
    elif hook is not None:
        yield hook


def _is_cpu(device: Any) -> bool:
    """Return whether a hook's device is the CPU: accelerate takes names, numbers of GPUs, and torch's devices."""
    return isinstance(device, str | torch.device) and torch.device(device).type == "cpu"


def _calls_the_class(module: nn.Module) -> bool:
    """Return whether the forward is accelerate's function, around the forward of the module's class."""
    forward, inner = vars(module).get("forward"), vars(module).get("_old_forward")
    hooked = isinstance(forward, partial) and forward.func.__globals__.get("__name__") == "accelerate.hooks"
    ours = getattr(inner, "__self__", None) is module and getattr(inner, "__func__", None) is type(module).forward
    return hooked and ours
