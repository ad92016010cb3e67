"""Adapters of requests, from the folders that PEFT saves: LoRA of linear layers, and what of it is refused."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from ...cache.hf import page_groups
from ...cache.pages import Pages
from ...cache.pass_rows import Parts, rows_of_passes
from ...cache.step import Step
from ...config import CacheConfig
from ...errors import UnsupportedError
from ...fused.hf.layer_calls import TracedForward
from ...kernels.cpu.library import FLOATS
from ...linear import QuantLinear
from ...linear.adapters import Adapter, LowRankPart, pass_adapters
from ...tensors import model_device
from ...undo.state import state_of
from .model_runner import ModelRunner

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of tensors
TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
# Fields of a LoraConfig that are honoured, and those that say how an adapter was trained or where it comes from.
HONOURED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "exclude_modules",
    "layers_to_transform", "layers_pattern",
}  # fmt: skip
OF_TRAINING = {
    "task_type", "inference_mode", "lora_dropout", "base_model_name_or_path", "revision", "auto_mapping",
    "peft_version", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying",
    "eva_config", "corda_config", "lora_ga_config", "arrow_config", "loftq_config", "init_lora_weights", "bias",
    "velora_config",
}  # fmt: skip
# Ways to begin that leave the weights of the model as they are. Others train next to weights that they have changed.
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


class LoadedAdapters:
    """The adapters that requests of one model can name. Any thread may use it."""

    def __init__(self, model: PreTrainedModel, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """pause: makes a block within which no pass runs."""
        self._model, self._pause = model, pause
        self._loaded: dict[str, Adapter] = {}
        self._tried: set[frozenset[nn.Module]] = set()  # layers of adapters
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in list(self._loaded.values()))

    def load(self, name: str, path: str | PathLike[str]) -> None:
        """Load an adapter. Raises UnsupportedError for a name that is taken, and what read_adapter raises."""
        adapter = read_adapter(self._model, name, path)
        layers = frozenset(adapter.parts)
        if layers not in self._tried:
            with self._pause():
                refuse_other_rows(self._model, adapter)
        with self._lock:
            self._tried.add(layers)
            if name in self._loaded:
                raise UnsupportedError(
                    f"an adapter {name!r} is loaded already; unload it first, or give this one another name"
                )
            self._loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that have it go on with it. Raises UnsupportedError if there is none."""
        with self._lock:
            self.named(name)
            del self._loaded[name]

    def named(self, name: str) -> Adapter:
        """Return an adapter. Raises UnsupportedError if there is none of this name."""
        adapter = self._loaded.get(name)
        if adapter is None:
            known = ", ".join(map(repr, self._loaded)) or "none is"
            raise UnsupportedError(f"no adapter {name!r} is loaded ({known}); call load_adapter({name!r}, path)")
        return adapter


def read_adapter(model: PreTrainedModel, name: str, path: str | PathLike[str]) -> Adapter:
    """Read the folder of a LoRA adapter that PEFT has saved, for a patched model.

    Its matrices are kept in the dtype of the model, and multiplied with float32 sums. Raises UnsupportedError for
    another kind of adapter, for one that does not fit the model, and for a model whose requests can have none.
    """
    where = f"adapter {name!r} ({path})"
    refusal = model_refusal(model)
    if refusal is not None:
        raise UnsupportedError(f"{where}: requests of this model can have no adapter: {refusal}")
    config, tensors = _config(Path(path), where), _tensors(Path(path), where)
    layers = _named_layers(tensors, where)
    parts: dict[nn.Module, LowRankPart] = {}
    known = _known_layers(model)
    for layer, matrices in layers.items():
        module, reason = known.get(layer), None
        if module is None:
            reason = _layer_refusal(model, layer)
        elif not _is_target(layer, config["target_modules"]):
            reason = f"its target_modules {config['target_modules']!r} do not name it, so that PEFT leaves it out"
        elif module in parts:
            reason = "the model calls one module by two names"
        else:
            reason = _shape_refusal(module, matrices)
        if reason is not None or module is None:
            raise UnsupportedError(f"{where}: {layer!r}: {reason}; load it into the model that it was trained for")
        dtype = _dtype_of(module)
        a, b = (matrices[each].to(dtype) for each in "AB")
        parts[module] = LowRankPart(a, b, _scale(layer, config, len(a), where))
    if not parts:
        raise UnsupportedError(f"{where}: {WEIGHTS} holds nothing that could be added to a layer")
    LowRankPart.put_together(parts.values())
    traced = {child for layer in model.modules() if isinstance(layer, TracedForward) for child in layer.modules()}
    return Adapter(name, parts, frozenset(parts.keys() - traced), _salt(config, tensors))


