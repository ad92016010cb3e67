"""AccelConfig, and the quantizer that transformers calls while it saves a model with quantized layers.

loading.py has the part that loads them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import KeywordsWithoutWeights, PatchConfig, Weights
from ..config.fit import take_fit
from ..config.patch_config import LEFT_OUT, check_patch_keywords, takes_patch_keywords
from ..errors import UnsupportedError
from ..recognition.trial import RandomNumbers, Tolerance, agree
from ..recognition.unchanged import has_own_forward
from ..tensors import is_plain_tensor, is_sharded
from .embedding import QuantEmbedding
from .experts import grouped, one_by_one
from .formats import KINDS
from .formats.blocks import VERSION, VERSION_SETTING, Blocks
from .gates import EXPERTS_FORWARDS, activated
from .layer import QuantModule
from .layer_settings import SCALE_DTYPES, parse_modules, parse_tables, without_idle_groups
from .layer_state import blanks, file_state
from .model_card import METHOD as METHOD  # which others take from here


class AccelConfig(QuantizationConfigMixin):
    """`from_pretrained(path, quantization_config=hf_accel.AccelConfig(weights="int4"))` loads patched, whole.

    Takes the keywords of hf_accel.patch; AccelConfig("int4") is AccelConfig(weights="int4"). save_pretrained writes it
    into config.json with the modules that are quantized: from_pretrained(folder) needs nothing but `import hf_accel`.

    fit: a memory, for which bits, cache and tokens are chosen while the model is loaded: see hf_accel.load().
    tables: the head's name by that of an embedding that looks its rows up there.
    stored_as: the quantization_config of a checkpoint of another program, while hf_accel.load() reads it.
    check_files: how hf_accel.load() has the files of a float checkpoint checked; None: from_pretrained() only warns.
    """

    check_files: dict[str, Any] | None = None

    @takes_patch_keywords
    def __init__(
        self,
        weights: Weights = "int8",
        *,
        modules: Mapping[str, Mapping[str, Any]] | None = None,
        tables: Mapping[str, str] | None = None,
        stored_as: Mapping[str, Any] | None = None,
        fit: Any = None,
        **others: Unpack[KeywordsWithoutWeights],
    ) -> None:
        keywords: dict[str, Any] = {"weights": weights, "fit": fit, **others}
        self.fit = take_fit(keywords)
        keywords.pop("quant_method", None)  # which a checkpoint's config has
        self.stored_as = None if stored_as is None else dict(stored_as)
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers takes any registered name
        check_patch_keywords("AccelConfig", (name for name in keywords if name != "config"))
        self.modules = parse_modules(modules)
        keywords["weights"] = without_idle_groups(keywords.get("weights", LEFT_OUT), self.modules)
        self.patch = PatchConfig.build(**keywords)
        self.tables = parse_tables(tables, self.modules)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; AccelConfig(**config.to_dict()) is equal."""
        keywords = {name: value for name, value in self.patch.to_dict().items() if name in self.patch.explicit}
        modules = {"modules": self.modules} if self.modules else {}
        stored_as = {"stored_as": self.stored_as} if self.stored_as else {}
        tables = {"tables": self.tables} if self.tables else {}
        return {"quant_method": self.quant_method, **keywords, **modules, **tables, **stored_as}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


class AccelQuantizer(HfQuantizer):
    """The answers to transformers about a model with quantized layers, when it saves or trains it."""

    quantization_config: AccelConfig

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Called by save_pretrained before it writes the config: which modules are quantized now, and their tensors.

        Raises UnsupportedError for layers of which this process holds a part.
        """
        layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}
        part = next((name for name, layer in layers.items() if layer.part), None)
        if part is not None:
            raise UnsupportedError(
                f"{part!r} is quantized, and this rank holds a part of it: the model cannot be saved so. Save it from "
                "one process that has the whole model (hf-accel quantize), or call hf_accel.unpatch(model) and save "
                "the float weights"
            )
        self.quantization_config.modules = {n: m.layout.module_settings(m.activations) for n, m in layers.items()}
        self.quantization_config.tables = stored_tables(model)
        # Of a model with adapters, or on several devices, transformers writes less than all, or fetches it.
        apart = getattr(model, "hf_device_map", None) or getattr(model, "_hf_peft_config_loaded", False)
        in_blocks = not apart and keeps_endings(model, [field.name for field in fields(Blocks)])
        written = file_state(model, layers) if in_blocks else None
        if written is None:
            return None, {}
        for name in written[1]:
            self.quantization_config.modules[name][VERSION_SETTING] = VERSION
        tensors = remove_tied_weights_from_state_dict(written[0], model)
        ignored = model._keys_to_ignore_on_save or ()
        renamed = get_model_conversion_mapping(model, add_legacy=False)  # then the names in the file are not these
        return tensors, {} if renamed else blanks({n: t for n, t in tensors.items() if n not in ignored})

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top can be trained; the quantized weights themselves cannot."""
        return True


