"""Checks that the files of a checkpoint hold the tensors of the model that its config.json describes.

They run before anything is loaded. transformers would fill in random numbers for missing tensors and ignore unknown
ones, each in a line of a long report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key

from ..errors import HfAccelError
from ..hardware import release
from ..linear.formats import converts
from ..linear.hf import by_kind, lost_expert
from ..models import layers_config
from ..patching.originals import remaining_ties
from .readers.reader import Described, Found

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AGAIN = "save the model again with save_pretrained, or load the float one with quantization_config=AccelConfig(...)"
COPY = (
    "copy the checkpoint again; if it is meant to be so, load it with from_pretrained(), which warns and goes on, and "
    "call hf_accel.patch(model)"
)
AT_ONCE = 2**22  # numbers that are looked at for NaN


def check_float_model(
    model: PreTrainedModel, headers: Iterable[tuple[str, Found]], *, key_mapping: dict[str, str] | None = None,
    shapes: bool = True,
) -> None:  # fmt: skip
    """Raise HfAccelError unless `headers`, those of a checkpoint, are what a float model needs.

    model: on the meta device. key_mapping: as from_pretrained() takes it. shapes: whether they have to be the model's.
    """
    expected = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    stored = dict(headers)
    found = dict(own_names(model, expected, stored.items(), key_mapping=key_mapping))
    _check_names(model, expected, with_shared(found, shared_names(model, ())), strict=False, again=COPY)
    lost = lost_expert(model, stored)
    if lost is not None:
        raise HfAccelError(f"the checkpoint lacks a piece of expert {lost[1]} of {lost[0]!r}; {COPY}")
    check_tensors(expected, found, shapes=shapes, again=COPY)
    check_values(model, found, again=COPY)


def check_report(model: PreTrainedModel, missing_keys: Collection[str], unexpected_keys: Collection[str]) -> None:
    """Raise HfAccelError for what transformers reported of a checkpoint that it has loaded itself."""
    for name in sorted(missing_keys):
        raise missing(model, name, again=COPY)
    expected = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    for name in sorted(unexpected_keys):
        if _is_of_more_layers(name, expected) and not passed_over(model, name):
            raise _no_place(model, name, COPY)


# -- names ---------------------------------------------------------------------------------------------


def own_names(
    model: PreTrainedModel, expected: Mapping[str, Tensor], headers: Iterable[tuple[str, Found]], *,
    key_mapping: dict[str, str] | None = None,
) -> Iterator[tuple[str, Found]]:  # fmt: skip
    """Return what files hold, by the names that transformers will give to it in the model.

    expected: the model's tensors by name; the files may hold some of them.
    """
    names_of = renamer(model, expected, key_mapping)
    for stored_as, found in headers:
        names, is_whole = names_of(stored_as)
        for name in names:
            yield name, found if is_whole else Found(found.dtype, None, found.read)


def renamer(
    model: PreTrainedModel, expected: Mapping[str, Tensor], key_mapping: dict[str, str] | None = None
) -> Callable[[str], tuple[list[str], bool]]:
    """Return a function from a name in a file to the names in the model, and whether a tensor gets there unchanged."""
    renamings, converters = by_kind(get_model_conversion_mapping(model, key_mapping))
    targets = {pattern: entry.target_patterns for entry in converters for pattern in entry.source_patterns}
    prefix, known = model.base_model_prefix, dict(expected)

    def names_of(stored_as: str) -> tuple[list[str], bool]:
        name, pattern = rename_source_key(stored_as, renamings, converters, prefix, known)
        if name not in expected and stored_as in expected:
            name, pattern = rename_source_key(stored_as, [], [], prefix, known)
        if pattern is None:
            return [name], True
        return [name.replace(targets[pattern][0], target) for target in targets[pattern]], False

    return names_of


def shared_names(model: PreTrainedModel, quantized: Collection[str]) -> list[set[str]]:
    """Return sets of names of one tensor: of tied weights, or of a module at two places. A file has one of the names.

    quantized: names of the modules whose weights are no longer tied.
    """
    groups: dict[object, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), set()).add(name)
    for target, source in remaining_ties(model.all_tied_weights_keys, quantized).items():
        groups.setdefault(source, {source}).add(target)
    return [names for names in groups.values() if len(names) > 1]


def with_shared(found: Mapping[str, Found], shared: Iterable[set[str]]) -> dict[str, Found]:
    """Return what was found, with each tensor that a model shares by all of its names."""
    stored = dict(found)
    for names in shared:
        present = next((name for name in sorted(names) if name in stored), None)
        if present is not None:
            stored = dict.fromkeys(names, stored[present]) | stored
    return stored


def check_floats(model: PreTrainedModel, floats: Mapping[str, Tensor], stored: Mapping[str, Found]) -> None:
    """Raise HfAccelError unless the files hold the tensors outside of the quantized layers, and no others."""
    if type(model).__name__ in (model.config.architectures or ()):  # another class may have a new head
        _check_names(model, floats, stored, strict=True)
    check_tensors(floats, stored)
    check_values(model, {name: found for name, found in stored.items() if name in floats})


def _check_names(
    model: PreTrainedModel, expected: Mapping[str, Tensor], found: Mapping[str, Found], *, strict: bool,
    again: str = AGAIN,
) -> None:  # fmt: skip
    """Raise HfAccelError for tensors that are missing, and for those without a place.

    strict: whether all must have a place, or only those that show that config.json is of another model.
    """
    optional = set(model._keys_to_ignore_on_save or ())
    for name in sorted(expected.keys() - found.keys() - optional):
        if not _matches(name, model._keys_to_ignore_on_load_missing) and not name.endswith("num_batches_tracked"):
            raise missing(model, name, instead=_sibling_of(name, found.keys() - expected.keys()), again=again)
    for name in sorted(found.keys() - expected.keys()):
        lost = strict or _is_of_more_layers(name, expected) or _is_lost_bias(name, expected, found[name])
        if lost and not passed_over(model, name):
            raise _no_place(model, name, again)


def passed_over(model: PreTrainedModel, name: str) -> bool:
    """Return whether transformers ignores a tensor of this name: old buffers, and layers that draft."""
    if _matches(name, model._keys_to_ignore_on_load_unexpected) or "rotary_emb.inv_freq" in name:
        return True
    if name.rpartition(".")[2] == "position_ids":
        return True
    config = layers_config(model.config)
    drafting, count = getattr(config, "num_nextn_predict_layers", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(drafting, int) or not isinstance(count, int):
        return False
    return any(count <= int(number) < count + drafting for number in re.findall(r"(?<=\blayers\.)\d+(?=\.)", name))


def _is_of_more_layers(name: str, expected: Mapping[str, Tensor]) -> bool:
    """Return whether the tensor belongs to a member of a list that the model has, after the members that the model
    has.
    """
    for place in re.finditer(r"(?<=\.)\d+(?=\.)", f".{name}"):
        start, end = place.start() - 1, place.end() - 1
        same = re.compile(re.escape(name[:start]) + r"\d+" + re.escape(name[end:]))
        if not any(own.startswith(name[: end + 1]) for own in expected) and any(map(same.fullmatch, expected)):
            return True
    return False


def _is_lost_bias(name: str, expected: Mapping[str, Tensor], found: Found) -> bool:
    """Return whether it is a bias, not of zeros, of a layer that has none in the model."""
    module, _, suffix = name.rpartition(".")
    if suffix != "bias" or f"{module}.weight" not in expected or found.dtype not in FLOATS:
        return False
    return bool(found.read().any())


def _matches(name: str, patterns: Collection[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _sibling_of(name: str, others: Collection[str]) -> str | None:
    """Describe what a file holds of the module that a missing tensor belongs to."""
    module = name.rpartition(".")[0]
    return min((other for other in others if other.startswith(f"{module}.")), default=None)


# -- tensors -------------------------------------------------------------------------------------------


def check_tensors(
    floats: Mapping[str, Tensor], stored: Mapping[str, Found], *, shapes: bool = True, again: str = AGAIN
) -> None:
    """Raise HfAccelError for another kind of numbers, and for another shape."""
    for name in sorted(floats.keys() & stored.keys()):
        found = stored[name] if shapes else Found(stored[name].dtype, None, stored[name].read)
        if converts(floats[name].dtype) or found.dtype in FLOATS:
            check_tensor(name, floats[name], found, again=again)
        elif shapes and found.shape is not None and found.shape != tuple(floats[name].shape):
            raise _misshapen(name, floats[name], found, again)


def check_tensor(
    key: str, expected: Tensor | Described, found: Found, described: str = "", *, again: str = AGAIN
) -> None:
    """Raise HfAccelError unless a tensor has the dtype, or is a float for a float, and the shape."""
    as_described = f" with {described}" if described else ""
    same_kind = found.dtype in FLOATS if converts(expected.dtype) else found.dtype == expected.dtype
    if not same_kind:
        wanted = "a floating-point dtype" if converts(expected.dtype) else expected.dtype
        raise HfAccelError(f"{key!r} is {found.dtype} in the checkpoint, but must be {wanted}{as_described}; {again}")
    if found.shape is not None and found.shape != tuple(expected.shape):
        raise _misshapen(key, expected, found, again, as_described=as_described)


def check_values(model: PreTrainedModel, found: Mapping[str, Found], *, again: str = AGAIN) -> None:
    """Raise HfAccelError for NaN and infinity in norms, biases and embeddings; packing looks at the rest."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in found or found[name].dtype not in FLOATS:
            continue
        if parameter.dim() > 1 and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            continue
        values = found[name].read()
        check_finite(name, values, again=again)
        release(values)