def adapters_of_prompts(model: PreTrainedModel, given: Any, count: int) -> list[Adapter | None]:
    """Return the adapters of `count` prompts. given: the folder of one, a list of one or None for each, or None.

    Raises UnsupportedError for a list of another length, and what read_adapter and refuse_other_rows raise.
    """
    paths = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(paths) != count:
        raise UnsupportedError(f"adapter has {len(paths)} folders for {count} prompts; give one, or one each")
    read = {path: read_adapter(model, str(path), path) for path in {*paths} - {None}}
    for each in read.values():
        if each.outside:
            refuse_other_rows(model, each)
    return [read.get(path) for path in paths]


# -- a trial -------------------------------------------------------------------------------------------------

LENGTHS, LAST = (7, 10), 2  # tokens of the prompts of a trial, and of those the ones that its last pass computes
SAME = 0.1  # the most that may differ of what an adapter changes: rounding, but no other rows


def refuse_other_rows(model: PreTrainedModel, adapter: Adapter) -> None:
    """Raise UnsupportedError if a layer of the adapter is called on other rows than those of a pass, or in another
    order, as an expert is: two prompts, of which one has an adapter, must get together what each gets alone.

    So does one that is never called, as of attention to an encoder that is not there. No pass may run meanwhile.
    """
    numbers = torch.Generator().manual_seed(0)
    parts = {layer: _noise(layer, numbers) for layer in adapter.parts}
    tried = Adapter(adapter.name, parts, adapter.outside, b"")
    first, second = LENGTHS
    try:
        together = _logits(model, [(first, tried), (second, None)])
        alone, other = _logits(model, [(first, tried)]), _logits(model, [(second, None)])
        changed = (alone - _logits(model, [(first, None)])).norm()
    except UnsupportedError as error:
        raise UnsupportedError(f"adapter {adapter.name!r}: a trial has failed: {error}") from error
    if not (together - torch.cat((alone, other))).norm() <= SAME * changed:
        raise UnsupportedError(
            f"adapter {adapter.name!r}: {type(model).__name__} gives two prompts other results together than alone if "
            "one of them has an adapter of these layers; use PEFT and generate()"
        )


def _noise(layer: Any, numbers: torch.Generator) -> LowRankPart:
    sizes = ((2, layer.in_features), (layer.out_features, 2))
    a, b = (torch.randn(size, generator=numbers).to(_dtype_of(layer)) for size in sizes)
    return LowRankPart(a, b, 0.5 * layer.in_features**-0.5)


@torch.no_grad()
def _logits(model: PreTrainedModel, rows: list[tuple[int, Adapter | None]]) -> Tensor:
    """Return the logits [N, V] of prompts of so many tokens, in float32. Two passes compute them, so that tokens of
    the second one attend to those of the first.
    """
    groups, groups_of_layer = page_groups(model.config, CacheConfig(), capacity=64)
    pages, runner = Pages(groups), ModelRunner(model, groups, groups_of_layer)
    firsts = [(number, length - LAST) for number, (length, _) in enumerate(rows)]
    lasts = [(number, LAST) for number, _ in firsts]

    def compute(parts: Parts, step: Step) -> Tensor:
        ids = [place for _, span in parts for place in span]  # which are also their positions
        with pass_adapters([adapter for _, adapter in rows], [len(span) for _, span in parts]):
            return runner(ids, ids, step, list(range(len(ids)))).float()

    return torch.cat(rows_of_passes(pages, [pages.begin() for _ in rows], (firsts, lasts), compute))


# -- the model -----------------------------------------------------------------------------------------------


def model_refusal(model: PreTrainedModel) -> str | None:
    """Return why requests of a patched model can have no adapter, as one clause; None if they can."""
    state = state_of(model).generation
    if state.agreement.size > 1:
        return "several processes share it"
    if model.config.is_encoder_decoder:
        return "an encoder reads their prompts outside of its passes"
    if model_device(model).type != "cpu":
        return f"it is on {model_device(model)}, and their products are computed on the CPU"
    if any(hasattr(module, "base_layer") for module in model.modules()):
        return "PEFT has put adapters into it already, which apply to all requests; unload those"
    return None


def _known_layers(model: Any) -> dict[str, nn.Module]:
    """Return the layers that an adapter may change, by their names: linear layers of the decoder, of which each pass
    asks its own rows.
    """
    decoder = model.get_decoder()
    inside, head = set(decoder.modules()), model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) and module in inside and module is not head and _dtype_of(module) in FLOATS
    }


def _layer_refusal(model: nn.Module, layer: str) -> str:
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        return f"{type(model).__name__} has no such layer"
    if not isinstance(module, nn.Linear):
        return f"it is a {type(module).__name__}, and adapters of requests are for linear layers"
    return "it is not a linear layer of the decoder, whose rows are those of a pass"


