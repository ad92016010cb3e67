"""Write a patched model as a compressed-tensors checkpoint, which vLLM and SGLang serve as it is."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer

from ...config import Activations, WeightConfig
from ...errors import HfAccelError, UnsupportedError
from ...hardware.atomic import replaced_folder
from ...keywords import one_of
from ...linear import QuantExperts, QuantLinear, Replacement, quantize
from ...linear.activations import EightBits
from ...linear.formats import Format, state
from ...models import layers_config
from ...patching.check import first_names
from ...patching.printed import Line
from ...patching.twin import twin
from ...undo.state import state_of
from ..readers.compressed_config import PACKED, Scheme, compressed_config, units
from ..readers.reader import headers_of
from .savable import Saved, bring_over, check_folder, check_room, refuse_infinite, savable

# What vLLM does not read of a weight that another program quantized.
UNREAD = {"input_order": "its inputs in an order of their own (act-order)", "weight_minimum": "minima for zero points"}
READ_BITS = (8, 4)
ROUNDED_TO: dict[Format, EightBits] = {"int": "int8", "fp8": "fp8"}


def save_compressed(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    activations: Activations = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: int | str = "5GB",
) -> Saved:
    """Write a patched model in the layouts of compressed-tensors; returns what was written and what that loses.

    INT4 is written as pack-quantized W4A16, the integers, scales and zero points as they are. INT8 is written as
    int-quantized W8A8 (activations rounded to INT8 per token as they come) where all INT8 layers round their
    activations here too, and else as pack-quantized W8A16: so activations are rounded there only where they are here,
    and the files are of the kinds that most engines read. activations="int8" or None asks for the one or the other.
    FP8 is written as float-quantized, W8A8 or W8A16 by the same rule ("fp8" asks for W8A8). Here a scale of rounded
    activations is for 128 inputs, there for a whole token; INT4 layers may round theirs here, there they do not.

    The head is written in floating point, since engines have none other: dequantized, or, where it is the embedding
    quantized, as the embedding alone, to which it is tied. Norms, embeddings and dense layers are written as they are,
    fused experts dequantized.

    The folder is replaced whole: a process killed at any moment leaves the old checkpoint or the new one (see
    hf_accel/hardware/atomic.py). Files of the old folder that are no part of a model, such as a tokenizer's, are kept.

    tokenizer: written next to the model. max_shard_size: as in save_pretrained.
    Raises UnsupportedError, with nothing written, for a model that is not patched, or cannot be written like this, and
    for a folder that cannot be replaced; HfAccelError if the disk does not take it.
    """
    one_of("activations", activations, ("auto", None, "int8", "fp8"))
    inner = _check(model)
    target = Path(folder)
    check_folder(target, inner)
    copy = twin(inner)
    experts = [name for name, module in copy.named_modules() if isinstance(module, QuantExperts)]
    for name, module in list(copy.named_modules()):
        if isinstance(module, Replacement) and not isinstance(module, QuantLinear):
            copy.set_submodule(name, module.original())
    content = _content(copy, activations)
    if experts:
        content.lines.append(Line("experts", f"{len(experts)} layers", "dequantized", "written in floating point"))
    check_room(target, content.bytes)
    with replaced_folder(target, errors=(SafetensorError,)) as unfinished:
        _write(copy, content, unfinished, max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        bring_over(target, unfinished)
    return Saved(target, content.bytes, tuple(content.lines))


# -- the model -----------------------------------------------------------------------------------------


def _check(model: nn.Module) -> PreTrainedModel:
    inner = savable(model)
    state_of(inner)
    if not any(isinstance(module, QuantLinear) for module in inner.modules()):
        raise UnsupportedError(
            "the model has no quantized layer; patch it with weights='int8' or 'int4', or use save_pretrained"
        )
    if any(Conv1D in vars(sys.modules[kind.__module__]).values() for kind in type(inner).__mro__):
        raise UnsupportedError(
            f"{type(inner).__name__} is made of Conv1D, which compressed-tensors does not know; use save_pretrained"
        )
    return inner


@dataclass
class Content:
    """The content to be written. tensors, schemes: by names in the model. tied: the head is the embedding."""

    tensors: dict[str, Tensor]
    schemes: dict[str, Scheme]
    tied: bool
    lines: list[Line]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _content(model: PreTrainedModel, activations: Activations) -> Content:
    """Return the content to be written. model: a copy, whose layers are left unpacked."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    head = model.get_output_embeddings()
    head_name = next((name for name, layer in layers.items() if layer is head), None)
    body = {name: layer for name, layer in layers.items() if layer is not head}
    rounds = {kind: _rounds(body, kind, activations) for kind in ROUNDED_TO}
    schemes = {name: _scheme(name, layer, rounds.get(layer.layout.format, False)) for name, layer in body.items()}
    _check_units(model, schemes)
    for layer in layers.values():
        layer.unpack()
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name, scheme in schemes.items():
        if scheme.layout.bits == 8 and scheme.format == PACKED:
            integers = tensors.pop(f"{name}.weight")
            tensors[f"{name}.weight_packed"] = pack_bytes(integers)
            tensors[f"{name}.weight_shape"] = torch.tensor(integers.shape)
    lines = [
        Line("weights", f"{n} linears", kind.label, _meaning(kind)) for kind, n in Counter(schemes.values()).items()
    ]
    for name, tensor in tensors.items():
        refuse_infinite(name, tensor)
    tied = False
    if head_name is not None:
        tied = _is_embedding(model, head_name, layers[head_name])
        for suffix in state(layers[head_name].quantized):
            del tensors[f"{head_name}.{suffix}"]
        if not tied:
            tensors[f"{head_name}.weight"] = layers[head_name].quantized.dequantize(layers[head_name].compute_dtype)
        lines.append(_head_line(head_name, layers[head_name], tied))
    return Content(tensors, schemes, tied, lines)