def check_finite(name: str, values: Tensor, *, again: str = AGAIN) -> None:
    """Raise HfAccelError for NaN and infinity, with the first place that has one."""
    # A sum with NaN or infinity is not finite. One without may be too large: then the numbers are looked at in pieces.
    if values.device.type == "meta" or math.isfinite(values.sum().item()):
        return
    start = 0
    for part in values.flatten().split(AT_ONCE):
        least, most = part.aminmax()
        if not (least.isfinite() and most.isfinite()):
            place = _place(start + int((~part.isfinite()).nonzero()[0]), values.shape)
            raise HfAccelError(f"{name!r} holds NaN or infinity at {place} in the checkpoint; {again}")
        start += len(part)


def _place(number: int, shape: Sequence[int]) -> list[int]:
    place: list[int] = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        place.insert(0, index)
    return place


def missing(
    model: PreTrainedModel, key: str, described: str = "", *, instead: str | None = None, again: str = AGAIN
) -> HfAccelError:
    needs = f"a layer with {described}" if described else type(model).__name__
    there = f"; it holds {instead!r}, and config.json says nothing of that" if instead else ""
    return HfAccelError(f"the checkpoint has no {key!r}, which {needs} needs{there}; {again}")


def _misshapen(
    key: str, expected: Tensor | Described, found: Found, again: str, *, as_described: str = ""
) -> HfAccelError:
    return HfAccelError(
        f"{key!r} is {list(found.shape or ())} in the checkpoint, but {list(expected.shape)} in the model that "
        f"config.json describes{as_described}; {again}"
    )


def _no_place(model: PreTrainedModel, name: str, again: str) -> HfAccelError:
    return HfAccelError(
        f"the checkpoint holds {name!r}, which {type(model).__name__} has no place for: config.json describes it "
        f"without that part, or does not list the module as quantized; {again}"
    )