def _dtype_of(module: nn.Module) -> torch.dtype:
    if isinstance(module, QuantLinear):
        return module.compute_dtype
    weight = module._parameters.get("weight")
    return torch.float64 if weight is None else weight.dtype  # which no kernel knows


def _shape_refusal(module: Any, matrices: Mapping[str, Tensor]) -> str | None:
    a, b = matrices["A"], matrices["B"]
    wanted = (module.out_features, module.in_features)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not len(a):
        return f"its matrices {list(a.shape)} and {list(b.shape)} have no common rank"
    if (b.shape[0], a.shape[1]) != wanted:
        return f"it changes a layer {[b.shape[0], a.shape[1]]}, and that of the model is {list(wanted)}"
    return None if a.dtype in FLOATS and b.dtype in FLOATS else f"its matrices are {a.dtype} and {b.dtype}"


# -- the folder ----------------------------------------------------------------------------------------------


def _config(path: Path, where: str) -> dict[str, Any]:
    """Return the settings of a LoRA adapter. Raises UnsupportedError for what is not known."""
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{where}: {CONFIG} cannot be read: {error}; give a folder that PEFT has saved"
        ) from error
    refusal = _config_refusal(found) if isinstance(found, dict) else f"{CONFIG} holds no settings"
    if refusal is not None:
        raise UnsupportedError(f"{where}: {refusal}; merge it into the model (PEFT's merge_and_unload) instead")
    return {"target_modules": None, **found}


def _config_refusal(found: dict[str, Any]) -> str | None:
    """Return why an adapter with these settings is none of ours, as one clause; None if it is."""
    if found.get("peft_type") != "LORA":
        return f"peft_type {found.get('peft_type')!r} is not 'LORA'"
    others = {name: value for name, value in found.items() if name not in HONOURED | OF_TRAINING and value}
    if others:
        return f"{', '.join(f'{name}={value!r}' for name, value in others.items())} is not known"
    if found.get("bias", "none") != "none":
        return f"bias={found['bias']!r} changes biases of the model"
    beginning = found.get("init_lora_weights")
    if beginning not in BEGINNINGS:
        return f"init_lora_weights={beginning!r} was trained next to other weights than the model's"
    for name in ("r", "lora_alpha"):
        if not isinstance(found.get(name), int | float) or isinstance(found[name], bool) or found[name] <= 0:
            return f"{name}={found.get(name)!r} is no positive number"
    patterns = (found.get("rank_pattern") or {}, found.get("alpha_pattern") or {})
    return None if all(isinstance(each, dict) for each in patterns) else "its patterns are no mappings"


def _tensors(path: Path, where: str) -> dict[str, Tensor]:
    try:
        return load_state_dict(str(path / WEIGHTS))
    except Exception as error:  # safetensors has an error of its own
        raise UnsupportedError(
            f"{where}: {WEIGHTS} cannot be read: {error}; save the adapter with safe_serialization=True"
        ) from error


def _named_layers(tensors: Mapping[str, Tensor], where: str) -> dict[str, dict[str, Tensor]]:
    """Return matrices A and B by the name of their layer. Raises UnsupportedError for tensors of other kinds."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = TENSOR.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            raise UnsupportedError(
                f"{where}: the tensor {name!r} is no matrix A or B of a linear layer (DoRA, modules_to_save and "
                "embeddings are not served by request); merge it into the model (PEFT's merge_and_unload) instead"
            )
        layers.setdefault(found["layer"], {})[found["matrix"]] = tensor
    for layer, matrices in layers.items():
        if len(matrices) != 2:
            raise UnsupportedError(f"{where}: {layer!r} has only matrix {', '.join(matrices)} of A and B")
    return layers


def _is_target(layer: str, targets: Any) -> bool:
    """Return whether PEFT puts an adapter into a layer of this name. targets: target_modules of its config."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, layer) is not None
    return targets is None or any(layer == each or layer.endswith(f".{each}") for each in targets)


def _scale(layer: str, config: dict[str, Any], rank: int, where: str) -> float:
    """Return the number that an adapter's product is multiplied by in a layer, as PEFT computes it."""
    planned = _of_pattern(layer, config.get("rank_pattern") or {}, config["r"])
    if planned != rank:
        raise UnsupportedError(f"{where}: {layer!r} has rank {rank}, and {CONFIG} says {planned}")
    alpha = _of_pattern(layer, config.get("alpha_pattern") or {}, config["lora_alpha"])
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _of_pattern(layer: str, patterns: dict[str, Any], usual: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), usual)


def _salt(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a digest of all that an adapter is, so that one that is loaded again finds its prefixes."""
    digest = hashlib.blake2b(
        repr(sorted((name, repr(config.get(name))) for name in HONOURED)).encode(), digest_size=16
    )
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