def _rounds(layers: Mapping[str, QuantLinear], kind: Format, activations: Activations) -> bool:
    """Return whether weights of 8 bits of this kind are written with activations of the same kind."""
    eight = {name: layer for name, layer in layers.items() if (layer.layout.bits, layer.layout.format) == (8, kind)}
    grouped, wanted = (
        next((name for name, layer in eight.items() if layer.layout.group_size is not None), None),
        ROUNDED_TO[kind],
    )
    if activations == wanted and grouped is not None:
        raise UnsupportedError(
            f"activations={wanted!r} was asked for, but {grouped!r} has a scale for each group of inputs, which "
            f"engines multiply by {wanted.upper()} activations nowhere; leave activations= out"
        )
    if activations != "auto" or grouped is not None:
        return activations == wanted
    choices = [layer.pack().choice for layer in eight.values()]
    return all(choice is not None and choice.backend.activations == wanted for choice in choices)


def _scheme(name: str, layer: QuantLinear, rounds: bool) -> Scheme:
    weight = layer.quantized
    for part, meaning in UNREAD.items():
        if getattr(weight, part) is not None:
            raise UnsupportedError(f"{name!r} has {meaning}, which vLLM does not read; use save_pretrained")
    layout = replace(weight.layout, scale_dtype=None)
    if layout.format == "fp8" and layout.group_size is not None:
        raise UnsupportedError(
            f"{name!r} has FP8 scales for groups of inputs, which are not written so; use save_pretrained"
        )
    if layout.format not in ROUNDED_TO:
        raise UnsupportedError(f"{name!r} is in {layout.label.upper()}, which is not written so; use save_pretrained")
    if layout.bits not in READ_BITS:
        raise UnsupportedError(f"{name!r} has {layout.bits} bits, and vLLM reads 8 and 4; use save_pretrained")
    return Scheme(layout, rounds=rounds and layout.bits == 8)


def _check_units(model: PreTrainedModel, schemes: Mapping[str, Scheme]) -> None:
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for unit in units(linears):
        kinds = {name: schemes[name].label if name in schemes else "dense" for name in unit}
        if len(set(kinds.values())) > 1:
            described = ", ".join(f"{name.rpartition('.')[2]} is {kind}" for name, kind in kinds.items())
            names = [name.rpartition(".")[2] for name in unit]
            raise UnsupportedError(
                f"vLLM and SGLang make one tensor of {first_names(names)} of {unit[0].rpartition('.')[0]!r}, which "
                f"must be stored in one way, but {described}; patch all of them in one way, or leave all alone with "
                f"weights=WeightConfig(skip={names})"
            )


def pack_bytes(integers: Tensor) -> Tensor:
    """Pack int8 [out, in] -> int32 [out, ceil(in / 4)], q + 128, the first of four in the lowest bits."""
    padded = F.pad(integers, (0, -integers.shape[1] % 4), value=-128)
    return (padded.view(torch.uint8) ^ 128).view(torch.int32)