def is_split(model: nn.Module) -> bool:
    """Return whether this process holds only a part of some weights."""
    quantized = any(isinstance(layer, QuantModule) and layer.part for layer in model.modules())
    return quantized or any(is_sharded(parameter) for parameter in model.parameters())


def stored_tables(model: nn.Module) -> dict[str, str]:
    """Return the quantized head of each embedding that looks its rows up in one, by their names.

    Raises UnsupportedError for a head that is no part of the model.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embeddings = {n: m for n, m in model.named_modules() if isinstance(m, QuantEmbedding) and m.is_shared}
    alone = next((name for name, embedding in embeddings.items() if id(embedding.head) not in names), None)
    if alone is not None:
        raise UnsupportedError(
            f"{alone!r} looks its rows up in a head that is not in this model, and cannot be saved without it; "
            "save the whole model, or call hf_accel.unpatch(model) before"
        )
    return {name: names[id(embedding.head)] for name, embedding in embeddings.items()}


def lost_on_saving(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return whether transformers, which renames and joins tensors while it saves, would not find a module's own
    again.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions:
        return lambda name: False
    if not keeps_endings(model, {field.name for kind in KINDS.values() for field in fields(kind)}):
        return lambda name: True
    there = [entry.reverse_transform() for entry in reversed(conversions)]

    def is_lost(name: str) -> bool:
        for tensor in (f"{name}.weight", f"{name}.weight_scale"):
            stored, converter = rename_source_key(tensor, *by_kind(there), reverse=True)
            if converter is not None or rename_source_key(stored, *by_kind(conversions))[0] != tensor:
                return True
        return False

    return is_lost


def keeps_endings(model: PreTrainedModel, endings: Iterable[str]) -> bool:
    """Return whether transformers leaves the last parts of tensors' names as they are when it loads and saves a model.

    Kimi K2.5's `blocks` become `layers`, and so would the name of our blocks.
    """
    here, there = get_model_conversion_mapping(model), get_model_conversion_mapping(model, add_legacy=False)
    ways = (by_kind(here), by_kind([entry.reverse_transform() for entry in reversed(there)]))
    return all(rename_source_key(f"-.{e}", *way)[0].endswith(f".{e}") for e in endings for way in ways)


def by_kind(conversions: Sequence[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """transformers' conversions, as rename_source_key takes them."""
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in conversions if isinstance(entry, WeightConverter)]


Pieces = tuple[tuple[tuple[Path, str], ...], ...]


def stored_experts(model: PreTrainedModel, files: Mapping[str, Path]) -> dict[str, Pieces]:
    """Find the weights of a checkpoint that transformers joins while it loads them: one for each expert.

    files: the file of each stored tensor. By the name in the model: of each expert, the files and names of the tensors
    that lie end to end. Left out where a piece is missing.
    """
    pieces = {}
    for name, (places, size) in _expert_places(model, files).items():
        experts = range(len(places) // size)
        if places.keys() == {(expert, piece) for expert in experts for piece in range(size)}:
            named = {place: (files[stored], stored) for place, stored in places.items()}
            pieces[name] = tuple(tuple(named[expert, piece] for piece in range(size)) for expert in experts)
    return pieces


def lost_expert(model: PreTrainedModel, stored: Collection[str]) -> tuple[str, int] | None:
    """The name in the model, and the number, of an expert of which `stored`, names in a checkpoint, lack a piece."""
    shapes = model.state_dict()
    for name, (places, size) in _expert_places(model, stored).items():
        for expert in range(shapes[name].shape[0] if name in shapes else 0):
            if any((expert, piece) not in places for piece in range(size)):
                return name, expert
    return None


Places = dict[tuple[int, int], str]  # the stored name of each (expert, piece)


def _expert_places(model: PreTrainedModel, stored: Collection[str]) -> dict[str, tuple[Places, int]]:
    """By the name in the model: where its experts are, and the number of pieces of one."""
    renamings, converters = by_kind(get_model_conversion_mapping(model, add_legacy=False))
    joining = {pattern: one for one in converters if _joins_experts(one) for pattern in one.source_patterns}
    found: dict[str, tuple[Places, int]] = {}
    for own in stored if joining else ():
        name, pattern = rename_source_key(own, renamings, converters)
        if pattern not in joining:
            continue
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), rename_source_key(own, renamings, [])[0])
        if number is not None:
            patterns = joining[pattern].source_patterns
            places, _ = found.setdefault(name, ({}, len(patterns)))
            places[int(number[1]), patterns.index(pattern)] = own
    return found


def _joins_experts(converter: WeightConverter) -> bool:
    """Return whether it stacks the weights of all experts, after laying several of each end to end."""
    kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
    whole = [(MergeModulelist, 0), (Concatenate, 1)]
    return kinds == (whole if len(converter.source_patterns) > 1 else whole[:1])


# -- experts -------------------------------------------------------------------------------------------


def with_outputs_first(experts: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight of experts, or another tensor of its shape, as [experts, out, in]."""
    return weight.transpose(1, 2) if getattr(experts, "is_transposed", False) else weight


def experts_refusal(module: nn.Module) -> str | None:
    """Return why QuantExperts cannot stand for this module, as one clause; None if it can.

    Its forward has to be that of transformers' experts interface, and to compute what `grouped` does.
    """
    kind = type(module).__name__
    if getattr(type(module).forward, "__code__", None) is not _decorated_code() or has_own_forward(module):
        return f"{kind} has a forward of its own"
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return f"{kind} norms what experts say, or has a part of the experts only"
    first, has_bias = ("gate_up_proj" if _has(module, "has_gate") else "up_proj"), _has(module, "has_bias")
    expected = {first, "down_proj", *((f"{first}_bias", "down_proj_bias") if has_bias else ())}
    if set(module._parameters) != expected or module._buffers:
        return f"{kind} has {', '.join(sorted(module._parameters))}, which is not what its settings say"
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not all(is_plain_tensor(p) and p.dtype in SCALE_DTYPES.values() for p in parameters):
        return f"{kind} has {parameters[0].dtype} weights in a {type(parameters[0]).__name__}"
    if hasattr(module, "_hf_hook"):
        return "are moved between devices by accelerate"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    own = ALL_EXPERTS_FUNCTIONS.get(implementation, None) if implementation in EXPERTS_FORWARDS[2:] else None
    if implementation not in EXPERTS_FORWARDS or (own is not None and own.__module__ != moe.__name__):
        return f"their forward was set to {implementation!r}, which may do what ours does not"
    return None if _agrees(module, first) else f"the forward of {kind} is not what we know"


def _has(module: nn.Module, setting: str) -> bool:
    return bool(getattr(module, setting, False))


@functools.cache
def _decorated_code() -> Any:
    """The code of every forward that transformers' decorator makes."""

    class Probe(nn.Module):
        pass

    decorated: Any = use_experts_implementation(Probe)
    return decorated.forward.__code__


def _agrees(module: nn.Module, first: str) -> bool:
    """Return whether the class's own forward, on small random weights with the module's settings, gives what ours
    does.
    """
    kind, has_gate, experts, hidden, inner = type(module), _has(module, "has_gate"), 3, 8, 6
    numbers = RandomNumbers()
    small: Any = kind.__new__(kind)
    nn.Module.__init__(small)
    vars(small).update({name: value for name, value in vars(module).items() if name not in vars(small)})
    small._modules.update(module._modules)
    small.num_experts = experts
    weights = {first: numbers(experts, inner * (1 + has_gate), hidden), "down_proj": numbers(experts, hidden, inner)}
    biases = {name: numbers(experts, weight.shape[1]) for name, weight in weights.items() if _has(module, "has_bias")}
    for name, weight in weights.items():
        small._parameters[name] = nn.Parameter(with_outputs_first(module, weight).contiguous())
    small._parameters.update({f"{name}_bias": nn.Parameter(bias) for name, bias in biases.items()})

    def expert(index: int, rows: Tensor) -> Tensor:
        up = F.linear(rows, weights[first][index], biases[first][index] if biases else None)
        out = activated(small, kind, up)
        return F.linear(out, weights["down_proj"][index], biases["down_proj"][index] if biases else None)

    x, scores = numbers(5, hidden), numbers(5, 2).softmax(-1)
    chosen = torch.tensor([[0, 2], [2, 0], [1, 2], [0, 1], [2, 1]], device="cpu")
    return agree(
        lambda: cast(Any, kind.forward).__wrapped__(small, x, chosen, scores),
        lambda: grouped(
            x, chosen, scores, experts=experts, compute=lambda rows, starts: one_by_one(rows, starts, expert)
        ),
        Tolerance(relative=1e-4, absolute=1e-4),
    )