def _is_embedding(model: PreTrainedModel, name: str, head: QuantLinear) -> bool:
    """Return whether the head is what quantizing the embedding gives, and the class can tie the two."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    can = any(re.fullmatch(pattern, f"{name}.weight") for pattern in type(model)._tied_weights_keys or ())
    if not can or weight is None or tuple(weight.shape) != (head.out_features, head.in_features):
        return False
    if torch.equal(head.quantized.dequantize(weight.dtype), weight):  # it was read from the very same blocks
        return True
    mine, config = state(head.quantized), WeightConfig(bits=8)
    for rows in (slice(1), slice(None)):  # the first row says it of most that are not
        its = state(quantize(weight[rows], config))
        if mine.keys() != its.keys() or not all(torch.equal(mine[key][rows], its[key]) for key in mine):
            return False
    return True


def _meaning(scheme: Scheme) -> str:
    if scheme.rounds:
        return f"{scheme.layout}; a scale for each token's activations, where here it is for 128 inputs"
    return f"{scheme.layout}; activations stay in floating point there"


def _head_line(name: str, head: QuantLinear, tied: bool) -> Line:
    size = head.in_features * head.out_features * head.compute_dtype.itemsize
    kind = head.spec.layout.label.upper()
    lost = f"engines read {size / 1e6:,.1f} MB for it where {kind} takes {head.spec.weight_bytes / 1e6:,.1f}"
    if tied:
        return Line(
            "head",
            name,
            "the embedding, dense",
            f"tied, so not rounded to {kind} as it is here; {lost}",
        )
    return Line("head", name, "dense", f"the {kind} numbers in floating point; {lost}")


# -- the files -----------------------------------------------------------------------------------------


class CompressedWriter(HfQuantizer):
    """Hands save_pretrained the tensors of a compressed checkpoint."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.tensors, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _write(copy: Any, content: Content, folder: Path, max_shard_size: int | str) -> None:
    """Save `copy`, then give its config.json the names that the files hold."""
    copy.hf_quantizer = CompressedWriter(dict(content.tensors))
    del copy.config.quantization_config
    if content.tied:
        for config in (copy.config, layers_config(copy.config)):
            config.tie_word_embeddings = True
    copy.save_pretrained(folder, max_shard_size=max_shard_size)
    names = _stored_names(copy, list(content.schemes))
    shapes = {name: found.shape or () for name, found in headers_of(sorted(folder.glob("*.safetensors")))}
    lost = [name for name in content.schemes if f"{names.get(name)}.weight_scale" not in shapes]
    if lost:
        raise HfAccelError(f"transformers stores {lost[0]!r} under a name that is not known; use save_pretrained")
    # Engines know a layer by its name in the checkpoint, transformers by that in the model.
    schemes = {names[name]: scheme for name, scheme in content.schemes.items()} | content.schemes
    ignore = _dense(copy, shapes, schemes)
    copy.config.quantization_config = compressed_config(schemes, ignore)
    copy.config.save_pretrained(folder)
    experts = sum(1 for name in ignore if ".experts" in name)
    if experts:
        reason = "transformers 5.23 loads no such checkpoint through compressed-tensors; vLLM reads what ignore= names"
        content.lines.append(Line("experts", f"{experts} names", "as they are", reason))


def _stored_names(model: PreTrainedModel, names: Sequence[str]) -> dict[str, str]:
    """Return each module's name in a checkpoint; transformers renames on saving."""
    numbered = {f"{name}.weight_scale": torch.tensor(number) for number, name in enumerate(names)}
    reverted = revert_weight_conversion(model, numbered)
    return {names[int(number)]: name.removesuffix(".weight_scale") for name, number in reverted.items()}


def _dense(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], quantized: Mapping[str, Scheme]
) -> list[str]:
    """List the weights that are multiplied by but not quantized, by their names in the checkpoint and in the model."""
    modules = dict(model.named_modules())
    tables = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
    embeddings = {*tables, *_stored_names(model, tables).values()}
    names = ["lm_head"]
    for name, shape in shapes.items():
        owner, _, suffix = name.rpartition(".")
        if (len(shape) == 2 and suffix == "weight") or len(shape) == 3:  # experts in one tensor
            names.append(owner)
    names += [
        name for name, module in modules.items() if type(module) is not QuantLinear and isinstance(module, nn.Linear)
    ]
    names = [name for name in names if name not in embeddings]
    return [name for name in dict.fromkeys(names) if name not in quantized]
